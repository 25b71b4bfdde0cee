"""Leases, superseded claims, attempts, and commits of a claim."""

from __future__ import annotations

import asyncio
from uuid import UUID

from ..._core.ids import new_ulid
from ..._engines.base import Guard, Op
from ...errors import LeaseLost
from ...queue.records import ClaimRequest, RowChanged, RunFilter
from ...status import TERMINAL
from .checks import Cases, accepted, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, claim_new, drain, names, one, opened, settle

CASES: Cases[Case] = Cases()


@CASES
async def a_lease_that_ran_out_is_claimed_anew_and_counts_as_a_crash(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "agent")
        first = await queue.claim("w1", LEASE + 0.5)
        clock.advance(LEASE + 0.5)
        same(await queue.claim("w2", LEASE), None, "a claim while the lease lasts")
        clock.advance(0.1)
        second = await queue.claim("w2", LEASE)
        if second is None:
            raise AssertionError("a run with an expired lease was not claimed")
        same((second.run_id, second.attempt), (first.run_id, 2), "the run claimed after its lease expired")
        row = await queue.require(first.run_id)
        same((row.crashes, row.crashes_in_row, row.failures, row.worker), (1, 1, 0, "w2"), "the counters in its row")
        same(second.claim_id > first.claim_id, True, "whether the new claim id is greater")
        clock.advance(LEASE + 1)
        third = await queue.claim("w3", LEASE)
        row = await queue.require(first.run_id)
        same((third.attempt, row.crashes, row.crashes_in_row), (3, 2, 2), "attempt and crashes after a second crash")


@CASES
async def dropped_runs_come_before_new_ones(make: Make) -> None:
    async with opened(make) as (queue, clock):
        dropped = await claim_new(queue, "dropped")
        clock.advance(LEASE + 1)
        await add(queue, "new", priority=9)
        batch = await queue.claim("w2", LEASE, limit=2)
        same(names(batch), ["dropped", "new"], "the order of claims")
        same(batch[0].attempt, dropped.attempt + 1, "the attempt of the run with an expired lease")


@CASES
async def a_dropped_run_stays_with_its_agents(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await claim_new(queue, "a")
        clock.advance(LEASE + 1)
        same(await queue.claim("w2", agent_keys=["b"]), None, "a claim for another agent")
        same(names([await queue.claim("w2", agent_keys=["b", "a"])]), ["a"], "a claim for its agent")


@CASES
async def claim_ids_grow_also_where_the_clock_goes_back(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row, ids = await claim_new(queue), []
        for _ in range(6):
            ids.append(row.claim_id)
            await settle(queue, row, "pending")
            clock.set_wall(clock.wall() - 3600)
            row = await one(queue, "w")
        same(sorted(set(ids)), ids, "the claim ids of one run in order of the claims")


@CASES
async def a_beat_extends_the_lease_of_whoever_holds_it(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "a")
        run = await queue.claim("w", LEASE)
        clock.advance(50)
        same(await queue.extend_lease(run.run_id, "w", LEASE), True, "extend_lease by the worker of the claim")
        same(await queue.extend_lease(run.run_id, "stranger", LEASE), False, "extend_lease by another worker")
        clock.advance(50)
        same(await queue.claim("w2", LEASE), None, "a claim while the extended lease lasts")
        clock.advance(11)
        taken = await queue.claim("w2", LEASE)
        same(taken is not None, True, "whether the run is claimed after the extended lease expired")
        same(await queue.extend_lease(run.run_id, "w", LEASE), False, "extend_lease by the former worker")
        op = Op("queue.beat", (((str(run.run_id), run.claim_id), (str(run.run_id), taken.claim_id)), 1e9))
        same((await queue.commits.commit(None, [op]))[0], [(False, False), (True, False)], "heartbeats of both claims")
        await queue.cancel(run.run_id)
        same(
            (await queue.commits.commit(None, [op]))[0],
            [(False, False), (True, True)],
            "heartbeats after a cancel request",
        )


@CASES
async def a_stale_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "agent")
        old = await queue.claim("w1", LEASE)
        clock.advance(LEASE + 1)
        new = await queue.claim("w2", LEASE)
        key, before = str(old.run_id), await queue.require(old.run_id)
        [other] = await add(queue, "other")
        for status in ("running", "pending", "waiting", *sorted(TERMINAL)):
            with refused(LeaseLost, f"writing status {status} with a stale claim"):
                await queue.settle(key, queue.unchanged_update(before, old.claim_id)._replace(status=status))
        with refused(LeaseLost, "release by the former worker"):
            await queue.release(old.run_id, "w1", True, {"x": 1})
        with refused(LeaseLost, "release with a stale claim id"):
            await queue.release(old.run_id, "w2", True, claim_id=old.claim_id)
        same(await queue.requeue_for_retry(old.run_id, "w1", "boom"), False, "requeue_for_retry by the former worker")
        same(await queue.extend_lease(old.run_id, "w1", 60), False, "extend_lease by the former worker")
        stale, never = Guard(key, old.claim_id), Guard(key, f"7{new.claim_id[1:]}")
        with refused(LeaseLost, "a write by a greater claim id that does not exist"):
            await queue.commits.commit(never, [Op("queue.insert", (queue.new_row(None, "child", {}),))])
        for op in (
            Op("queue.insert", (queue.new_row(None, "child", {}),)),
            queue.post_op(other, "signal", "go", "1"),
            queue.post_op(key, "signal", "go", "1"),
            Op("queue.end", (key, ("running",), "cancelled", clock.wall(), "cancel")),
        ):
            with refused(LeaseLost, f"{op.name} under a stale claim"):
                await queue.commits.commit(stale, [op])
        same(await queue.require(key), before, "the row after the rejected writes")
        same((await queue.mail(key), await queue.mail(other)), ([], []), "the mailboxes")
        same(len(await queue.find(RunFilter())), 2, "the number of runs")
        await queue.release(new.run_id, "w2", True, {"x": 2})
        same((await queue.require(key)).output, '{"x":2}', "the output of the current claim")


@CASES
async def a_run_is_released_once(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [good, bad] = await add(queue, "a", "b")
        with refused(LeaseLost, "release of an unclaimed run"):
            await queue.release(good, "w", True)
        await drain(queue)
        clock.advance(1)
        await queue.release(UUID(good), "w", True, {"answer": 42})
        await queue.release(bad, "w", False, error={"type": "Boom"})
        done, failed = await queue.require(good), await queue.require(bad)
        same(
            (done.status, done.output, done.ended_at),
            ("succeeded", '{"answer":42}', clock.wall()),
            "the row after a success",
        )
        same((failed.status, failed.error), ("failed", '{"type":"Boom"}'), "the row after a failure")
        clock.advance(1)
        with refused(LeaseLost, "a second release"):
            await queue.release(good, "w", False)
        clock.advance(10 * LEASE)
        same(await queue.claim("w"), None, "the claimable runs after both were released")


@CASES
async def a_failed_attempt_is_given_back_until_the_last(make: Make) -> None:
    async with opened(make, max_retries=3) as (queue, clock):
        [run_id] = await add(queue, "agent")
        same(await queue.requeue_for_retry(run_id, "w", "boom"), False, "requeue_for_retry of an unclaimed run")
        run = await queue.claim("w")
        same(await queue.requeue_for_retry(run_id, "stranger", "boom"), False, "requeue_for_retry by another worker")
        same(await queue.requeue_for_retry(run.run_id, "w", "boom", delay_seconds=5), True, "the first retry")
        same((await queue.require(run_id)).status, "pending", "its status")
        same(await queue.claim("w"), None, "a claim before the delay has passed")
        clock.advance(5)
        run = await queue.claim("w")
        same(run.attempt, 2, "the attempt after one failure")
        same(await queue.requeue_for_retry(run_id, "w", {"type": "Boom"}), True, "the second retry")
        run = await queue.claim("w")
        same(run.attempt, 3, "the attempt after two failures")
        same(await queue.requeue_for_retry(run_id, "w", "boom"), False, "a retry after the last attempt")
        same((await queue.require(run_id)).status, "running", "the status after the last attempt failed")
        await queue.release(run_id, "w", False, error="boom")
        row = await queue.require(run_id)
        same((row.failures, row.crashes), (2, 0), "the counters in its row")


@CASES
async def crashes_in_a_row_are_counted_until_the_run_gets_on(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        for crash in (1, 2):
            clock.advance(LEASE + 1)
            row = await one(queue, "w", LEASE)
            counters = (row.crashes, row.crashes_in_row, row.min_step_count)
            same(counters, (crash, crash, -1), f"the counters after crash {crash}")
        row = await settle(queue, row, "running", crashes_in_row=1, min_step_count=7)
        same(
            (row.status, row.crashes_in_row, row.min_step_count, row.crashes),
            ("running", 1, 7, 2),
            "the row after the claim wrote its counters",
        )
        clock.advance(LEASE + 1)
        row = await one(queue, "w", LEASE)
        same((row.crashes_in_row, row.min_step_count, row.attempt), (2, 7, 4), "the counters after the next crash")
        row = await settle(queue, row, "pending", crashes_in_row=0)
        row = await one(queue, "w", LEASE)
        same((row.crashes, row.crashes_in_row, row.attempt), (3, 0, 4), "the counters after the run was released")


@CASES
async def a_lost_reply_is_repeated_without_harm(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [parent] = await add(queue, "parent")
        row = await claim_new(queue, "child")
        update = queue.unchanged_update(row, row.claim_id)._replace(status="succeeded", output="1")
        ops = [queue.post_op(parent, "child", row.run_id, "{}"), Op("queue.insert", (queue.new_row(None, "next", {}),))]
        ended = await queue.settle(row.run_id, update, ops)
        clock.advance(1)
        same(await queue.settle(row.run_id, update, ops), ended, "the result of the repeated commit")
        same(await queue.require(row.run_id), ended, "the row")
        same(len(await queue.mail(parent)), 1, "the number of messages in the parent's mailbox")
        same(names(await queue.find(RunFilter())), ["parent", "child", "next"], "all runs")
        with refused(LeaseLost, "a repeated commit with another final status"):
            await queue.settle(row.run_id, update._replace(status="failed"))
        with refused(LeaseLost, "a repeated commit with one more message"):
            await queue.settle(row.run_id, update, [queue.post_op(parent, "signal", "new", "1")])
        parked = await claim_new(queue, "other")
        update = queue.unchanged_update(parked, parked.claim_id)._replace(
            status="waiting", parked=1, reason="signal go"
        )
        same(await queue.settle(parked.run_id, update), await queue.settle(parked.run_id, update), "a repeated park")


@CASES
async def an_end_and_the_next_claim_are_one_commit(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue, "first")
        [second] = await add(queue, "second")
        end = Op("queue.settle", (row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")))
        request = ClaimRequest(
            (new_ulid(clock),), "w", "", queue.lease_now() + LEASE, queue.lease_now(), clock.wall(), None
        )
        guard, ops = Guard(row.run_id, row.claim_id), [end, Op("queue.claim", (request,))]
        ended, claimed = await queue.commits.commit(guard, ops)
        same((ended.status, names(claimed)), ("succeeded", ["second"]), "the results of the commit")
        same((await queue.require(second)).claim_id, claimed[0].claim_id, "the claim id of the next run")
        # The caller looks up the claims of a lost reply itself, so the repeated commit must not claim more runs.
        await add(queue, "third")
        same(await queue.commits.commit(guard, ops), [ended, []], "the result of the repeated commit")
        same(names(await drain(queue)), ["third"], "the claimable runs")


@CASES
async def a_writer_that_is_cancelled_wrote_all_or_nothing(make: Make) -> None:
    async with opened(make) as (queue, _):
        for iterations in range(8):
            row = await claim_new(queue, f"agent{iterations}")
            update = queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")
            child = queue.new_row(None, "child", {})
            writing = asyncio.ensure_future(queue.settle(row.run_id, update, [Op("queue.insert", (child,))]))
            await turns(iterations)
            writing.cancel()
            await asyncio.wait({writing})
            found = ((await queue.require(row.run_id)).status, await queue.row(child.run_id) is not None)
            same(
                found in (("running", False), ("succeeded", True)),
                True,
                f"whether all of the commit was applied or nothing: {found}",
            )


@CASES
async def a_caller_that_is_cancelled_in_a_commit_is_cancelled(make: Make) -> None:
    async with opened(make) as (queue, _):
        for iterations in range(8):
            committed = asyncio.Event()

            async def write(committed: asyncio.Event = committed) -> None:
                await queue.enqueue(None, "agent", {})
                committed.set()
                await asyncio.Event().wait()  # a commit that never suspended is cancelled here

            writing, passing = asyncio.ensure_future(write()), asyncio.ensure_future(committed.wait())
            await turns(iterations)
            writing.cancel()
            await asyncio.wait({writing, passing}, return_when=asyncio.FIRST_COMPLETED)
            await turns()
            cancelled = writing.cancelled()
            for task in (writing, passing):
                task.cancel()
            same(
                cancelled,
                True,
                f"whether a caller cancelled in its commit stops (cancelled after {iterations} loop iterations)",
            )


@CASES
async def a_claim_holds_past_its_lease_until_somebody_takes_the_run(make: Make) -> None:
    """An expired lease allows a new claim, but does not fence the old one."""
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await queue.claim("w")
        clock.advance(LEASE + 1)
        guard, late = Guard(row.run_id, row.claim_id), "after the lease expired, without a new claim"
        with accepted(f"a child enqueued under the claim, {late}"):
            await queue.commits.commit(guard, [Op("queue.insert", (queue.new_row(None, "child", {}),))])
        op = Op("queue.beat", (((row.run_id, row.claim_id),), queue.lease_now() + 5))
        same((await queue.commits.commit(None, [op]))[0], [(True, False)], f"a heartbeat of the claim, {late}")
        clock.advance(LEASE)
        for status in ("running", "succeeded"):
            with accepted(f"writing status {status}, {late}"):
                await settle(queue, row, status)
        job = queue.new_row("job", "agent", {}, origin="inline")
        _, mine = await queue.take(job, "mine", LEASE, insert=True, reopen=False)
        assert mine is not None
        clock.advance(LEASE + 1)
        await queue.claim("w")
        with accepted("finishing an inline run after its lease expired"):
            await settle(queue, mine, "succeeded")


@CASES
async def a_commit_is_all_or_nothing(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await claim_new(queue)
        fresh = queue.new_row(None, "fresh", {})
        ends_unknown = Op("queue.end", (fresh.run_id, ("waiting",), "cancelled", 0.0, ""))
        with refused(RowChanged, "a commit whose last operation is rejected"):
            update = queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")
            mail = queue.post_op(row.run_id, "signal", "go", "1")
            await queue.settle(row.run_id, update, [mail, Op("queue.insert", (fresh,)), ends_unknown])
        same(await queue.require(row.run_id), row._replace(parked=0), "the row of the run")
        same(await queue.row(fresh.run_id), None, "the row of the new run")
        same(await queue.mail(row.run_id), [], "the mailbox")
        same(
            (await settle(queue, row, "succeeded")).status, "succeeded", "a write under the claim, which is still valid"
        )
