"""Check arguments before they are stored. A list with one invalid value could be stored, but not read again."""

from __future__ import annotations

import datetime as _dt
import re
from enum import Enum
from typing import Any, TypeVar
from uuid import UUID

from ..._core.validation import did_you_mean, must, type_name
from ..models import moment

E = TypeVar("E", bound=Enum)

# Some backends truncate a string at NUL, and lone surrogates cannot be encoded as UTF-8. Both are escaped.
_ESCAPED = re.compile("[\x00\x1b\ud800-\udfff]")
_ESCAPE = re.compile("\x1b([0-9a-f]{4})")


def choice(kind: type[E], value: Any, what: str) -> E:
    """Return the member of an enumeration for a member or its value.

    Raises:
        InvalidArgument: There is no such member.
    """
    try:
        return kind(value)
    except Exception:  # noqa: BLE001 - ValueError, or an error of the value's repr, which Enum calls
        hint = did_you_mean(value, [str(each.value) for each in kind])
        raise must(what, f"be {type_name(kind)}", value, hint) from None


def seconds_of(when: Any, what: str) -> float:
    """Return the seconds since the epoch.

    Raises:
        InvalidArgument: `when` is not a datetime.
    """
    if not isinstance(when, _dt.datetime):
        raise must(what, "be a datetime", when)
    return moment(when)


def check_model(kind: type[Any], model: Any) -> None:
    if not isinstance(model, kind):
        raise must(kind.__name__.lower(), f"be {type_name(kind)}", model)


def check_link(other: Any, name: str) -> None:
    """Check a reference to another object.

    Raises:
        InvalidArgument: It is neither None, nor a UUID, nor a string.
    """
    if not isinstance(other, UUID | str | None):
        raise must(name, "be a UUID or None", other)


def check_count(count: Any, name: str) -> None:
    """Check a limit or an offset.

    Raises:
        InvalidArgument: It is neither None nor an integer of at least 0.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise must(name, "be an integer of at least 0", count)


def stored_key(key: Any, what: str = "key") -> str:
    """Return the document key of a string that is not empty. A prefix of the string becomes a prefix of the key."""
    if not isinstance(key, str) or not key:
        raise must(what, "be a non-empty string", key)
    return escaped(key)


def escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"\x1b{ord(found[0]):04x}", text)


def original(key: str) -> str:
    """Undo `escaped`."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), key)


def id_text(value: Any, what: str) -> str:
    """Return a UUID, or a string that is one, as a string.

    Raises:
        InvalidArgument: It is not a UUID.
    """
    if isinstance(value, UUID):
        return str(value)
    try:
        return str(UUID(value))
    except (TypeError, ValueError, AttributeError):
        raise must(f"the id of a {what}", "be a UUID", value) from None
