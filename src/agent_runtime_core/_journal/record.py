"""Records of a run's journal, and the events that are derived from them.

The journal is append-only. It alone decides what a run did. Each record is written once, with the id of the claim that
wrote it. The `step.*`, `progress.update` and `run.*` events are not stored: a record reserves their sequence numbers,
and `derived_events` returns them when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

from .._core.codec.json import decode
from .._core.ids import step_id
from .._engines.base import FunctionFailed, NotApplied, OperationSet
from .._engines.payloads import Payloads, mark_in_text, why_unreadable, words_of
from ..errors import LeaseLost

# Kinds of records.
ATTEMPT: Final = "attempt"  # a run attempt started; `name` is the agent key
RESUMED: Final = "resumed"  # a parked run resumed
STARTED: Final = "started"  # a step attempt started
DONE: Final = "done"  # a step completed; may include its own start and the start of the next step
RETRYING: Final = "retrying"  # a step attempt failed, and another attempt follows
FAILED: Final = "failed"  # the last step attempt failed
SKIPPED: Final = "skipped"  # recorded steps were passed on replay
RESET: Final = "reset"  # an executor restarted: earlier records of its scope no longer count
ENDED: Final = "ended"  # the run ended; `name` is its status; may include the start of its attempt
PROBE: Final = "looked"  # the claim checked an unconfirmed write: a write that is missing now will never be applied
FORKED: Final = "forked"  # the records after it were copied from another run; `state` is its checkpoint at that point

COPIED: Final = "fork:"  # prefix of the claim id in a copied record; the id of the other run follows

_EVENT_OF_STATUS = {
    "succeeded": "run.succeeded",
    "failed": "run.failed",
    "dead": "run.failed",
    "timed_out": "run.timed_out",
    "cancelled": "run.cancelled",
}


class Record(NamedTuple):
    """An entry of a run's journal. Strings are JSON unless noted; times are seconds since 1970.

    Attributes:
        seq: The position in the journal; -1 lets the store choose the next.
        kind: What it records, such as "done" (a step completed) or "ended" (the run ended).
        name: The name of the step, wait or value.
        key: The step key: scope and occurrence, or the caller's key; identifies a step together with `name`.
        attempt: The number of the attempt.
        claim_id: The claim that wrote the record.
        t: When it was written.
        result: The result of the step, as JSON.
        error: The error of the step, as JSON.
        state: The state that the step leaves, as JSON.
        pos: The position of the step in its list.
        total: How many steps the list contains.
        tries: The attempts of the step.
        ms: How long the step took, in milliseconds.
        info: JSON object with the fields that only some kinds have.
        next: JSON object: the next step, if this record includes its start.
        digest: The digest of the arguments of the step.
        ev: The first event sequence number of this record, set by the store.
        nev: Number of events that are derived from it.
    """

    seq: int
    kind: str
    name: str = ""
    key: str = ""
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
    info: str | None = None
    next: str | None = None
    digest: str | None = None
    ev: int = -1
    nev: int = 0


def numbered(record: Record, ev: int) -> Record:
    """Return the record with its first event sequence number. Five times as fast as `_replace`."""
    return tuple.__new__(Record, (*record[:17], ev, record[18]))


def repeated(applied: Callable[..., int], tx: Any, run_id: str, record: Record) -> int:
    """Return the position of a record that was appended before.

    Raises:
        LeaseLost: if another claim wrote a record at that position.
    """
    try:
        return applied(tx, run_id, record)
    except NotApplied:
        raise LeaseLost(run_id, record.claim_id) from None


def is_duplicate_end(record: Record, last: Record | None) -> bool:
    """Return whether a record that ends a run without a claim repeats the last end.

    Two callers may cancel a run at the same time. Only one caller may append the end.
    """
    if record.kind != ENDED or record.claim_id or last is None:
        return False
    return not last.claim_id and last.attempt == record.attempt


@dataclass(frozen=True, repr=False, eq=False)
class JournalOperations:
    """The operations on journals, decided once for the backends that keep records in a transaction.

    A backend passes what reads and writes its rows in an open transaction, and calls `operation_set`.

    Attributes:
        record: `record(tx, run_id, seq)` returns the record at a position, or None.
        newest: `newest(tx, run_id)` returns the position of the last record, or -1.
        ending: `ending(tx, run_id)` returns the last record of kind "ended", or None.
        insert: `insert(tx, run_id, record)` stores a record at its position.
        head: For a bus with `derives`: `head(tx, run_id)` returns the sequence of the run's next event, which is the
            greatest of 0, `ev + nev` of the records, and the sequence after the last published event. No other
            transaction may take that sequence before this transaction ends.
        connection: For a store with `transacts`: `connection(tx)` returns what the function of `ctx.transaction` gets.
            It must not be able to commit or roll back.
    """

    record: Callable[[Any, str, int], Record | None]
    newest: Callable[[Any, str], int]
    ending: Callable[[Any, str], Record | None]
    insert: Callable[[Any, str, Record], object]
    head: Callable[[Any, str], int] | None = None
    connection: Callable[[Any], Any] = attrgetter("conn")

    def operation_set(self, operations: Mapping[str, Callable[..., Any]] | None = None, **options: Any) -> OperationSet:
        """Return the operations of a backend, with further `operations` and the options of `OperationSet`.

        Args:
            operations: Further operations of the backend.
            **options: The options of `OperationSet`.
        """
        return OperationSet(
            "journal",
            {"journal.append": self._append, "journal.transact": self._transact, **(operations or {})},
            {"journal.append": self._applied, "journal.transact": _not_applied},
            not_repeatable=frozenset({"journal.transact"}),
            **options,
        )

    def _append(self, tx: Any, run_id: str, record: Record) -> int:
        if record.seq < 0 and is_duplicate_end(record, last := self.ending(tx, run_id)):
            assert last is not None
            return last.seq
        newest = self.newest(tx, run_id)
        if record.seq < 0:
            record = record._replace(seq=newest + 1)
        elif record.seq <= newest:
            return self._applied(tx, run_id, record)
        if self.head is not None:
            record = numbered(record, self.head(tx, run_id))
            if record.nev:
                tx.notify("events")
        self.insert(tx, run_id, record)
        return record.seq

    def _applied(self, tx: Any, run_id: str, record: Record) -> int:
        stored = self.record(tx, run_id, record.seq)
        if stored is None or (stored.claim_id, stored.kind, stored.key) != (record.claim_id, record.kind, record.key):
            raise LeaseLost(run_id, record.claim_id)
        return record.seq

    def _transact(
        self, tx: Any, run_id: str, fn: Callable[..., Any], args: tuple[Any, ...], draft: Record,
        make_record: Callable[[Any], Record],
    ) -> str | None:  # fmt: skip
        stored = self.record(tx, run_id, draft.seq)
        if stored is not None:  # an earlier commit was applied and its reply was lost: the function was called
            self._applied(tx, run_id, draft)
            return stored.result
        try:
            record = make_record(fn(self.connection(tx), *args))
        except Exception as error:
            raise FunctionFailed(error) from error
        self._append(tx, run_id, record)
        return record.result


def _not_applied(tx: Any, run_id: str, *_: Any) -> None:
    raise NotApplied


def record_size(record: Record) -> int:
    """Return about how many bytes a record takes."""
    return len(record[7] or "") + len(record[8] or "") + len(record[14] or "") + len(record[15] or "")


def with_start_info(info: str | None, start: Record) -> str:
    """Return the `info` of a DONE record that includes the start of its step, which is not recorded separately."""
    began = start.info or "{}"
    # The start of a tool call contains all fields of the call.
    if info is None or (began.startswith('{"tool":') and '"charged":' not in info):
        return f'{{"began":{began}}}'
    return f'{info[:-1]},"began":{began}}}'


def with_beginning(end: Record, began: Record) -> Record:
    """Return the end of a run attempt with the start of that attempt, which is not recorded separately."""
    field = f'"began":["{began.kind}",{quote(began.name)},{began.attempt},{began.info or "{}"}]'
    info = f"{{{field}}}" if end.info is None else f"{end.info[:-1]},{field}}}"
    # Faster than calling the class.
    return tuple.__new__(Record, (began.seq, *end[1:14], info, *end[15:18], end.nev + began.nev))


def with_outcome(info: str | None, outcome: str) -> str:
    """Return the `info` of an ENDED record with the error and usage of the result, which is large."""
    return f'{{"end":{outcome}}}' if info is None or info == "{}" else f'{info[:-1]},"end":{outcome}}}'


def has_outcome(info: str | None) -> bool:
    """Return whether `with_outcome` made this `info`. Older releases did not."""
    return info is not None and '"end":' in info and "end" in json.loads(info)


def outcome_of(record: Record) -> tuple[Any, Any]:
    """Return the error and the usage of the result in an ENDED record, as plain values or None."""
    info = json.loads(record.info) if record.info else {}
    if (outcome := info.get("end")) is None:
        outcome = json.loads(record.result) if record.result else {}
    elif "type" in info:  # the event of a failed run is its error
        outcome = {"error": {name: info[name] for name in info if name not in ("began", "end")}, **outcome}
    return outcome.get("error") or None, outcome.get("usage") or None


def includes_start(record: Record) -> bool:
    return record.kind in (DONE, ENDED) and record.info is not None and '"began":' in record.info


def is_copied(record: Record) -> bool:
    """Return whether the record was copied from another run, whose limits count its usage."""
    return record.claim_id.startswith(COPIED)


def start_events(total: int) -> int:
    """Return how many events the start of a step represents: 2 with a known total, as it also reports progress."""
    return 2 if total else 1


def derived_events(
    run_id: str, record: Record, decode_text: Callable[[str], Any] = decode
) -> list[tuple[str, dict[str, Any]]]:
    """Return the (event type, payload) pairs that follow from a record, in order."""
    if record.nev == 0:
        return []
    info = cast("dict[str, Any]", decode_text(record.info)) if record.info else {}
    if "encrypted" in info:
        return _marked_events(run_id, record, {"encrypted": info["encrypted"]})
    match record.kind:
        case "attempt" | "resumed":
            return [_attempt_event(record.kind, record.name, record.attempt, info)]
        case "ended":
            began = info.pop("began", None)
            info.pop("end", None)
            payload = _success_payload(record, decode_text) if record.name == "succeeded" else info
            return [*([] if began is None else [_attempt_event(*began)]), (_EVENT_OF_STATUS[record.name], payload)]
        case "skipped":
            return [_skipped_event(run_id, record, step) for step in info["steps"]]
        case _:
            return _step_events(run_id, record, info, decode_text)


def _marked_events(run_id: str, record: Record, mark: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a record that cannot be decrypted, with a mark as their contents.

    The numbers of the events stay right. Which event belongs to which number is certain, except for a step of a list
    with three events: it contains its own start or the start of the next step.
    """
    fields = _step_fields(run_id, record.name, record.key, record.pos, record.total)
    counts = {"attempt": record.attempt, "max_attempts": record.tries}
    started, done = ["step.started", "progress.update"][: start_events(record.total)], "step.completed"
    if record.key.startswith("k:l:"):  # a tool call of an agent loop
        started, done = ["tool.call"], "tool.result"
    match record.kind:
        case "attempt" | "resumed":
            return [_attempt_event(record.kind, record.name, record.attempt, mark)]
        case "ended":
            kinds = [*["run.started"][: record.nev - 1], _EVENT_OF_STATUS[record.name]]
            return [(kind, dict(mark)) for kind in kinds]
        case "skipped":
            return [("step.skipped", {"total_steps": record.total or None, **mark})] * record.nev
        case "started":
            kinds = started
        case _:
            has_own_start = record.nev > 1 and (record.nev != 3 or record.pos + 1 == record.total)
            kinds = [*(started if has_own_start else ()), done]
            after = record.nev - len(kinds)
            own = [(kind, {**fields, **counts, **mark}) for kind in kinds]
            return own + [(kind, {"total_steps": record.total or None, **mark}) for kind in started[:after]]
    return [(kind, {**fields, **counts, **mark}) for kind in kinds]


def stored_events(run_id: str, record: Record) -> list[tuple[str, str]]:
    """Return `derived_events` with payloads as JSON, even if they contain a type that is not registered here."""
    return [(event_type, json.dumps(payload)) for event_type, payload in derived_events(run_id, record, json.loads)]


def _attempt_event(kind: str, agent: str, attempt: int, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return ("run.started" if kind == ATTEMPT else "run.resumed", {"agent_key": agent, "attempt": attempt, **info})


def _success_payload(record: Record, decode_text: Callable[[str], Any]) -> dict[str, Any]:
    """Return the payload of `run.succeeded`, which is not stored twice: it is part of the record's result."""
    result = cast("dict[str, Any]", decode_text(record.result or "{}"))
    return {"final_output": result.get("final_output", {}), "usage": result.get("usage", {})}


def _skipped_event(run_id: str, record: Record, step: list[Any]) -> tuple[str, dict[str, Any]]:
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


def _start_events(
    fields: dict[str, Any], attempt: int, tries: int, info: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    counts, description = {"attempt": attempt, "max_attempts": tries}, info.get("description")
    doubt = {"in_doubt": True} if info.get("in_doubt") else {}
    events = [("step.started", fields | counts | {"description": description} | doubt)]
    if total := fields["total_steps"]:
        # The index of a concurrent step is not the number of completed steps.
        progress = info.get("completed", fields["step_index"]) / total * 100
        events.append(("progress.update", fields | counts | {"progress_percent": progress, "description": description}))
    return events


def _tool_call_event(run_id: str, record: Record, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the event of a tool call that an agent loop starts."""
    doubt = {"in_doubt": True} if info.get("in_doubt") else {}
    return ("tool.call", _tool_fields(run_id, record, info) | {"tool_args": info["tool"]["args"]} | doubt)


def _tool_result_event(
    run_id: str, record: Record, info: dict[str, Any], decode_text: Callable[[str], Any]
) -> tuple[str, dict[str, Any]]:
    result = cast("dict[str, Any]", decode_text(record.result or "{}"))
    outcome = {"result": result.get("result", result.get("content"))}
    if result.get("ok") is False:
        outcome["error"] = result.get("content")
    return ("tool.result", _tool_fields(run_id, record, info) | outcome)


def _tool_fields(run_id: str, record: Record, info: dict[str, Any]) -> dict[str, Any]:
    ids = {"step_id": step_id(run_id, record.name, record.key), "trace_id": run_id.replace("-", "")}
    return ids | {"tool_name": info["tool"]["name"], "tool_call_id": info["tool"]["id"]}


def _step_events(
    run_id: str, record: Record, info: dict[str, Any], decode_text: Callable[[str], Any]
) -> list[tuple[str, dict[str, Any]]]:
    began: dict[str, Any] | None = info.get("began") if record.kind == DONE else None
    if began is not None and "tool" in began:
        return [_tool_call_event(run_id, record, began), _tool_result_event(run_id, record, began, decode_text)]
    if "tool" in info and record.kind == STARTED:
        return [_tool_call_event(run_id, record, info)]
    if "tool" in info and record.kind == DONE:
        return [_tool_result_event(run_id, record, info, decode_text)]
    fields = _step_fields(run_id, record.name, record.key, record.pos, record.total)
    counts = {"attempt": record.attempt, "max_attempts": record.tries}
    match record.kind:
        case "started":
            return _start_events(fields, record.attempt, record.tries, info)
        case "retrying":
            error = info["error"]
            return [("step.retrying", fields | counts | {"error": error, "retry_delay": info["retry_delay"]})]
        case "failed":
            return [("step.failed", fields | {"attempts": record.attempt, "error": info["error"]})]
    events = [] if began is None else _start_events(fields, record.attempt, record.tries, began)
    events += [("step.completed", fields | counts | {"duration_ms": record.ms})]
    if record.next is not None:
        after: dict[str, Any] = json.loads(record.next)
        fields = _step_fields(run_id, after["name"], after["key"], after["pos"], record.total)
        events += _start_events(fields, 1, after["tries"], after)
    return events


def event_id(record: Record, index: int) -> str:
    """Return the id of a derived event that is published, because the bus is on another engine than the journal.

    It contains the claim id. A claim that died may have published an event of a record at the same position that was
    never committed.
    """
    if record.kind == ENDED and not record.claim_id:
        return f"end:{record.attempt}"  # the same id for all callers that cancel the run without a claim
    return f"j{record.seq}.{index}.{record.claim_id[-16:]}"


TOGETHER = ("error", "state", "info", "next", "digest")
_MARK = "="  # begins what was encoded together; no JSON object begins so


def encode_record(payloads: Payloads, run_id: str, record: Record) -> Record:
    """Return a record as its store gets it. What most records do not have is encoded together, in `info`."""
    values = {name: value for name in TOGETHER if (value := getattr(record, name)) is not None}
    info = payloads.encode("record of run", run_id, _MARK + json.dumps(values)) if values else None
    result = payloads.encode_optional("result of run", run_id, record.result)
    return record._replace(result=result, error=None, state=None, info=info, next=None, digest=None)


def decode_record(payloads: Payloads | None, run_id: str, record: Record) -> Record:
    """Return a stored record as its readers get it."""
    if payloads is None:
        return record
    record = record._replace(result=payloads.decode_optional("result of run", run_id, record.result))
    if payloads.reads_only and record.kind == ENDED and (mark := mark_in_text(record.result)) is not None:
        said = [{"role": "assistant", "content": words_of(mark)}]
        record = record._replace(result=json.dumps({"final_output": mark, "final_messages": said}))
    if record.info is None:
        return record
    text = payloads.decode("record of run", run_id, record.info)
    if payloads.reads_only and (mark := mark_in_text(text)) is not None:
        return record._replace(info=_marked_info(record, mark))
    # Without the mark, the record was stored before there was a codec.
    return record._replace(**{"info": None, **json.loads(text[1:])}) if text.startswith(_MARK) else record


def _marked_info(record: Record, mark: dict[str, Any]) -> str:
    """Return the fields that readers of a record need, with marks as contents."""
    error = {"type": "Encrypted", "message": words_of(mark)}
    if record.kind in (RETRYING, FAILED):
        return json.dumps({"error": words_of(mark), "type": "Encrypted", "retry_delay": 0.0})
    if record.kind == ENDED and record.name not in ("succeeded", "cancelled"):
        return json.dumps({**mark, "end": {"error": error}})
    return json.dumps(mark)


def decode_records(payloads: Payloads | None, run_id: str, records: list[Record]) -> list[Record]:
    """Return stored records as their readers get them."""
    if payloads is None:
        # A process without a codec continues no encrypted journal, so the last contents are encrypted if any are.
        texts = (each.info or each.result for each in reversed(records))
        error = why_unreadable(f"record of run {run_id}", next((text for text in texts if text is not None), None))
        if error is not None:
            raise error
        return records
    return [decode_record(payloads, run_id, each) for each in records]
