"""Safeguards of the library that can be taken away, to see that the simulation misses them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

from agent_runtime_core._core.clock import Clock, Duration
from agent_runtime_core._engines.base import Op, OperationSet
from agent_runtime_core._engines.memory import MemoryTx
from agent_runtime_core._engines.payloads import Payloads
from agent_runtime_core._execution import effects
from agent_runtime_core._execution.claim_writer import ClaimWriter, EventPublisher
from agent_runtime_core._execution.effects import GuardedStep, TimeLimitPassed
from agent_runtime_core._execution.journal_view import JournalView
from agent_runtime_core._execution.step_journal import RunJournal, StepJournal
from agent_runtime_core._execution.step_keys import StepKeys
from agent_runtime_core._journal.record import Record
from agent_runtime_core.queue import transitions as rows
from agent_runtime_core.queue.base import RunQueue
from agent_runtime_core.queue.live_claims import DelayedRuns, LiveClaims
from agent_runtime_core.queue.memory import MemoryTransitions
from agent_runtime_core.queue.records import ClaimRequest, RunRow, RunUpdate
from agent_runtime_core.queue.sqlite import SQLiteTransitions
from agent_runtime_core.queue.transitions import RunTransitions
from agent_runtime_core.runner import forking
from agent_runtime_core.runner.claim import CrashSuspects
from agent_runtime_core.steps.graph import Graph

Patch = tuple[Any, str, Any]


def weakened(concern: OperationSet, ablated: frozenset[str]) -> OperationSet:
    """The concern as an engine of the simulation takes it, without what was taken away."""
    ops = dict(concern.operations)
    if "replay" in ablated and "journal.append" in ops:
        ops["journal.append"] = _appended(ops["journal.append"])
    if "absorb" in ablated and "events.publish" in ops:
        ops["events.publish"] = _published(ops["events.publish"])
    if "effects" in ablated and "effect.begin" in ops:
        ops["effect.begin"] = ops["effect.put"]
    return concern if ops == concern.operations else replace(concern, operations=ops)


def _appended(append: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever comes again is another record."""
    return lambda tx, run_id, record: append(tx, run_id, record._replace(seq=-1))


def _published(publish: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever comes again is another event."""
    count = itertools.count()
    return lambda tx, run_id, rows: publish(tx, run_id, [(f"{row[0]}#{next(count)}", *row[1:]) for row in rows])


def _match() -> list[Patch]:
    """An imperative step is whatever was recorded at its place."""

    matched: WeakKeyDictionary[JournalView, int] = WeakKeyDictionary()

    def recorded(self: JournalView, name: str, key: str) -> Record | None:
        if key.startswith("s:"):
            index = matched.get(self, 0)
            return self.ordered[index] if index < len(self.ordered) else None
        return self.completed.get((name, key))

    def match(self: StepJournal[Any], name: str, record: Record | None) -> None:
        matched[self.view] = matched.get(self.view, 0) + 1

    return [(JournalView, "lookup", recorded), (StepJournal, "check_order", match)]


def _count() -> list[Patch]:
    """Taking a run from a dead worker does not count as a crash."""
    counted: Callable[..., RunRow] = vars(rows)["as_claimed"]

    def claimed(row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        return counted(row, ticket, want)._replace(crashes=row.crashes, crashes_in_row=row.crashes_in_row)

    return [(rows, "as_claimed", claimed)]


def _cursor() -> list[Patch]:
    """A run parks whatever came between its last look and the commit."""
    settled: Callable[..., Any] = RunTransitions.settle

    def settle(self: RunTransitions, run_id: str, how: RunUpdate) -> Any:
        return settled(self, run_id, how._replace(cursor=-1))

    return [(RunTransitions, "settle", settle)]


def _rollback() -> list[Patch]:
    """What a commit wrote before its process died stays; the SQLite engine of the simulation does the same."""
    return [(MemoryTx, "rollback", lambda self: None)]


def _resume() -> list[Patch]:
    """Records are written and never looked up."""
    return [
        (JournalView, "lookup", lambda self, name, key: None),
        (StepJournal, "check_order", lambda self, name, record: None),
    ]


def _once() -> list[Patch]:
    """A message that comes twice is two messages."""
    return [(MemoryTransitions, "message_number", lambda self, run_id, msg_id: None)]


def _liveness() -> list[Patch]:
    """Nobody looks whether the process that holds a run still lives; its lease has to run out."""
    return [(SQLiteTransitions, "_expire_dead_processes", lambda self: None)]


def _expire() -> list[Patch]:
    """A claim takes a run off the queue for good: what is claimed counts as done."""
    none: Callable[..., list[RunRow]] = lambda self, want, limit: []  # noqa: E731
    return [(MemoryTransitions, "expired_leases", none), (SQLiteTransitions, "expired_leases", none)]


def _terminal() -> list[Patch]:
    """Whoever ends a run that nobody holds does not look whether it has ended meanwhile."""

    def expect(self: RunTransitions, run_id: str, statuses: Sequence[str]) -> RunRow:
        row = self.get(run_id)
        assert row is not None
        return row

    return [(RunTransitions, "_expect", expect)]


def _publish() -> list[Patch]:
    """What a crash between two engines left out of the log is not looked for."""

    async def missing(self: ClaimWriter, publisher: EventPublisher, records: Sequence[Record]) -> None:
        return None

    return [(ClaimWriter, "_publish_missing", missing)]


def _submit() -> list[Patch]:
    """An idempotency key is stored and never looked up."""
    none: Callable[..., None] = lambda self, idem_key, tenant: None  # noqa: E731
    return [(MemoryTransitions, "by_key", none), (SQLiteTransitions, "by_key", none)]


def _order() -> list[Patch]:
    """Over several engines the queue's row is written first."""
    written: Callable[..., Any] = ClaimWriter.write

    async def write(
        self: ClaimWriter, state: Sequence[Op] = (), events: Sequence[Op] = (), queue: Sequence[Op] = ()
    ) -> list[list[Any]]:
        if not queue or self._single_engine:
            return cast("list[list[Any]]", await written(self, state, events, queue))
        first: list[list[Any]] = await written(self, (), (), queue)
        # The fence of the queue may have fallen with its row; those of the other engines stand.
        rest: list[list[Any]] = await written(self, state, events)
        return [rest[0], rest[1], first[2]]

    return [(ClaimWriter, "write", write)]


def _boot() -> list[Patch]:
    """Leases are written in the wall time of whoever claims."""
    return [(RunQueue, "lease_now", lambda self: self.clock.wall())]


def _cancel() -> list[Patch]:
    """A request to cancel is told to the holder of the run, and not kept for the next one."""
    counted: Callable[..., RunRow] = vars(rows)["as_claimed"]

    def claimed(row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        return counted(row, ticket, want)._replace(cancel_at=None)

    return [(rows, "as_claimed", claimed)]


def _durable() -> list[Patch]:
    """A step of a graph counts as done when its function is, and not when its record is durable."""

    def take_after(self: Graph, place: int) -> int | None:
        finished(self, place)
        return self.take()

    finished: Callable[[Graph, int], None] = Graph.finished
    return [(Graph, "next_after", take_after), (Graph, "finished", lambda self, place: None)]


def _alone() -> list[Patch]:
    """A run whose next crash is its last is executed beside others."""
    return [(CrashSuspects, "may_start", lambda self, row: True), (CrashSuspects, "is_careful", lambda self: False)]


def _inside() -> list[Patch]:
    """What happens inside a step is counted over the whole run."""

    def occurrence(self: StepKeys, space: str, name: str, mark: str | None = None) -> str:
        count = self._counts.get((space, name), 0)
        self._counts[space, name] = count + 1
        return f"{space}:{count}"

    return [(StepKeys, "next_key", occurrence)]


def _own() -> list[Patch]:
    """A claim does not extend the leases of its own process first."""
    return [(LiveClaims, "unextended", lambda self, queue: [])]


def _defer() -> list[Patch]:
    """Time in which the machine was suspended counts against leases when it wakes up."""
    return [(LiveClaims, "suspended", lambda self: 0.0)]


def _woken() -> list[Patch]:
    """A wait in memory ends by the monotonic clock alone, which stands still in a suspend."""
    return [(Clock, "sleep_for", lambda self, seconds: self.sleep(seconds))]


def _set_back() -> list[Patch]:
    """A wait ends by the wall clock alone, which may be set back."""
    return [(Duration, "left", lambda self: self.until - self._clock.wall())]


def _delayed() -> list[Patch]:
    """Nobody remembers what it parked, so that a wall clock which is set back delays it."""
    return [(DelayedRuns, "remember", lambda *args: None)]


def _child() -> list[Patch]:
    """Each child run is a lineage of its own, whoever called it."""

    async def alone(journal: RunJournal, parent_id: str) -> None:
        return None

    return [(effects, "_join_lineage", alone)]


def _limit() -> list[Patch]:
    """A payment whose time limit has passed has failed."""
    decided: Callable[..., Any] = GuardedStep.left_in_doubt

    def decide(self: GuardedStep, error: Exception, *, returned: bool) -> Any:
        return None if isinstance(error, TimeLimitPassed) else decided(self, error, returned=returned)

    return [(GuardedStep, "left_in_doubt", decide)]


def _adopt() -> list[Patch]:
    """The payments of a child that is deleted are forgotten, although its caller is stored."""
    return [(effects, "_adoption", lambda origin, child: [])]


def _digests() -> list[Patch]:
    """Payments from before encryption was switched on are not found any more."""
    digests: Callable[..., tuple[str, ...]] = Payloads.digests
    return [(Payloads, "digests", lambda self, digest: digests(self, digest)[:1])]


def _member() -> list[Patch]:
    """The payments of the run that made them are forgotten when it is deleted, although a fork is stored."""
    none: Callable[..., list[Op]] = lambda origin, run_id: []  # noqa: E731
    return [(forking, "membership", none)]


def _in_the_double() -> list[Patch]:
    """The engines of the simulation leave it out by themselves."""
    return []


SAFEGUARDS: dict[str, Callable[[], list[Patch]]] = {
    "absorb": _in_the_double,
    "adopt": _adopt,
    "alone": _alone,
    "beat": _in_the_double,
    "boot": _boot,
    "cancel": _cancel,
    "child": _child,
    "count": _count,
    "cursor": _cursor,
    "defer": _defer,
    "delayed": _delayed,
    "digests": _digests,
    "durable": _durable,
    "effects": _in_the_double,
    "expire": _expire,
    "fence": _in_the_double,
    "inside": _inside,
    "install": _in_the_double,
    "liveness": _liveness,
    "limit": _limit,
    "match": _match,
    "member": _member,
    "once": _once,
    "order": _order,
    "own": _own,
    "publish": _publish,
    "replay": _in_the_double,
    "resume": _resume,
    "rollback": _rollback,
    "set back": _set_back,
    "submit": _submit,
    "terminal": _terminal,
    "woken": _woken,
}


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Run the block with these safeguards taken away."""
    patches = [patch for name in names for patch in SAFEGUARDS[name]()]
    kept = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, replacement in patches:
        setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        for owner, attribute, original in reversed(kept):
            setattr(owner, attribute, original)
