"""Cases of leases, of claims of named runs, and of the list of processes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from uuid import UUID

from ..._core.ids import new_ulid
from ..._engines.base import Guard, Op
from ...errors import LeaseLost
from ...queue.base import RunQueue
from ...queue.records import ABANDONED, SCHEDULE, ClaimRequest, ProcessRow, RowChanged, RunFilter, RunRow
from ...status import TERMINAL, TRANSITIONS, RunStatus
from .checks import Cases, accepted, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, claim_new, drain, margin, names, one, opened, settle

CASES: Cases[Case] = Cases()


@CASES
async def a_lease_that_ran_out_is_claimed_anew_and_counts_as_a_crash(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "agent")
        first = await queue.claim("w1", LEASE + 0.5)
        clock.advance(LEASE + 0.5 - margin(queue))
        same(await queue.claim("w2", LEASE), None, "a claim while the lease lasts")
        clock.advance(0.1 + margin(queue))
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
async def a_claim_without_agents_claims_no_schedule(make: Make) -> None:
    async with opened(make) as (queue, clock):
        schedule = await queue.insert(queue.new_row(None, SCHEDULE, {}, {}, 9))
        await add(queue, "a")
        same(names(await queue.claim_rows("w", LEASE, limit=5)), ["a"], "the rows claimed without agents")
        [claimed] = await queue.claim_rows("w", LEASE, agent_keys=["a", SCHEDULE])
        same(claimed.run_id, schedule.run_id, "the schedule claimed by its agent")
        clock.advance(LEASE + 1)
        same(names(await queue.claim_rows("w", LEASE, limit=5)), ["a"], "the rows claimed after their leases expired")
        [again] = await queue.claim_rows("w", LEASE, agent_keys=[SCHEDULE])
        same((again.run_id, again.crashes), (schedule.run_id, 1), "the schedule claimed again")


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
        same((await queue.commits.commit(None, [op]))[0], [(False, False), (True, True)], "heartbeats after a cancel")


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
        same((done.status, done.output, done.ended_at), ("succeeded", '{"answer":42}', clock.wall()), "a finished row")
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
            same(
                (row.crashes, row.crashes_in_row, row.min_step_count),
                (crash, crash, -1),
                f"the counters after crash {crash}",
            )
        row = await settle(queue, row, "running", crashes_in_row=1, min_step_count=7)
        same(
            (row.status, row.crashes_in_row, row.min_step_count, row.crashes),
            ("running", 1, 7, 2),
            "the row with its counters",
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
            whole = found in (("running", False), ("succeeded", True))
            same(whole, True, f"whether all of the commit was applied or nothing: {found}")


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
            same(cancelled, True, f"whether a caller cancelled after {iterations} loop iterations stops")


@CASES
async def a_claim_holds_past_its_lease_until_somebody_takes_the_run(make: Make) -> None:
    """An expired lease allows a new claim, but does not fence the old claim."""
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


@CASES
async def take_claims_that_one_run(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = queue.new_row("job", "agent", {"n": 1}, origin="inline")
        options = {"insert": True, "reopen": True}
        same(await queue.take(row, "w", LEASE, insert=False, reopen=True), ("unknown", None), "take of an unknown run")
        outcome, mine = await queue.take(row, "w", LEASE, **options)
        assert mine is not None
        same((outcome, mine.status, mine.attempt, mine.worker), ("claimed", "running", 1, "w"), "take of a new run")
        other = queue.new_row("job", "agent", {"n": 2}, origin="inline")
        same((await queue.take(other, "w2", LEASE, **options))[0], "conflict", "take of the same id with another input")
        clock.advance(1)
        outcome, there = await queue.take(row, "w2", LEASE, **options)
        same((outcome, there and there.worker), ("held", "w"), "take of a claimed run")
        same(there, await queue.require(mine.run_id), "the returned row, compared with the stored row")
        same(there, mine, "the returned row, compared with that of the first take")
        clock.advance(LEASE + 1)
        same(await queue.claim("w2"), None, "a worker's claim of an inline run with an expired lease")
        outcome, again = await queue.take(row, "w2", LEASE, **options)
        assert again is not None
        same((outcome, again.crashes, again.claim_id > mine.claim_id), ("claimed", 1, True), "take of an expired lease")
        await settle(queue, again, "succeeded")
        same((await queue.take(row, "w", LEASE, **options))[0], "ended", "take of a succeeded run")


@CASES
async def take_opens_an_ended_run_only_when_told(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        _, mine = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert mine is not None
        await settle(queue, mine, "failed", failures=2)
        same((await queue.take(row, "w", LEASE, insert=True, reopen=False))[0], "ended", "take with reopen=False")
        outcome, again = await queue.take(row, "w", LEASE, insert=True, reopen=True)
        assert again is not None
        same((outcome, again.generation, again.attempt), ("claimed", 2, 1), "take of a failed run with reopen=True")


@CASES
async def racing_takers_of_one_run_make_one_claim(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = queue.new_row("job", "agent", {})
        answers = await asyncio.gather(*(queue.take(row, f"w{n}", LEASE, insert=True, reopen=True) for n in range(16)))
        same(sorted(outcome for outcome, _ in answers), ["claimed"] + ["held"] * 15, "outcomes of 16 concurrent takes")


@CASES
async def an_ended_run_is_reopened_as_a_new_generation(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await queue.cancel(row.run_id)
        await settle(
            queue,
            row,
            "dead",
            crashes=3,
            crashes_in_row=3,
            min_step_count=4,
            failures=1,
            reason="Poisoned",
            error='"x"',
        )
        clock.advance(1)
        op = Op("queue.reopen", (row.run_id, ("dead", "failed"), clock.wall()))
        reopened: RunRow = (await queue.commits.commit(None, [op]))[0]
        same(reopened, await queue.require(row.run_id), "the returned row, compared with the stored row")
        same((reopened.status, reopened.generation, reopened.attempt, reopened.crashes_in_row, reopened.min_step_count),
             ("pending", 2, 1, 0, -1), "its status, generation and counters")  # fmt: skip
        left = (reopened.reason, reopened.error, reopened.ended_at, reopened.cancel_at)
        same(left, ("", None, None, None), "the columns of the former final status")
        with refused(RowChanged, "reopening a run that is pending"):
            await queue.commits.commit(None, [op])
        again = await one(queue, "w")
        same(again.claim_id > row.claim_id, True, "whether its claim ids keep growing")


async def _make_run(queue: RunQueue, status: RunStatus, agent: str) -> RunRow:
    """Make a run of agent `agent` with this status."""
    [run_id] = await add(queue, agent)
    if status is not RunStatus.PENDING:
        row = await one(queue, "w", LEASE, agent_keys=[agent])
        if status is not RunStatus.RUNNING:
            await settle(queue, row, status.value)
    return await queue.require(run_id)


async def _implicitly(queue: RunQueue, row: RunRow, way: str) -> None:
    match way:
        case "claim":
            await queue.claim("w2", agent_keys=[row.agent])
        case "cancel":
            await queue.cancel(row.run_id)
        case "post":
            await queue.post(row.run_id, "signal", "go", "1")
        case status if row.status == "running":
            await settle(queue, row, status)
        case status:
            with refused(LeaseLost, f"a write of {status} by the last claim of a run that is {row.status}"):
                await settle(queue, row, status)


async def _explicitly(queue: RunQueue, row: RunRow, way: str) -> None:
    if way == "take":
        await queue.take(row, "w2", LEASE, insert=False, reopen=True)
        return
    ended = tuple(status for status in TERMINAL if status != "succeeded")
    with contextlib.suppress(RowChanged):
        await queue.commits.commit(None, [Op("queue.reopen", (row.run_id, ended, queue.clock.wall()))])


@CASES
async def a_run_moves_only_along_the_table_of_transitions(make: Make) -> None:
    async with opened(make) as (queue, clock):
        count = 0
        for old in RunStatus:
            reached: dict[bool, set[str]] = {False: set(), True: set()}
            for way in ("claim", "cancel", "post", *(status.value for status in RunStatus), "take", "reopen"):
                count += 1
                row = await _make_run(queue, old, f"agent{count}")
                clock.advance(1)  # the same status at the same time would count as a repeated commit
                explicit = way in ("take", "reopen")
                await (_explicitly if explicit else _implicitly)(queue, row, way)
                reached[explicit].add((await queue.require(row.run_id)).status)
            for explicit, what in ((False, "without"), (True, "with")):
                expected = {new.value for new, needs_call in TRANSITIONS[old].items() if needs_call is explicit}
                found = reached[explicit] - {old.value} - (reached[False] if explicit else set())
                same(found, expected, f"the statuses that a {old.value} run can reach {what} an explicit call")


@CASES
async def an_end_is_written_only_from_what_was_seen(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        for expected in (("pending", "waiting"), ()):
            with refused(RowChanged, "queue.end of a run with another status than expected"):
                await queue.commits.commit(
                    None, [Op("queue.end", (row.run_id, expected, "cancelled", clock.wall(), "cancel"))]
                )
        with refused(RowChanged, "queue.end of an unknown run"):
            await queue.commits.commit(None, [Op("queue.end", ("unknown", ("pending",), "cancelled", 0.0, ""))])
        same(await queue.require(row.run_id), row, "the row")


DAY = 86_400.0


def _row(queue: RunQueue, process_id: str, **values: Any) -> ProcessRow:
    now = queue.clock.wall()
    row = ProcessRow(process_id, "w", "host", 7, now, "1.0", ("a", 'b "c"'), 2, "", now, queue.lease_now() + 40)
    return row._replace(**values)


async def _save(queue: RunQueue, *rows: ProcessRow) -> None:
    await queue.commits.commit(None, [Op("queue.save_process", (row, DAY)) for row in rows])


async def _rows(queue: RunQueue) -> list[ProcessRow]:
    rows: list[ProcessRow] = await queue.read("processes")
    return sorted(rows)


@CASES
async def the_row_of_a_process_is_replaced_and_deleted(make: Make) -> None:
    async with opened(make) as (queue, clock):
        if not queue.keeps_processes:
            return
        same(await _rows(queue), [], "the processes of a new queue")
        one_row, other = _row(queue, "p1"), _row(queue, "p2", agents=(), slots=0)
        await _save(queue, one_row, other)
        same(await _rows(queue), [one_row, other], "two stored processes")
        clock.advance(20.5)
        later = _row(queue, "p1", started_at=one_row.started_at, agents=("c",))
        await _save(queue, later)
        same(await _rows(queue), [later, other], "the processes after one of them has renewed its row")
        for process_id in ("p1", "unknown"):
            await queue.commits.commit(None, [Op("queue.drop_process", (process_id,))])
        same(await _rows(queue), [other], "the processes after one of them was deleted")


@CASES
async def a_process_that_was_not_seen_for_a_day_is_deleted_by_the_next_one(make: Make) -> None:
    async with opened(make) as (queue, clock):
        if not queue.keeps_processes:
            return
        await _save(queue, _row(queue, "old"))
        clock.advance(DAY)
        await _save(queue, _row(queue, "p1"))
        same([row.process_id for row in await _rows(queue)], ["old", "p1"], "the processes after a day")
        clock.advance(1)
        await _save(queue, _row(queue, "p1"))
        same([row.process_id for row in await _rows(queue)], ["p1"], "the processes after a day and a second")


def _check(queue: RunQueue, row: RunRow, since: float = 0.0, *, required: bool = False) -> Op:
    want = queue.claim_request("w", 1, (), 0)
    want = want._replace(lease_now=want.lease_now - since)
    return Op("queue.abandoned", (row.run_id, row.claim_id, want, required))


async def _is_abandoned(queue: RunQueue, row: RunRow, since: float = 0.0) -> bool:
    found: bool = (await queue.commits.commit(None, [_check(queue, row, since)]))[0]
    return found


def _end(queue: RunQueue, row: RunRow) -> list[Op]:
    ended = Op("queue.end", (row.run_id, ("running",), "cancelled", queue.clock.wall(), ABANDONED))
    return [_check(queue, row, required=True), ended]


@CASES
async def a_run_is_abandoned_if_it_is_to_be_cancelled_and_its_claim_is_over(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        clock.advance(LEASE + 1)
        same(await _is_abandoned(queue, row), False, "abandoned without a request to cancel")
        row = await one(queue, "w2")
        await queue.cancel(row.run_id)
        same(await _is_abandoned(queue, row), False, "abandoned during the lease")
        with refused(RowChanged, "ending a run during its lease"):
            await queue.commits.commit(None, _end(queue, row))
        clock.advance(LEASE + 1)
        same(await _is_abandoned(queue, row), True, "abandoned after the lease")
        same(await _is_abandoned(queue, row, 0.5), True, "abandoned half a second ago")
        same(await _is_abandoned(queue, row, 2), False, "abandoned two seconds ago")
        other = row.with_values(claim_id=f"7{row.claim_id[1:]}")
        same(await _is_abandoned(queue, other), False, "abandoned by another claim")
        same(await _is_abandoned(queue, row.with_values(run_id="unknown")), False, "an unknown run abandoned")
        await settle(queue, row, "pending")
        same(await _is_abandoned(queue, row), False, "a released run abandoned")


@CASES
async def who_ends_an_abandoned_run_ends_its_claim_and_frees_its_key(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue, "a", concurrency_key="k")
        await add(queue, "b", concurrency_key="k")
        await queue.cancel(row.run_id)
        clock.advance(LEASE + 1)
        await queue.commits.commit(None, _end(queue, row))
        ended = await queue.require(row.run_id)
        same((ended.status, ended.reason, ended.crashes), ("cancelled", ABANDONED, 0), "the ended run")
        for _ in range(2):
            with refused(RowChanged, "ending it again"):
                await queue.commits.commit(None, _end(queue, row))
        with refused(LeaseLost, "a late write of its claim"):
            await settle(queue, row, "succeeded")
        same(names(await queue.claim_rows("w2", LEASE, limit=2)), ["b"], "the runs that are claimed next")


@CASES
async def a_worker_that_claims_an_abandoned_run_first_keeps_it(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue)
        await queue.cancel(row.run_id)
        clock.advance(LEASE + 1)
        [new] = await queue.claim_rows("w2", LEASE)
        [other] = await add(queue, "other")
        with refused(RowChanged, "ending a run that was claimed"):
            await queue.commits.commit(None, [queue.post_op(other, "signal", "go", "1"), *_end(queue, row)])
        same(await queue.mail(other), [], "the mailbox in the refused commit")
        same((await queue.require(row.run_id)).claim_id, new.claim_id, "the claim of the run")
        await settle(queue, new, "cancelled")
