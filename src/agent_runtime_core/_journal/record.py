"""A boundary record of a run, and the events that follow from it.

The journal is append-only and the only truth about what a run has done. Each record is written once,
with the claim that wrote it. STEP_*, PROGRESS and RUN_* events are not stored: a record keeps the
range of event sequence numbers it stands for, and `expand` derives them on reading.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final, NamedTuple, cast

from .._core.codec.json import decode
from .._core.ids import step_id
from .._engines.base import NotApplied
from ..errors import LeaseLost

# Kinds of records.
ATTEMPT: Final = "attempt"  # the run began to execute: name is the agent key
RESUMED: Final = "resumed"  # a parked run went on
STARTED: Final = "started"  # a try of a step began
DONE: Final = "done"  # a step ended well; may carry its own start, and the next one's
RETRYING: Final = "retrying"  # a try failed, another follows
FAILED: Final = "failed"  # the last try failed
SKIPPED: Final = "skipped"  # recorded steps were answered from here
RESET: Final = "reset"  # an executor was told to begin anew: earlier records of that scope no longer count
ENDED: Final = "ended"  # the run ended: name is the status; may carry the beginning of its attempt
PROBE: Final = "looked"  # what is not there when this is will never be: its claim found out what became of a write
FORKED: Final = "forked"  # what follows was copied from another run, whose checkpoint then is the state

COPIED: Final = "fork:"  # how the claim id of a record begins that was copied; the run it is from follows

_EVENT_OF_STATUS = {
    "succeeded": "run.succeeded",
    "failed": "run.failed",
    "dead": "run.failed",
    "timed_out": "run.timed_out",
    "cancelled": "run.cancelled",
}


class Record(NamedTuple):
    """One boundary of a run. Texts are JSON as `_json.encode` writes it; times are seconds since the epoch."""

    seq: int  # position in the journal; -1 lets the store choose the next
    kind: str
    name: str = ""
    key: str = ""  # scope and occurrence or key: with the name, the identity of a step
    attempt: int = 0
    claim_id: str = ""
    t: float = 0.0
    result: str | None = None
    error: str | None = None
    state: str | None = None
    pos: int = 0
    total: int = 0
    tries: int = 0
    ms: int = 0
    info: str | None = None  # JSON object of what only some kinds need
    next: str | None = None  # JSON object: the step whose start this record carries
    digest: str | None = None
    ev: int = -1  # the first event sequence number of this record, set by the store
    nev: int = 0  # how many events it stands for; 0 for quiet ones


def numbered(record: Record, ev: int) -> Record:
    """The record with its first event sequence number; `_replace` costs five times as much."""
    return tuple.__new__(Record, (*record[:17], ev, record[18]))


def repeated(applied: Callable[..., int], tx: Any, run_id: str, record: Record) -> int:
    """The position of a record that is there already; LeaseLost where another claim wrote that place."""
    try:
        return applied(tx, run_id, record)
    except NotApplied:
        raise LeaseLost(run_id, record.claim_id) from None


def is_again(record: Record, last: Record | None) -> bool:
    """Whether this end, under no claim, is the last one there: two may cancel a run at once."""
    if record.kind != ENDED or record.claim_id or last is None:
        return False
    return not last.claim_id and last.attempt == record.attempt


def with_start_info(info: str | None, start: Record) -> str:
    """The `info` of a DONE record that stands for the start of its step too, whose own record was never written."""
    began = start.info or "{}"
    if info is None or began.startswith('{"tool":'):  # it tells all of the call
        return f'{{"began":{began}}}'
    return f'{info[:-1]},"began":{began}}}'


def with_beginning(end: Record, began: Record) -> Record:
    """The end of an attempt that stands for its beginning too, whose own record was never written."""
    told = f'"began":["{began.kind}",{quote(began.name)},{began.attempt},{began.info or "{}"}]'
    info = f"{{{told}}}" if end.info is None else f"{end.info[:-1]},{told}}}"
    # As a NamedTuple itself makes one, only faster.
    return tuple.__new__(Record, (began.seq, *end[1:14], info, *end[15:18], end.nev + began.nev))


def includes_start(record: Record) -> bool:
    return record.kind in (DONE, ENDED) and record.info is not None and '"began":' in record.info


def is_copied(record: Record) -> bool:
    """Whether another run paid for what this record tells."""
    return record.claim_id.startswith(COPIED)


def start_events(total: int) -> int:
    """How many events the start of a step stands for: one with a known total tells its progress too."""
    return 2 if total else 1


def derived_events(
    run_id: str, record: Record, read: Callable[[str], Any] = decode
) -> list[tuple[str, dict[str, Any]]]:
    """The (event type, payload) pairs a record stands for, in order; `read` is what decodes its texts."""
    if record.nev == 0:
        return []
    info = cast("dict[str, Any]", read(record.info)) if record.info else {}
    match record.kind:
        case "attempt" | "resumed":
            return [_began(record.kind, record.name, record.attempt, info)]
        case "ended":
            began = info.pop("began", None)
            told = _success_payload(record, read) if record.name == "succeeded" else info
            return [*([] if began is None else [_began(*began)]), (_EVENT_OF_STATUS[record.name], told)]
        case "skipped":
            return [_skip(run_id, record, step) for step in info["steps"]]
        case _:
            return _step_events(run_id, record, info, read)


def stored_events(run_id: str, record: Record) -> list[tuple[str, str]]:
    """What `expand` gives, with payloads as JSON texts; also where they hold a type that is not registered here."""
    return [(event_type, json.dumps(payload)) for event_type, payload in derived_events(run_id, record, json.loads)]


def _began(kind: str, agent: str, attempt: int, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return ("run.started" if kind == ATTEMPT else "run.resumed", {"agent_key": agent, "attempt": attempt, **info})


def _success_payload(record: Record, read: Callable[[str], Any]) -> dict[str, Any]:
    """Its result is in the record already."""
    result = cast("dict[str, Any]", read(record.result or "{}"))
    return {"final_output": result.get("final_output", {}), "usage": result.get("usage", {})}


def _skip(run_id: str, record: Record, step: list[Any]) -> tuple[str, dict[str, Any]]:
    name, key, pos = step[:3]
    payload = _step_fields(run_id, name, key, pos, record.total) | {"reason": "already_completed"}
    if len(step) > 3:
        payload |= step[3]
    return ("step.skipped", payload)


def _step_fields(run_id: str, name: str, key: str, pos: int, total: int) -> dict[str, Any]:
    return {
        "step_name": name,
        "step_index": pos,
        "total_steps": total or None,
        "step_id": step_id(run_id, name, key),
        "trace_id": run_id.replace("-", ""),
    }


def _begin(about: dict[str, Any], attempt: int, tries: int, info: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    tried, description = {"attempt": attempt, "max_attempts": tries}, info.get("description")
    doubt = {"in_doubt": True} if info.get("in_doubt") else {}
    events = [("step.started", about | tried | {"description": description} | doubt)]
    if total := about["total_steps"]:
        # Where steps run side by side, the place in the list does not tell how many are done.
        progress = info.get("completed", about["step_index"]) / total * 100
        events.append(("progress.update", about | tried | {"progress_percent": progress, "description": description}))
    return events


def _tool_call_event(run_id: str, record: Record, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A tool call of an agent loop begins, with these arguments."""
    doubt = {"in_doubt": True} if info.get("in_doubt") else {}
    return ("tool.call", _about_tool(run_id, record, info) | {"tool_args": info["tool"]["args"]} | doubt)


def _tool_result_event(
    run_id: str, record: Record, info: dict[str, Any], read: Callable[[str], Any]
) -> tuple[str, dict[str, Any]]:
    answer = cast("dict[str, Any]", read(record.result or "{}"))
    told = {"result": answer.get("result", answer.get("content"))}
    if answer.get("ok") is False:
        told["error"] = answer.get("content")
    return ("tool.result", _about_tool(run_id, record, info) | told)


def _about_tool(run_id: str, record: Record, info: dict[str, Any]) -> dict[str, Any]:
    about = {"step_id": step_id(run_id, record.name, record.key), "trace_id": run_id.replace("-", "")}
    return about | {"tool_name": info["tool"]["name"], "tool_call_id": info["tool"]["id"]}


def _step_events(
    run_id: str, record: Record, info: dict[str, Any], read: Callable[[str], Any]
) -> list[tuple[str, dict[str, Any]]]:
    began: dict[str, Any] | None = info.get("began") if record.kind == DONE else None
    if began is not None and "tool" in began:
        return [_tool_call_event(run_id, record, began), _tool_result_event(run_id, record, began, read)]
    if "tool" in info and record.kind == STARTED:
        return [_tool_call_event(run_id, record, info)]
    if "tool" in info and record.kind == DONE:
        return [_tool_result_event(run_id, record, info, read)]
    about = _step_fields(run_id, record.name, record.key, record.pos, record.total)
    tried = {"attempt": record.attempt, "max_attempts": record.tries}
    match record.kind:
        case "started":
            return _begin(about, record.attempt, record.tries, info)
        case "retrying":
            error = info["error"]
            return [("step.retrying", about | tried | {"error": error, "retry_delay": info["retry_delay"]})]
        case "failed":
            return [("step.failed", about | {"attempts": record.attempt, "error": info["error"]})]
    events = [] if began is None else _begin(about, record.attempt, record.tries, began)
    events += [("step.completed", about | tried | {"duration_ms": record.ms})]
    if record.next is not None:
        after: dict[str, Any] = json.loads(record.next)
        about = _step_fields(run_id, after["name"], after["key"], after["pos"], record.total)
        events += _begin(about, 1, after["tries"], after)
    return events


def event_id(record: Record, index: int) -> str:
    """The id under which a derived event is published where the journal and the bus are apart.

    It names the claim: one that died may have published for a record at this place that never landed.
    """
    if record.kind == ENDED and not record.claim_id:
        return f"end:{record.attempt}"  # as whoever cancelled it under no claim published it
    return f"j{record.seq}.{index}.{record.claim_id[-16:]}"
