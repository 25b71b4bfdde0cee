"""Check what callers pass before it is stored: a list that holds one wrong value could not be read again."""

from __future__ import annotations

import datetime as _dt
import re
from enum import Enum
from typing import Any, TypeVar
from uuid import UUID

from ...errors import InvalidArgument, brief
from ..models import moment

E = TypeVar("E", bound=Enum)

# A NUL cuts text off in some stores, and lone surrogates have no UTF-8. Each is stored as an escape sequence.
_ESCAPED = re.compile("[\x00\x1b\ud800-\udfff]")
_ESCAPE = re.compile("\x1b([0-9a-f]{4})")


def choice(kind: type[E], value: Any, what: str) -> E:
    """Return the member, or the member of that value. InvalidArgument: there is none."""
    try:
        return kind(value)
    except Exception:  # noqa: BLE001 - ValueError, or what the repr raises that Enum puts into it
        names = ", ".join(each.name for each in kind)
        raise InvalidArgument(f"{brief(value)} is no {what}: there are {names}") from None


def seconds_of(when: Any, what: str) -> float:
    """Return the seconds since the epoch. InvalidArgument: `when` is no datetime."""
    if not isinstance(when, _dt.datetime):
        raise InvalidArgument(f"{what} is a datetime, not {brief(when)}")
    return moment(when)


def check_model(kind: type[Any], model: Any) -> None:
    if not isinstance(model, kind):
        raise InvalidArgument(f"a model of {kind.__name__} is stored here, not {brief(model)}")


def check_link(other: Any, name: str) -> None:
    """InvalidArgument: it is neither None nor the id of another thing, a UUID or a string."""
    if not isinstance(other, UUID | str | None):
        raise InvalidArgument(f"{name} is a UUID or None, not {brief(other)}")


def check_count(count: Any, name: str) -> None:
    """InvalidArgument: it is neither None nor an integer of at least 0."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise InvalidArgument(f"{name} is a number of at least 0, not {brief(count)}")


def stored_key(key: Any, what: str = "key") -> str:
    """Return the document key of a string that is not empty. Keys with a common prefix keep one."""
    if not isinstance(key, str) or not key:
        raise InvalidArgument(f"a {what} is a string that is not empty, not {brief(key)}")
    return escaped(key)


def escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"\x1b{ord(found[0]):04x}", text)


def original(key: str) -> str:
    """Return the argument of `escaped`."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), key)


def id_text(value: Any, what: str) -> str:
    """Return the text of a UUID, or of a string that is one."""
    if isinstance(value, UUID):
        return str(value)
    try:
        return str(UUID(value))
    except (TypeError, ValueError, AttributeError):
        raise InvalidArgument(f"the id of a {what} is a UUID, not {brief(value)}") from None
