"""What a queue is given, checked: each refusal names the value and the way out."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ..errors import InvalidArgument, brief
from .clock import TOO_LATE
from .ids import HALF, storable

_THIS_CENTURY: Final = 978_307_200.0
_YEAR_10000: Final = 253_402_300_800.0


def checked_seconds(name: str, value: float, *, least: float = 0.0) -> float:
    """A number of seconds of at least `least`, and that no calendar is too short for, or InvalidArgument naming it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < TOO_LATE:
        raise InvalidArgument(
            f"{name} is a number of seconds of at least {least:g} and below {TOO_LATE:g}, not {brief(value)}"
        )
    return float(value)


def checked_int(name: str, value: object, *, least: int = 1) -> int:
    """A whole number of at least `least`, or InvalidArgument naming it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"{name} is a whole number of at least {least}, not {brief(value)}")
    return value


def mapping(what: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of a mapping, empty for None, or InvalidArgument, which says that of `what`."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument(f"{what} is a dict, not {type(value).__name__}: {brief(value)}")
    return {**(value or {})}


def checked_agent_keys(agent_keys: Sequence[str] | None) -> tuple[str, ...] | None:
    """The agents that a claim is for; a text alone would be read as its characters."""
    if agent_keys is None:
        return None
    if isinstance(agent_keys, str) or not isinstance(agent_keys, Iterable):
        raise InvalidArgument(f"agent_keys is a list of agent keys, or None for all of them, not {brief(agent_keys)}")
    keys = list(agent_keys)
    if not all(isinstance(each, str) for each in keys):
        raise InvalidArgument(f"agent_keys is a list of agent keys, which are texts, not {brief(keys)}")
    # No store keeps half a character, nor can be asked for it.
    return tuple(dict.fromkeys([each for each in keys if each.isascii() or HALF.search(each) is None]))


def checked_name(what: str, value: object) -> str:
    """A text that every store keeps and finds again, or InvalidArgument, which says that of `what`."""
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{what} is a text of 1 to 512 characters, not {brief(value)}")
    return storable(what.partition(" ")[2], value)


def checked_time(name: str, value: _dt.datetime | float | None) -> float | None:
    """A point in time as wall seconds, or InvalidArgument naming it."""
    if value is None:
        return None
    if isinstance(value, _dt.datetime):
        if value.tzinfo is None:
            raise InvalidArgument(f"{name} {brief(value)} names no time zone: give an aware datetime")
        found = value.timestamp()
        if found >= _YEAR_10000:  # by UTC, or rounded up to it as that of datetime.max is
            raise InvalidArgument(f"{name} {brief(value)} is later than any date of UTC: give an earlier one, or None")
        return found
    return checked_seconds(name, value)


def deadline_at(deadline: _dt.datetime | float | None) -> float | None:
    when = checked_time("deadline", deadline)
    if when is not None and when < _THIS_CENTURY:
        raise InvalidArgument(f"deadline {brief(deadline)} is a point in time, in seconds since 1970, and no duration")
    return when
