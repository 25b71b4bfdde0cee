"""Writes of one claim on one run, to the journal, the event bus and the queue.

What belongs together is one commit if the three share an engine. Otherwise the order is fixed: journal and state first,
then events, then the row of the queue. Every id is deterministic, so the next claim can publish what a crash in between
left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from .._core.clock import Clock
from .._core.codec.json import decode, encode
from .._core.former_names import renamed_attribute
from .._core.log import CURRENT_STEP, Step, position_of
from .._core.per_loop import PerLoop
from .._core.redaction import Redaction
from .._core.validation import Shown, must, type_name
from .._engines.base import FORGET, INSTALL, Committer, Engine, Guard, Op, Outcome, end_fence
from .._engines.outages import OUTAGE, StoreOutage
from .._journal.record import (
    ATTEMPT,
    DONE,
    ENDED,
    FAILED,
    PROBE,
    RESUMED,
    RETRYING,
    STARTED,
    Record,
    derived_events,
    event_id,
    includes_start,
    start_events,
    stored_events,
    with_beginning,
)
from ..errors import LeaseLost, StorageBusy, StorageClosed, StorageFull, UnserialisableResult
from ..events.base import EventBus
from ..events.event import AGENT_MARK, agent_type
from ..queue.base import RunQueue
from ..queue.records import LIVE, QUESTION, MailboxMessage, RunRow, RunUpdate
from ..state.base import APPROVED, BEGUN, HAPPENED, TAKEN, EffectRow, StateStore
from ..tracing.tracer import EventMaker, TracedEvent
from .run_writer import OUTCOME_UNKNOWN, ChildCall, Row, UnconfirmedWrite

_new = tuple.__new__
_ENDS: Final = (DONE, RETRYING, FAILED)
#: How often a commit without an answer is repeated, if `ClaimWriter.outlast` does not decide it. A repeat changes
#: nothing if the first commit was applied.
BUSY_ATTEMPTS = 2


def _effect_operations(row: EffectRow, record: Record, call: ChildCall | None) -> list[Op]:
    """Return what this record of a guarded step or an approval changes in its effect row."""
    if record.kind == STARTED:
        name = "effect.put" if row.status == TAKEN else "effect.begin"
        ops = [Op(name, (row._replace(status=BEGUN, t=record.t),))]
        return ops if call is None else [*ops, Op("effect.put", (call.row(row, record.t),))]
    if record.kind == DONE:
        status = APPROVED if row.status == APPROVED else HAPPENED
        return [Op("effect.put", (row._replace(status=status, result=record.result, t=record.t),))]
    # The error of a failed step is known, so another run may execute it.
    return [Op("effect.drop", (row,))] if record.kind == FAILED else []


def _records_in(ops: Sequence[Op]) -> list[Record]:
    """Return the records that these operations append; records of transactions without their results."""
    return records_of(ops) + [op.args[3] for op in ops if op.name == "journal.transact"]


class ClaimWriter:
    """Writes for one claim; every engine refuses its writes once another claim exists. `open` it before the first read.

    Attributes:
        on_events: Receives what makes the events that this claim wrote: types with payloads, in order. It is
            called later, in another thread, so that a step does not wait for it.
        on_write: Called with each write of the run's code; None without a stall limit.
        closed_error: Why the step of that name must not start; None while steps may start.
        outlast: Waits during an outage, which began at that monotonic time, before a commit is repeated. Returns False
            if the commit must fail instead. If None, it fails after `BUSY_ATTEMPTS`.
        unconfirmed: Commits with an unknown outcome, oldest first.
        parent_id: The run that called this run. None without a parent, and once its lineage was read.
        arrival: The order of arrival of the run, which tells it from a deleted run with the same id.
        input: The input of the run, as JSON.
        effects: Rows of the guarded steps that this claim started, and of approvals, by the identity of their records.
        call: The call of a child run, known since it joined its lineage. None for a call with a key.
        reservations: The pools in which calls have open reservations, by the identity of their steps; those of earlier
            claims under names that no step has.
    """

    has_journal: Final = True
    earlier: Final[dict[str, Any]] = {}

    def __init__(self, row: RunRow, queue: RunQueue, bus: EventBus, state: StateStore, clock: Clock) -> None:
        self.run_id: str = row.run_id
        self._run_key = row.run_key
        self.claim_id: str = row.claim_id
        self.parent_id: str | None = row.parent_id
        self.input: str = row.input
        self.arrival: int = row.arrival
        self.mail_seq: int = row.mail_seq
        self.caller_id: str | None = row.parent_id
        self.queue: RunQueue = queue
        self.bus: EventBus = bus
        self.state: StateStore = state
        self.redaction: Redaction | None = state.redaction
        self.clock: Clock = clock
        self.guard: Guard = Guard(row.run_id, row.claim_id)
        self.on_events: Callable[[EventMaker], None] | None = None
        self.on_write: Callable[[], None] | None = None
        self.closed_error: Callable[[str], Exception] | None = None
        self.outlast: Callable[[float], Awaitable[bool]] | None = None
        self.unconfirmed: list[UnconfirmedWrite] = []
        self.effects: dict[tuple[str, ...], EffectRow] = {}
        self.call: ChildCall | None = None
        self.reservations: dict[tuple[str, str], list[str]] = {}
        self._spent: dict[tuple[str, ...], list[Op]] = {}  # committed with the next end of each step
        self._state, self._bus, self._queue = state.commits, bus.commits, queue.commits
        events_derived = bus.derives and self._bus is self._state
        self._publisher: EventPublisher | None = None if events_derived else EventPublisher(row.run_id, bus)
        self._single_engine = events_derived and self._state is self._queue
        self.max_delay: float = getattr(self._state, "buffer_delay", 0.0) if self._single_engine else 0.0
        self._buffer = buffer = WriteBuffer(self.guard, self._state, clock, self.max_delay)
        self.next_seq: Callable[[], int] = buffer.next_seq
        self.is_newest: Callable[[Sequence[Record]], bool] = buffer.is_newest
        self.withdraw: Callable[[Record], bool] = buffer.withdraw
        #: Whether the end of the run is one commit.
        self.ends_at_once: bool = self._state is self._bus is self._queue
        self._mail_count: list[Op] = []  # returns the number of messages in the mailbox of the run
        self._on_mail_count: Callable[[int], None] | None = None
        self._first_new_event = 0  # an earlier claim reported the events with lower sequence numbers
        self._partially_written = False  # a write failed after it was committed on one of its engines

    async def open(self, *, fresh: bool = False) -> list[Record]:
        """Install the claim on the other engines, read the journal, and publish what an earlier claim could not.

        Args:
            fresh: The run never started: there is nothing to read.
        """
        if fresh and self._single_engine:
            return []
        others = {id(each.commits): each for each in (self.state, self.bus) if each.commits is not self._queue}
        for backend in others.values():
            await require_separate_fences(self.queue, backend, self.guard)
            await self._commit_repeatedly(backend.commits, None, [Op(INSTALL, (self.run_id, self.claim_id))])
        records = [] if fresh else await self.state.records(self.run_id)
        self._buffer.start_at(records[-1].seq + 1 if records else 0)
        if self._publisher is not None and records:
            await self._publish_missing(self._publisher, records)
        if self.on_events is not None and not fresh:
            self._first_new_event = await self.bus.head(self.run_id)
        return records

    async def _publish_missing(self, publisher: EventPublisher, records: Sequence[Record]) -> None:
        if ops := await publisher.missing(records):
            await self._commit(self._bus, ops)

    def revoke(self) -> None:
        """Have every later write refused, because another attempt of the run starts."""
        self.flush()
        self.guard = self._buffer.guard = Guard(self.run_id, "")
        self.on_write = None  # it keeps no later attempt from a stall
        self.closed_error = lambda _: LeaseLost(self.run_id, self.claim_id, self._run_key)

    def flush(self) -> None:
        """Hand the buffered writes to the engine now, without waiting for the commit."""
        self._buffer.flush()

    def merge_begin_and_end(self, end: Record) -> Record:
        """Return the record of an attempt's end, extended by its beginning if only that is still buffered."""
        return self._buffer.merge_begin_and_end(end)

    def unmerge(self) -> None:
        """Buffer the beginning of an attempt again, because the record that contained it was not written."""
        self._buffer.unmerge()

    # -- commits

    async def write(
        self, state: Sequence[Op] = (), events: Sequence[Op] = (), queue: Sequence[Op] = ()
    ) -> list[list[Any]]:
        """Commit operations of the three stores, in one commit for each engine. Returns their results in that order."""
        unconfirmed = self._publisher.unconfirmed if self._publisher is not None else []
        repeated = len(unconfirmed)
        if events and repeated:
            events = [publish_op(self.run_id, unconfirmed), *events]
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
            del unconfirmed[:repeated]
        first, second = len(state), len(state) + len(events)
        return [results[:first], results[first:second], results[second:]]

    async def _commit(self, target: Committer, ops: Sequence[Op]) -> list[Any]:
        """Commit these operations, together with the buffered operations if they are for the same engine."""
        if self.on_write is not None:
            self.on_write()
        buffer = self._buffer
        if not (buffer.ops or buffer.flushed) or target is not self._state:
            return await self._commit_repeatedly(target, self.guard, ops)
        refused = self._refused_flushes()
        buffered, seq = buffer.take()
        buffered = [*refused, *buffered]
        try:
            results = (await self._commit_repeatedly(target, self.guard, ops, buffered))[len(buffered) :]
            if buffer.flushed:  # what they contained must not be written before these records any more
                self._note_unconfirmed(self._refused_flushes())
            return results
        except LeaseLost:
            raise  # no later commit of this claim is applied either
        except OUTCOME_UNKNOWN:
            self._note_unconfirmed(buffered)
            raise
        except Exception:
            buffer.put_back(buffered, seq)
            raise

    def _note_unconfirmed(self, ops: Sequence[Op]) -> None:
        if records := records_of(ops):
            self.unconfirmed.append(UnconfirmedWrite(records, reported=True))

    def _refused_flushes(self) -> list[Op]:
        """Return the operations of flushes that a full store refused, and note flushes with an unknown outcome.

        A flush without an outcome yet is kept: the commits after it have the same fate.
        """
        refused: list[Op] = []
        flushed, self._buffer.flushed = self._buffer.flushed, []
        for outcome, ops in flushed:
            if isinstance(outcome.error, StorageFull):
                refused += ops
            elif isinstance(outcome.error, StorageBusy):
                self._note_unconfirmed(ops)
            elif outcome.error is None and outcome.result is None:
                self._buffer.flushed.append((outcome, ops))
        return refused

    async def _commit_repeatedly(
        self, target: Committer, guard: Guard | None, ops: Sequence[Op], buffered: list[Op] | None = None
    ) -> list[Any]:
        """Commit; repeat a commit that an outage failed while that keeps the order of the journal.

        Args:
            target: The engine.
            guard: The guard of the commit.
            ops: The operations.
            buffered: Operations before them, which come to include flushes that the same outage refused.
        """
        began, tries = 0.0, 0
        try:
            while True:
                try:
                    results = await target.commit(guard, [*buffered, *ops] if buffered else ops)
                except OUTAGE as error:
                    if not self.is_newest(_records_in(ops)):
                        raise
                    began, tries = began or self.clock.monotonic(), tries + 1
                    if not await self._may_repeat(target, ops, error, began, tries):
                        if isinstance(error, StorageBusy):
                            error.tries = tries
                        raise
                    if buffered is not None:
                        buffered[:0] = self._refused_flushes()
                else:
                    if tries:
                        StoreOutage.of(target, self.clock).answered()
                    return results
        except LeaseLost as error:  # the engine does not know the name that the caller gave the run
            raise LeaseLost(error.key, error.token, self._run_key) from error

    async def _may_repeat(
        self, target: Committer, ops: Sequence[Op], error: Exception, began: float, tries: int
    ) -> bool:
        """Return whether a commit that an outage failed is repeated, after a pause if it lasts."""
        quiet = BUSY_ATTEMPTS if self.outlast is None else 1  # a connection that was cut is no outage yet
        if tries <= quiet and isinstance(error, StorageBusy):
            return True
        # What a claim gets would have a part of its lease only, if it were repeated for long.
        if self.outlast is None or any(op.name == "queue.claim" for op in ops):
            return False
        StoreOutage.of(target, self.clock).noticed(error)
        return await self.outlast(began)

    async def _commit_later(self, target: Committer, ops: Sequence[Op]) -> None:
        """Commit without waiting for it, if the engine can."""
        commit_nowait = renamed_attribute(target, "commit_nowait", "post")
        if commit_nowait is None:
            await self._commit(target, ops)
        elif (outcome := commit_nowait(self.guard, ops)) is not None and target is self._state:
            self._buffer.flushed.append((outcome, ops))

    def _appends(self, records: Sequence[Record]) -> list[Op]:
        ops: list[Op] = []
        if self.on_write is not None:
            self.on_write()
        for record in records:  # usually one record; `_new` does what the constructor of a NamedTuple does, but faster
            ops.append(_new(Op, ("journal.append", (self.run_id, record))))
        if self.effects:
            for record in records:
                if (row := self.effects.get(record[2:4])) is not None:
                    ops += _effect_operations(row, record, self.call)
        if self._spent:
            for record in records:
                if record.kind in _ENDS:
                    ops += self._spent.get(record[2:4], ())
        return ops

    # -- reports to `on_events`

    def _report(self, records: Sequence[Record]) -> None:
        if self.on_events is not None:
            self.on_events(partial(_events_of_records, self.run_id, tuple(records), CURRENT_STEP.get()))

    def _report_rows(self, rows: Sequence[Row], sequences: Sequence[int]) -> None:
        if self.on_events is not None:
            new = [row for row, sequence in zip(rows, sequences, strict=True) if sequence >= self._first_new_event]
            self.on_events(partial(_events_of_rows, new))

    # -- records

    def count_mail(self, receive: Callable[[int], None]) -> None:
        """Have `receive` called with the number of messages in the mailbox when the end of a step is written.

        Does nothing if that would save no call of the store.
        """
        if self._single_engine and self.queue.mail_count:
            self._mail_count, self._on_mail_count = [Op(self.queue.mail_count, (self.run_id,))], receive

    def watched(self, call: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[Any]]:
        """Return `call` itself: a runner cancels the task of a cancelled run."""
        return call

    def record(self, records: Sequence[Record]) -> Awaitable[Any]:
        """Return what makes the ends of steps durable when it is awaited.

        A single commit is not repeated here: `StepJournal.write` does that. Each step of a run comes through here, and
        a separate coroutine would cost it time.
        """
        buffer = self._buffer
        while buffer.flushed and buffer.flushed[0][0].result is not None:
            del buffer.flushed[0]
        if (
            self._single_engine
            and not (buffer.ops or buffer.flushed)
            and self.on_events is None
            and self._on_mail_count is None
            and not self._spent
        ):
            return self._state.commit(self.guard, self._appends(records))
        return self.append(*records)

    async def append(self, *records: Record, queue: Sequence[Op] = (), reported: bool = False) -> list[Any]:
        """Make records durable, and operations of the queue with them.

        Args:
            records: The records.
            queue: Operations for the same commit, if one engine stores both.
            reported: `on_events` already received the events of the records.

        Returns:
            The results of the operations of the queue.
        """
        results: list[Any] = []
        if not self._single_engine:
            events = [] if self._publisher is None else self._publisher.operations(records)
            results = (await self.write(self._appends(records), events, queue))[2]
        else:
            # Of this commit: another task may ask for the number while it is under way.
            state, receive = self._appends(records), self._on_mail_count
            results = (await self._commit(self._state, [*state, *queue, *self._mail_count]))[len(state) :]
            if receive is not None:
                receive(results.pop())
        if self._spent:
            for record in records:
                if record.kind in _ENDS:
                    self._spent.pop(record[2:4], None)
        if self.on_events is not None and not reported:
            self._report(records)
        return results

    async def find_record(self, record: Record) -> Record | None:
        """Return the record of this number if the same claim wrote it to the journal."""
        found = await self.state.records(self.run_id, record.seq - 1)
        return found[0] if found and (found[0].seq, found[0].claim_id) == (record.seq, record.claim_id) else None

    async def confirm_record(self, record: Record) -> Record | None:
        """Return the record if the commit that contained it was applied; None if it was not and never will be.

        Writes a probe record first. After that, an earlier commit is in the journal or is refused.
        """
        await self.append(Record(self.next_seq(), PROBE, claim_id=self.claim_id, t=self.clock.wall()))
        return await self.find_record(record)

    async def buffer(self, *records: Record, then: Sequence[Op] = ()) -> None:
        """Write records before all later records, and these operations, without waiting for the commit."""
        ops = self._appends(records)
        ops += then
        if ops and self.max_delay:  # one engine stores everything
            self._buffer.add(ops)
        elif ops:
            await self._commit_later(self._state, ops)
        if self._publisher is not None and (rows := self._publisher.rows(records)):
            self._publisher.unconfirmed += rows
            await self._commit_later(self._bus, [publish_op(self.run_id, rows)])
        self._report(records)

    async def with_next_record(self, identity: tuple[str, str], ops: list[Op]) -> None:
        """Have operations of the queue committed with the next end of a step, which closes its reservations.

        If the journal is on another engine, they are committed now: the call has been paid, also if its record is lost.
        """
        if self._state is self._queue:
            self._spent[identity] = ops
        else:
            await self.write(queue=ops)
        self.reservations.pop(identity, None)

    async def later(self, op: Op) -> None:
        """Write an operation of the queue with the next commit, without waiting for it."""
        if self.max_delay:  # one engine has everything
            self._buffer.add([op])
        else:
            await self._commit_later(self._queue, [op])

    def given_back(self) -> list[Op]:
        """Return what gives back all open reservations of the run at its end."""
        names = sorted({name for each in self.reservations.values() for name in each})
        return [Op("queue.give_back", (names, f"{self.run_id}/", self.clock.wall()))] if names else []

    async def status(self, status: str, *records: Record) -> None:
        """Write the status of the run, and records that belong to it, without waiting for the commit."""
        await self.buffer(*records, then=self.state.status_ops(self.queue, self.run_id, status, self.clock.wall()))

    async def transact(self, fn: Any, args: tuple[Any, ...], record: Record, seal: Any) -> str | None:
        """Run `fn` inside the commit that also writes its record.

        The events of the record are published by `publish_events`.

        Args:
            fn: The function, called with a connection and `args`.
            args: Its other arguments.
            record: The record without its result.
            seal: Makes the record of the result of `fn`.

        Returns:
            The recorded result.
        """
        op = Op("journal.transact", (self.run_id, fn, args, record, seal))
        try:
            text: str | None = (await self._commit(self._state, [op]))[0]
        except BaseException:
            self._partially_written = True  # the commit may have been applied
            raise
        return text

    # -- events

    def publish_heartbeat(self, now: float, payload: str) -> None:
        """Publish a heartbeat event if that is possible without waiting for the commit."""
        commit_nowait = renamed_attribute(self._bus, "commit_nowait", "post")
        if commit_nowait is not None:
            row = (f"beat:{self.claim_id}:{now}", "run.heartbeat", payload, now)
            commit_nowait(self.guard, [publish_op(self.run_id, [row])])

    async def emit(self, rows: Sequence[Row]) -> list[int]:
        """Publish events. Returns their sequence numbers when they are durable."""
        op = publish_op(self.run_id, rows)
        if self._publisher is not None and self._publisher.unconfirmed:
            results = (await self.write(events=[op]))[1]
        else:
            results = await self._commit(self._bus, [op])
        sequences: list[int] = results[-1]
        self._report_rows(rows, sequences)
        return sequences

    async def ask(self, row: Row, name: str, request_id: str) -> int:
        """Publish a question to a person, and post it to the mailbox of the run. Returns its number in the mailbox.

        With the event it is one commit, if one engine stores both. Otherwise the event comes last: a person who sees it
        may answer immediately, and the mailbox decides what an answer is for.
        """
        post = [Op("queue.post", (self.run_id, MailboxMessage(QUESTION, name, row[2], request_id, row[3])))]
        publish = [publish_op(self.run_id, [row])]
        if self._bus is self._queue:
            _, events, [(_, number)] = await self.write(events=publish, queue=post)
        else:
            [(_, number)] = (await self.write(queue=post))[2]
            events = (await self.write(events=publish))[1]
        self._report_rows([row], events[-1])
        return int(number)

    async def checkpoint(self, text: str, mark: str, row: Row) -> None:
        """Save a checkpoint together with its event."""
        state, events = Op("state.checkpoint", (self.run_id, text, mark, row[3])), publish_op(self.run_id, [row])
        results = await self.write([state], [events])
        self._report_rows([row], results[1][-1])

    async def publish_events(self, *records: Record) -> None:
        """Publish the events of records that were committed without them."""
        if self._publisher is not None:
            try:
                await self.write(events=[publish_op(self.run_id, self._publisher.rows(records))])
            except BaseException:
                self._partially_written = True
                raise
        self._report(records)

    # -- the row of the run

    async def update_run(
        self, how: RunUpdate, records: Sequence[Record] = (), ops: Sequence[Op] = (), *, events: Sequence[Op] = ()
    ) -> list[Any]:
        """Update the row of the run.

        A final status also ends the fence on each other engine, so that nothing of this claim is written after it.

        Args:
            how: The update.
            records: Records that belong to it.
            ops: Operations of the queue for the same commit.
            events: Operations of the event bus, applied after the events of the records.

        Returns:
            The new row, then the results of `ops`.

        Raises:
            RowChanged: The row changed since it was read. If one engine stores everything, nothing was written.
                Otherwise the caller repeats or corrects what was written to the journal and the bus.
        """
        if self._partially_written and self._publisher is not None:  # no later claim publishes what is missing
            await self._publish_missing(self._publisher, await self.state.records(self.run_id))
            self._partially_written = False
        state = [*self._appends(records), *self.state.status_ops(self.queue, self.run_id, how.status, how.now)]
        published = [*([] if self._publisher is None else self._publisher.operations(records)), *events]
        if how.status not in LIVE:
            if self._state is not self._queue:
                state.append(end_fence(self.run_id, self.claim_id))
            if self._bus not in (self._queue, self._state):
                published.append(end_fence(self.run_id, self.claim_id))
        results = await self.write(state, published, [_new(Op, ("queue.settle", (self.run_id, how))), *ops])
        self._report(records)
        return results[2]


# -- events that are reported


def _events_of_records(run_id: str, records: Sequence[Record], step: Step | None) -> Iterator[TracedEvent]:
    """Yield the events of records that code of `step` wrote."""
    for record in records:
        events = derived_events(run_id, record)
        if includes_start(record):  # reported when the start was buffered
            events = events[1 if record.kind == ENDED else start_events(record.total) :]
        for kind, payload in events:
            if kind == "step.started":
                payload["parent_id"] = position_of(step, payload["step_id"])["parent_id"]
            elif kind in ("step.failed", "step.retrying"):
                payload["error_type"] = json.loads(record.info or "{}").get("type")
            yield kind, payload


def _events_of_rows(rows: Sequence[Row]) -> Iterator[TracedEvent]:
    for id_, kind, text, _ in rows:  # the mark is not part of a trace
        yield agent_type(kind) if id_.startswith(AGENT_MARK) else kind, cast("dict[str, Any]", decode(text))


# -- buffered writes


def records_of(ops: Sequence[Op]) -> list[Record]:
    """Return the records that these operations append."""
    return [op.args[1] for op in ops if op.name == "journal.append"]


class FlushTimer:
    """The timer of all buffers of one engine in one event loop. Thousands of runs would start a timer for each step.

    It looks twice within the time that a write may be buffered, and flushes what it finds for the second time.

    Attributes:
        looks: How often it has looked.
        buffers: The buffers that got operations since the last look but one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.looks: int = 0
        self.buffers: dict[WriteBuffer, None] = {}
        self._loop = loop
        self._is_set = False

    def watch(self, buffer: WriteBuffer) -> None:
        """Flush the buffer, unless it is emptied before that."""
        self.buffers[buffer] = None
        if not self._is_set:
            self._is_set = True
            buffer.clock.call_later(buffer.max_delay / 2, partial(self._look, buffer.clock, buffer.max_delay / 2))

    def _look(self, clock: Clock, seconds: float) -> None:
        self.looks += 1
        due = [each for each in self.buffers if each.ops and each.filled_at < self.looks - 1]
        self.buffers = {each: None for each in self.buffers if each.ops and each.filled_at >= self.looks - 1}
        self._is_set = bool(self.buffers)
        if self._is_set:
            clock.call_later(seconds, partial(self._look, clock, seconds))
        for each in due:
            self._loop.call_soon(each.flush)  # an error of one engine does not keep the others


class WriteBuffer:
    """Operations that are written with the next commit of the claim, or by a timer.

    A separate commit would delay the commit after it.

    Attributes:
        guard: The guard of the writes.
        clock: Sets the timer.
        max_delay: Seconds until the timer writes the operations; 0 if none are buffered.
        ops: The buffered operations, oldest first.
        flushed: What was handed to the engine since the last commit of the claim, and its outcome.
        filled_at: The number of looks of the timer before the first of them.
    """

    def __init__(self, guard: Guard, state: Committer, clock: Clock, max_delay: float) -> None:
        self.guard: Guard = guard
        self.max_delay: float = max_delay
        self.ops: list[Op] = []
        self.flushed: list[tuple[Outcome, Sequence[Op]]] = []
        self.clock: Clock = clock
        self.filled_at: int = 0
        self._state = state
        self._timer: FlushTimer | None = None
        self._next_seq = 0
        self._merged: Record | None = None  # the beginning of an attempt that `merge_begin_and_end` removed

    # -- the numbers of records

    def next_seq(self) -> int:
        """Return the number of the next record."""
        seq = self._next_seq
        self._next_seq = seq + 1
        return seq

    def start_at(self, seq: int) -> None:
        """Give the next record this number."""
        self._next_seq = seq

    def is_newest(self, records: Sequence[Record]) -> bool:
        """Whether these records contain the highest number.

        Otherwise, repeating their commit could write them after a later record.
        """
        return not records or max(record.seq for record in records) + 1 == self._next_seq

    # -- buffered operations

    def add(self, ops: Sequence[Op]) -> None:
        """Buffer operations until the next commit, or until the timer flushes them."""
        if not self.ops:
            timer = self._timer
            if timer is None:
                timers: PerLoop[FlushTimer] = vars(self._state).setdefault("_flush_timers", PerLoop(FlushTimer))
                timer = self._timer = timers[asyncio.get_running_loop()]
            self.filled_at = timer.looks
            if self not in timer.buffers:
                timer.watch(self)
        self.ops += ops

    def flush(self) -> None:
        """Hand the buffered operations to the engine now, without waiting for the commit."""
        if self.ops:
            ops = self.take()[0]
            with contextlib.suppress(StorageClosed):
                if (outcome := cast(Engine, self._state).commit_nowait(self.guard, ops)) is not None:
                    self.flushed.append((outcome, ops))

    def take(self) -> tuple[list[Op], int]:
        """Remove the buffered operations. Returns what `put_back` takes if their commit is refused."""
        ops, self.ops = self.ops, []
        return ops, self._next_seq

    def put_back(self, ops: Sequence[Op], seq: int) -> None:
        """Buffer operations again, before all others: the commit that contained them was refused.

        `seq` is the number of the next record at the time of `take`. Records get new numbers if others were numbered
        since.
        """
        if self._next_seq != seq:
            ops = [
                Op(op.name, (self.guard.key, op.args[1]._replace(seq=self.next_seq())))
                if op.name == "journal.append"
                else op
                for op in ops
            ]
        later, self.ops = self.ops, [*ops]
        self.add(later)

    def withdraw(self, record: Record) -> bool:
        """Remove a buffered record, because another record replaces it. Returns whether it was still there."""
        ops = self.ops
        for index in range(len(ops) - 1, -1, -1):
            op = ops[index]
            if op.name == "journal.append" and op.args[1] is record:
                del ops[index]
                if record.seq + 1 == self._next_seq:
                    self._next_seq = record.seq
                return True
        return False

    def merge_begin_and_end(self, end: Record) -> Record:
        """Return the record of an attempt's end, extended by its beginning if only that is still buffered."""
        ops = self.ops
        if len(ops) != 1 or ops[0].name != "journal.append":
            return end
        began: Record = ops[0].args[1]
        # The event of the beginning gets the time of this record, which must not be far off.
        if began.kind not in (ATTEMPT, RESUMED) or end.t - began.t > self.max_delay:
            return end
        if self._next_seq != end.seq + 1 or end.seq != began.seq + 1:
            return end
        del ops[0]
        self._next_seq, self._merged = end.seq, began
        return with_beginning(end, began)

    def unmerge(self) -> None:
        """Buffer the beginning of an attempt again, because the record that contained it was not written."""
        if self._merged is not None:
            self.add([Op("journal.append", (self.guard.key, self._merged))])
            self._merged = None


# -- engines that install claims
#
# The queue sets the fence of a claim on its own engine, and the runner copies it to the other engines. If two engines
# share the same fences, the end of a run on one of them rejects the writes of the same claim on the other.

#: The ids of the engines that were found to have their own fences, by queue.
_separate: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


async def require_separate_fences(queue: Any, backend: Any, guard: Guard) -> None:
    """Check once in this process that the engine of `backend` does not have the fences of the queue's engine.

    Args:
        queue: The queue.
        backend: A backend on another engine. Nothing was written to it under this claim.
        guard: The claim, whose fence only the queue set.

    Raises:
        InvalidArgument: The engine knows the claim already.
    """
    target: Committer = backend.commits
    checked = _separate.setdefault(queue, set())
    if id(target) in checked:
        return
    try:
        # The end of a claim that never was. With the guard of a claim it does not know, an engine raises LeaseLost.
        await target.commit(guard, [Op(FORGET, (f"{guard.key} has its own fences",))])
    except LeaseLost:
        checked.add(id(target))
        return
    got = Shown(f"{type_name(type(queue))} and {type_name(type(backend))} with the same fences and an engine each")
    raise must(
        "backends on one database",
        "share one engine",
        got,
        "Set the attribute `engine` of each to the same object, or give each its own table of fences",
    )


# -- events of records, for a bus that does not read them from the journal itself


def publish_op(run_id: str, rows: Sequence[Row]) -> Op:
    """Return the operation that publishes these events."""
    return Op("events.publish", (run_id, tuple(rows)))


def derived_rows(run_id: str, record: Record) -> list[Row]:
    """Return the events of a record."""
    try:
        texts = [(kind, encode(payload)) for kind, payload in derived_events(run_id, record)]
    except UnserialisableResult:  # a process that cancels a run may not know the types of its results
        texts = stored_events(run_id, record)
    return [(event_id(record, i), kind, text, record.t) for i, (kind, text) in enumerate(texts)]


async def missing_events(bus: EventBus, run_id: str, records: Sequence[Record]) -> list[Row]:
    """Return the events of these records that were never published."""
    published = await bus.published(run_id)
    return [row for record in records for row in derived_rows(run_id, record) if row[0] not in published]


class EventPublisher:
    """Publishes the events of one run's records. Their ids are deterministic, so that none is published twice.

    Attributes:
        unconfirmed: Events that were handed to the bus without waiting for the commit. They are published once more
            with the next events, in case they were lost.
    """

    def __init__(self, run_id: str, bus: EventBus) -> None:
        self.unconfirmed: list[Row] = []
        self._run_id = run_id
        self._bus = bus

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """Return the events of these records."""
        return [row for record in records for row in derived_rows(self._run_id, record)]

    def operations(self, records: Sequence[Record]) -> list[Op]:
        """Return what publishes the events of these records."""
        rows = self.rows(records)
        return [publish_op(self._run_id, rows)] if rows else []

    async def missing(self, records: Sequence[Record]) -> list[Op]:
        """Return what publishes the events of these records that an earlier claim could not publish."""
        rows = await missing_events(self._bus, self._run_id, records)
        return [publish_op(self._run_id, rows)] if rows else []
