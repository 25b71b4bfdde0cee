"""All writes of one claim on one run: the only module that commits across concerns.

Where state, events and queue share an engine, what belongs together is one commit. Where they do not,
the order is fixed, journal and state first, then events, then the queue's row, and every id is
deterministic, so that the next claim can publish what a crash in between left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, cast

from .._core.clock import Clock
from .._core.codec.json import decode, encode
from .._core.former_names import renamed_attribute
from .._engines.base import INSTALL, Committer, Guard, Op, end_fence
from .._journal.record import (
    DONE,
    ENDED,
    FAILED,
    PROBE,
    STARTED,
    Record,
    derived_events,
    event_id,
    includes_start,
    start_events,
    stored_events,
)
from ..errors import LeaseLost, StorageBusy, UnserialisableResult
from ..events.base import EventBus
from ..queue.base import RunQueue
from ..queue.records import LIVE, RunRow, RunUpdate
from ..state.base import APPROVED, BEGUN, HAPPENED, TAKEN, EffectRow, StateStore
from .write_buffer import WriteBuffer, records_of

_new = tuple.__new__
BUSY_ATTEMPTS = 2  # a write that was not answered in time is repeated: its operations know themselves


#: What ends a commit of which nobody here knows whether it landed.
OUTCOME_UNKNOWN: Final = (StorageBusy, asyncio.CancelledError)


class UnconfirmedWrite(NamedTuple):
    """Whether the commit of these records has landed."""

    records: Sequence[Record]
    noted: bool = False  # they were told of when they were noted
    whole: bool = True  # it can be written again: all that was in it is here


Row = tuple[str, str, str, float]  # an event to be published: its id, kind, payload and time


def derived_rows(run_id: str, record: Record) -> list[Row]:
    """The events that a record stands for."""
    try:
        texts = [(kind, encode(payload)) for kind, payload in derived_events(run_id, record)]
    except UnserialisableResult:  # whoever cancels a run need not know the types of its results
        texts = stored_events(run_id, record)
    return [(event_id(record, i), kind, text, record.t) for i, (kind, text) in enumerate(texts)]


async def missing_events(bus: EventBus, run_id: str, records: Sequence[Record]) -> list[Row]:
    """Of the events that these records stand for, those that were never published."""
    published = await bus.published(run_id)
    return [row for record in records for row in derived_rows(run_id, record) if row[0] not in published]


def _effect_operations(row: EffectRow, record: Record) -> list[Op]:
    """What happens to the effect row of a step or an approval in the commit of that record of it."""
    if record.kind == STARTED:
        name = "effect.put" if row.status == TAKEN else "effect.begin"
        return [Op(name, (row._replace(status=BEGUN, t=record.t),))]
    if record.kind == DONE:
        status = APPROVED if row.status == APPROVED else HAPPENED
        return [Op("effect.put", (row._replace(status=status, result=record.result, t=record.t),))]
    return [Op("effect.drop", row[:4])] if record.kind == FAILED else []  # its error is known: it may be done again


def _records_in(ops: Sequence[Op]) -> list[Record]:
    """The records that these append, those of transactions as they were placed."""
    return records_of(ops) + [op.args[3] for op in ops if op.name == "journal.transact"]


class ClaimWriter(WriteBuffer):
    """What a claim writes, guarded by it everywhere; `open` before the first read."""

    #: Whether the starts of steps are stored.
    has_journal: Final = True
    #: Results of other lists that the steps of a list can read.
    earlier: Final[dict[str, Any]] = {}

    def __init__(self, row: RunRow, queue: RunQueue, bus: EventBus, state: StateStore, clock: Clock) -> None:
        self.queue: RunQueue = queue
        self.bus: EventBus = bus
        self.state: StateStore = state
        self._bus, self._queue = bus.commits, queue.commits
        self._events_derived = bus.derives and self._bus is state.commits
        self._single_engine = self._events_derived and state.commits is self._queue
        linger = getattr(state.commits, "buffer_delay", 0.0) if self._single_engine else 0.0
        super().__init__(row.run_id, row.claim_id, state.commits, clock, linger)
        #: Hears of every event that this claim has written: its kind and its payload.
        self.on_event: Callable[[str, dict[str, Any]], None] | None = None
        self._before = 0  # events with a lower number were told by an earlier claim
        #: Why a step of that name cannot begin; None while steps can.
        self.closed_error: Callable[[str], Exception] | None = None
        #: Commits of which nobody has heard, in their order.
        self.unconfirmed: list[UnconfirmedWrite] = []
        self.parent_id: str | None = row.parent_id
        #: Rows of the guarded steps that this claim has begun, and of approvals, by name and key of their records.
        self.effects: dict[tuple[str, ...], EffectRow] = {}
        self._unpublished: list[Row] = []  # events that nobody waited for, on an engine of their own
        self._partially_written = False  # a write was broken off when it was through on some of its engines

    async def open(self, *, fresh: bool = False) -> list[Record]:
        """Carry the claim to the other engines, read the journal, and publish what an earlier claim could not.

        A `fresh` run was never begun: there is nothing to read.
        """
        for target in self._distinct():
            if target is not self._queue:
                await self._commit_repeatedly(target, None, [Op(INSTALL, (self.run_id, self.claim_id))])
        records = [] if fresh else await self.state.records(self.run_id)
        self._seq = records[-1].seq + 1 if records else 0
        if not self._events_derived and records:
            await self._publish_missing(records)
        if self.on_event is not None and not fresh:
            self._before = await self.bus.head(self.run_id)
        return records

    def _distinct(self) -> list[Committer]:
        return list({id(target): target for target in (self._state, self._bus, self._queue)}.values())

    async def _publish_missing(self, records: Sequence[Record]) -> None:
        rows = await missing_events(self.bus, self.run_id, records)
        if rows:
            await self._commit(self._bus, [self._publish(rows)])

    def revoke(self) -> None:
        """Have every later write refused: another attempt goes on."""
        self._flush()
        self.guard: Guard = Guard(self.run_id, "")
        self.closed_error = lambda _: LeaseLost(self.run_id, self.claim_id)

    # -- writing

    def _rows(self, record: Record) -> list[Row]:
        return derived_rows(self.run_id, record)

    def _publish(self, rows: Sequence[tuple[str, str, str, float]]) -> Op:
        return Op("events.publish", (self.run_id, tuple(rows)))

    async def write(
        self, state: Sequence[Op] = (), events: Sequence[Op] = (), queue: Sequence[Op] = ()
    ) -> list[list[Any]]:
        """Commit operations of the three concerns; their results, in that order."""
        posted = len(self._unpublished)
        if events and posted:
            events = [self._publish(self._unpublished), *events]
        parts: list[tuple[Committer, list[Op]]] = []
        for target, ops in ((self._state, state), (self._bus, events), (self._queue, queue)):
            if not ops:
                continue
            if parts and parts[-1][0] is target:
                parts[-1][1].extend(ops)
            else:
                parts.append((target, list(ops)))
        results: list[Any] = []
        try:
            for target, ops in parts:
                results += await self._commit(target, ops)
        except BaseException:
            self._partially_written = self._partially_written or len(parts) > 1
            raise
        if events:
            del self._unpublished[:posted]
        first, second = len(state), len(state) + len(events)
        return [results[:first], results[first:second], results[second:]]

    async def _commit(self, target: Committer, ops: Sequence[Op]) -> list[Any]:
        if not self._buffered or target is not self._state:
            return await self._commit_repeatedly(target, self.guard, ops)
        (notes, self._buffered), seq = (self._buffered, []), self._seq
        try:
            return (await self._commit_repeatedly(target, self.guard, [*notes, *ops]))[len(notes) :]
        except LeaseLost:
            raise  # no later one lands either
        except OUTCOME_UNKNOWN:  # they may have landed with it
            noted = records_of(notes)
            self.unconfirmed += [UnconfirmedWrite(noted, noted=True)] if noted else []
            raise
        except Exception:
            self._requeue(notes, seq)
            raise

    async def _commit_repeatedly(self, target: Committer, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Commit, and again where there was no answer in time, as long as that keeps the order of the journal."""
        for _ in range(BUSY_ATTEMPTS):
            try:
                return await target.commit(guard, ops)
            except StorageBusy:
                if not self.is_newest(_records_in(ops)):
                    raise
        try:
            return await target.commit(guard, ops)
        except StorageBusy as error:
            error.tries = BUSY_ATTEMPTS + 1
            raise

    def _appends(self, records: Sequence[Record]) -> list[Op]:
        ops: list[Op] = []
        for record in records:  # mostly one; as a NamedTuple itself makes one, only faster
            ops.append(_new(Op, ("journal.append", (self.run_id, record))))
        if self.effects:
            for record in records:
                if (row := self.effects.get(record[2:4])) is not None:
                    ops += _effect_operations(row, record)
        return ops

    def _with_events(self, records: Sequence[Record]) -> tuple[list[Op], list[Op]]:
        state = self._appends(records)
        if self._events_derived:
            return state, []
        rows = [row for record in records for row in self._rows(record)]
        return state, [self._publish(rows)] if rows else []

    def _report(self, records: Sequence[Record]) -> None:
        if self.on_event is not None:
            for record in records:
                events = derived_events(self.run_id, record)
                if includes_start(record):  # told when it was noted
                    events = events[1 if record.kind == ENDED else start_events(record.total) :]
                for kind, payload in events:
                    self.on_event(kind, payload)

    def watched(self, call: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[Any]]:
        """The call of a step, as it is: a runner cancels the task of a cancelled run."""
        return call

    def record(self, records: Sequence[Record]) -> Awaitable[Any]:
        """Make ends of steps durable: what to await, which each step does. Where it is one commit and no more, it is
        tried once; `StepJournal.write_failed` says what is to be done after that."""
        if self._single_engine and not self._buffered and self.on_event is None:
            return self._state.commit(self.guard, self._appends(records))
        return self.append(*records)

    async def append(self, *records: Record, queue: Sequence[Op] = (), noted: bool = False) -> list[Any]:
        """Make boundary records durable, with what must land in the queue together with them.

        Those that were `noted` before are not told of again.
        """
        results: list[Any] = []
        if not self._single_engine:
            state, events = self._with_events(records)
            results = (await self.write(state, events, queue))[2]
        else:
            state = self._appends(records)
            results = (await self._commit(self._state, [*state, *queue]))[len(state) :]
        if self.on_event is not None and not noted:
            self._report(records)
        return results

    async def find_record(self, record: Record) -> Record | None:
        """The record as it is in the journal, if it is, though whoever wrote it was cancelled."""
        found = await self.state.records(self.run_id, record.seq - 1)
        return found[0] if found and (found[0].seq, found[0].claim_id) == (record.seq, record.claim_id) else None

    async def confirm_record(self, record: Record) -> Record | None:
        """The same where its outcome is not known: behind a later record, it is there or never will be."""
        await self.append(Record(self.next_seq(), PROBE, claim_id=self.claim_id, t=self.clock.wall()))
        return await self.find_record(record)

    async def buffer(self, *records: Record) -> None:
        """Queue records ahead of all later writes without waiting for them."""
        if self._single_engine:
            if self.max_delay:
                self._schedule_flush(self._appends(records))
            else:
                await self._commit_later(self._state, self._appends(records))
            if self.on_event is not None:
                self._report(records)
            return
        state, events = self._with_events(records)
        await self._commit_later(self._state, state)
        await self._publish_later(records, events)
        self._report(records)

    async def _publish_later(self, records: Sequence[Record], events: Sequence[Op]) -> None:
        """Nobody waits for these, which may be lost or late: they are told once more, with the next that are told."""
        if events:
            self._unpublished += [row for record in records for row in self._rows(record)]
            await self._commit_later(self._bus, events)

    async def _commit_later(self, target: Committer, ops: Sequence[Op]) -> None:
        if self.max_delay:
            self._schedule_flush(ops)
            return
        post = renamed_attribute(target, "commit_nowait", "post")
        if post is not None:
            post(self.guard, ops)
        else:
            await self._commit(target, ops)

    def publish_heartbeat(self, now: float, payload: str) -> None:
        """Queue a heartbeat event, where events can be queued; nobody waits for one."""
        post = renamed_attribute(self._bus, "commit_nowait", "post")
        if post is not None:
            post(self.guard, [self._publish([(f"beat:{self.claim_id}:{now}", "run.heartbeat", payload, now)])])

    async def emit(self, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        """Publish events; their sequence numbers, once they are durable."""
        op = self._publish(rows)
        told = (await self.write(events=[op]))[1] if self._unpublished else await self._commit(self._bus, [op])
        sequences: list[int] = told[-1]
        self._report_rows(rows, sequences)
        return sequences

    def _report_rows(self, rows: Sequence[tuple[str, str, str, float]], sequences: Sequence[int]) -> None:
        if self.on_event is not None:
            for (_, kind, text, _), sequence in zip(rows, sequences, strict=True):
                if sequence >= self._before:
                    self.on_event(kind, cast("dict[str, Any]", decode(text)))

    async def checkpoint(self, text: str, mark: str, row: tuple[str, str, str, float]) -> None:
        """Save a checkpoint together with its event."""
        now = row[3]
        told = await self.write([Op("state.checkpoint", (self.run_id, text, mark, now))], [self._publish([row])])
        self._report_rows([row], told[1][-1])

    async def status(self, status: str, *records: Record) -> None:
        """Queue the run's status, and records that go with it, without waiting."""
        state, events = self._with_events(records)
        await self._commit_later(self._state, [*state, Op("state.status", (self.run_id, status, self.clock.wall()))])
        await self._publish_later(records, events)
        self._report(records)

    async def transact(self, fn: Any, args: tuple[Any, ...], place: Record, seal: Any) -> str | None:
        """Run `fn` inside the commit of the record that `seal` makes of its result at `place`; the recorded result.

        Its events are left to `tell`.
        """
        op = Op("journal.transact", (self.run_id, fn, args, place, seal))
        try:
            text: str | None = (await self._commit(self._state, [op]))[0]
        except BaseException:
            self._partially_written = True  # it may have landed
            raise
        return text

    async def publish_events(self, *records: Record) -> None:
        """Publish the events of records that were committed without them, as far as anybody knows."""
        if not self._events_derived:
            try:
                await self.write(events=[self._publish([row for record in records for row in self._rows(record)])])
            except BaseException:
                self._partially_written = True
                raise
        self._report(records)

    async def update_run(
        self, how: RunUpdate, records: Sequence[Record] = (), ops: Sequence[Op] = (), *, events: Sequence[Op] = ()
    ) -> list[Any]:
        """Leave the run as `how` says, with the records and queue operations that belong to it; its row, their results.

        `events` are operations of the bus that follow the events of the records. On one engine, RowChanged refuses
        all of it; elsewhere what went before is repeated or put right. Of the claim whose end it is,
        nothing comes behind it, on any engine.
        """
        if self._partially_written and not self._events_derived:  # after an end, no claim comes to put it right
            await self._publish_missing(await self.state.records(self.run_id))
            self._partially_written = False
        self._buffered = [op for op in self._buffered if op.name != "state.status"]  # nobody can see it any more
        state, told = self._with_events(records)
        state.append(Op("state.status", (self.run_id, how.status, how.now)))
        told += events
        if how.status not in LIVE:
            if self._state is not self._queue:
                state.append(end_fence(self.run_id, self.claim_id))
            if self._bus not in (self._queue, self._state):
                told.append(end_fence(self.run_id, self.claim_id))
        done = await self.write(state, told, [Op("queue.settle", (self.run_id, how)), *ops])
        self._report(records)
        return done[2]
