"""What every queue must do; run each of `CASES` on your own with `await case(make)`.

`make(**options)` gives a new and empty queue each time, constructed with those options: `clock`, and
`max_retries` in some cases. A class that passes its keywords on to `RunQueue.__init__` will do. Where the
queue breaks the contract a case raises AssertionError, or the error that the queue raised and should not
have; `check(make)` runs them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from ..._engines.base import Guard, Op
from ..._ids import new_ulid
from ...errors import IdempotencyConflict, InvalidArgument, LeaseLost, UnknownRun, UnserialisableResult
from ...queue.base import QueuedRun, RunQueue
from ...queue.row import ClaimRequest, Mail, Moved, News, RunFilter, RunRow
from ...status import TERMINAL, TRANSITIONS, RunStatus
from ..clock import VirtualClock
from .checks import PATIENCE, refused, same, turns

Make = Callable[..., RunQueue]
Case = Callable[[Make], Awaitable[None]]

CASES: list[Case] = []

LEASE = 60.0


def case(function: Case) -> Case:
    CASES.append(function)
    return function


async def check(make: Make) -> None:
    """Run every case."""
    for each in CASES:
        await each(make)


@contextlib.asynccontextmanager
async def opened(make: Make, **options: Any) -> AsyncIterator[tuple[RunQueue, VirtualClock]]:
    clock = VirtualClock()
    queue = make(clock=clock, **options)
    try:
        async with asyncio.timeout(PATIENCE):
            yield queue, clock
    finally:
        await queue.close()


def names(runs: Sequence[QueuedRun | RunRow]) -> list[str]:
    return [run.agent_key if isinstance(run, QueuedRun) else run.agent for run in runs]


async def add(queue: RunQueue, *agents: str, **options: Any) -> list[str]:
    """Enqueue one run for each of those agents; their ids."""
    return [str((await queue.enqueue(None, agent, {}, **options)).run_id) for agent in agents]


async def one(queue: RunQueue, worker: str, lease: float = LEASE, **options: Any) -> RunRow:
    """The run a claim gets, where there is one to get."""
    rows = await queue.claim_rows(worker, lease, **options)
    same(len(rows), 1, f"how many runs a claim by {worker!r} got")
    return rows[0]


async def hold(queue: RunQueue, agent: str = "agent", **options: Any) -> RunRow:
    """A new run, claimed by worker "w"."""
    await add(queue, agent, **options)
    return await one(queue, "w", LEASE, agent_keys=[agent])


async def drain(queue: RunQueue, worker: str = "w") -> list[QueuedRun]:
    found: list[QueuedRun] = []
    while (run := await queue.claim(worker)) is not None:
        found.append(run)
    return found


async def leave(queue: RunQueue, row: RunRow, status: str, **changes: Any) -> RunRow:
    return await queue.settle(row.run_id, queue.keep(row, row.claim_id)._replace(status=status, **changes))


# -- entering and claiming


@case
async def a_claim_hands_over_what_was_enqueued(make: Make) -> None:
    async with opened(make) as (queue, clock):
        run_id, sent = UUID(int=7), {"messages": [{"role": "user"}], "who": UUID(int=1), "price": Decimal("1.10")}
        await queue.enqueue(run_id, "agent", sent, {"tenant": 5}, 3)
        sent["messages"] = []
        run = await queue.claim("worker-1", lease_seconds=60)
        same((run.run_id, run.agent_key, run.priority, run.attempt), (run_id, "agent", 3, 1), "the claimed run")
        expected = {"messages": [{"role": "user"}], "who": UUID(int=1), "price": Decimal("1.10")}
        same(run.input, expected, "its input")
        same(run.metadata, {"tenant": 5}, "its metadata")
        same(run.created_at, dt.datetime.fromtimestamp(clock.wall(), dt.UTC), "when it was created")
        same(run.scheduled_at, None, "when it is scheduled")
        same(bool(run.claim_id), True, "that there is a claim id")
        run.input["messages"].append("mine")
        stored = await queue.must_get(run_id)
        same(QueuedRun.of(stored).input, expected, "the stored input after the caller changed its copy")


@case
async def an_empty_queue_gives_none(make: Make) -> None:
    async with opened(make) as (queue, _):
        same(await queue.claim("w"), None, "a claim on an empty queue")
        same(await queue.claim("w", limit=3), [], "a claim of three on an empty queue")
        same(await queue.next_due(), None, "when the next run is due")
        same(await queue.row(UUID(int=9)), None, "the row of an unknown run")
        with refused(UnknownRun, "must_get of an unknown run"):
            await queue.must_get(UUID(int=9))


@case
async def claims_come_by_priority_then_in_order_of_arrival(make: Make) -> None:
    async with opened(make) as (queue, _):
        for agent, priority in (("low", -1), ("b", 0), ("high", 5), ("c", 0), ("higher", 2**31 - 1), ("d", 0)):
            await add(queue, agent, priority=priority)
        same(names(await drain(queue)), ["higher", "high", "b", "c", "d", "low"], "the order of claims")


@case
async def a_batch_is_claimed_in_the_same_order(make: Make) -> None:
    async with opened(make) as (queue, _):
        for agent, priority in (("a", 0), ("b", 2), ("c", 0), ("d", 1)):
            await add(queue, agent, priority=priority)
        batch = await queue.claim("w", limit=3)
        same(names(batch), ["b", "d", "a"], "a batch of three")
        same(len({run.claim_id for run in batch}), 3, "the number of claim ids in it")
        same(names(await queue.claim("w", limit=3)), ["c"], "what is left for the next batch")


@case
async def a_run_that_got_a_message_is_in_a_batch_once(make: Make) -> None:
    async with opened(make) as (queue, _):
        [run_id, _other] = await add(queue, "a", "b")
        await queue.post(run_id, "signal", "go", "1")
        same(names(await queue.claim("w", limit=3)), ["a", "b"], "a batch of three where there are two runs")


@case
async def a_claim_that_goes_on_under_a_new_id_is_refused_under_the_old_one(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "a")
        [row] = await queue.claim_rows("w", LEASE)
        how = queue.keep(row, row.claim_id)._replace(status="running", failures=1, renew=new_ulid(clock))
        renewed = await queue.settle(row.run_id, how)
        same((renewed.status, renewed.failures, renewed.worker), ("running", 1, "w"), "the row it goes on with")
        same(renewed.claim_id > row.claim_id, True, "that the new claim id is above the old one")
        try:
            again = await queue.settle(row.run_id, how)
        except Moved:
            raise AssertionError("a renewal whose answer was lost is refused when it is repeated") from None
        same(again.claim_id, renewed.claim_id, "the claim id of the same once more, its answer was lost")
        late = queue.keep(row, row.claim_id)._replace(status="failed")
        with refused(LeaseLost, "an end by the old claim id"):
            await queue.settle(row.run_id, late)
        same((await queue.settle(row.run_id, late._replace(claim_id=renewed.claim_id))).status, "failed", "its own end")


@case
async def a_run_goes_to_one_of_many_claimers(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = await add(queue, *["agent"] * 24)

        async def claim(worker: int) -> list[QueuedRun]:
            one, more = await queue.claim(f"w{worker}"), await queue.claim(f"w{worker}", limit=2)
            return [*([one] if one else []), *more]

        found = [str(run.run_id) for runs in await asyncio.gather(*map(claim, range(16))) for run in runs]
        same(sorted(found), sorted(ids), "what 16 claimers got")


@case
async def a_claimer_that_is_cancelled_keeps_nothing(make: Make) -> None:
    async with opened(make) as (queue, _):
        await add(queue, "agent")
        for patience in range(6):
            claiming = asyncio.ensure_future(queue.claim("w1", LEASE))
            await turns(patience)
            claiming.cancel()
            await asyncio.wait({claiming})
            run: Any = await queue.claim("w2", LEASE) if claiming.cancelled() else claiming.result()
            same(run is not None, True, f"that somebody has the run, its claimer cancelled after {patience} turns")
            same(run.attempt, 1, f"the attempt, its claimer cancelled after {patience} turns")
            await leave(queue, run.row, "pending")


@case
async def a_claim_is_for_the_agents_it_names(make: Make) -> None:
    async with opened(make) as (queue, _):
        await add(queue, "a", "b", "c", "b")
        same(await queue.claim("w", agent_keys=[]), None, "a claim for no agent")
        same(await queue.claim("w", agent_keys=["other"]), None, "a claim for an agent without runs")
        same(names(await queue.claim("w", agent_keys=["c", "b"], limit=5)), ["b", "c", "b"], "a claim for b and c")
        same(names(await drain(queue)), ["a"], "what nobody asked for")


@case
async def a_delayed_run_waits_for_its_time(make: Make) -> None:
    async with opened(make) as (queue, clock):
        later = await queue.enqueue(None, "later", {}, delay=30)
        await add(queue, "now")
        same(later.scheduled_at, dt.datetime.fromtimestamp(clock.wall() + 30, dt.UTC), "when it is scheduled")
        same(await queue.next_due(), clock.wall() + 30, "when the next run is due")
        same(names(await drain(queue)), ["now"], "claims before that time")
        clock.advance(29.9)
        same(await queue.claim("w"), None, "a claim a moment too early")
        clock.advance(0.1)
        same(names(await drain(queue)), ["later"], "claims at that time")
        same(await queue.next_due(), None, "when the next run is due after that")


@case
async def a_delayed_run_keeps_its_priority_and_place(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "first", delay=10)
        await add(queue, "second")
        await add(queue, "urgent", priority=1, delay=10)
        clock.advance(10)
        same(names(await drain(queue)), ["urgent", "first", "second"], "the order of claims once all are due")


# -- one run for one id or key


@case
async def racing_enqueuers_of_one_key_make_one_run(make: Make) -> None:
    async with opened(make) as (queue, _):

        async def enqueue(_: int) -> UUID:
            return (await queue.enqueue(None, "agent", {"n": 1}, idempotency_key="order-17")).run_id

        ids = await asyncio.gather(*map(enqueue, range(32)))
        same(len(set(ids)), 1, "how many runs 32 enqueuers of one key made")
        same([run.run_id for run in await drain(queue)], [ids[0]], "what is there to claim")
        row = await queue.read("row_by_key", "order-17")
        same(row.run_id, str(ids[0]), "the run of that key")
        same(await queue.read("row_by_key", "order-18"), None, "the run of another key")


@case
async def the_same_run_twice_is_the_first_one(make: Make) -> None:
    async with opened(make) as (queue, clock):
        first = await queue.enqueue("nightly", "agent", {"n": 1}, {"from": 1}, 5)
        run = await queue.claim("w")
        clock.advance(1)
        again = await queue.enqueue("nightly", "agent", {"n": 1}, {"from": 2})
        same((again.run_id, again.metadata, again.priority), (first.run_id, {"from": 1}, 5), "the run enqueued again")
        same((await queue.must_get(run.run_id)).status, "running", "its status")
        same(await queue.claim("w"), None, "what is there to claim")


@case
async def another_run_under_the_same_id_or_key_is_a_conflict(make: Make) -> None:
    async with opened(make) as (queue, _):
        await queue.enqueue("nightly", "agent", {"n": 1}, idempotency_key="key-1")
        for run_id, key, agent, input_, told in (
            ("nightly", None, "other", {"n": 1}, ("nightly", "agent", "other")),
            ("nightly", None, "agent", {"n": 2}, ("nightly", '"n":1', '"n":2')),
            (None, "key-1", "agent", {"n": 2}, ("key-1", '"n":1', '"n":2')),
        ):
            try:
                await queue.enqueue(run_id, agent, input_, idempotency_key=key)
            except IdempotencyConflict as error:
                missing = [part for part in told if part not in str(error).replace(" ", "")]
                same(missing, [], f"what the conflict leaves untold ({error})")
            else:
                raise AssertionError(f"enqueue of {agent} with {input_} under {run_id or key} was not refused")
        same(len(await drain(queue)), 1, "the number of runs")


# -- leases and claims


@case
async def a_lease_that_ran_out_is_claimed_anew_and_counts_as_a_crash(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "agent")
        first = await queue.claim("w1", LEASE)
        clock.advance(LEASE)
        same(await queue.claim("w2", LEASE), None, "a claim while the lease lasts")
        clock.advance(0.1)
        second = await queue.claim("w2", LEASE)
        if second is None:
            raise AssertionError("a run whose lease ran out was not claimed anew")
        same((second.run_id, second.attempt), (first.run_id, 2), "the run claimed anew")
        row = await queue.must_get(first.run_id)
        same((row.crashes, row.stalls, row.failures, row.worker), (1, 1, 0, "w2"), "what its row counts")
        same(second.claim_id > first.claim_id, True, "that the new claim id is greater")
        clock.advance(LEASE + 1)
        third = await queue.claim("w3", LEASE)
        row = await queue.must_get(first.run_id)
        same((third.attempt, row.crashes, row.stalls), (3, 2, 2), "attempt and crashes after a second crash")


@case
async def dropped_runs_come_before_new_ones(make: Make) -> None:
    async with opened(make) as (queue, clock):
        dropped = await hold(queue, "dropped")
        clock.advance(LEASE + 1)
        await add(queue, "new", priority=9)
        batch = await queue.claim("w2", LEASE, limit=2)
        same(names(batch), ["dropped", "new"], "the order of claims")
        same(batch[0].attempt, dropped.attempt + 1, "the attempt of the dropped one")


@case
async def a_dropped_run_stays_with_its_agents(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await hold(queue, "a")
        clock.advance(LEASE + 1)
        same(await queue.claim("w2", agent_keys=["b"]), None, "a claim for another agent")
        same(names([await queue.claim("w2", agent_keys=["b", "a"])]), ["a"], "a claim for its agent")


@case
async def claim_ids_grow_also_where_the_clock_goes_back(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row, ids = await hold(queue), []
        for _ in range(6):
            ids.append(row.claim_id)
            await leave(queue, row, "pending")
            clock.set_wall(clock.wall() - 3600)
            row = await one(queue, "w")
        same(sorted(set(ids)), ids, "claim ids of one run in order")


@case
async def a_beat_extends_the_lease_of_whoever_holds_it(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "a")
        run = await queue.claim("w", LEASE)
        clock.advance(50)
        same(await queue.extend_lease(run.run_id, "w", LEASE), True, "extend_lease by the holder")
        same(await queue.extend_lease(run.run_id, "stranger", LEASE), False, "extend_lease by another worker")
        clock.advance(50)
        same(await queue.claim("w2", LEASE), None, "a claim while the extended lease lasts")
        clock.advance(11)
        taken = await queue.claim("w2", LEASE)
        same(taken is not None, True, "that the run is claimed once the extended lease ran out")
        same(await queue.extend_lease(run.run_id, "w", LEASE), False, "extend_lease by the one who lost it")
        op = Op("queue.beat", (((str(run.run_id), run.claim_id), (str(run.run_id), taken.claim_id)), 1e9))
        same((await queue.commits.commit(None, [op]))[0], [(False, False), (True, False)], "beats of both claims")
        await queue.cancel(run.run_id)
        same((await queue.commits.commit(None, [op]))[0][1], (True, True), "a beat after a request to cancel")


@case
async def a_stale_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "agent")
        old = await queue.claim("w1", LEASE)
        clock.advance(LEASE + 1)
        new = await queue.claim("w2", LEASE)
        key, before = str(old.run_id), await queue.must_get(old.run_id)
        [other] = await add(queue, "other")
        for status in ("running", "pending", "waiting", *sorted(TERMINAL)):
            with refused(LeaseLost, f"leaving the run as {status} with a stale claim"):
                await queue.settle(key, queue.keep(before, old.claim_id)._replace(status=status))
        with refused(LeaseLost, "release by the one who lost the run"):
            await queue.release(old.run_id, "w1", True, {"x": 1})
        with refused(LeaseLost, "release with a stale claim id"):
            await queue.release(old.run_id, "w2", True, claim_id=old.claim_id)
        same(await queue.requeue_for_retry(old.run_id, "w1", "boom"), False, "requeue_for_retry by the loser")
        same(await queue.extend_lease(old.run_id, "w1", 60), False, "extend_lease by the loser")
        stale = Guard(key, old.claim_id)
        for op in (
            Op("queue.insert", (queue.new_row(None, "child", {}),)),
            queue.post_op(other, "signal", "go", "1"),
            queue.post_op(key, "signal", "go", "1"),
        ):
            with refused(LeaseLost, f"{op.name} under a stale claim"):
                await queue.commits.commit(stale, [op])
        same(await queue.must_get(key), before, "the row after all these")
        same((await queue.mail(key), await queue.mail(other)), ([], []), "the mailboxes")
        same(len(await queue.find(RunFilter())), 2, "the number of runs")
        await queue.release(new.run_id, "w2", True, {"x": 2})
        same((await queue.must_get(key)).output, '{"x":2}', "what the holder left")


@case
async def a_run_is_released_once(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [good, bad] = await add(queue, "a", "b")
        with refused(LeaseLost, "release of a run nobody claimed"):
            await queue.release(good, "w", True)
        await drain(queue)
        clock.advance(1)
        await queue.release(UUID(good), "w", True, {"answer": 42})
        await queue.release(bad, "w", False, error={"type": "Boom"})
        done, failed = await queue.must_get(good), await queue.must_get(bad)
        same((done.status, done.output, done.ended_at), ("succeeded", '{"answer":42}', clock.wall()), "a success")
        same((failed.status, failed.error), ("failed", '{"type":"Boom"}'), "a failure")
        clock.advance(1)
        with refused(LeaseLost, "a second release"):
            await queue.release(good, "w", False)
        clock.advance(10 * LEASE)
        same(await queue.claim("w"), None, "what is there to claim after that")


@case
async def a_failed_attempt_is_given_back_until_the_last(make: Make) -> None:
    async with opened(make, max_retries=3) as (queue, clock):
        [run_id] = await add(queue, "agent")
        same(await queue.requeue_for_retry(run_id, "w", "boom"), False, "giving back what nobody claimed")
        run = await queue.claim("w")
        same(await queue.requeue_for_retry(run_id, "stranger", "boom"), False, "giving back another worker's run")
        same(await queue.requeue_for_retry(run.run_id, "w", "boom", delay_seconds=5), True, "the first retry")
        same((await queue.must_get(run_id)).status, "pending", "its status")
        same(await queue.claim("w"), None, "a claim before the delay is over")
        clock.advance(5)
        run = await queue.claim("w")
        same(run.attempt, 2, "the attempt after one failure")
        same(await queue.requeue_for_retry(run_id, "w", {"type": "Boom"}), True, "the second retry")
        run = await queue.claim("w")
        same(run.attempt, 3, "the attempt after two failures")
        same(await queue.requeue_for_retry(run_id, "w", "boom"), False, "a retry after the last attempt")
        same((await queue.must_get(run_id)).status, "running", "its status then")
        await queue.release(run_id, "w", False, error="boom")
        row = await queue.must_get(run_id)
        same((row.failures, row.crashes), (2, 0), "what its row counts")


@case
async def crashes_in_a_row_are_counted_until_the_run_gets_on(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        for crash in (1, 2):
            clock.advance(LEASE + 1)
            row = await one(queue, "w", LEASE)
            same((row.crashes, row.stalls, row.mark), (crash, crash, -1), f"the counts at crash {crash}")
        row = await leave(queue, row, "running", stalls=1, mark=7)
        same((row.status, row.stalls, row.mark, row.crashes), ("running", 1, 7, 2), "a claim that writes its counts")
        clock.advance(LEASE + 1)
        row = await one(queue, "w", LEASE)
        same((row.stalls, row.mark, row.attempt), (2, 7, 4), "the counts at the next crash")
        row = await leave(queue, row, "pending", stalls=0)
        row = await one(queue, "w", LEASE)
        same((row.crashes, row.stalls, row.attempt), (3, 0, 4), "the counts after it was handed back")


@case
async def a_lost_reply_is_repeated_without_harm(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [parent] = await add(queue, "parent")
        row = await hold(queue, "child")
        how = queue.keep(row, row.claim_id)._replace(status="succeeded", output="1")
        ops = [queue.post_op(parent, "child", row.run_id, "{}"), Op("queue.insert", (queue.new_row(None, "next", {}),))]
        ended = await queue.settle(row.run_id, how, ops)
        clock.advance(1)
        same(await queue.settle(row.run_id, how, ops), ended, "the answer to the same end once more")
        same(await queue.must_get(row.run_id), ended, "the row")
        same(len(await queue.mail(parent)), 1, "messages in the parent's mailbox")
        same(names(await queue.find(RunFilter())), ["parent", "child", "next"], "the runs there are")
        with refused(LeaseLost, "an end as something else"):
            await queue.settle(row.run_id, how._replace(status="failed"))
        with refused(LeaseLost, "the same end with one more message"):
            await queue.settle(row.run_id, how, [queue.post_op(parent, "signal", "new", "1")])
        parked = await hold(queue, "other")
        how = queue.keep(parked, parked.claim_id)._replace(status="waiting", parked=1, reason="signal go")
        same(await queue.settle(parked.run_id, how), await queue.settle(parked.run_id, how), "parking twice")


@case
async def an_end_and_the_next_claim_are_one_commit(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue, "first")
        [second] = await add(queue, "second")
        end = Op("queue.settle", (row.run_id, queue.keep(row, row.claim_id)._replace(status="succeeded")))
        want = ClaimRequest(
            (new_ulid(clock),), "w", "", queue.lease_now() + LEASE, queue.lease_now(), clock.wall(), None
        )
        guard, ops = Guard(row.run_id, row.claim_id), [end, Op("queue.claim", (want,))]
        ended, claimed = await queue.commits.commit(guard, ops)
        same((ended.status, names(claimed)), ("succeeded", ["second"]), "the end and the claim")
        same((await queue.must_get(second)).claim_id, claimed[0].claim_id, "who holds the next run")
        # What the lost reply had claimed is for its caller to look for: nothing more is claimed.
        await add(queue, "third")
        same(await queue.commits.commit(guard, ops), [ended, []], "the answer to the same commit once more")
        same(names(await drain(queue)), ["third"], "what is there to claim")


@case
async def a_commit_is_all_or_nothing(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await hold(queue)
        fresh = queue.new_row(None, "fresh", {})
        ends_nobody = Op("queue.end", (fresh.run_id, ("waiting",), "cancelled", 0.0, ""))
        with refused(Moved, "a commit whose last operation is refused"):
            how = queue.keep(row, row.claim_id)._replace(status="succeeded")
            mail = queue.post_op(row.run_id, "signal", "go", "1")
            await queue.settle(row.run_id, how, [mail, Op("queue.insert", (fresh,)), ends_nobody])
        same(await queue.must_get(row.run_id), row._replace(parked=0), "the row it would have ended")
        same(await queue.row(fresh.run_id), None, "the run it would have stored")
        same(await queue.mail(row.run_id), [], "the mailbox")
        same((await leave(queue, row, "succeeded")).status, "succeeded", "the claim, which still holds")


# -- cancelling


@case
async def a_run_cancelled_before_its_claim_is_skipped(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [gone, _, late] = [*await add(queue, "gone", "stays"), *await add(queue, "late", delay=9)]
        same(await queue.is_cancelled(gone), False, "is_cancelled before")
        same((await queue.cancel(UUID(gone)), await queue.cancel(late)), (True, True), "cancel of queued runs")
        same((await queue.is_cancelled(gone), await queue.is_cancelled(UUID(late))), (True, True), "is_cancelled after")
        clock.advance(10)
        same(names(await drain(queue)), ["stays"], "what is there to claim")
        row = await queue.must_get(gone)
        same((row.status, row.ended_at is not None), ("cancelled", True), "the row of the cancelled one")
        same(await queue.cancel(gone), False, "cancel of a run that is over")
        same((await queue.cancel(UUID(int=5)), await queue.is_cancelled(UUID(int=5))), (False, False), "an unknown run")


@case
async def a_running_run_is_asked_to_stop(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        clock.advance(2)
        same((await queue.cancel(row.run_id), await queue.cancel(row.run_id)), (True, True), "cancel of a running run")
        now = await queue.must_get(row.run_id)
        same((now.status, now.cancel_at), ("running", clock.wall()), "its row")
        same(await queue.is_cancelled(row.run_id), True, "is_cancelled")
        kinds = {mail.kind for mail in await queue.mail(row.run_id)}
        same(kinds, {"cancel"}, "what its mailbox holds")
        news = await queue.news([row.run_id, str(UUID(int=3))])
        same(news, {row.run_id: News("running", row.claim_id, now.mail_seq, True)}, "the news of it")
        # A terminal commit that arrives first wins.
        same((await leave(queue, row, "succeeded")).status, "succeeded", "an end in spite of the request")
        same(await queue.cancel(row.run_id), False, "cancel after the end")


@case
async def a_run_asked_to_stop_is_not_put_off(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        await queue.cancel(row.run_id)
        with refused(Moved, "parking a run that was asked to stop"):
            await leave(queue, row, "waiting", parked=1, reason="sleep")
        later = await leave(queue, row, "pending", due_at=clock.wall() + 3600)
        same((later.status, later.due_at), ("pending", 0.0), "the row, given back for an hour later")
        same((await one(queue, "w")).cancel_at is not None, True, "that its next claim knows of the request")


@case
async def a_request_to_stop_outlives_its_worker(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        await queue.cancel(row.run_id)
        clock.advance(LEASE + 1)
        row = await one(queue, "w2")
        same(row.cancel_at is not None, True, "that the next claim knows of the request")


# -- waiting and mail


@case
async def a_waiting_run_is_claimed_when_its_time_has_come(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        due = clock.wall() + 30 * 86400
        await leave(queue, row, "waiting", due_at=due, parked=1, reason="sleep")
        same(await queue.next_due(), due, "when the next run is due")
        clock.advance(29 * 86400)
        same(await queue.claim("w"), None, "a claim before that time")
        clock.advance(86400)
        again = await one(queue, "w")
        same((again.parked, again.attempt, again.reason), (1, 1, "sleep"), "what the next claim is told")
        clock.advance(LEASE + 1)
        again = await one(queue, "w")
        same((again.parked, again.attempt), (0, 2), "what the next claim is told after a crash")


@case
async def a_message_wakes_a_waiting_run(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        await leave(queue, row, "waiting", due_at=clock.wall() + 60, parked=1, cursor=0)
        same(await queue.claim("w"), None, "a claim while it waits")
        same(await queue.post(row.run_id, "signal", "go", '{"n":1}', "m1"), ("waiting", 1), "the answer to a message")
        same((await queue.must_get(row.run_id)).status, "pending", "its status then")
        again = await one(queue, "w", 600)
        same((again.parked, again.attempt, again.mail_seq), (1, 1, 1), "what the next claim is told")
        clock.advance(61)
        same(await queue.claim("w2"), None, "a second claim when its old time has come")


@case
async def a_message_is_kept_once(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [run_id, other] = await add(queue, "a", "b")
        same(await queue.post(UUID(run_id), "signal", "go", "1", "m1"), ("pending", 1), "the first message")
        same(await queue.post(run_id, "signal", "go", "2"), ("pending", 2), "the second")
        same(await queue.post(run_id, "signal", "go", "3", "m1"), ("pending", 1), "the first one again")
        same(await queue.post(other, "signal", "go", "4", "m1"), ("pending", 1), "its id in another mailbox")
        await queue.claim("w", agent_keys=["a"])
        same(await queue.post(run_id, "child", "x", "5", "m5"), ("running", 3), "a message to a running run")
        box = await queue.mail(run_id)
        same([(m.seq, m.kind, m.name, m.payload) for m in box],
             [(1, "signal", "go", "1"), (2, "signal", "go", "2"), (3, "child", "x", "5")], "the mailbox")  # fmt: skip
        same(box[0], Mail("signal", "go", "1", "m1", clock.wall(), 1), "its first message")
        same([m.seq for m in await queue.mail(run_id, 2)], [3], "the mailbox after message 2")
        same((await queue.must_get(run_id)).mail_seq, 3, "the number of the last message, in the row")


@case
async def a_run_does_not_park_past_a_message(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await hold(queue)
        await queue.post(row.run_id, "signal", "go", "1")
        with refused(Moved, "parking with a cursor before the last message"):
            await leave(queue, row, "waiting", parked=1, cursor=0)
        now = await queue.must_get(row.run_id)
        same((now.status, now.claim_id), ("running", row.claim_id), "the row then")
        same((await leave(queue, row, "waiting", parked=1, cursor=1)).status, "waiting", "parking once it was read")


@case
async def messages_racing_a_park_are_never_lost(make: Make) -> None:
    async with opened(make) as (queue, _):
        for n in range(12):
            row = await hold(queue, f"agent{n}")

            async def park(row: RunRow = row, n: int = n) -> None:
                await turns(n % 4)
                with contextlib.suppress(Moved):
                    await leave(queue, row, "waiting", parked=1, cursor=0)

            async def post(row: RunRow = row, n: int = n) -> None:
                await turns(3 - n % 4)
                await queue.post(row.run_id, "signal", "go", str(n))

            await asyncio.gather(park(), post())
            now = await queue.must_get(row.run_id)
            same(now.status in ("pending", "running"), True, f"that it does not sleep over its message ({now.status})")
            same([m.payload for m in await queue.mail(row.run_id)], [str(n)], "the mailbox")


@case
async def a_run_that_is_over_takes_no_message(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await hold(queue)
        await leave(queue, row, "failed")
        same(await queue.post(row.run_id, "signal", "go", "1"), ("failed", 0), "the answer to a message")
        same(await queue.post(UUID(int=4), "signal", "go", "1"), ("unknown", 0), "a message to an unknown run")
        same(await queue.mail(row.run_id), [], "the mailbox")


# -- one run, at once or again


@case
async def take_claims_that_one_run(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = queue.new_row("job", "agent", {"n": 1}, origin="inline")
        way = {"insert": True, "reopen": True}
        same(await queue.take(row, "w", LEASE, insert=False, reopen=True), ("unknown", None), "an unknown run")
        outcome, mine = await queue.take(row, "w", LEASE, **way)
        assert mine is not None
        same((outcome, mine.status, mine.attempt, mine.worker), ("claimed", "running", 1, "w"), "a new run")
        other = queue.new_row("job", "agent", {"n": 2}, origin="inline")
        same((await queue.take(other, "w2", LEASE, **way))[0], "conflict", "the same id with another input")
        outcome, there = await queue.take(row, "w2", LEASE, **way)
        same((outcome, there and there.worker), ("held", "w"), "a run that is held")
        clock.advance(LEASE + 1)
        same(await queue.claim("w2"), None, "a worker's claim on a run that its own process recovers")
        outcome, again = await queue.take(row, "w2", LEASE, **way)
        assert again is not None
        same((outcome, again.crashes, again.claim_id > mine.claim_id), ("claimed", 1, True), "a run that was dropped")
        await leave(queue, again, "succeeded")
        same((await queue.take(row, "w", LEASE, **way))[0], "ended", "a run that succeeded")


@case
async def take_opens_an_ended_run_only_when_told(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        _, mine = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert mine is not None
        await leave(queue, mine, "failed", failures=2)
        same((await queue.take(row, "w", LEASE, insert=True, reopen=False))[0], "ended", "without being told")
        outcome, again = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert again is not None
        same((outcome, again.generation, again.attempt), ("claimed", 2, 1), "when told")


@case
async def racing_takers_of_one_run_make_one_claim(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        answers = await asyncio.gather(*(queue.take(row, f"w{n}", LEASE, insert=True, reopen=True) for n in range(16)))
        same(sorted(outcome for outcome, _ in answers), ["claimed"] + ["held"] * 15, "the answers to 16 takers")


@case
async def an_ended_run_is_reopened_as_a_new_generation(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        await queue.cancel(row.run_id)
        await leave(queue, row, "dead", crashes=3, stalls=3, mark=4, failures=1, reason="Poisoned", error='"x"')
        clock.advance(1)
        op = Op("queue.reopen", (row.run_id, ("dead", "failed"), clock.wall()))
        reopened: RunRow = (await queue.commits.commit(None, [op]))[0]
        same(reopened, await queue.must_get(row.run_id), "the answer and the row")
        same((reopened.status, reopened.generation, reopened.attempt, reopened.stalls, reopened.mark),
             ("pending", 2, 1, 0, -1), "its status, generation and counters")  # fmt: skip
        left = (reopened.reason, reopened.error, reopened.ended_at, reopened.cancel_at)
        same(left, ("", None, None, None), "what is left of its end")
        with refused(Moved, "reopening a run that is pending"):
            await queue.commits.commit(None, [op])
        again = await one(queue, "w")
        same(again.claim_id > row.claim_id, True, "that its claim ids go on growing")


async def _stand(queue: RunQueue, status: RunStatus, agent: str) -> RunRow:
    """A run of its own agent that stands at `status`."""
    [run_id] = await add(queue, agent)
    if status is not RunStatus.PENDING:
        row = await one(queue, "w", LEASE, agent_keys=[agent])
        if status is not RunStatus.RUNNING:
            await leave(queue, row, status.value)
    return await queue.must_get(run_id)


async def _without_a_door(queue: RunQueue, row: RunRow, way: str) -> None:
    match way:
        case "claim":
            await queue.claim("w2", agent_keys=[row.agent])
        case "cancel":
            await queue.cancel(row.run_id)
        case "post":
            await queue.post(row.run_id, "signal", "go", "1")
        case status if row.status == "running":
            await leave(queue, row, status)
        case status:
            with refused(LeaseLost, f"going from {row.status} to {status} with the last claim"):
                await leave(queue, row, status)


async def _through_a_door(queue: RunQueue, row: RunRow, way: str) -> None:
    if way == "take":
        await queue.take(row, "w2", LEASE, insert=False, reopen=True)
        return
    ended = tuple(status for status in TERMINAL if status != "succeeded")
    with contextlib.suppress(Moved):
        await queue.commits.commit(None, [Op("queue.reopen", (row.run_id, ended, queue.clock.wall()))])


@case
async def a_run_moves_only_along_the_table_of_transitions(make: Make) -> None:
    async with opened(make) as (queue, clock):
        count = 0
        for old in RunStatus:
            reached: dict[bool, set[str]] = {False: set(), True: set()}
            for way in ("claim", "cancel", "post", *(status.value for status in RunStatus), "take", "reopen"):
                count += 1
                row = await _stand(queue, old, f"agent{count}")
                clock.advance(1)  # the same end at the same instant would be the repeat of a lost reply
                door = way in ("take", "reopen")
                await (_through_a_door if door else _without_a_door)(queue, row, way)
                reached[door].add((await queue.must_get(row.run_id)).status)
            for door, what in ((False, "by itself"), (True, "through an explicit door")):
                expected = {new.value for new, explicit in TRANSITIONS[old].items() if explicit is door}
                found = reached[door] - {old.value} - (reached[False] if door else set())
                same(found, expected, f"where a run that is {old.value} gets {what}")


@case
async def an_end_is_written_only_from_what_was_seen(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue)
        for expected in (("pending", "waiting"), ()):
            with refused(Moved, "ending a run that is not as expected"):
                await queue.commits.commit(
                    None, [Op("queue.end", (row.run_id, expected, "cancelled", clock.wall(), "cancel"))]
                )
        with refused(Moved, "ending an unknown run"):
            await queue.commits.commit(None, [Op("queue.end", ("nobody", ("pending",), "cancelled", 0.0, ""))])
        same(await queue.must_get(row.run_id), row, "the row")


# -- concurrency keys


async def line(queue: RunQueue, *agents: str, key: str = "lane", **options: Any) -> list[str]:
    """Enqueue one run for each of those agents, all of one concurrency key; their ids."""
    return await add(queue, *agents, concurrency_key=key, **options)


async def finish(queue: RunQueue, worker: str = "w") -> list[str]:
    """End runs one by one, as they come; their agents."""
    found: list[str] = []
    while rows := await queue.claim_rows(worker, LEASE):
        found += names(rows)
        await leave(queue, rows[0], "succeeded")
    return found


def inline(queue: RunQueue, run_id: str, **options: Any) -> RunRow:
    """A row of agent `run_id`, for its own process, in the lane."""
    return queue.new_row(run_id, run_id, {}, concurrency_key="lane", origin="inline", **options)


async def ask(queue: RunQueue, row: RunRow, *, wait: bool = True, reopen: bool = True) -> tuple[str, RunRow]:
    outcome, there = await queue.take(row, "mine", LEASE, insert=True, reopen=reopen, wait=wait)
    assert there is not None
    return outcome, there


@case
async def runs_of_one_key_go_one_at_a_time_in_order_of_arrival(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = await line(queue, "a", "b", "c")
        same([(await queue.must_get(each)).lane for each in ids], ["lane"] * 3, "their key")
        for n, (agent, worker) in enumerate((("a", "w1"), ("b", "w2"), ("c", "w1"))):
            rows = await queue.claim_rows(worker, LEASE, limit=3)
            same(names(rows), [agent], f"what {worker} gets")
            same(await queue.claim("w3"), None, f"what is there to claim beside {agent}")
            same([(await queue.must_get(each)).held for each in ids[n:]], [0, 1, 1][: 3 - n], "who is held")
            await leave(queue, rows[0], ("succeeded", "failed", "dead")[n])
        same(await queue.claim("w3"), None, "what is there to claim at last")
        await line(queue, "d")
        same(names(await drain(queue)), ["d"], "a run that comes when the others are over")


@case
async def keys_do_not_wait_for_each_other(make: Make) -> None:
    async with opened(make) as (queue, _):
        await line(queue, "a1", "a2", key="a")
        await line(queue, "b1", "b2", key="b")
        await add(queue, "free", "none", concurrency_key="")
        same(names(await queue.claim("w", limit=9)), ["a1", "b1", "free", "none"], "what is there to claim")


@case
async def of_those_held_the_greatest_priority_goes_first(make: Make) -> None:
    async with opened(make) as (queue, _):
        for agent, priority in (("first", 0), ("low", -1), ("b", 3), ("high", 7), ("c", 3)):
            await line(queue, agent, priority=priority)
        await add(queue, "other", priority=5)
        same(await finish(queue), ["other", "first", "high", "b", "c", "low"], "the order of claims")


@case
async def a_delayed_run_comes_into_its_lane_when_it_is_due(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await line(queue, "later", delay=30)
        await line(queue, "now", "next")
        same(names(await drain(queue)), ["now"], "claims before that time")
        clock.advance(30)
        same(await queue.claim("w"), None, "a claim at that time, the lane being busy")
        [row] = await queue.find(RunFilter(("running",)))
        await leave(queue, row, "succeeded")
        same(await finish(queue), ["later", "next"], "the order of claims then")
        await line(queue, "tomorrow", "too", delay=10)
        await line(queue, "today", "tonight")
        same(await finish(queue), ["today", "tonight"], "the order of claims while others are delayed")
        clock.advance(10)
        same(names(await queue.claim("w", limit=3)), ["tomorrow"], "claims of a lane in which all were delayed")


@case
async def a_park_a_retry_and_a_hand_back_keep_the_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue, "first", concurrency_key="lane")
        await line(queue, "second", priority=9)
        for status, changes in (
            ("waiting", {"parked": 1, "due_at": clock.wall() + 60}),
            ("pending", {"failures": 1, "due_at": clock.wall() + 120}),
            ("pending", {"failures": 1}),
        ):
            await leave(queue, row, status, **changes)
            await line(queue, "third")
            rows = await queue.claim_rows("w2")
            if "due_at" in changes:
                same(names(rows), [], f"what is there to claim while the first is {status}")
                clock.advance(60)
                rows = await queue.claim_rows("w2")
            same(names(rows), ["first"], "who goes on")
            row = rows[0]
        await leave(queue, row, "waiting", parked=1)
        await queue.post(row.run_id, "signal", "go", "1")
        row = await one(queue, "w")
        same(row.agent, "first", "who goes on after a message")
        await leave(queue, row, "succeeded")
        same(await finish(queue), ["second", "third", "third", "third"], "who comes then")


@case
async def a_run_that_was_dropped_keeps_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await hold(queue, "first", concurrency_key="lane")
        await line(queue, "second", priority=9)
        clock.advance(LEASE + 1)
        batch = await queue.claim_rows("w2", LEASE, limit=2)
        same(names(batch), ["first"], "what is claimed once its lease ran out")
        await leave(queue, batch[0], "succeeded")
        same(await finish(queue), ["second"], "who comes then")


@case
async def the_end_of_a_run_lets_the_next_of_its_key_go_in_the_same_commit(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue, "first", concurrency_key="lane")
        await line(queue, "second", "third")
        end = Op("queue.settle", (row.run_id, queue.keep(row, row.claim_id)._replace(status="succeeded")))
        want = queue.want("w", LEASE, None, 2, light=True)
        ops, nobody = [end, Op("queue.claim", (want,))], Op("queue.end", ("nobody", ("pending",), "cancelled", 0.0, ""))
        with refused(Moved, "a commit whose last operation is refused"):
            await queue.commits.commit(Guard(row.run_id, row.claim_id), [*ops, nobody])
        same(await queue.claim("w2"), None, "what is there to claim after it")
        clock.advance(1)
        _, claimed = await queue.commits.commit(Guard(row.run_id, row.claim_id), ops)
        same(names(claimed), ["second"], "what the same commit claims")
        await leave(queue, claimed[0], "succeeded")
        same(await finish(queue), ["third"], "who comes then")


@case
async def cancelling_takes_a_run_out_of_its_lane(make: Make) -> None:
    async with opened(make) as (queue, _):
        head, held, late, last = [*await line(queue, "head", "held"), *await line(queue, "late", delay=9),
                                  *await line(queue, "last")]  # fmt: skip
        same([await queue.cancel(each) for each in (held, late)], [True, True], "cancel of what is held")
        same((await queue.must_get(held)).status, "cancelled", "its status")
        same(names(await queue.claim("w", limit=9)), ["head"], "what is there to claim")
        same(await queue.cancel(last), True, "cancel of the last one")
        [more] = await line(queue, "more")
        await leave(queue, await queue.must_get(head), "waiting", parked=1)
        same(await queue.cancel(head), True, "cancel of the one that waits")
        same((await queue.must_get(more)).held, 0, "what holds the next one")
        same(names(await drain(queue)), ["more"], "what is there to claim then")
        await line(queue, "next")
        await queue.cancel(more)
        same(await queue.claim("w"), None, "what is there to claim while the running one was only asked to stop")


@case
async def a_run_opened_again_goes_behind_the_one_that_has_its_lane(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue, "first", concurrency_key="lane")
        await leave(queue, row, "failed")
        second = await hold(queue, "second", concurrency_key="lane")
        reopen = Op("queue.reopen", (row.run_id, ("failed",), clock.wall()))
        reopened: RunRow = (await queue.commits.commit(None, [reopen]))[0]
        same((reopened.status, reopened.generation, reopened.held), ("pending", 2, 1), "the run opened again")
        same(await queue.claim("w"), None, "what is there to claim")
        await leave(queue, second, "dead")
        first = await one(queue, "w")
        same(first.agent, "first", "who comes when the lane is free")
        again = queue.new_row(second.run_id, "second", {})
        same((await ask(queue, again, wait=False))[0], "behind", "a take of another ended one")
        same((await queue.must_get(second.run_id)).status, "dead", "its status when nobody waits")
        outcome, front = await ask(queue, again)
        same((outcome, front.run_id), ("behind", row.run_id), "the same by somebody who waits")
        second = await queue.must_get(second.run_id)
        same((second.status, second.generation, second.held), ("pending", 2, 1), "its row then")
        await leave(queue, first, "succeeded")
        delete = Op("queue.delete", (row.run_id,))
        await queue.commits.commit(None, [delete])
        same((await ask(queue, again))[0], "claimed", "a take when the lane is free")


@case
async def take_waits_for_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        first = await hold(queue, "first", concurrency_key="lane")
        mine = inline(queue, "mine")
        outcome, front = await ask(queue, mine, wait=False)
        same((outcome, front), ("behind", await queue.must_get(first.run_id)), "a take by somebody who does not wait")
        same(await queue.row(mine.run_id), None, "the run it did not store")
        same((await ask(queue, mine))[0], "behind", "a take by somebody who waits")
        await line(queue, "later")
        stored = await queue.must_get(mine.run_id)
        same((stored.status, stored.held, stored.origin), ("pending", 1, "inline"), "the row it stored")
        await leave(queue, first, "succeeded")
        same(await queue.claim("w"), None, "what is there to claim while its turn has come")
        clock.advance(1)
        outcome, row = await ask(queue, mine)
        same((outcome, row.held, row.attempt), ("claimed", 0, 1), "the next take")
        await leave(queue, row, "succeeded")
        same(await finish(queue), ["later"], "who comes then")
        with refused(Moved, "ending it once more"):
            await queue.commits.commit(None, [Op("queue.end", (mine.run_id, ("pending",), "cancelled", 0.0, ""))])


@case
async def an_inline_run_that_nobody_goes_on_with_stands_aside(make: Make) -> None:
    async with opened(make) as (queue, clock):
        _, mine = await ask(queue, inline(queue, "mine"))
        await line(queue, "a", "b", "c")
        same(await queue.claim("w"), None, "what is there to claim while it runs")
        clock.advance(LEASE + 1)
        row = await one(queue, "w")
        same(row.agent, "a", "who comes when its lease is over")
        with refused(LeaseLost, "a write by its last claim"):
            await leave(queue, mine, "succeeded")
        again = inline(queue, "mine")
        same((await ask(queue, again))[0], "behind", "a take of it while the lane is busy")
        await leave(queue, row, "succeeded")
        outcome, mine = await ask(queue, again)
        same((outcome, mine.crashes, mine.stalls, mine.attempt), ("claimed", 1, 1, 2), "its turn, before that of b")
        await leave(queue, mine, "pending")
        row = await one(queue, "w")
        same(row.agent, "b", "who comes when it is handed back")
        same((await ask(queue, again))[0], "behind", "a take of it then")
        await leave(queue, row, "succeeded")
        same(await queue.claim("w"), None, "what is there to claim while it keeps its place")
        clock.advance(LEASE)
        row = await one(queue, "w")
        same(row.agent, "c", "who comes when it was not asked for again")
        await leave(queue, row, "succeeded")
        same(((await queue.must_get(mine.run_id)).status, await finish(queue)), ("pending", []), "what is left")
        same((await ask(queue, again, wait=False))[0], "claimed", "a take when the lane is free")


@case
async def takers_of_one_key_do_without_a_worker(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await ask(queue, inline(queue, "gone"))
        same((await ask(queue, inline(queue, "next")))[0], "behind", "a take behind a live run")
        same((await ask(queue, inline(queue, "last")))[0], "behind", "another one")
        clock.advance(LEASE + 1)
        outcome, front = await ask(queue, inline(queue, "last"))
        same((outcome, front.agent), ("claimed", "last"), "a take when those in front were not asked for any more")
        same((await ask(queue, inline(queue, "gone"), wait=False))[0], "behind", "a take of what was dropped")
        outcome, front = await ask(queue, inline(queue, "next"))
        same((outcome, front.agent), ("behind", "last"), "a take of what lost its place")


@case
async def a_run_that_stands_aside_can_be_cancelled(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = []
        for agent in ("one", "two"):
            _, mine = await ask(queue, inline(queue, agent))
            await leave(queue, mine, "pending")
            ids.append(mine.run_id)
        same(await finish(queue), [], "what is there to claim")
        same(await queue.cancel(ids[0]), True, "cancel")
        same((await queue.must_get(ids[0])).status, "cancelled", "its status")
        await queue.post(ids[1], "cancel", "", "null")
        same((await one(queue, "w")).run_id, ids[1], "which one is there for any worker to end")


@case
async def racing_claims_never_hold_two_runs_of_one_key(make: Make) -> None:
    async with opened(make) as (queue, _):
        running: dict[str, str] = {}
        done: list[str] = []

        async def work(n: int) -> None:
            for m in range(6):
                await line(queue, f"run{n}.{m}", key=f"key{(n + m) % 3}", priority=m % 2)
                for row in await queue.claim_rows(f"w{n}", LEASE, limit=2):
                    assert row.lane is not None
                    same(running.get(row.lane), None, f"who holds {row.lane} when {row.agent} is claimed")
                    running[row.lane] = row.agent
                    await turns(n % 4)
                    running.pop(row.lane)
                    await leave(queue, row, ("succeeded", "failed")[m % 2])
                    done.append(row.run_id)

        await asyncio.gather(*map(work, range(8)))
        left = await finish(queue)
        same((len(done) + len(left), len(set(done))), (48, len(done)), "how many runs went through")


# -- looking and clearing away


@case
async def find_lists_what_was_asked_for(make: Make) -> None:
    async with opened(make) as (queue, clock):
        start = clock.wall()
        for agent in "abab":
            await add(queue, agent)
            clock.advance(10)
        for row in await queue.claim_rows("w", agent_keys=["a"], limit=2):
            await leave(queue, row, "failed")
            clock.advance(5)
        every = await queue.find(RunFilter())
        same(names(every), list("abab"), "all runs, in order of arrival")
        same(names(await queue.find(RunFilter(("failed",)))), list("aa"), "the failed ones")
        same(names(await queue.find(RunFilter(("failed", "pending"), "b"))), list("bb"), "b's, failed or pending")
        same(names(await queue.find(RunFilter(("running",)))), [], "the running ones")
        same(len(await queue.find(RunFilter(since=start + 10))), 3, "those created since the second")
        same(len(await queue.find(RunFilter(ended_before=start + 45))), 1, "those that ended before")
        page = await queue.find(RunFilter(limit=3))
        rest = await queue.find(RunFilter(after=page[-1].n, limit=3))
        same([*page, *rest], every, "two pages")
        same([row.n for row in every], sorted({row.n for row in every}), "their numbers, growing")


@case
async def children_know_their_parent(make: Make) -> None:
    async with opened(make) as (queue, _):
        [parent] = await add(queue, "parent")
        children = await add(queue, "a", "b", parent_run_id=parent)
        same([row.run_id for row in await queue.children(parent)], children, "the children of a run")
        same(await queue.children(children[0]), [], "the children of a child")


@case
async def a_deleted_run_is_gone_with_its_mail_and_key(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await hold(queue, idempotency_key="key-1")
        await queue.post(row.run_id, "signal", "go", "1", "m1")
        delete = Op("queue.delete", (row.run_id,))
        with refused(Moved, "deleting a live run"):
            await queue.commits.commit(None, [delete])
        await leave(queue, row, "succeeded")
        await queue.commits.commit(None, [delete])
        await queue.commits.commit(None, [delete])
        same(await queue.row(row.run_id), None, "the row")
        same(await queue.mail(row.run_id), [], "the mailbox")
        same(await queue.find(RunFilter()), [], "all runs")
        with refused(LeaseLost, "a write by its last claim"):
            await leave(queue, row, "running")
        run = await queue.enqueue(row.run_id, "other", {"n": 2}, idempotency_key="key-1")
        same(await queue.post(run.run_id, "signal", "go", "2", "m1"), ("pending", 1), "a message to its successor")


@case
async def times_and_limits_are_kept(make: Make) -> None:
    async with opened(make) as (queue, clock):
        until = dt.datetime.fromtimestamp(clock.wall() + 90, dt.UTC)
        run = await queue.enqueue("job", "agent", {}, expires_in=30, deadline=until)
        row = await queue.must_get(run.run_id)
        same((row.expires_at, row.deadline, row.run_key), (clock.wall() + 30, until.timestamp(), "job"), "its limits")
        clock.advance(5)
        row = await one(queue, "w", 40)
        same((row.started_at, row.claimed_at, row.created_at), (clock.wall(), clock.wall(), clock.wall() - 5), "times")
        same(row.lease_until, queue.lease_now() + 40, "the end of its lease")
        await leave(queue, row, "pending")
        clock.advance(5)
        row = await one(queue, "w")
        same((row.started_at, row.claimed_at), (clock.wall() - 5, clock.wall()), "its first start and its last claim")


@case
async def listeners_hear_what_concerns_them(make: Make) -> None:
    """A queue may do without: its `listen` answers None and workers poll."""
    async with opened(make) as (queue, _):
        bells = {topic: asyncio.Event() for topic in ("work", "mail", "done")}
        loop = asyncio.get_running_loop()

        def listen(topic: str) -> Callable[[], None] | None:
            def wake() -> None:
                loop.call_soon_threadsafe(bells[topic].set)

            return queue.listen(topic, wake)

        stops = [listen(topic) for topic in bells]
        if None in stops:
            same(stops, [None] * 3, "listening to some topics only")
            return

        row = await hold(queue)
        await bells["work"].wait()
        await queue.post(row.run_id, "signal", "go", "1")
        await bells["mail"].wait()
        await leave(queue, row, "succeeded")
        await bells["done"].wait()
        for stop in stops:
            assert stop is not None
            stop()
        bells["work"].clear()
        await add(queue, "agent")
        await turns()
        same(bells["work"].is_set(), False, "that work is heard of after listening was stopped")


# -- what is refused


@case
async def what_makes_no_sense_is_refused_and_nothing_written(make: Make) -> None:
    async with opened(make) as (queue, _):
        no_zone = dt.datetime(2027, 1, 1)  # noqa: DTZ001 - this is what is refused
        for wrong in (
            {"priority": 2**31}, {"priority": 1.5}, {"priority": True}, {"delay": -1}, {"delay": float("nan")},
            {"expires_in": -1}, {"deadline": no_zone}, {"idempotency_key": ""},
            {"concurrency_key": 7}, {"concurrency_key": "x" * 513}, {"concurrency_key": "a\0b"},
            {"agent_key": ""}, {"agent_key": None}, {"input": [1]}, {"run_id": ""}, {"run_id": "a\0b"},
        ):  # fmt: skip
            asked: dict[str, Any] = {"run_id": None, "agent_key": "agent", "input": {}, **wrong}
            with refused(InvalidArgument, f"enqueue with {wrong}"):
                await queue.enqueue(**asked)
        with refused(UnserialisableResult, "an input that has no JSON form"):
            await queue.enqueue(None, "agent", {"x": object()})
        same(await queue.find(RunFilter()), [], "what was stored")
        [run_id] = await add(queue, "agent")
        for lease in (-1, 0, float("inf"), float("nan"), True, "60"):
            with refused(InvalidArgument, f"a lease of {lease!r}"):
                await queue.claim("w", lease)  # type: ignore[arg-type]
        with refused(InvalidArgument, "a claim of no run"):
            await queue.claim("w", limit=0)
        await queue.claim("w")
        with refused(InvalidArgument, "extending a lease by less than nothing"):
            await queue.extend_lease(run_id, "w", -1)
        with refused(InvalidArgument, "a retry in the past"):
            await queue.requeue_for_retry(run_id, "w", "boom", delay_seconds=-1)
        with refused(InvalidArgument, "a queue that never tries"):
            make(clock=VirtualClock(), max_retries=0)
