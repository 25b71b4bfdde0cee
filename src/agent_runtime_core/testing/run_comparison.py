"""Summarize a whole run (final results, executed steps, published events) and compare two summaries."""

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
EventKey = tuple[str, bool]  # an event, and whether a step published it: a repeated step publishes it again

FINAL_EVENTS = {"run.succeeded", "run.failed", "run.cancelled", "run.timed_out"}
#: Events that a resumed run may publish again or in addition.
REPEATABLE = {
    "run.started", "run.resumed", "run.heartbeat", "step.started", "step.skipped", "step.retrying", "step.failed",
    "step.in_doubt", "progress.update", "tool.call",
}  # fmt: skip
COMPLETED = "step.completed"
#: Statuses of a run that was stopped from outside: after a crash it may have made less progress.
STOPPED = {RunStatus.CANCELLED, RunStatus.TIMED_OUT}
REVIEW = "signal:in_doubt:"  # prefix of waits that only exist after a crash


class WriteLog:
    """The journal records of one whole run, over all its simulated processes."""

    def __init__(self) -> None:
        self.started: set[Identity] = set()
        self.done: dict[Identity, Record] = {}
        self.repeated: list[str] = []
        self._drawn: dict[str, list[str]] = {}

    def __call__(self, ops: Sequence[Op], applied: bool) -> None:
        for op in ops:
            if op.name == "journal.append":
                (self._applied if applied else self._attempted)(*op.args)

    def drawn(self, run_id: str) -> Sequence[str]:
        """The random values that the run has drawn so far: "random" or "uuid4", in order."""
        return self._drawn.get(run_id, ())

    def _attempted(self, run_id: str, record: Record) -> None:
        if record.kind not in (STARTED, DONE, RETRYING, FAILED) or record.name.startswith(REVIEW):
            return
        steps = [(run_id, record.name, record.key)]
        if record.next is not None:
            after = json.loads(record.next)
            steps.append((run_id, after["name"], after["key"]))
        for step in steps:
            self.started.add(step)
            known = self.done.get(step)
            if known is not None and (known.seq, known.claim_id) != (record.seq, record.claim_id):
                self.repeated.append(_named(step))

    def _applied(self, run_id: str, record: Record) -> None:
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
    """The outcome of one whole run; `events` counts the events of each run id."""

    result: RunResult
    outcomes: dict[str, Any]
    steps: frozenset[Identity]
    events: dict[str, Counter[EventKey]]
    exact: bool  # no attempt failed, so each event published between steps must occur exactly once
    conversation: list[Any] | None  # the run's conversation, if it is in the same store
    effects: Any
    errors: Sequence[str]


async def summarize(
    client: AgentRunner, root: str, writes: WriteLog, compare: Callable[[RunResult], Any],
    conversation: list[Any] | None, effects: Any,
) -> RunSummary:  # fmt: skip
    """Summarize the store after the run `root` and its children have finished."""
    outcomes, counts, errors, exact = {}, {}, [], True
    if writes.repeated:
        errors.append(f"{writes.repeated[0]} has a saved result but was executed again")
    for row in await client.queue.find(RunFilter()):
        result = await client.wait(row.run_id)
        exact = exact and row.failures == 0
        label = "the run" if row.run_id == root else f"child {row.agent!r}"
        outcomes[row.run_id] = (label, (compare if row.run_id == root else outcome_of)(result))
        events = await client.event_bus.get_events(row.run_id)
        errors += [f"{error} in the events of {label}" for error in event_log_errors(events)]
        counts[row.run_id] = Counter(_comparable(events))
    result = await client.wait(root)
    return RunSummary(result, outcomes, frozenset(writes.started), counts, exact, conversation, effects, errors)


def outcome_of(result: RunResult) -> tuple[Any, ...]:
    """The compared parts of a result: status, final output and error type.

    The output of a stopped run is left out: after a crash the run may have made less progress.
    """
    output = None if result.status in STOPPED else result.final_output
    return status_of(result), output, None if result.error is None else result.error.type


def status_of(result: RunResult) -> str:
    """Return the status of a result, or an empty string."""
    return "" if result.status is None else result.status.value


def event_log_errors(events: Sequence[Event]) -> Iterable[str]:
    """Yield what is wrong with the events of a run."""
    numbers = [event.sequence for event in events]
    if numbers != list(range(len(numbers))):
        yield f"the sequence numbers have a gap ({numbers})"
    final = [event.event_type for event in events if event.event_type in FINAL_EVENTS and not event.from_agent]
    if len(final) != 1 or events[-1].event_type != final[0]:
        yield f"the log must end with its only final event, got {[event.event_type for event in events]}"
    completed = Counter(event.payload["step_id"] for event in events if event.event_type == COMPLETED)
    for step, count in completed.items():
        if count > 1:
            yield f"{COMPLETED} of step {step} was published {count} times"


def _comparable(events: Sequence[Event]) -> Iterable[EventKey]:
    for event in events:
        kind, payload = event.event_type, event.payload
        if kind == COMPLETED:
            yield f"{kind} of {payload['step_name']} ({payload['step_id']})", False
        elif kind == "tool.result":
            # Published with the step's record or by the step itself, so a repeated step may publish it twice.
            yield f"{kind} of {payload['tool_name']} ({payload['step_id']})", True
        elif kind in FINAL_EVENTS and not event.from_agent:
            yield kind, False
        elif event.from_agent or kind not in REPEATABLE:
            yield f"{kind} {encode(payload)}", "step_id" in payload


def difference(baseline: RunSummary, other: RunSummary) -> str | None:
    """Return the first difference of `other` from the undisturbed run, or None."""
    if other.errors:
        return other.errors[0]
    for compare in (_outcome_difference, _step_difference, _event_difference):
        if (found := compare(baseline, other)) is not None:
            return found
    if other.conversation != baseline.conversation:
        return f"the conversation is {other.conversation!r:.1000}, undisturbed {baseline.conversation!r:.1000}"
    if other.effects != baseline.effects:
        return f"effects() returned {other.effects!r:.1000}, undisturbed {baseline.effects!r:.1000}"
    return None


def _outcome_difference(baseline: RunSummary, other: RunSummary) -> str | None:
    for run_id, (label, expected) in baseline.outcomes.items():
        found = other.outcomes.get(run_id)
        if found is None and not _stopped(baseline):
            return f"{label} is missing"
        if found is not None and found[1] != expected:
            return f"{label} ended as {found[1]!r:.1000}{_error(other.result)}, undisturbed as {expected!r:.1000}"
    if more := other.outcomes.keys() - baseline.outcomes.keys():
        return f"{other.outcomes[min(more)][0]} was called, which the undisturbed run does not call"
    return None


def _stopped(baseline: RunSummary) -> bool:
    return baseline.result.status in STOPPED


def _error(result: RunResult) -> str:
    return "" if result.error is None else f" ({result.error.type}: {result.error.message:.1000})"


def _step_difference(baseline: RunSummary, other: RunSummary) -> str | None:
    more, less = (sorted(map(_named, steps)) for steps in (other.steps - baseline.steps, baseline.steps - other.steps))
    if not more and (not less or _stopped(baseline)):
        return None
    steps = [f"also {', '.join(more)}"] if more else []
    steps += [f"not {', '.join(less)}"] if less else []
    return (
        f"other steps were executed, with other idempotency keys ({'; '.join(steps)}). Derive the names, keys and "
        "order of steps only from the input and from results of steps"
    )


def _event_difference(baseline: RunSummary, other: RunSummary) -> str | None:
    exact = baseline.exact and other.exact
    for run_id, expected in baseline.events.items():
        found = other.events.get(run_id, Counter())
        for event in [*found, *(() if _stopped(baseline) else expected)]:
            repeats = not exact or event[1]
            if (event in found) != (event in expected) or not (repeats or found[event] == expected[event]):
                return f"event {event[0]:.1000} was published {found[event]} times, undisturbed {expected[event]} times"
    return None


def _named(step: Identity) -> str:
    _, name, key = step
    return f"step {name!r} ({key.removeprefix('k:')})"
