"""Cases with several backend objects on one store, as in several processes. Run a case with `await case(make, again)`.

`make(**options)` returns a backend on a new and empty store, as for the other cases. `again(backend)` opens another
object on the same store; `backend` may be closed by then. `check(make, again=again)` runs these cases too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar
from uuid import UUID

from ..._engines.base import INSTALL, Guard, Op
from ..._journal.record import DONE, Record
from ...errors import LeaseLost
from ...events.base import EventBus
from ...queue.base import RunQueue
from ...queue.records import RunFilter
from ...state.base import StateStore
from ..clock import VirtualClock
from .checks import Cases, refused, same
from .queue_fixtures import LEASE, add, claim_new, drain, names, one, settle

B = TypeVar("B", RunQueue, EventBus, StateStore)

MakeQueue = Callable[..., RunQueue]
MakeBus = Callable[..., EventBus]
MakeStore = Callable[..., StateStore]
QueueAgain = Callable[[RunQueue], RunQueue]
BusAgain = Callable[[EventBus], EventBus]
StoreAgain = Callable[[StateStore], StateStore]

QUEUE: Cases[Callable[[MakeQueue, QueueAgain], Awaitable[None]]] = Cases()
EVENTS: Cases[Callable[[MakeBus, BusAgain], Awaitable[None]]] = Cases()
STATE: Cases[Callable[[MakeStore, StoreAgain], Awaitable[None]]] = Cases()

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2c01")
OLD, NEW = (f"01HZX00000000000000000000{n}" for n in (1, 2))


@contextlib.asynccontextmanager
async def opened(first: B, again: Callable[[B], B] | None = None) -> AsyncIterator[tuple[B, B]]:
    """Yield `first` and, with `again`, another object on its store. Both are closed at the end."""
    try:
        second = first if again is None else again(first)
        try:
            yield first, second
        finally:
            if second is not first:
                await second.close()
    finally:
        await first.close()


# -- queues


@QUEUE
async def of_two_claimers_one_gets_the_run(make: MakeQueue, again: QueueAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        ids = await add(first, *["agent"] * 12)
        claims = (queue.claim(f"w{n}", limit=2) for n, queue in enumerate([first, second] * 4))
        got = [str(run.run_id) for runs in await asyncio.gather(*claims) for run in runs]
        same(sorted(got), sorted(ids), "the runs that eight workers claimed through two objects")
        [run_id] = await add(second, "agent")
        async with opened(again(first)) as (third, _):
            same([row.run_id for row in await first.claim_rows("w")], [run_id], "the run claimed through the first one")
            same(names(await drain(third)), [], "the claimable runs through the third object")
            same(names(await drain(second)), [], "the claimable runs through the second object")


@QUEUE
async def a_claim_through_one_is_over_for_the_other(make: MakeQueue, again: QueueAgain) -> None:
    clock = VirtualClock()
    async with opened(make(clock=clock), again) as (first, second):
        old = await claim_new(first)
        clock.advance(LEASE + 1)
        new = await one(second, "w2")
        same((new.run_id, new.crashes), (old.run_id, 1), "the run claimed through the second object after its lease")
        child = Op("queue.insert", (first.new_row(None, "child", {}),))
        for queue, name in ((first, "first"), (second, "second")):
            with refused(LeaseLost, f"a final status by the old claim through the {name} object"):
                await settle(queue, old, "succeeded")
            with refused(LeaseLost, f"a child enqueued under the old claim through the {name} object"):
                await queue.commits.commit(Guard(old.run_id, old.claim_id), [child])
            same(await queue.require(old.run_id), new, f"its row through the {name} object")
        await settle(first, new, "succeeded")
        same((await second.require(old.run_id)).status, "succeeded", "the status written through the first object")


@QUEUE
async def what_is_written_through_one_is_read_through_the_other(make: MakeQueue, again: QueueAgain) -> None:
    clock = VirtualClock()
    async with opened(make(clock=clock), again) as (first, second):
        job = await first.enqueue("job", "a", {"n": 1}, idempotency_key="key-1", concurrency_key="lane")
        twice = await second.enqueue(None, "a", {"n": 1}, idempotency_key="key-1")
        same(twice.run_id, job.run_id, "the run of an idempotency key through the second object")
        await second.enqueue(None, "b", {}, concurrency_key="lane", parent_run_id=job.run_id)
        await first.enqueue(None, "c", {})
        same(names(await first.find(RunFilter())), ["a", "b", "c"], "all runs through the first object")
        key = str(job.run_id)
        posts = (queue.post(key, "signal", "go", "1", f"m{n % 12}") for n, queue in enumerate([first, second] * 8))
        await asyncio.gather(*posts)
        posted = [mail.seq for mail in await first.mail(key)]
        same(posted, [*range(1, 13)], "the messages with 12 ids, posted through both objects")
        same(names(await second.claim("w", limit=9)), ["a", "c"], "the claimable runs through the second object")
        same(await first.cancel(key), True, "cancel through the first object")
        for what, *args in (("row", key), ("children", key), ("mail", key, 0), ("news", (key,)), ("find", RunFilter())):
            found = [await queue.read(what, *args) for queue in (first, second)]
            same(found[1], found[0], f"{what} through the second object, compared with the first")
        same(await second.is_cancelled(key), True, "is_cancelled through the second object")


@QUEUE
async def a_queue_is_all_there_when_it_is_opened_again(make: MakeQueue, again: QueueAgain) -> None:
    clock = VirtualClock()
    first = make(clock=clock)
    async with opened(again(first)) as (second, _):
        async with opened(first):
            row = await claim_new(first, "held", idempotency_key="key-1")
            await add(first, "later", delay=30)
            await first.post(row.run_id, "signal", "go", "1", "m1")
            rows, mail = await first.find(RunFilter()), await first.mail(row.run_id)
        same(await second.find(RunFilter()), rows, "the runs after the first object was closed")
    async with opened(again(second)) as (third, _):
        same(await third.find(RunFilter()), rows, "the runs after both were closed and the store was reopened")
        same(await third.mail(row.run_id), mail, "the mailbox after reopening")
        same(await third.next_due(), clock.wall() + 30, "next_due after reopening")
        twice = await third.enqueue(None, "held", {}, idempotency_key="key-1")
        same(str(twice.run_id), row.run_id, "the run of its idempotency key after reopening")
        same(
            (await settle(third, row, "succeeded")).status, "succeeded", "a write under the claim, which is still valid"
        )
        [more] = await add(third, "more")
        same((await third.require(more)).arrival > rows[-1].arrival, True, "whether run numbers keep growing")


# -- event buses


async def carry(target: EventBus | StateStore, claim: str) -> None:
    await target.commits.commit(None, [Op(INSTALL, (str(RUN), claim))])


@EVENTS
async def sequences_go_on_through_both(make: MakeBus, again: BusAgain) -> None:
    async with opened(make(), again) as (first, second):
        publishing = (bus.publish(RUN, "tick", {"n": n}) for n, bus in enumerate([first, second] * 8))
        found = sorted(event.sequence for event in await asyncio.gather(*publishing))
        same(found, [*range(16)], "the sequences of 16 publishers through two objects")
        same(await second.get_events(RUN), await first.get_events(RUN), "the log through both objects")
        repeated = [(await bus.publish(RUN, "tick", {}, event_id="e1")).sequence for bus in (first, second)]
        same((repeated, await first.head(RUN)), ([16, 16], 17), "one event id published through both objects")


@EVENTS
async def a_fence_of_a_bus_is_seen_through_the_other(make: MakeBus, again: BusAgain) -> None:
    async with opened(make(), again) as (first, second):
        await carry(first, OLD)
        await second.publish(RUN, "tick", {}, claim=OLD)
        await carry(second, NEW)
        for bus, name in ((first, "first"), (second, "second")):
            with refused(LeaseLost, f"publish by the old claim through the {name} object"):
                await bus.publish(RUN, "tick", {}, claim=OLD)
            with refused(LeaseLost, f"installing the old claim through the {name} object"):
                await carry(bus, OLD)
        await first.publish(RUN, "tick", {}, claim=NEW)
        same(await second.head(RUN), 2, "the number of events")


@EVENTS
async def a_follower_hears_what_another_object_publishes(make: MakeBus, again: BusAgain) -> None:
    async with opened(make(), again) as (first, second):
        await first.publish(RUN, "before", {})
        following = second.subscribe(RUN, 0)
        try:
            same((await anext(following)).event_type, "before", "the event replayed through the second object")
            for name in ("one", "two"):
                await first.publish(RUN, name, {})
                same((await anext(following)).event_type, name, "the live event through the second object")
        finally:
            await following.aclose()


@EVENTS
async def a_log_is_all_there_when_it_is_opened_again(make: MakeBus, again: BusAgain) -> None:
    first = make()
    async with opened(again(first)) as (second, _):
        async with opened(first):
            await carry(first, NEW)
            for n in range(3):
                await first.publish(RUN, "tick", {"n": n}, event_id=f"e{n}", claim=NEW)
            events = await first.get_events(RUN)
        same(await second.get_events(RUN), events, "the log after the first object was closed")
    async with opened(again(second)) as (third, _):
        same(await third.get_events(RUN), events, "the log after both were closed and the store was reopened")
        same((await third.publish(RUN, "tick", {}, event_id="e1")).sequence, 1, "a known event id after reopening")
        with refused(LeaseLost, "publish by an old claim after reopening"):
            await third.publish(RUN, "tick", {}, claim=OLD)
        same((await third.publish(RUN, "tick", {}, claim=NEW)).sequence, 3, "the next sequence after reopening")


# -- state stores


def _record(seq: int, claim: str) -> Record:
    return Record(seq, DONE, f"step{seq}", "c:0", 1, claim, 1_800_000_000.0, result="1")


async def append(store: StateStore, seq: int, claim: str = NEW) -> None:
    await store.commits.commit(Guard(str(RUN), claim), [Op("journal.append", (str(RUN), _record(seq, claim)))])


@STATE
async def a_journal_is_one_through_both(make: MakeStore, again: StoreAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        await carry(first, OLD)
        await append(second, 0, OLD)
        await carry(second, NEW)
        for store, name in ((first, "first"), (second, "second")):
            with refused(LeaseLost, f"a record of the old claim through the {name} object"):
                await append(store, 1, OLD)
            with refused(LeaseLost, f"another record at an existing position through the {name} object"):
                await append(store, 0)
        await append(first, 1)
        await append(second, 2)
        for store, name in ((first, "first"), (second, "second")):
            found = [(record.seq, record.claim_id) for record in await store.records(RUN)]
            same(found, [(0, OLD), (1, NEW), (2, NEW)], f"the journal through the {name} object")


@STATE
async def a_state_is_one_through_both(make: MakeStore, again: StoreAgain) -> None:
    async with opened(make(clock=VirtualClock()), again) as (first, second):
        for n, (store, other) in enumerate(((first, second), (second, first))):
            await store.save_checkpoint(RUN, {"n": n})
            await other.update_run_status(RUN, f"status{n}")
            same(await other.get_checkpoint(RUN), {"n": n}, "the checkpoint saved through the other object")
            same(await store.get_run_status(RUN), f"status{n}", "the status written through the other object")


@STATE
async def a_store_is_all_there_when_it_is_opened_again(make: MakeStore, again: StoreAgain) -> None:
    first = make(clock=VirtualClock())
    async with opened(again(first)) as (second, _):
        async with opened(first):
            await carry(first, NEW)
            for seq in range(3):
                await append(first, seq)
            await first.save_checkpoint(RUN, {"n": 1}, claim=NEW)
            await first.update_run_status(RUN, "running", claim=NEW)
            records, row = await first.records(RUN), await first.state(str(RUN))
        same(await second.records(RUN), records, "the journal after the first object was closed")
    async with opened(again(second)) as (third, _):
        same(await third.records(RUN), records, "the journal after both were closed and the store was reopened")
        same(await third.state(str(RUN)), row, "the checkpoint and status after reopening")
        with refused(LeaseLost, "a record of an old claim after reopening"):
            await append(third, 3, OLD)
        await append(third, 3)
        same(len(await third.records(RUN)), 4, "the journal after the next record")
