"""Concurrency keys: one run at a time, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from ..._engines.base import Guard, Op
from ...errors import LeaseLost
from ...queue.base import RunQueue
from ...queue.records import RowChanged, RunFilter, RunRow
from .checks import Cases, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, claim_new, drain, margin, names, once, one, opened, settle

CASES: Cases[Case] = Cases()


async def add_with_key(queue: RunQueue, *agents: str, key: str = "lane", **options: Any) -> list[str]:
    """Enqueue one run with the same concurrency key for each agent and return the run ids."""
    return await add(queue, *agents, concurrency_key=key, **options)


async def finish_all(queue: RunQueue, worker: str = "w") -> list[str]:
    """Claim and finish runs one by one; return their agents in order."""
    found: list[str] = []
    seen: set[str] = set()
    while rows := await queue.claim_rows(worker, LEASE):
        once(seen, rows[0].run_id, rows[0].agent)
        found += names(rows)
        await settle(queue, rows[0], "succeeded")
    return found


def inline(queue: RunQueue, run_id: str, **options: Any) -> RunRow:
    """A row of agent `run_id` with origin "inline" and the concurrency key "lane"."""
    return queue.new_row(run_id, run_id, {}, concurrency_key="lane", origin="inline", **options)


async def take(queue: RunQueue, row: RunRow, *, wait: bool = True, reopen: bool = True) -> tuple[str, RunRow]:
    outcome, found = await queue.take(row, "mine", LEASE, insert=True, reopen=reopen, wait=wait)
    assert found is not None
    return outcome, found


@CASES
async def runs_of_one_key_go_one_at_a_time_in_order_of_arrival(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = await add_with_key(queue, "a", "b", "c")
        keys = [(await queue.require(each)).concurrency_key for each in ids]
        same(keys, ["lane"] * 3, "the concurrency keys of the rows")
        for n, (agent, worker) in enumerate((("a", "w1"), ("b", "w2"), ("c", "w1"))):
            rows = await queue.claim_rows(worker, LEASE, limit=3)
            same(names(rows), [agent], f"the runs claimed by {worker}")
            same(await queue.claim("w3"), None, f"the claimable runs while {agent} is running")
            blocked = [(await queue.require(each)).blocked for each in ids[n:]]
            same(blocked, [0, 1, 1][: 3 - n], "which runs are blocked")
            await settle(queue, rows[0], ("succeeded", "failed", "dead")[n])
        same(await queue.claim("w3"), None, "the claimable runs after all have finished")
        await add_with_key(queue, "d")
        same(names(await drain(queue)), ["d"], "a run enqueued after the others finished")


@CASES
async def keys_do_not_wait_for_each_other(make: Make) -> None:
    async with opened(make) as (queue, _):
        await add_with_key(queue, "a1", "a2", key="a")
        await add_with_key(queue, "b1", "b2", key="b")
        await add(queue, "free", "none", concurrency_key="")
        same(names(await queue.claim("w", limit=9)), ["a1", "b1", "free", "none"], "the claimable runs")


@CASES
async def of_those_held_the_greatest_priority_goes_first(make: Make) -> None:
    async with opened(make) as (queue, _):
        for agent, priority in (("first", 0), ("low", -1), ("b", 3), ("high", 7), ("c", 3)):
            await add_with_key(queue, agent, priority=priority)
        await add(queue, "other", priority=5)
        same(await finish_all(queue), ["other", "first", "high", "b", "c", "low"], "the order of claims")


@CASES
async def a_delayed_run_comes_into_its_lane_when_it_is_due(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add_with_key(queue, "later", delay=30)
        await add_with_key(queue, "now", "next")
        same(names(await drain(queue)), ["now"], "claims before the delay has passed")
        clock.advance(30)
        same(await queue.claim("w"), None, "a claim after the delay, while another run of the key is running")
        [row] = await queue.find(RunFilter(("running",)))
        await settle(queue, row, "succeeded")
        same(await finish_all(queue), ["later", "next"], "the order of claims after that")
        await add_with_key(queue, "tomorrow", "too", delay=10)
        await add_with_key(queue, "today", "tonight")
        same(await finish_all(queue), ["today", "tonight"], "the order of claims while others are delayed")
        clock.advance(10)
        same(names(await queue.claim("w", limit=3)), ["tomorrow"], "claims of a key whose runs were all delayed")
        for key in ("one", "two"):
            await add_with_key(queue, key, key=key, delay=10)
        clock.advance(10)
        same(names(await queue.claim("w", limit=3)), ["one", "two"], "claims of two keys, of runs due at the same time")


@CASES
async def a_park_a_retry_and_a_hand_back_keep_the_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue, "first", concurrency_key="lane")
        await add_with_key(queue, "second", priority=9)
        for status, changes in (
            ("waiting", {"parked": 1, "due_at": clock.wall() + 60}),
            ("pending", {"failures": 1, "due_at": clock.wall() + 120}),
            ("pending", {"failures": 1}),
        ):
            await settle(queue, row, status, **changes)
            await add_with_key(queue, "third")
            rows = await queue.claim_rows("w2")
            if "due_at" in changes:
                same(names(rows), [], f"the claimable runs while the first is {status}")
                clock.advance(60)
                rows = await queue.claim_rows("w2")
            same(names(rows), ["first"], "the run claimed next")
            row = rows[0]
        await settle(queue, row, "waiting", parked=1)
        await queue.post(row.run_id, "signal", "go", "1")
        row = await one(queue, "w")
        same(row.agent, "first", "the run claimed after a message")
        await settle(queue, row, "succeeded")
        same(await finish_all(queue), ["second", "third", "third", "third"], "the order of claims after that")


@CASES
async def a_run_that_was_dropped_keeps_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await claim_new(queue, "first", concurrency_key="lane")
        await add_with_key(queue, "second", priority=9)
        clock.advance(LEASE + 1)
        batch = await queue.claim_rows("w2", LEASE, limit=2)
        same(names(batch), ["first"], "the runs claimed after the lease expired")
        await settle(queue, batch[0], "succeeded")
        same(await finish_all(queue), ["second"], "the order of claims after that")


@CASES
async def the_end_of_a_run_lets_the_next_of_its_key_go_in_the_same_commit(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue, "first", concurrency_key="lane")
        await add_with_key(queue, "second", "third")
        end = Op("queue.settle", (row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")))
        request = queue.claim_request("w", LEASE, None, 2, ready_only=True)
        ops, unknown = (
            [end, Op("queue.claim", (request,))],
            Op("queue.end", ("unknown", ("pending",), "cancelled", 0.0, "")),
        )
        with refused(RowChanged, "a commit whose last operation is rejected"):
            await queue.commits.commit(Guard(row.run_id, row.claim_id), [*ops, unknown])
        same(await queue.claim("w2"), None, "the claimable runs after the rejected commit")
        clock.advance(1)
        _, claimed = await queue.commits.commit(Guard(row.run_id, row.claim_id), ops)
        same(names(claimed), ["second"], "the runs claimed by the same commit")
        await settle(queue, claimed[0], "succeeded")
        same(await finish_all(queue), ["third"], "the order of claims after that")


@CASES
async def cancelling_takes_a_run_out_of_its_lane(make: Make) -> None:
    async with opened(make) as (queue, _):
        head, blocked = await add_with_key(queue, "head", "blocked")
        [late] = await add_with_key(queue, "late", delay=9)
        [last] = await add_with_key(queue, "last")
        same([await queue.cancel(each) for each in (blocked, late)], [True, True], "cancel of blocked runs")
        same((await queue.require(blocked)).status, "cancelled", "its status")
        same(names(await queue.claim("w", limit=9)), ["head"], "the claimable runs")
        same(await queue.cancel(last), True, "cancel of the last run")
        [more] = await add_with_key(queue, "more")
        await settle(queue, await queue.require(head), "waiting", parked=1)
        same(await queue.cancel(head), True, "cancel of the waiting run")
        same((await queue.require(more)).blocked, 0, "whether the next run is blocked")
        same(names(await drain(queue)), ["more"], "the claimable runs after the cancel")
        await add_with_key(queue, "next")
        await queue.cancel(more)
        same(await queue.claim("w"), None, "the claimable runs while the running run has a cancel request")


@CASES
async def a_run_opened_again_goes_behind_the_one_that_has_its_lane(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue, "first", concurrency_key="lane")
        await settle(queue, row, "failed")
        second = await claim_new(queue, "second", concurrency_key="lane")
        reopen = Op("queue.reopen", (row.run_id, ("failed",), clock.wall()))
        reopened: RunRow = (await queue.commits.commit(None, [reopen]))[0]
        same((reopened.status, reopened.generation, reopened.blocked), ("pending", 2, 1), "the reopened run")
        same(await queue.claim("w"), None, "the claimable runs")
        await settle(queue, second, "dead")
        first = await one(queue, "w")
        same(first.agent, "first", "the run claimed when the concurrency slot is free")
        again = queue.new_row(second.run_id, "second", {})
        same((await take(queue, again, wait=False))[0], "behind", "take of another finished run, without waiting")
        same((await queue.require(second.run_id)).status, "dead", "its status without waiting")
        outcome, holder = await take(queue, again)
        same((outcome, holder.run_id), ("behind", row.run_id), "take of the same run, with waiting")
        second = await queue.require(second.run_id)
        same((second.status, second.generation, second.blocked), ("pending", 2, 1), "its row after take")
        await settle(queue, first, "succeeded")
        ended = await queue.require(row.run_id)
        await queue.commits.commit(None, [Op("queue.delete", (ended.run_id, ended.generation, ended.arrival))])
        same((await take(queue, again))[0], "claimed", "take when the concurrency slot is free")


@CASES
async def take_waits_for_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        first = await claim_new(queue, "first", concurrency_key="lane")
        mine = inline(queue, "mine")
        outcome, holder = await take(queue, mine, wait=False)
        same((outcome, holder), ("behind", await queue.require(first.run_id)), "take without waiting")
        same(await queue.row(mine.run_id), None, "the row that take must not store")
        same((await take(queue, mine))[0], "behind", "take with waiting")
        await add_with_key(queue, "later")
        stored = await queue.require(mine.run_id)
        same((stored.status, stored.blocked, stored.origin), ("pending", 1, "inline"), "the row that take stored")
        await settle(queue, first, "succeeded")
        same(await queue.claim("w"), None, "the claimable runs while the slot is reserved for the inline run")
        clock.advance(1)
        outcome, row = await take(queue, mine)
        same((outcome, row.blocked, row.attempt), ("claimed", 0, 1), "take after the slot became free")
        await settle(queue, row, "succeeded")
        same(await finish_all(queue), ["later"], "the order of claims after that")
        with refused(RowChanged, "queue.end of a finished run"):
            await queue.commits.commit(None, [Op("queue.end", (mine.run_id, ("pending",), "cancelled", 0.0, ""))])


@CASES
async def an_inline_run_that_nobody_goes_on_with_stands_aside(make: Make) -> None:
    async with opened(make) as (queue, clock):
        _, mine = await take(queue, inline(queue, "mine"))
        await add_with_key(queue, "a", "b", "c")
        same(await queue.claim("w"), None, "the claimable runs while it runs")
        clock.advance(LEASE - margin(queue))
        same(await queue.claim("w"), None, "the claimable runs while its lease is valid")
        clock.advance(1 + margin(queue))
        row = await one(queue, "w")
        same(row.agent, "a", "the run claimed after its lease expired")
        with refused(LeaseLost, "a write by its last claim"):
            await settle(queue, mine, "succeeded")
        again = inline(queue, "mine")
        same((await take(queue, again))[0], "behind", "take of it while another run has the slot")
        await settle(queue, row, "succeeded")
        outcome, mine = await take(queue, again)
        same((outcome, mine.crashes, mine.crashes_in_row, mine.attempt), ("claimed", 1, 1, 2), "take of it before b")
        await settle(queue, mine, "pending")
        row = await one(queue, "w")
        same(row.agent, "b", "the run claimed after it was released")
        same((await take(queue, again))[0], "behind", "take of it while b has the slot")
        await settle(queue, row, "succeeded")
        same(await queue.claim("w"), None, "the claimable runs while it keeps its priority")
        clock.advance(LEASE)
        row = await one(queue, "w")
        same(row.agent, "c", "the run claimed when take was not called again in time")
        await settle(queue, row, "succeeded")
        ending = ((await queue.require(mine.run_id)).status, await finish_all(queue))
        same(ending, ("pending", []), "its status and the claimable runs after all others finished")
        same((await take(queue, again, wait=False))[0], "claimed", "take when the concurrency slot is free")


@CASES
async def an_inline_run_that_waits_keeps_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        _, mine = await take(queue, inline(queue, "mine"))
        await add_with_key(queue, "next")
        await settle(queue, mine, "waiting", parked=1)
        clock.advance(LEASE + 1)
        same(await queue.claim("w"), None, "the claimable runs while it waits")
        same((await take(queue, inline(queue, "other"), wait=False))[0], "behind", "take of another run")
        row = await queue.require(mine.run_id)
        same((row.status, row.blocked), ("waiting", 0), "its row")


@CASES
async def takers_of_one_key_do_without_a_worker(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await take(queue, inline(queue, "gone"))
        same((await take(queue, inline(queue, "next")))[0], "behind", "take of a second run")
        same((await take(queue, inline(queue, "last")))[0], "behind", "take of a third run")
        clock.advance(LEASE + 1)
        outcome, holder = await take(queue, inline(queue, "last"))
        same((outcome, holder.agent), ("claimed", "last"), "take after the runs before it were not taken again in time")
        same(
            (await take(queue, inline(queue, "gone"), wait=False))[0], "behind", "take of the run with an expired lease"
        )
        outcome, holder = await take(queue, inline(queue, "next"))
        same((outcome, holder.agent), ("behind", "last"), "take of the run that lost its priority")


@CASES
async def a_run_that_stands_aside_can_be_cancelled(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = []
        for agent in ("one", "two"):
            _, mine = await take(queue, inline(queue, agent))
            await settle(queue, mine, "pending")
            ids.append(mine.run_id)
        same(await finish_all(queue), [], "the claimable runs")
        same(await queue.cancel(ids[0]), True, "cancel")
        same((await queue.require(ids[0])).status, "cancelled", "its status")
        await queue.post(ids[1], "cancel", "", "null")
        same((await one(queue, "w")).run_id, ids[1], "the run that any worker can claim after a cancel message")


@CASES
async def racing_claims_never_hold_two_runs_of_one_key(make: Make) -> None:
    async with opened(make) as (queue, _):
        running: dict[str, str] = {}
        done: list[str] = []

        async def work(n: int) -> None:
            for m in range(6):
                await add_with_key(queue, f"run{n}.{m}", key=f"key{(n + m) % 3}", priority=m % 2)
                for row in await queue.claim_rows(f"w{n}", LEASE, limit=2):
                    key = row.concurrency_key
                    assert key is not None
                    same(running.get(key), None, f"the running run of {key} when {row.agent} is claimed")
                    running[key] = row.agent
                    await turns(n % 4)
                    running.pop(key)
                    await settle(queue, row, ("succeeded", "failed")[m % 2])
                    done.append(row.run_id)

        await asyncio.gather(*map(work, range(8)))
        left = await finish_all(queue)
        same((len(done) + len(left), len(set(done))), (48, len(done)), "the number of finished runs, all and distinct")
