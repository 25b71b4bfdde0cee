"""Cases in which several objects on one store write at the same time, as several processes do.

A store that reads, decides and writes without a lock passes every case with one writer. The cases are added to those
of `concurrency`, and run in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any
from uuid import UUID

from ..._core.clock import Clock
from ..._engines.base import INSTALL, Guard, Op
from ..._journal.record import DONE, ENDED, Record
from ...errors import LeaseLost
from ...queue.base import RunQueue
from ...queue.records import RowChanged
from ...state.base import BEGUN, EffectExists, EffectRow
from ..clock import RunClock, VirtualClock
from .checks import accepted, refused, same, turns
from .concurrency import (
    EVENTS,
    NEW,
    OLD,
    QUEUE,
    RUN,
    STATE,
    B,
    BusAgain,
    MakeBus,
    MakeQueue,
    MakeStore,
    QueueAgain,
    StoreAgain,
    carry,
    opened,
)
from .queue_fixtures import LEASE, add, claim_new, drain, names, one, settle

__all__ = ["EVENTS", "QUEUE", "STATE"]

OFFSETS = 6  # rounds in which the first writer starts before the other writer, and as many after it
SLOW = 0.0005  # seconds of a commit that is more than a few loop iterations
MACHINE = 1e6  # seconds between the boot times of two machines

MANY = 24  # operations of a commit that takes longer than a commit that supersedes its claim
OTHER = UUID(int=999)

Start = Callable[[], Awaitable[None]]


async def starts(write: Callable[..., Awaitable[Any]], *args: Any) -> list[tuple[int, Start, Start]]:
    """Return numbers, and how long each of two writers waits before it starts.

    They start up to OFFSETS loop iterations apart. If `write(*args)` takes longer than that, they then start up to this
    time apart, so that each reads and writes in every part of the other's transaction.
    """
    loop = asyncio.get_running_loop()
    await write(*args)  # it connects, and creates what the store lacks
    began = loop.time()
    await write(*args)
    took = loop.time() - began
    apart = range(-OFFSETS, OFFSETS + 1)
    pairs = [(_turns(max(-n, 0)), _turns(max(n, 0))) for n in apart]
    if took > SLOW:
        part = took / OFFSETS
        pairs += [(_seconds(max(-n, 0) * part), _seconds(max(n, 0) * part)) for n in apart]
    return [(n, one, two) for n, (one, two) in enumerate(pairs)]


def _turns(count: int) -> Start:
    return lambda: turns(count)


def _seconds(seconds: float) -> Start:
    return lambda: asyncio.sleep(seconds)


async def after(start: Start, write: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    await start()
    return await write(*args, **options)


async def both(one: Coroutine[Any, Any, Any], two: Coroutine[Any, Any, Any], *errors: type[Exception]) -> list[Any]:
    """Await two writers, and return their results, or the errors of these types that they raised."""
    found: list[Any] = [*await asyncio.gather(one, two, return_exceptions=True)]
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, errors):
            raise each
    return found


@contextlib.asynccontextmanager
async def opened_together(first: B, again: Callable[[B], B]) -> AsyncIterator[list[B]]:
    """Yield four objects on one store that have written nothing."""
    async with contextlib.AsyncExitStack() as closing:
        objects = [first]
        closing.push_async_callback(first.close)
        for _ in range(3):
            objects.append(again(first))
            closing.push_async_callback(objects[-1].close)
        yield objects


# -- queues


@QUEUE
async def objects_that_open_an_empty_queue_together_use_it(make: MakeQueue, again: QueueAgain) -> None:
    async with opened_together(make(clock=VirtualClock()), again) as queues:
        with accepted("the first write of four objects on an empty store, at the same time"):
            await asyncio.gather(*(queue.enqueue(f"run{n}", f"agent{n}", {}) for n, queue in enumerate(queues)))
        found = sorted(names(await drain(queues[0])))
        same(found, ["agent0", "agent1", "agent2", "agent3"], "the runs that four objects enqueued")


@QUEUE
async def of_runs_enqueued_together_with_one_key_one_is_active(make: MakeQueue, again: QueueAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        for n, one_starts, two_starts in await starts(add, first, "sample"):
            key = f"key{n}"
            ids = await both(
                after(one_starts, add, first, "agent", concurrency_key=key),
                after(two_starts, add, second, "agent", concurrency_key=key),
            )
            rows = [await first.require(run_id) for [run_id] in ids]
            same(sorted(row.blocked for row in rows), [0, 1], "which of two runs with one concurrency key are blocked")


@QUEUE
async def a_key_goes_on_when_its_run_ends_while_another_enters(make: MakeQueue, again: QueueAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        for n, one_starts, two_starts in await starts(add, first, "sample"):
            key = f"key{n}"
            row = await claim_new(first, f"first{n}", concurrency_key=key)
            _, [run_id] = await both(
                after(one_starts, settle, first, row, "succeeded"),
                after(two_starts, add, second, f"second{n}", concurrency_key=key),
            )
            found = await second.require(run_id)
            same(found.blocked, 0, "whether a run is blocked whose key is free since the run before it has ended")
            await settle(second, await one(second, "w", agent_keys=[f"second{n}"]), "succeeded")


@QUEUE
async def of_runs_enqueued_together_with_one_idempotency_key_one_is_stored(make: MakeQueue, again: QueueAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        rounds = await starts(add, first, "sample")
        await drain(first)
        for n, one_starts, two_starts in rounds:
            for run_key, options in ((f"run{n}", {}), (None, {"idempotency_key": f"key{n}"})):
                with accepted("the same run, enqueued through two objects at the same time"):
                    one_run, two_run = await both(
                        after(one_starts, first.enqueue, run_key, "agent", {}, **options),
                        after(two_starts, second.enqueue, run_key, "agent", {}, **options),
                    )
                same(two_run.run_id, one_run.run_id, "the run ids that two enqueuers of one run got")
                same(len(await drain(first)), 1, "the number of claimable runs")


@QUEUE
async def messages_through_both_are_numbered_and_wake_a_run(make: MakeQueue, again: QueueAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        for n, one_starts, two_starts in await starts(add, first, "sample"):
            row = await claim_new(first, f"agent{n}")
            await both(
                after(one_starts, settle, first, row, "waiting", parked=1, cursor=0),
                after(two_starts, second.post, row.run_id, "signal", "go", "1"),
                RowChanged,
            )
            now = await second.require(row.run_id)
            same(now.status in ("pending", "running"), True, f"whether it is not parked with a message ({now.status})")
            await both(
                after(one_starts, first.post, row.run_id, "signal", "go", "2"),
                after(two_starts, second.post, row.run_id, "signal", "go", "3"),
            )
            same([mail.seq for mail in await first.mail(row.run_id)], [1, 2, 3], "the numbers of its messages")


@QUEUE
async def a_run_is_taken_over_before_it_ends_or_not_at_all(make: MakeQueue, again: QueueAgain) -> None:
    clock = VirtualClock()
    async with opened(make(clock=clock), again) as (first, second):
        for n, one_starts, two_starts in await starts(add, first, "sample"):
            row = await claim_new(first, f"agent{n}")
            clock.advance(LEASE + 1)
            ended, taken = await both(
                after(one_starts, settle, first, row, "succeeded"),
                after(two_starts, second.claim_rows, "w2", LEASE, agent_keys=[row.agent]),
                LeaseLost,
            )
            outcome = (isinstance(ended, LeaseLost), len(taken))
            same(outcome in ((True, 1), (False, 0)), True, f"whether a run is ended or taken over, got {outcome}")
            status = (await second.require(row.run_id)).status
            same(status, "running" if taken else "succeeded", "the status of the run after that")


@QUEUE
async def a_claim_that_is_superseded_through_the_other_queue_writes_before_or_not_at_all(
    make: MakeQueue, again: QueueAgain
) -> None:
    clock = VirtualClock()
    async with opened(make(clock=clock), again) as (first, second):

        def children(parent: str | None = None) -> list[Op]:
            rows = [first.new_row(None, "child", {}, parent_run_id=parent) for _ in range(MANY)]
            return [Op("queue.insert", (row,)) for row in rows]

        for n, one_starts, two_starts in await starts(lambda: first.commits.commit(None, children())):
            row = await claim_new(first, f"agent{n}")
            clock.advance(LEASE + 1)

            async def supersede(agent: str, run_id: str) -> int:
                # A store may leave out a row that another transaction locks.
                while not await second.claim_rows("w2", LEASE, agent_keys=[agent]):  # noqa: ASYNC110 - see above
                    await asyncio.sleep(0)
                return len(await second.children(run_id))

            _, seen = await both(
                after(one_starts, first.commits.commit, Guard(row.run_id, row.claim_id), children(row.run_id)),
                after(two_starts, supersede, row.agent, row.run_id),
                LeaseLost,
            )
            same(len(await first.children(row.run_id)), seen, "the children, after the next claim has read them")


@QUEUE
async def commits_that_write_the_same_runs_in_another_order_are_applied(make: MakeQueue, again: QueueAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        ids = await add(first, "a", "b")
        for n, one_starts, two_starts in await starts(first.post, ids[0], "signal", "go", "0", "sample"):
            with accepted("messages to two runs, in both orders at the same time"):
                await both(
                    after(one_starts, first.commits.commit, None, [_post(first, run_id, f"one{n}") for run_id in ids]),
                    after(
                        two_starts,
                        second.commits.commit,
                        None,
                        [_post(second, run_id, f"two{n}") for run_id in ids[::-1]],
                    ),
                )
        for extra, run_id in ((1, ids[0]), (0, ids[1])):
            same(len(await second.mail(run_id)), 2 * (n + 1) + extra, "the number of messages")


def _post(queue: RunQueue, run_id: str, message_id: str) -> Op:
    return queue.post_op(run_id, "signal", "go", "1", message_id)


class _OtherMachine(RunClock):
    """The clock of another machine, whose wall clock is wrong and which was started at another time."""

    def __init__(self, clock: Clock, ahead: float, boot: float) -> None:
        super().__init__(clock, ())
        self._ahead, self._boot_ahead = ahead, boot

    def wall(self) -> float:
        return super().wall() + self._ahead

    def boot(self) -> float:
        return super().boot() + self._boot_ahead

    def monotonic(self) -> float:
        return super().monotonic() + self._boot_ahead


@contextlib.contextmanager
def _on(queue: RunQueue, clock: Clock) -> Iterator[None]:
    """Have `again(queue)` pass on another clock."""
    own, queue.clock = queue.clock, clock
    try:
        yield
    finally:
        queue.clock = own


@QUEUE
async def wall_clocks_that_differ_move_no_lease(make: MakeQueue, again: QueueAgain) -> None:
    for ahead in (3600.0, -3600.0):
        clock = VirtualClock()
        first = make(clock=clock)
        async with opened(first) as _:
            clock.advance(100)  # a lease clock does not begin when an object is opened
            row = await claim_new(first)
            # A store of one machine uses the machine's boot clock. Another lease clock is the same on all machines.
            boot = 0.0 if first.lease_now() in (0.0, clock.boot()) else MACHINE
            with _on(first, _OtherMachine(clock, ahead, boot)):
                second = again(first)
            async with opened(second) as _:
                where = f"on a machine whose clock is {ahead:+g} s wrong"
                same(names(await second.claim_rows("w2", LEASE)), [], f"the runs claimed {where} during the lease")
                apart = abs(second.lease_now() - first.lease_now())
                same(apart < LEASE / 2, True, f"whether lease_now {where} is the same, {apart:g} s apart")
                clock.advance(LEASE + 1)
                new = await one(second, "w2")
                same((new.run_id, new.claim_id > row.claim_id), (row.run_id, True), f"the run claimed {where} after it")
                same(await first.claim_rows("w", LEASE), [], "the runs claimed during that lease")
                with refused(LeaseLost, "a final status by the old claim"):
                    await settle(first, row, "succeeded")
                clock.advance(LEASE + 1)
                last = await one(first, "w")
                same(last.claim_id > new.claim_id, True, "whether claim ids grow when the clock is behind the last one")
                await settle(first, last, "succeeded")
                await add(second, "a")
                await add(first, "b")
                await add(second, "c")
                same(names(await drain(first)), ["a", "b", "c"], "the runs in order of arrival")


# -- event buses


@EVENTS
async def objects_that_open_an_empty_bus_together_use_it(make: MakeBus, again: BusAgain) -> None:
    async with opened_together(make(), again) as buses:
        with accepted("the first write of four objects on an empty store, at the same time"):
            found = await asyncio.gather(
                *(bus.publish(RUN, "tick", {}, event_id=f"e{n}") for n, bus in enumerate(buses))
            )
        same(sorted(event.sequence for event in found), [0, 1, 2, 3], "the sequences that four objects published")


@EVENTS
async def an_event_published_through_both_is_stored_once(make: MakeBus, again: BusAgain) -> None:
    async with opened(make(), again) as (first, second):
        for n, one_starts, two_starts in await starts(first.publish, OTHER, "tick", {}):
            run = UUID(int=n + 1)
            events: list[Any] = [[(f"{name}{m}", "tick", {}) for m in range(3)] for name in "ab"]
            with accepted("events published through two objects at the same time"):
                same_id = await both(
                    after(one_starts, first.publish, run, "tick", {}, event_id="e"),
                    after(two_starts, second.publish, run, "tick", {}, event_id="e"),
                )
                found = await both(
                    after(one_starts, first.commits.commit, None, [first.publishing(run, events[0])]),
                    after(two_starts, second.commits.commit, None, [second.publishing(run, events[1])]),
                )
            same([event.sequence for event in same_id], [0, 0], "the sequence of one event, published twice")
            numbers = sorted(sequence for [sequences] in found for sequence in sequences)
            same(numbers, [*range(1, 7)], "the sequences of three events each")
            log = await second.get_events(run)
            same([event.sequence for event in log], [*range(7)], "the log")


@EVENTS
async def a_claim_that_is_superseded_through_the_other_bus_writes_before_or_not_at_all(
    make: MakeBus, again: BusAgain
) -> None:
    async with opened(make(), again) as (first, second):
        numbers = itertools.count()

        def late(run: UUID) -> list[Op]:
            return [first.publishing(run, [(f"e{next(numbers)}", "tick", {})]) for _ in range(4 * MANY)]  # short rows

        for n, one_starts, two_starts in await starts(lambda: first.commits.commit(None, late(OTHER))):
            run = UUID(int=n + 1)
            await first.commits.commit(None, [Op(INSTALL, (str(run), OLD))])

            async def supersede(run: UUID) -> int:
                await second.commits.commit(None, [Op(INSTALL, (str(run), NEW))])
                return len(await second.get_events(run))

            _, seen = await both(
                after(one_starts, first.commits.commit, Guard(str(run), OLD), late(run)),
                after(two_starts, supersede, run),
                LeaseLost,
            )
            same(len(await first.get_events(run)), seen, "the log, after the next claim has read it")
            await first.commits.commit(None, [Op("events.delete", (str(run),))])


@EVENTS
async def a_reader_sees_all_of_a_commit_or_nothing(make: MakeBus, again: BusAgain) -> None:
    async with opened(make(), again) as (first, second):
        for n, one_starts, two_starts in await starts(first.publish, OTHER, "tick", {}):
            runs = UUID(int=2 * n + 1), UUID(int=2 * n + 2)
            ops = [first.publishing(run, [(f"{m}", "tick", {}) for m in range(3)]) for run in runs]

            async def read(runs: tuple[UUID, UUID]) -> list[int]:
                return [len(await second.get_events(run)) for run in reversed(runs)]

            _, found = await both(after(one_starts, first.commits.commit, None, ops), after(two_starts, read, runs))
            same(
                found in ([0, 0], [0, 3], [3, 3]), True, f"whether a commit is seen as a whole, got {found} of 3 events"
            )


@EVENTS
async def commits_that_write_the_same_logs_in_another_order_are_applied(make: MakeBus, again: BusAgain) -> None:
    async with opened(make(), again) as (first, second):
        runs = UUID(int=1), UUID(int=2)
        for n, one_starts, two_starts in await starts(first.publish, OTHER, "tick", {}):
            ops = [
                [bus.publishing(run, [(f"{name}{n}", "tick", {})]) for run in order]
                for bus, name, order in ((first, "a", runs), (second, "b", runs[::-1]))
            ]
            with accepted("events of two runs, in both orders at the same time"):
                await both(
                    after(one_starts, first.commits.commit, None, ops[0]),
                    after(two_starts, second.commits.commit, None, ops[1]),
                )
        for run in runs:
            found = [event.sequence for event in await second.get_events(run)]
            same(found, [*range(2 * (n + 1))], "the sequences of a log")


# -- state stores


def _record(seq: int, name: str, claim: str = "", kind: str = DONE) -> Record:
    return Record(seq, kind, name, "c:0", 1, claim, 1_800_000_000.0)


def _append(run: UUID, *records: Record) -> list[Op]:
    return [Op("journal.append", (str(run), each)) for each in records]


@STATE
async def objects_that_open_an_empty_store_together_use_it(make: MakeStore, again: StoreAgain) -> None:
    async with opened_together(make(clock=VirtualClock()), again) as stores:
        with accepted("the first write of four objects on an empty store, at the same time"):
            found = await asyncio.gather(
                *(store.commits.commit(None, _append(RUN, _record(-1, f"s{n}"))) for n, store in enumerate(stores))
            )
        same(sorted(position for [position] in found), [0, 1, 2, 3], "the positions that four objects appended")


@STATE
async def a_claim_that_is_superseded_through_the_other_store_writes_before_or_not_at_all(
    make: MakeStore, again: StoreAgain
) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        await carry(first, OLD)
        late = _append(RUN, *(_record(m, f"late{m}", OLD) for m in range(MANY)))
        other = _append(OTHER, *(_record(-1, "a") for _ in range(MANY)))
        for _, one_starts, two_starts in await starts(first.commits.commit, None, other):
            await first.commits.commit(None, [Op("fence.forget", (str(RUN),)), Op(INSTALL, (str(RUN), OLD))])

            async def supersede() -> int:
                await carry(second, NEW)
                return len(await second.records(RUN))

            _, seen = await both(
                after(one_starts, first.commits.commit, Guard(str(RUN), OLD), late),
                after(two_starts, supersede),
                LeaseLost,
            )
            same(len(await first.records(RUN)), seen, "the journal, after the next claim has read it")
            await first.commits.commit(None, [Op("state.delete", (str(RUN),))])


@STATE
async def a_reader_sees_all_of_a_commit_or_nothing_of_it(make: MakeStore, again: StoreAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        for n, one_starts, two_starts in await starts(first.save_checkpoint, RUN, {"n": 1}):
            run = UUID(int=n + 1)
            _, records = await both(
                after(one_starts, first.commits.commit, None, _append(run, *(_record(m, f"s{m}") for m in range(6)))),
                after(two_starts, second.records, run),
            )
            same(len(records) in (0, 6), True, f"whether a commit is seen as a whole, got {len(records)} of 6 records")


@STATE
async def writers_of_a_journal_through_both_leave_no_gap(make: MakeStore, again: StoreAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        for n, one_starts, two_starts in await starts(first.save_checkpoint, RUN, {"n": 1}):
            run, end = UUID(int=n + 1), _record(-1, "cancelled", kind=ENDED)
            with accepted("records appended through two objects at the same time"):
                found = await both(
                    after(one_starts, first.commits.commit, None, _append(run, _record(-1, "a"), _record(-1, "b"))),
                    after(two_starts, second.commits.commit, None, _append(run, _record(-1, "c"))),
                )
                ends = await both(
                    after(one_starts, first.commits.commit, None, _append(run, end)),
                    after(two_starts, second.commits.commit, None, _append(run, end)),
                )
            same(sorted(position for positions in found for position in positions), [0, 1, 2], "the positions")
            same(ends, [[3], [3]], "the position of one end without a claim, written twice")
            same([each.seq for each in await second.records(run)], [0, 1, 2, 3], "the journal")


@STATE
async def an_effect_is_begun_through_one_of_two_objects(make: MakeStore, again: StoreAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        for n, one_starts, two_starts in await starts(first.save_checkpoint, RUN, {"n": 1}):
            rows = [EffectRow(str(RUN), f"pay{n}", "", f"run{m}", BEGUN, None, 1.0) for m in range(2)]
            ops = [[Op("effect.begin", (row,))] for row in rows]
            found = await both(
                after(one_starts, first.commits.commit, None, ops[0]),
                after(two_starts, second.commits.commit, None, ops[1]),
                EffectExists,
            )
            begun = [row for row, each in zip(rows, found, strict=True) if not isinstance(each, EffectExists)]
            same(len(begun), 1, "the number of forks that began one effect")
            same(await second.effects(*rows[0][:3]), begun, "the stored effect")
