"""What callers give, checked before it is stored: no list with a wrong one in it could be read again."""

from __future__ import annotations

import datetime as _dt
from enum import Enum
from typing import Any, TypeVar
from uuid import UUID

from ...errors import InvalidArgument, brief
from ..models import moment

E = TypeVar("E", bound=Enum)


def choice(kind: type[E], value: Any, what: str) -> E:
    """The member, or that of this value. InvalidArgument: there is none."""
    try:
        return kind(value)
    except Exception:  # noqa: BLE001 - ValueError, or what the repr raises that Enum puts into it
        names = ", ".join(each.name for each in kind)
        raise InvalidArgument(f"{brief(value)} is no {what}: there are {names}") from None


def seconds_of(when: Any, what: str) -> float:
    """Seconds since the epoch. InvalidArgument: it is no datetime."""
    if not isinstance(when, _dt.datetime):
        raise InvalidArgument(f"{what} is a datetime, not {brief(when)}")
    return moment(when)


def check_model(kind: type[Any], model: Any) -> None:
    """InvalidArgument: it is another thing."""
    if not isinstance(model, kind):
        raise InvalidArgument(f"a model of {kind.__name__} is stored here, not {brief(model)}")


def check_link(other: Any, name: str) -> None:
    """InvalidArgument: it is neither None nor the id of another thing, a UUID or a text."""
    if not isinstance(other, UUID | str | None):
        raise InvalidArgument(f"{name} is a UUID or None, not {brief(other)}")


def check_count(count: Any, name: str) -> None:
    """InvalidArgument: it is neither None nor a number of at least 0."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise InvalidArgument(f"{name} is a number of at least 0, not {brief(count)}")
