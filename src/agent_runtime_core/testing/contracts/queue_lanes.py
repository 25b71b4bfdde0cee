"""Runs of one concurrency key."""

from __future__ import annotations

import asyncio
from typing import Any

from ..._engines.base import Guard, Op
from ...errors import LeaseLost
from ...queue.base import RunQueue
from ...queue.records import RowChanged, RunFilter, RunRow
from .checks import Cases, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, drain, hold, leave, names, once, one, opened

CASES: Cases[Case] = Cases()


async def line(queue: RunQueue, *agents: str, key: str = "lane", **options: Any) -> list[str]:
    """Enqueue one run for each of those agents, all of one concurrency key; their ids."""
    return await add(queue, *agents, concurrency_key=key, **options)


async def finish(queue: RunQueue, worker: str = "w") -> list[str]:
    """End runs one by one, as they come; their agents."""
    found: list[str] = []
    seen: set[str] = set()
    while rows := await queue.claim_rows(worker, LEASE):
        once(seen, rows[0].run_id, rows[0].agent)
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


@CASES
async def runs_of_one_key_go_one_at_a_time_in_order_of_arrival(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = await line(queue, "a", "b", "c")
        same([(await queue.require(each)).lane for each in ids], ["lane"] * 3, "their key")
        for n, (agent, worker) in enumerate((("a", "w1"), ("b", "w2"), ("c", "w1"))):
            rows = await queue.claim_rows(worker, LEASE, limit=3)
            same(names(rows), [agent], f"what {worker} gets")
            same(await queue.claim("w3"), None, f"what is there to claim beside {agent}")
            same([(await queue.require(each)).held for each in ids[n:]], [0, 1, 1][: 3 - n], "who is held")
            await leave(queue, rows[0], ("succeeded", "failed", "dead")[n])
        same(await queue.claim("w3"), None, "what is there to claim at last")
        await line(queue, "d")
        same(names(await drain(queue)), ["d"], "a run that comes when the others are over")


@CASES
async def keys_do_not_wait_for_each_other(make: Make) -> None:
    async with opened(make) as (queue, _):
        await line(queue, "a1", "a2", key="a")
        await line(queue, "b1", "b2", key="b")
        await add(queue, "free", "none", concurrency_key="")
        same(names(await queue.claim("w", limit=9)), ["a1", "b1", "free", "none"], "what is there to claim")


@CASES
async def of_those_held_the_greatest_priority_goes_first(make: Make) -> None:
    async with opened(make) as (queue, _):
        for agent, priority in (("first", 0), ("low", -1), ("b", 3), ("high", 7), ("c", 3)):
            await line(queue, agent, priority=priority)
        await add(queue, "other", priority=5)
        same(await finish(queue), ["other", "first", "high", "b", "c", "low"], "the order of claims")


@CASES
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
        for key in ("one", "two"):
            await line(queue, key, key=key, delay=10)
        clock.advance(10)
        same(names(await queue.claim("w", limit=3)), ["one", "two"], "claims of two lanes whose runs are due at once")


@CASES
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


@CASES
async def a_run_that_was_dropped_keeps_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await hold(queue, "first", concurrency_key="lane")
        await line(queue, "second", priority=9)
        clock.advance(LEASE + 1)
        batch = await queue.claim_rows("w2", LEASE, limit=2)
        same(names(batch), ["first"], "what is claimed once its lease ran out")
        await leave(queue, batch[0], "succeeded")
        same(await finish(queue), ["second"], "who comes then")


@CASES
async def the_end_of_a_run_lets_the_next_of_its_key_go_in_the_same_commit(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await hold(queue, "first", concurrency_key="lane")
        await line(queue, "second", "third")
        end = Op("queue.settle", (row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")))
        want = queue.claim_request("w", LEASE, None, 2, ready_only=True)
        ops, nobody = [end, Op("queue.claim", (want,))], Op("queue.end", ("nobody", ("pending",), "cancelled", 0.0, ""))
        with refused(RowChanged, "a commit whose last operation is refused"):
            await queue.commits.commit(Guard(row.run_id, row.claim_id), [*ops, nobody])
        same(await queue.claim("w2"), None, "what is there to claim after it")
        clock.advance(1)
        _, claimed = await queue.commits.commit(Guard(row.run_id, row.claim_id), ops)
        same(names(claimed), ["second"], "what the same commit claims")
        await leave(queue, claimed[0], "succeeded")
        same(await finish(queue), ["third"], "who comes then")


@CASES
async def cancelling_takes_a_run_out_of_its_lane(make: Make) -> None:
    async with opened(make) as (queue, _):
        head, held, late, last = [*await line(queue, "head", "held"), *await line(queue, "late", delay=9),
                                  *await line(queue, "last")]  # fmt: skip
        same([await queue.cancel(each) for each in (held, late)], [True, True], "cancel of what is held")
        same((await queue.require(held)).status, "cancelled", "its status")
        same(names(await queue.claim("w", limit=9)), ["head"], "what is there to claim")
        same(await queue.cancel(last), True, "cancel of the last one")
        [more] = await line(queue, "more")
        await leave(queue, await queue.require(head), "waiting", parked=1)
        same(await queue.cancel(head), True, "cancel of the one that waits")
        same((await queue.require(more)).held, 0, "what holds the next one")
        same(names(await drain(queue)), ["more"], "what is there to claim then")
        await line(queue, "next")
        await queue.cancel(more)
        same(await queue.claim("w"), None, "what is there to claim while the running one was only asked to stop")


@CASES
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
        same((await queue.require(second.run_id)).status, "dead", "its status when nobody waits")
        outcome, front = await ask(queue, again)
        same((outcome, front.run_id), ("behind", row.run_id), "the same by somebody who waits")
        second = await queue.require(second.run_id)
        same((second.status, second.generation, second.held), ("pending", 2, 1), "its row then")
        await leave(queue, first, "succeeded")
        ended = await queue.require(row.run_id)
        await queue.commits.commit(None, [Op("queue.delete", (ended.run_id, ended.generation, ended.n))])
        same((await ask(queue, again))[0], "claimed", "a take when the lane is free")


@CASES
async def take_waits_for_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        first = await hold(queue, "first", concurrency_key="lane")
        mine = inline(queue, "mine")
        outcome, front = await ask(queue, mine, wait=False)
        same((outcome, front), ("behind", await queue.require(first.run_id)), "a take by somebody who does not wait")
        same(await queue.row(mine.run_id), None, "the run it did not store")
        same((await ask(queue, mine))[0], "behind", "a take by somebody who waits")
        await line(queue, "later")
        stored = await queue.require(mine.run_id)
        same((stored.status, stored.held, stored.origin), ("pending", 1, "inline"), "the row it stored")
        await leave(queue, first, "succeeded")
        same(await queue.claim("w"), None, "what is there to claim while its turn has come")
        clock.advance(1)
        outcome, row = await ask(queue, mine)
        same((outcome, row.held, row.attempt), ("claimed", 0, 1), "the next take")
        await leave(queue, row, "succeeded")
        same(await finish(queue), ["later"], "who comes then")
        with refused(RowChanged, "ending it once more"):
            await queue.commits.commit(None, [Op("queue.end", (mine.run_id, ("pending",), "cancelled", 0.0, ""))])


@CASES
async def an_inline_run_that_nobody_goes_on_with_stands_aside(make: Make) -> None:
    async with opened(make) as (queue, clock):
        _, mine = await ask(queue, inline(queue, "mine"))
        await line(queue, "a", "b", "c")
        same(await queue.claim("w"), None, "what is there to claim while it runs")
        clock.advance(LEASE)
        same(await queue.claim("w"), None, "what is there to claim while its lease lasts")
        clock.advance(1)
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
        same(((await queue.require(mine.run_id)).status, await finish(queue)), ("pending", []), "what is left")
        same((await ask(queue, again, wait=False))[0], "claimed", "a take when the lane is free")


@CASES
async def an_inline_run_that_waits_keeps_its_turn(make: Make) -> None:
    async with opened(make) as (queue, clock):
        _, mine = await ask(queue, inline(queue, "mine"))
        await line(queue, "next")
        await leave(queue, mine, "waiting", parked=1)
        clock.advance(LEASE + 1)
        same(await queue.claim("w"), None, "what is there to claim while it waits")
        same((await ask(queue, inline(queue, "other"), wait=False))[0], "behind", "a take of another one")
        row = await queue.require(mine.run_id)
        same((row.status, row.held), ("waiting", 0), "its row")


@CASES
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


@CASES
async def a_run_that_stands_aside_can_be_cancelled(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = []
        for agent in ("one", "two"):
            _, mine = await ask(queue, inline(queue, agent))
            await leave(queue, mine, "pending")
            ids.append(mine.run_id)
        same(await finish(queue), [], "what is there to claim")
        same(await queue.cancel(ids[0]), True, "cancel")
        same((await queue.require(ids[0])).status, "cancelled", "its status")
        await queue.post(ids[1], "cancel", "", "null")
        same((await one(queue, "w")).run_id, ids[1], "which one is there for any worker to end")


@CASES
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
