"""Redact what the trace sinks get. Ids, names, times and counts of this library stay, also if the hook fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .._core.event_types import EventType
from .._core.redaction import Kind, Redaction

_LIBRARY: Final = frozenset({
    *(each.value for each in EventType), "llm.call", "tool.done", "topic.published", "topic.invalid",
    "approval.requested", "step.in_doubt",
})  # fmt: skip
#: Fields of traces of this library that are no contents.
_KEPT: Final = frozenset({
    "agent_key", "attempt", "attempts", "completed", "cost_usd", "duration_ms", "ended_at", "in_doubt", "latency_ms",
    "max_attempts", "model", "offset", "parent_id", "progress_percent", "provider", "request_id", "retry_delay",
    "sequence", "started_at", "step_id", "step_index", "step_name", "tenant", "time", "timestamp", "tool_call_id",
    "tool_name", "topic", "total_steps", "trace_id", "usage",
})  # fmt: skip
#: Fields that sinks read as dicts.
_DICTS: Final = frozenset({"metadata", "model_parameters"})
#: Fields that code of the application may have, because this library adds them to its events.
_ADDED: Final = frozenset({"parent_id", "step_id", "trace_id"})
_ERRORS: Final = frozenset({"details", "error", "message", "stack"})
_OF_ERRORS: Final = frozenset({
    EventType.RUN_FAILED.value, EventType.RUN_TIMED_OUT.value, EventType.STEP_FAILED.value,
    EventType.STEP_RETRYING.value, EventType.TOOL_RESULT.value, "llm.call", "tool.done",
})  # fmt: skip
_KINDS: Final[Mapping[str, Mapping[str, Kind]]] = {
    "start_run": {"input": "input", "metadata": "input"},
    "end_run": {"output": "result", "error": "error"},
    "llm.call": {"input": "message", "output": "message", "model_parameters": "event"},
    "tool.done": {"input": "input", "output": "result"},
}


def redacted_trace(redaction: Redaction, method: str, kind: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sinks get of a trace.

    Args:
        redaction: Calls the hook.
        method: The method of the sinks that gets it.
        kind: The type of an event, or the outcome of a run.
        about: The fields.
    """
    if method != "log_event":
        kinds = _KINDS[method]
        return {
            name: _field(redaction, kinds[name], name, each) if name in kinds else each for name, each in about.items()
        }
    kept = _KEPT if kind in _LIBRARY else _ADDED
    found = {name: each for name, each in about.items() if name in kept and _is_plain(each)}
    kinds, errors = _KINDS.get(kind, {}), _ERRORS if kind in _OF_ERRORS else frozenset()
    rest = {}
    for name, each in about.items():
        if errors and name in ("type", "retriable"):
            found[name] = each
        elif name in errors:
            found[name] = _field(redaction, "error", name, each)
        elif name in kinds:
            found[name] = _field(redaction, kinds[name], name, each)
        elif name not in found:
            rest[name] = each
    return {**redaction.for_sink("event", rest, {}), **found}


def _field(redaction: Redaction, kind: Kind, name: str, value: Any) -> Any:
    if kind == "message" and isinstance(value, list):
        return [redaction.for_sink(kind, each) for each in value]
    if kind == "error" and isinstance(value, Mapping):
        return {
            name: each if name in ("type", "retriable") else redaction.for_sink(kind, each)
            for name, each in value.items()
        }
    return redaction.for_sink(kind, value, {}) if name in _DICTS else redaction.for_sink(kind, value)


def _is_plain(value: Any) -> bool:
    """Whether the value of a kept field is a name, a number or counts."""
    return value is None or isinstance(value, str | int | float) or _are_counts(value)


def _are_counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        each is None or isinstance(each, int | float) or _are_counts(each) for each in value.values()
    )
