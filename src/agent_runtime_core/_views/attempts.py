"""What a journal says of each step, call and wait of a run: its kind, its attempts and its state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .._core.ids import step_id
from .._execution.step import SCOPE_SUFFIX, Identity, scope_id
from .._execution.usage import charged_by, total, usage_of
from .._journal.record import ATTEMPT, DONE, ENDED, FAILED, RETRYING, STARTED, Record, includes_start, is_copied
from ..queue.records import IN_DOUBT, LIVE, RunRow, open_questions
from .plain import iso_time

Kind = Literal["step", "model", "tool", "wait", "approval", "sleep", "child"]

SIGNAL: Final = "signal:"  # begins the name of a wait for a signal or an approval
CALL: Final = "call:"  # begins the name of the call of a child run
LIST: Final = "x:"  # begins the key of all steps of one step list
LOOP: Final = "k:l:"  # begins the key of the model and tool calls of an agent loop
_BEGAN = '{"began":{}}'  # what nearly all steps have: decoding it takes a quarter of the time of a long journal
_WAITS = frozenset({"wait", "approval", "sleep", "child"})
_ENDS = frozenset({DONE, RETRYING, FAILED})


@dataclass(slots=True)
class Attempt:
    """One attempt of a step.

    Attributes:
        seq: The position of the record with its start, or of its end if the journal contains no start.
        claim_id: The claim of that record.
        began: When it started, wall seconds; None if the journal does not say.
        ended: When it ended.
        end: The record of its end. None while it is open, or if it never ended.
        replaced: Whether another attempt followed although this attempt has not ended.
    """

    seq: int
    claim_id: str
    began: float | None
    ended: float | None = None
    end: Record | None = None
    replaced: bool = False


@dataclass(slots=True)
class TracedStep:
    """A step, call or wait of a run.

    Attributes:
        name: Its name in the journal.
        key: Its key in the journal.
        kind: What it is; None for a recorded value, such as the value of `ctx.now`.
        attempts: Its attempts over all executions of the run.
        records: Its records.
        start: The fields of its starts: `pos`, and in a DAG `completed` and `needs`, the positions of other steps.
        digest: The digest of its arguments; of a step of a list, the number of the list.
        copied: Whether its result was copied from the run that this run was forked from.
        state: done, running, waiting, in doubt, retrying, failed, copied, cancelled or timed_out.
    """

    name: str
    key: str
    kind: Kind | None = "step"
    attempts: list[Attempt] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None
    copied: bool = False
    state: str = "running"

    @property
    def last(self) -> Record | None:
        """The end of its last attempt; None while that is open."""
        return self.attempts[-1].end

    @property
    def number(self) -> int:
        """The number of its last attempt in this execution of the run."""
        return self.records[-1].attempt if self.records else 1

    @property
    def began(self) -> float | None:
        """When its first attempt started. A copied step shows no times, because it ran in another run."""
        if self.copied:
            return None
        first = self.attempts[0]
        return first.ended if first.began is None else first.began  # the journal has no start of a failed model call

    @property
    def ended(self) -> float | None:
        """When it was done or had failed; None while it may go on."""
        return None if self.copied or self.last is None or self.last.kind == RETRYING else self.last.t

    @property
    def error(self) -> Any:
        """The message of the error of its last attempt, or None."""
        return None if self.last is None or self.last.kind == DONE else json.loads(self.last.info or "{}").get("error")

    @property
    def usage(self) -> dict[str, Any]:
        """What its model call or child run has used, and what all of its attempts have charged."""
        ends = [each.end for each in self.attempts if each.end is not None]
        if len(ends) == 1:
            return usage_of(ends[0]) if ends[0].kind == DONE else charged_by(ends[0])
        return total(usage_of(each) if each.kind == DONE else charged_by(each) for each in ends)

    def read(self, record: Record) -> None:
        """Add one of its records."""
        self.records.append(record)
        info = json.loads(record.info) if record.info and record.info != _BEGAN else {}
        if record.kind == STARTED:
            self._open(record, record.t)
            self.start.update(info)
        else:
            self._close(record, info)
        self.start["pos"] = record.pos
        self.digest = record.digest or self.digest  # the record of a failure has none
        self.kind = _kind(self, record, info)

    def carried(self, record: Record, start: dict[str, Any]) -> None:
        """Add its start, which the record of the step before it contains."""
        self._open(record, record.t)
        self.start.update(start)
        if record.key == self.key and self.key.startswith(LIST):
            self.digest = self.digest or record.digest

    def _open(self, record: Record, began: float | None) -> None:
        if self.attempts and self.attempts[-1].end is None:
            self.attempts[-1].replaced = True
        self.attempts.append(Attempt(record.seq, record.claim_id, began))

    def _close(self, record: Record, info: dict[str, Any]) -> None:
        self.copied = is_copied(record)
        began = info.get("began")
        if isinstance(began, dict):
            self.start.update(began)
        is_open = bool(self.attempts) and self.attempts[-1].end is None
        if includes_start(record) or not is_open:
            # Of the failed attempt of a model call, the journal has no start.
            self._open(record, record.t - record.ms / 1000 if record.kind == DONE else None)
        attempt = self.attempts[-1]
        attempt.ended, attempt.end = record.t, record


def _kind(step: TracedStep, record: Record, info: dict[str, Any]) -> Kind | None:
    name, start = step.name, step.start
    # The DONE records of waits and values have no number of attempts.
    if "until" not in start and "child" not in start and (record.kind != DONE or record.tries):
        if not step.key.startswith(LOOP):
            return "step"
        return "model" if name == "model" else "tool" if name == "tool" else "step"
    if name.startswith(CALL):
        return "child"
    if name.startswith(SIGNAL):
        is_approval = "approval" in info or "approval" in start or name.startswith(f"{SIGNAL}tool:")
        return "approval" if is_approval or step.kind == "approval" else "wait"
    return "sleep" if name == "sleep" else "wait" if name == "messages" else None


def traced_steps(row: RunRow, records: Sequence[Record]) -> dict[Identity, TracedStep]:
    """Return the steps, calls and waits of a run in the order of their start, which later records do not change."""
    found: dict[Identity, TracedStep] = {}
    for record in records:
        if record.kind != STARTED and record.kind not in _ENDS:
            continue
        identity = (record.name, record.key)
        if identity not in found:
            found[identity] = TracedStep(*identity)
        found[identity].read(record)
        if record.next is not None:
            start = json.loads(record.next)
            identity = (start["name"], start["key"])
            if identity not in found:
                found[identity] = TracedStep(*identity)
            found[identity].carried(record, start)
    steps = [*found.values()]
    _mark_approvals(row, steps)
    _set_states(row, records, steps)
    return found


def _mark_approvals(row: RunRow, steps: Iterable[TracedStep]) -> None:
    """Set the kind of open approvals. In the journal, they look like waits for signals."""
    asked = {each.request_id for each in open_questions(row) if not each.name.startswith(IN_DOUBT)}
    for each in steps if asked else ():
        if each.kind == "wait" and step_id(row.run_id, each.name, each.key) in asked:
            each.kind = "approval"


def _set_states(row: RunRow, records: Sequence[Record], steps: Sequence[TracedStep]) -> None:
    last_start = max((each.seq for each in records if each.kind == ATTEMPT), default=-1)
    reviewed = {key for each in steps if each.last is None for key in _reviewed(each)}
    around = _around_waits(steps)
    ending = next((each.claim_id for each in reversed(records) if each.kind == ENDED), None)
    for step in steps:
        last = step.last
        if last is not None:
            step.state = _ended_state(row, step, last)
        elif step.kind in _WAITS or (step.name, step.key) in around:
            step.state = "waiting" if row.status in LIVE else _stopped(row)
        elif row.status in LIVE:
            is_reviewed = step_id(row.run_id, step.name, step.key) in reviewed if reviewed else False
            step.state = "in doubt" if is_reviewed or _is_lost(row, step, last_start) else row.status
        else:
            interrupted = step.attempts[-1].claim_id == ending and row.status in ("cancelled", "timed_out")
            step.state = row.status if interrupted else "in doubt"


def _ended_state(row: RunRow, step: TracedStep, last: Record) -> str:
    if step.copied:
        return "copied"
    if last.kind == RETRYING:
        return "retrying" if row.status in LIVE else _stopped(row, "failed")
    if last.kind == FAILED:
        return "failed"
    return "timed_out" if '"late":true' in (last.info or "") and step.kind in _WAITS else "done"


def _stopped(row: RunRow, otherwise: str = "cancelled") -> str:
    return row.status if row.status in ("cancelled", "timed_out") else otherwise


def _is_lost(row: RunRow, step: TracedStep, last_start: int) -> bool:
    """Return whether the claim that started a step of a live run has ended, so the outcome is unknown."""
    if row.status == "running":
        return step.attempts[-1].claim_id != row.claim_id
    return row.status != "waiting" or step.attempts[-1].seq < last_start


def _reviewed(step: TracedStep) -> Iterator[str]:
    """Yield the id of the step in doubt whose review this wait is for."""
    if step.name.startswith(f"{SIGNAL}{IN_DOUBT}"):
        yield step.key.removeprefix("k:").rpartition(":")[0]


def _around_waits(steps: Sequence[TracedStep]) -> set[Identity]:
    """Return the steps that contain an open wait."""
    waits = [each for each in steps if each.last is None and each.kind in _WAITS and "@" in each.key]
    if not waits:
        return set()
    scopes, around = scopes_of(steps), set[Identity]()
    for each in waits:
        outer = enclosing(each, scopes)
        while outer is not None:
            around.add((outer.name, outer.key))
            outer = enclosing(outer, scopes)
    return around


def scopes_of(steps: Sequence[TracedStep]) -> dict[str, TracedStep]:
    """Return the steps by the id with which the keys of the steps inside them end. Nearly all runs have none."""
    return {scope_id(each.name, each.key): each for each in steps} if any("@" in each.key for each in steps) else {}


def enclosing(step: TracedStep, scopes: dict[str, TracedStep]) -> TracedStep | None:
    """Return the step that a step is inside of, or None."""
    found = SCOPE_SUFFIX.search(step.key)
    return None if found is None else scopes.get(found[1])


def steps_of(row: RunRow, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the steps, waits and calls of a run in order of their start, as `agent-runtime show` prints them."""
    return [
        {
            "state": each.state, "name": each.name, "step_key": each.key.partition(":")[2],
            "step_id": step_id(row.run_id, each.name, each.key), "attempts": each.number,
            "duration_ms": each.last.ms if each.last is not None and each.last.kind == DONE else None,
            "timestamp": iso_time(each.records[-1].t, "seconds") if each.records else None, "error": each.error,
        }
        for each in traced_steps(row, records).values()
    ]  # fmt: skip


def step_views(row: RunRow, records: Sequence[Record], after: int = -1, limit: int | None = None) -> dict[str, Any]:
    """Return a page of the steps of a run in the order of their start: {"items", "next"}.

    Args:
        row: The run.
        records: Its whole journal.
        after: The `sequence` of the last step of the page before, -1 for the first page.
        limit: How many steps at most; None for all.

    Returns:
        `next` is the `after` of the next page, None for the last page. Each item is {"sequence", "step_id", "name",
        "key", "state", "started_at", "ended_at", "duration_ms", "attempts", "error", "cost_usd", "usage", "parent"};
        `parent` is the step id of the enclosing step.
    """
    steps = [*traced_steps(row, records).values()]
    scopes = scopes_of(steps)
    first = max(after + 1, 0)
    end = len(steps) if limit is None else min(first + limit, len(steps))
    items = [_step_view(row, number, steps[number], scopes) for number in range(first, end)]
    return {"items": items, "next": end - 1 if items and end < len(steps) else None}


def _step_view(row: RunRow, number: int, step: TracedStep, scopes: dict[str, TracedStep]) -> dict[str, Any]:
    last, usage, outer = step.last, step.usage, enclosing(step, scopes)
    return {
        "sequence": number, "step_id": step_id(row.run_id, step.name, step.key), "name": step.name,
        "key": step.key.partition(":")[2], "state": step.state, "started_at": iso_time(step.began),
        "ended_at": iso_time(step.ended),
        "duration_ms": last.ms if last is not None and last.kind == DONE else None,
        "attempts": step.number, "error": step.error, "cost_usd": usage.get("cost_usd"), "usage": usage or None,
        "parent": None if outer is None else step_id(row.run_id, outer.name, outer.key),
    }  # fmt: skip
