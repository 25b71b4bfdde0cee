"""What a whole run came to: how its runs ended, which steps were carried out, and what was told; and how two differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .._core.codec.json import encode
from .._engines.base import Op
from .._journal.record import DONE, FAILED, RESET, RETRYING, STARTED, Record
from ..events.event import Event
from ..interfaces import RunResult
from ..queue.records import RunFilter
from ..runner.runner import AgentRunner
from ..status import RunStatus

Identity = tuple[str, str, str]  # (run id, name of a step, its key)
Told = tuple[str, bool]  # an event, and whether it is told inside of a step: again, where that is carried out again

ENDS = {"run.succeeded", "run.failed", "run.cancelled", "run.timed_out"}
#: What a resume tells anew, or tells besides.
REPEATED = {
    "run.started", "run.resumed", "run.heartbeat", "step.started", "step.skipped", "step.retrying", "step.failed",
    "step.in_doubt", "progress.update", "tool.call",
}  # fmt: skip
COMPLETED = "step.completed"
#: Statuses of a run that was stopped from outside, which a crash may be ahead of.
STOPPED = {RunStatus.CANCELLED, RunStatus.TIMED_OUT}
REVIEW = "signal:in_doubt:"  # how the waits begin that only a crash brings about


class WriteLog:
    """The records that a store was asked to keep in one whole run, over all its lives."""

    def __init__(self) -> None:
        self.begun: set[Identity] = set()
        self.done: dict[Identity, Record] = {}
        self.again: list[str] = []
        self._drawn: dict[str, list[str]] = {}

    def __call__(self, ops: Sequence[Op], landed: bool) -> None:
        for op in ops:
            if op.name == "journal.append":
                (self._landed if landed else self._tried)(*op.args)

    def drawn(self, run_id: str) -> Sequence[str]:
        """How that run has drawn its chance so far: "random" or "uuid4", in order."""
        return self._drawn.get(run_id, ())

    def _tried(self, run_id: str, record: Record) -> None:
        if record.kind not in (STARTED, DONE, RETRYING, FAILED) or record.name.startswith(REVIEW):
            return
        steps = [(run_id, record.name, record.key)]
        if record.next is not None:
            after = json.loads(record.next)
            steps.append((run_id, after["name"], after["key"]))
        for step in steps:
            self.begun.add(step)
            known = self.done.get(step)
            if known is not None and (known.seq, known.claim_id) != (record.seq, record.claim_id):
                self.again.append(_named(step))

    def _landed(self, run_id: str, record: Record) -> None:
        if record.kind == RESET:
            self.done = {step: known for step, known in self.done.items() if step[0] != run_id}
        if record.kind != DONE:
            return
        step = (run_id, record.name, record.key)
        if step not in self.done and record.name in ("random", "uuid4") and record.key.startswith("v:"):
            self._drawn.setdefault(run_id, []).append(record.name)
        self.done.setdefault(step, record)


@dataclass(frozen=True)
class RunSummary:
    """One whole run; `told` has the events of each run, so often as each was told."""

    result: RunResult
    outcomes: dict[str, Any]
    steps: frozenset[Identity]
    told: dict[str, Counter[Told]]
    exact: bool  # no attempt failed, so that what is told between steps is told once
    said: list[Any] | None  # the conversation of the run, where it is kept in the same store
    effects: Any
    wrong: Sequence[str]


async def account(
    client: AgentRunner, root: str, tally: WriteLog, compare: Callable[[RunResult], Any], said: list[Any] | None,
    effects: Any,
) -> RunSummary:  # fmt: skip
    """The account of what is in the store when the run `root` has ended, and its children with it."""
    outcomes, told, wrong, exact = {}, {}, [], True
    if tally.again:
        wrong.append(f"{tally.again[0]} was recorded, and is carried out again")
    for row in await client.queue.find(RunFilter()):
        result = await client.wait(row.run_id)
        exact = exact and row.failures == 0
        about = "the run" if row.run_id == root else f"child {row.agent!r}"
        outcomes[row.run_id] = (about, (compare if row.run_id == root else ending)(result))
        events = await client.event_bus.get_events(row.run_id)
        wrong += [f"{what} in the events of {about}" for what in _wrong(events)]
        told[row.run_id] = Counter(_told(events))
    result = await client.wait(root)
    return RunSummary(result, outcomes, frozenset(tally.begun), told, exact, said, effects, wrong)


def ending(result: RunResult) -> tuple[Any, ...]:
    """What is to be the same of a result: its status, its final output, and the type of its error. One that was stopped
    may have got less far.
    """
    output = None if result.status in STOPPED else result.final_output
    return told_as(result), output, None if result.error is None else result.error.type


def told_as(result: RunResult) -> str:
    return "" if result.status is None else result.status.value


def _wrong(events: Sequence[Event]) -> Iterable[str]:
    numbers = [event.sequence for event in events]
    if numbers != list(range(len(numbers))):
        yield f"the sequence numbers have a gap ({numbers})"
    ends = [event.event_type for event in events if event.event_type in ENDS]
    if len(ends) != 1 or events[-1].event_type != ends[0]:
        yield f"there is not one end, and nothing behind it ({[event.event_type for event in events]})"
    completed = Counter(event.payload["step_id"] for event in events if event.event_type == COMPLETED)
    for step, count in completed.items():
        if count > 1:
            yield f"{COMPLETED} of step {step} is there {count} times"


def _told(events: Sequence[Event]) -> Iterable[Told]:
    for event in events:
        kind, payload = event.event_type, event.payload
        if kind == COMPLETED:
            yield f"{kind} of {payload['step_name']} ({payload['step_id']})", False
        elif kind == "tool.result":
            # Told with the record of its step, or by the step itself.
            yield f"{kind} of {payload['tool_name']} ({payload['step_id']})", True
        elif kind in ENDS:
            yield kind, False
        elif kind not in REPEATED:
            yield f"{kind} {encode(payload)}", "step_id" in payload


def difference(plain: RunSummary, other: RunSummary) -> str | None:
    """What is not in `other` as it is in the undisturbed run; None where nothing is."""
    if other.wrong:
        return other.wrong[0]
    for differs in (_wrong_outcome, _other_steps, _other_events):
        if (what := differs(plain, other)) is not None:
            return what
    if other.said != plain.said:
        return f"the conversation is {other.said!r:.1000}, and undisturbed {plain.said!r:.1000}"
    if other.effects != plain.effects:
        return f"effects() gives {other.effects!r:.1000}, and undisturbed {plain.effects!r:.1000}"
    return None


def _wrong_outcome(plain: RunSummary, other: RunSummary) -> str | None:
    for run_id, (about, expected) in plain.outcomes.items():
        found = other.outcomes.get(run_id)
        if found is None and not _stopped(plain):
            return f"{about} is not there"
        if found is not None and found[1] != expected:
            return f"{about} ended as {found[1]!r:.1000}{_why(other.result)}, and undisturbed as {expected!r:.1000}"
    if more := other.outcomes.keys() - plain.outcomes.keys():
        return f"{other.outcomes[min(more)][0]} is called, which the undisturbed run does not call"
    return None


def _stopped(plain: RunSummary) -> bool:
    return plain.result.status in STOPPED


def _why(result: RunResult) -> str:
    return "" if result.error is None else f" ({result.error.type}: {result.error.message:.1000})"


def _other_steps(plain: RunSummary, other: RunSummary) -> str | None:
    more, less = (sorted(map(_named, steps)) for steps in (other.steps - plain.steps, plain.steps - other.steps))
    if not more and (not less or _stopped(plain)):
        return None
    told = [f"also {', '.join(more)}"] if more else []
    told += [f"not {', '.join(less)}"] if less else []
    return (
        f"other steps were carried out, under other idempotency keys ({'; '.join(told)}): the names, keys and order "
        "of steps are to come from the input and from results of steps alone"
    )


def _other_events(plain: RunSummary, other: RunSummary) -> str | None:
    exact = plain.exact and other.exact
    for run_id, expected in plain.told.items():
        found = other.told.get(run_id, Counter())
        for event in [*found, *(() if _stopped(plain) else expected)]:
            repeats = not exact or event[1]
            if (event in found) != (event in expected) or not (repeats or found[event] == expected[event]):
                return f"event {event[0]:.1000} is there {found[event]} times, and undisturbed {expected[event]} times"
    return None


def _named(step: Identity) -> str:
    _, name, key = step
    return f"step {name!r} ({key.removeprefix('k:')})"
