"""Concurrency limits above one, and rate limits: how many runs are active or start, and in which order.

A queue without `keeps_limits` rejects both.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..._engines.base import Op
from ...errors import NotSupported
from ...limits import RateLimit
from ...queue.base import RunQueue
from ...queue.rate_limits import counted_rate
from ...queue.records import RATE_LIMITED, RunRow
from ..clock import VirtualClock
from .checks import Cases, refused, same
from .queue_fixtures import LEASE, Case, Make, add, claim_new, drain, margin, names, opened, settle

CASES: Cases[Case] = Cases()
SECOND = RateLimit(2, per=1.0)


@contextlib.asynccontextmanager
async def with_limits(make: Make) -> AsyncIterator[tuple[RunQueue, VirtualClock] | None]:
    """Open a queue; None for a queue that keeps no limits, which must reject them."""
    async with opened(make) as (queue, clock):
        if queue.keeps_limits:
            yield queue, clock
            return
        for options in ({"concurrency_key": "k", "concurrency_limit": 2}, {"rate_limit": SECOND}):
            with refused(NotSupported, f"enqueue with {options}"):
                await add(queue, "agent", **options)
        yield None


async def started(queue: RunQueue, clock: VirtualClock, until: float) -> list[RunRow]:
    """Claim and finish all that may start until some seconds from now, and return the claimed rows."""
    found: list[RunRow] = []
    end = clock.wall() + until
    while True:
        for row in (rows := await queue.claim_rows("w", LEASE, limit=3)):
            found.append(row)
            await settle(queue, row, "succeeded")
        if rows:
            continue
        due = await queue.next_due()
        if due is None or due > end:
            clock.advance(end - clock.wall())
            return found
        clock.advance(max(due - clock.wall(), 0.001))


def most(rows: Sequence[RunRow], per: float) -> int:
    """Return how many of the rows were claimed in the period with the most claims."""
    times = sorted(row.claimed_at or 0.0 for row in rows)
    return max((sum(0 <= at - first < per for at in times) for first in times), default=0)


@CASES
async def a_key_admits_as_many_active_runs_as_its_limit(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        ids = await add(queue, "a", "b", "c", "d", concurrency_key="k", concurrency_limit=2)
        same([(await queue.require(each)).blocked for each in ids], [0, 0, 1, 1], "which runs are blocked")
        rows = await queue.claim_rows("w", LEASE, limit=9)
        same(names(rows), ["a", "b"], "the runs claimed under a limit of 2")
        await settle(queue, rows[1], "pending", due_at=queue.clock.wall() + 99, failures=1)
        same(await queue.claim("w"), None, "the claimable runs while an active run waits for its retry")
        await settle(queue, rows[0], "failed")
        same(names(await drain(queue)), ["c"], "the runs claimed after an active run has ended")


@CASES
async def each_run_waits_for_its_own_concurrency_limit(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        for agent, limit in (("a", 1), ("two", 2), ("one", 1), ("three", 3)):
            await add(queue, agent, concurrency_key="k", concurrency_limit=limit)
        rows = await queue.claim_rows("w", LEASE, limit=9)
        same(names(rows), ["a", "two"], "the claimed runs: the next one waits, and those behind it keep the order")
        await settle(queue, rows[0], "succeeded")
        same(names(await drain(queue)), [], "the claimable runs while one run is active")
        await settle(queue, rows[1], "succeeded")
        same(names(await drain(queue)), ["one", "three"], "the runs claimed after both have ended")


@CASES
async def callers_wait_for_a_concurrency_limit(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        rows = [
            queue.new_row(name, name, {}, concurrency_key="k", origin="inline", concurrency_limit=2) for name in "abc"
        ]
        outcomes = [await queue.take(row, "mine", LEASE, insert=True, reopen=True, wait=True) for row in rows]
        same([word for word, _ in outcomes], ["claimed", "claimed", "behind"], "what three callers get")
        claimed = outcomes[0][1]
        assert claimed is not None
        await settle(queue, claimed, "succeeded")
        outcome, _ = await queue.take(rows[2], "mine", LEASE, insert=True, reopen=True, wait=True)
        same(outcome, "claimed", "what the third caller gets after the first run has ended")


@CASES
async def no_period_has_more_starts_than_its_rate_limit(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        ids = await add(queue, *["agent"] * 9, rate_limit=SECOND)
        rows = await started(queue, clock, 5.0)
        same(most(rows, 1.0), 2, "the most starts in a second")
        same([row.run_id for row in rows], ids, "the order of starts")
        last = max(row.claimed_at or 0.0 for row in rows)
        same(last - (rows[0].claimed_at or 0.0) <= 4.5, True, "whether nine runs start in four seconds")


@CASES
async def delayed_runs_do_not_delay_other_runs_and_say_why_they_wait(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        ids = await add(queue, *["agent"] * 30, rate_limit=SECOND, priority=5)
        await add(queue, "other")
        same(names(await queue.claim_rows("w", LEASE, limit=3)), ["agent", "agent", "other"], "the claimed runs")
        waiting = [await queue.require(each) for each in ids[2:]]
        same({row.reason for row in waiting}, {RATE_LIMITED}, "the reason of delayed runs")
        same({row.status for row in waiting}, {"pending"}, "the status of delayed runs")
        due = [row.due_at for row in waiting]
        same(due == sorted(set(due)) and due[0] > clock.wall(), True, "whether delayed runs are due one after another")
        clock.advance(1.5)
        row = (await queue.claim_rows("w", LEASE))[0]
        same((row.reason, row.due_at), ("", 0.0), "reason and due time of a run that has started")


@CASES
async def a_delayed_run_of_greater_priority_starts_first(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        first = await add(queue, *["agent"] * 5, rate_limit=SECOND)
        await queue.claim_rows("w", LEASE, limit=9)
        urgent = await add(queue, *["agent"] * 2, rate_limit=SECOND, priority=1)
        rows = await started(queue, clock, 5.0)
        same([row.run_id for row in rows], urgent + first[2:], "the order of starts")


@CASES
async def after_a_time_without_workers_there_is_no_burst(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        await add(queue, *["agent"] * 12, rate_limit=SECOND)
        rows = await started(queue, clock, 0.5)
        clock.advance(600.0)
        rows += await started(queue, clock, 6.0)
        same((len(rows), most(rows, 1.0)), (12, 2), "the runs that started, and the most of them in a second")


@CASES
async def retries_count_as_starts_and_resumed_runs_do_not(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        row = await claim_new(queue, rate_limit=RateLimit(1, per=60.0))
        await settle(queue, row, "waiting", parked=1, due_at=clock.wall() + 1)
        clock.advance(1.5)
        row = (await queue.claim_rows("w", LEASE))[0]
        await settle(queue, row, "pending", failures=1)
        same(await queue.claim_rows("w", LEASE), [], "the claimable runs while the retry has to wait")
        clock.advance(58.0)
        same(await queue.claim_rows("w", LEASE), [], "the claimable runs before the period of the first start is over")
        clock.advance(1.0)
        retried = (await queue.claim_rows("w", LEASE))[0]
        same(retried.failures, 1, "the failures of the run that starts again")


@CASES
async def a_run_whose_worker_crashed_waits_for_its_rate_limit(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        row = await claim_new(queue, rate_limit=RateLimit(1, per=1000.0))
        clock.advance(LEASE + margin(queue) + 1)
        same(await queue.claim_rows("v", LEASE), [], "the claimable runs while the second start has to wait")
        waiting = await queue.require(row.run_id)
        same((waiting.status, waiting.crashes, waiting.reason), ("pending", 1, RATE_LIMITED), "the run")
        clock.advance(1000.0)
        same((await queue.claim_rows("v", LEASE))[0].crashes, 1, "the crashes of the run that starts again")


@CASES
async def rate_limits_are_counted_by_key_and_period(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found

        async def starts(*limits: RateLimit, **options: Any) -> int:
            for number, limit in enumerate(limits):
                await add(queue, f"agent{number}", rate_limit=limit, **options)
            return len(await queue.claim_rows("w", LEASE, limit=9))

        one = RateLimit(1, per=100.0)
        same(await starts(one, one), 2, "the starts of two agents without a key")
        shared = RateLimit(1, per=100.0, key="x")
        same(await starts(shared, shared), 1, "the starts of two agents with one key")
        same(await starts(RateLimit(1, per=99.0, key="x")), 1, "the starts with the key and another period")
        same(await starts(RateLimit(2, per=100.0, key="x")), 1, "the starts with the key and a greater limit")
        apart = RateLimit(1, per=100.0, key="y", per_tenant=True)
        same(await starts(apart, apart, tenant="t"), 1, "the starts of a tenant")
        same(await starts(apart, tenant="u"), 1, "the starts of another tenant")


@CASES
async def a_delayed_run_that_is_cancelled_lets_the_next_one_start_when_it_would_have(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        ids = await add(queue, *["agent"] * 50, rate_limit=RateLimit(1, per=10.0))
        await queue.claim_rows("w", LEASE, limit=9)
        for each in ids[1:-1]:
            await queue.cancel(each)
        clock.advance(10.5)
        rows = await queue.claim_rows("w", LEASE, limit=9)
        same([row.run_id for row in rows], ids[-1:], "the run that starts after the first period")


async def add_turns(queue: RunQueue, turns: str, **options: Any) -> None:
    """Enqueue a run of agent "agent" for each letter, which is its turn; "-" is the empty turn."""
    for number, turn in enumerate(turns):
        await queue.enqueue(None, "agent", {"n": number}, turn=turn.strip("-"), **options)


async def served(queue: RunQueue, count: int, after: str = "", **options: Any) -> str:
    """Claim so many runs one by one, each after the turn of the one before, and return their turns."""
    found = ""
    for _ in range(count):
        rows = await queue.claim_rows("w", LEASE, after_turn=after, **options)
        found += "".join(row.turn or "-" for row in rows)
        after = (rows[-1].turn or "") if rows else after
    return found


@CASES
async def runs_of_equal_priority_are_claimed_in_turns(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        await add_turns(queue, "aaaaabbc-")
        same(await served(queue, 9), "abc-abaaa", "the turns of runs that are claimed one by one")
        await add_turns(queue, "aaaaabbc-")
        rows = await queue.claim_rows("w", LEASE, limit=9, after_turn="a")
        same("".join(row.turn or "-" for row in rows), "bc-abaaaa"[:9], "the turns of runs that are claimed at once")
        of_a = [row.arrival for row in rows if row.turn == "a"]
        same(of_a, sorted(of_a), "the order of the runs of one turn")


@CASES
async def a_greater_priority_comes_before_any_turn(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        await add_turns(queue, "abb")
        await add_turns(queue, "ca", priority=1)
        same(await served(queue, 5), "acabb", "the turns of the claimed runs")
        await add_turns(queue, "bab")
        same(
            names(await queue.claim_rows("w", LEASE, limit=9, agent_keys=["other"], after_turn="")), [], "other agents"
        )
        rows = await queue.claim_rows("w", LEASE, limit=3)
        same("".join(row.turn or "-" for row in rows), "bab", "the turns claimed by a worker that takes no turns")


@CASES
async def many_runs_of_one_turn_delay_another_turn_by_one_run(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        await add_turns(queue, "a" * 30)
        same(await served(queue, 5), "aaaaa", "the turns of the claimed runs")
        await add_turns(queue, "b")
        await add(queue, "agent", "agent")
        same(await served(queue, 2, "a"), "ba", "the turns after a run with another turn has arrived")


@CASES
async def runs_of_several_agents_share_their_turns(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        for agent, turn in (("x", "a"), ("y", "a"), ("y", "b"), ("x", "b"), ("z", "a")):
            await queue.enqueue(None, agent, {}, turn=turn)
        rows = await queue.claim_rows("w", LEASE, limit=9, after_turn="", agent_keys=["x", "y"])
        same(
            [(row.agent, row.turn) for row in rows],
            [("x", "a"), ("y", "b"), ("y", "a"), ("x", "b")],
            "the claimed runs",
        )
        await queue.enqueue(None, "y", {})  # without a turn
        same(await served(queue, 3), "a-", "the turns of the runs that are left, for a worker of all agents")


@CASES
async def a_delayed_run_does_not_use_its_turn(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        await add_turns(queue, "aaa", rate_limit=RateLimit(1, per=100.0))
        await add_turns(queue, "bb")
        rows = await queue.claim_rows("w", LEASE, limit=9, after_turn="")
        same("".join(row.turn or "-" for row in rows), "abb", "the turns of the claimed runs")


@CASES
async def a_delayed_run_that_is_given_to_a_tenant_is_checked_again(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        one = RateLimit(1, per=10.0)
        await add(queue, "agent", "agent", rate_limit=one)
        same(len(await queue.claim_rows("w", 1e9, limit=9)), 1, "the runs that start first")
        given = (await add(queue, "agent", rate_limit=one, concurrency_key="k", priority=5))[0]
        await add(queue, "other", concurrency_key="k", tenant="t")
        same(len(await queue.claim_rows("w", 1e9, limit=9)), 1, "the runs that start while one is delayed")
        same(await queue.assign(given, "t"), "assigned", "giving away a delayed run")
        await add(queue, "agent", rate_limit=one)
        clock.advance(10.5)
        rows = await queue.claim_rows("w", 1e9, limit=9)
        same([row.tenant for row in rows], [""], "the tenants of the runs that start: the key of the other is in use")
        apart = RateLimit(1, per=100.0, per_tenant=True)
        ids = await add(queue, "apart", "apart", rate_limit=apart, turn="")
        await queue.claim_rows("w", 1e9, agent_keys=["apart"], limit=9)
        same(await queue.assign(ids[1], "u"), "assigned", "giving away a run that its tenant's count delays")
        rows = await queue.claim_rows("w", 1e9, agent_keys=["apart"], limit=9)
        same([(row.run_id, row.turn) for row in rows], [(ids[1], "u")], "the run that starts as the new tenant's")


@CASES
async def runs_that_are_too_late_use_up_no_start(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        slow = RateLimit(1, per=100.0)
        late = clock.wall() + 50.0
        ids = await add(queue, "agent", "agent", rate_limit=slow)
        ids += await add(queue, *["agent"] * 3, rate_limit=slow, expires_in=50.0)
        ids += await add(queue, *["agent"] * 3, rate_limit=slow, deadline=late)
        ids += await add(queue, "agent", "agent", rate_limit=slow)
        same([row.run_id for row in await queue.claim_rows("w", 1e9, limit=9)], ids[:1], "the first run")
        clock.advance(101.0)
        same([row.run_id for row in await queue.claim_rows("w", 1e9, limit=9)], ids[1:2], "the second run")
        clock.advance(101.0)
        rows = await queue.claim_rows("w", 1e9, limit=9)
        same({row.run_id for row in rows}, {*ids[2:9]}, "the runs that are too late, and the run that starts")


@CASES
async def a_release_of_a_run_under_whose_claim_nothing_ran_takes_its_start_back(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        ids = await add(queue, *["agent"] * 4, rate_limit=RateLimit(1, per=1000.0))

        async def claimed(*expected: str, what: str) -> RunRow:
            rows = await queue.claim_rows("w", 1e9, limit=9)
            same([row.run_id for row in rows], [*expected], what)
            return rows[0] if rows else RunRow("", "")

        row = await claimed(ids[0], what="the run that starts first")
        await settle(queue, row, "pending", due_at=clock.wall() + 500.0, take_back=counted_rate(row))
        clock.advance(100.0)
        row = await claimed(ids[1], what="the run that starts instead of the released run")
        await settle(queue, row, "pending", take_back=counted_rate(row))
        clock.advance(100.0)
        row = await claimed(ids[1], what="the run that starts after its release")
        await settle(queue, row, "pending", parked=1)
        row = await claimed(ids[1], what="the run that resumes")
        await settle(queue, row, "pending", parked=1, take_back=counted_rate(row))
        row = await claimed(ids[1], what="the run that resumes again")
        await settle(queue, row, "succeeded")
        clock.advance(999.0)
        await claimed(what="the runs that start within a period of the start")
        clock.advance(2.0)
        await claimed(ids[0], what="the run that starts in the next period")


@CASES
async def only_the_rate_limit_that_counted_a_claim_takes_its_start_back(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        slow = RateLimit(9, per=1000.0)

        async def counted(agent: str, **options: Any) -> str:
            [run_id] = await add(queue, agent, rate_limit=slow, **options)
            if agent == "cancelled":
                await settle(queue, (await queue.claim_rows("w", 1e9, agent_keys=[agent]))[0], "waiting")
                await queue.post(run_id, "cancel", "", "null")
            clock.advance(2.0)
            return counted_rate((await queue.claim_rows("w", 1e9, agent_keys=[agent]))[0])

        same(await counted("new"), slow.text("new", {}, ""), "the limit that counted a new run")
        same(await counted("cancelled"), "", "the limit that counted a cancelled run")
        same(await counted("expired", expires_in=1.0), "", "the limit that counted a run that has expired")
        same(await counted("late", deadline=clock.wall() + 1.0), "", "the limit that counted a run after its deadline")
        inline = queue.new_row(None, "inline", {}, rate_limit=slow, origin="inline")
        _, taken = await queue.take(inline, "mine", 1e9, insert=True, reopen=True)
        assert taken is not None
        same(counted_rate(taken), "", "the limit that counted an inline run")
        [row] = [await claim_new(queue, "renewed", rate_limit=slow)]
        clock.advance(1.0)
        same(counted_rate(await settle(queue, row, "running")), "", "the limit of a claim that was written under")


@CASES
async def tickets_that_are_given_back_use_up_no_start(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, _ = found
        ids = await add(queue, "agent", "agent", rate_limit=RateLimit(1, per=1000.0))
        want = queue.claim_request("w", 1e9, None, 3)
        await queue.commits.commit(None, [Op("queue.claim", (want,))])
        await queue.give_back(want.tickets)
        rows = await queue.claim_rows("w", 1e9, limit=3)
        same([row.run_id for row in rows], ids[:1], "the runs that start after the claim was given back")


@CASES
async def after_the_clock_was_set_back_delayed_runs_start_as_soon_as_there_is_room(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        ten = RateLimit(1, per=10.0, key="x")
        ids = await add(queue, "a", "b", "a", "b", rate_limit=ten)
        ids += await add(queue, "a", rate_limit=RateLimit(1, per=10.0, key="y"))
        rows = await queue.claim_rows("w", LEASE, limit=9)
        same([row.run_id for row in rows], [ids[0], ids[4]], "the runs that start first")
        for row in rows:
            await settle(queue, row, "succeeded")
        clock.advance(1.0)
        clock.set_wall(clock.wall() - 5000.0)
        at = clock.wall()
        rows = await started(queue, clock, 45.0)
        same(sorted(row.run_id for row in rows), sorted(ids[1:4]), "the runs that start after the clock was set back")
        same(most(rows, 10.0), 1, "the most starts in ten seconds")
        same((rows[0].claimed_at or 0.0) - at >= 10.0, True, "whether the first start kept its age")


@CASES
async def delayed_runs_that_are_cancelled_leave_their_times_to_others(make: Make) -> None:
    async with with_limits(make) as found:
        if found is None:
            return
        queue, clock = found
        slow = RateLimit(1, per=100.0)
        ids = await add(queue, "agent", "agent", "agent", rate_limit=slow)
        await queue.claim_rows("w", 1e9, limit=9)
        await queue.post(ids[1], "cancel", "", "null")
        rows = await queue.claim_rows("w", 1e9, limit=9)
        found_now = [(row.run_id, row.cancel_at is None) for row in rows]
        same(found_now, [(ids[1], False)], "the run that is claimed to be cancelled")
        await settle(queue, rows[0], "cancelled")
        await queue.cancel(ids[2])
        clock.advance(50.0)
        ids += await add(queue, "agent", rate_limit=slow)
        same(await queue.claim_rows("w", 1e9, limit=9), [], "the claimable runs while the new run has to wait")
        clock.advance(50.5)
        same([row.run_id for row in await queue.claim_rows("w", 1e9, limit=9)], ids[3:], "the run of the next period")
