"""Checks of arguments. Each raises InvalidArgument, which names the argument and its value."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict

from .clock import TOO_LATE, aware, human_time
from .ids import HALF, storable
from .validation import Shown, must

MAX_TENANT: Final = 128  # characters of the name of a tenant
_THIS_CENTURY: Final = 978_307_200.0
_YEAR_10000: Final = 253_402_300_800.0


def checked_seconds(name: str, value: float, *, least: float = 0.0) -> float:
    """Return a number of seconds from `least` to `TOO_LATE` as a float, or raise InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= TOO_LATE:
        raise must(name, f"be from {least:g} to {TOO_LATE:,.0f} seconds", value)
    return float(value)


def checked_int(name: str, value: object, *, least: int = 1) -> int:
    """Return an int of at least `least`, or raise InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise must(name, f"be an integer of at least {least}", value)
    return value


def mapping(what: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of a mapping, empty for None, or raise InvalidArgument, which names it as `what`."""
    if value is not None and not isinstance(value, Mapping):
        raise must(what, "be a dict", value)
    return {**(value or {})}


def run_input(input: Any, params: Any = None, *, input_data: Any = None) -> dict[str, Any]:
    """Return the input of a run, with `params` merged into its "params".

    Args:
        input: The argument `input` of the caller.
        params: The argument `params`, whose names replace those in the input.
        input_data: The same as `input`, under its first name in `execute`.

    Raises:
        InvalidArgument: Both names are used, or a value is no dict. The message names the argument.
    """
    if input is not None and input_data is not None:
        raise must("input and input_data", "not both be passed", Shown("both"), "Pass input alone")
    name, given = ("input", input) if input_data is None else ("input_data", input_data)
    merged = mapping(name, given)
    if params is not None and (more := mapping("params", params)):
        merged["params"] = {**mapping(f"{name}['params']", merged.get("params")), **more}
    return merged


def checked_agent_keys(agent_keys: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the agent keys of a claim, each once; None means all agents. A single string is rejected."""
    if agent_keys is None:
        return None
    if isinstance(agent_keys, str) or not isinstance(agent_keys, Iterable):
        raise must("agent_keys", "be a list of agent keys, or None for all", agent_keys)
    keys = list(agent_keys)
    if not all(isinstance(each, str) for each in keys):
        raise must("agent_keys", "be a list of strings", keys)
    # No store accepts a lone surrogate, so no agent key of a run contains it.
    return tuple(dict.fromkeys([each for each in keys if each.isascii() or HALF.search(each) is None]))


def checked_name(what: str, value: object) -> str:
    """Return a string of 1 to 512 characters that every store can keep, or raise InvalidArgument about `what`."""
    if not isinstance(value, str) or not value:
        raise must(what, "be a string of 1 to 512 characters", value)
    return storable(what, value)


def checked_tenant(value: object) -> str:
    """Return the stored name of a tenant, "" for None, or raise InvalidArgument."""
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TENANT:
        raise must("tenant", f"be a string of 1 to {MAX_TENANT} characters, or None", value)
    return storable("tenant", value)


def checked_time(name: str, value: _dt.datetime | float | None) -> float | None:
    """Return a point in time as wall seconds; None for None. Raise InvalidArgument for anything else."""
    if value is None:
        return None
    if isinstance(value, _dt.datetime):
        if value.tzinfo is None:
            raise must(name, "be timezone-aware", Shown(f"{value:%Y-%m-%d %H:%M}"), "Use datetime.now(UTC)")
        found = value.timestamp()
        if found >= _YEAR_10000:  # in UTC, or rounded up to it, as datetime.max is
            raise must(name, "be before the year 10000 in UTC", Shown(value), "Pass an earlier time, or None")
        return found
    return checked_seconds(name, value)


def scheduled_at(metadata: Mapping[str, Any]) -> _dt.datetime | None:
    """Return the time of the schedule's tick that started the run, from its metadata."""
    found = metadata.get("scheduled_at")
    return _dt.datetime.fromisoformat(found) if isinstance(found, str) else None


def deadline_at(deadline: _dt.datetime | float | None) -> float | None:
    when = checked_time("deadline", deadline)
    if when is not None and when < _THIS_CENTURY:
        fix = f"For {when:g} seconds from now, pass datetime.now(UTC) + timedelta(seconds={when:g})"
        got = Shown(f"{when:g} ({aware(when):%Y-%m-%d})")
        if isinstance(deadline, _dt.datetime):
            got, fix = Shown(human_time(when)), ""
        raise must("deadline", "be a time after the year 2000", got, fix)
    return when


class Message(TypedDict, total=False):
    """A chat message in OpenAI's format."""

    role: str
    content: str | list[Any] | dict[str, Any] | None
    name: str
    tool_call_id: str
    tool_calls: list[dict[str, Any]]
    metadata: dict[str, Any]


#: Two names of the role of a prompt.
SYSTEM_ROLES: Final = ("system", "developer")


def messages_in(given: Any) -> list[Any]:
    """Return the messages as a new list; InvalidArgument unless they are a list of dicts."""
    no_list = isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable)
    messages = [] if no_list else list(given)
    if no_list or not are_mappings(messages):
        raise must("messages", "be a list of dicts", given, "Example: [{'role': 'user', 'content': 'hi'}]")
    return messages


def are_mappings(values: Iterable[Any]) -> bool:
    """Return whether all values are mappings. A check of the type of each value takes several times as long."""
    return all(kind is dict or issubclass(kind, Mapping) for kind in set(map(type, values)))
