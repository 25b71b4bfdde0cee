"""The queue on a Redis server: what is left where somebody took a part of it away."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

pytest.importorskip("redis")

from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.queue.redis import RedisQueue
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.redis


async def fill(queue: RedisQueue, clock: VirtualClock, how: str) -> list[str]:
    """Runs that are looked for in one of the sorted sets, before all others there."""
    options: dict[str, Any] = {"priority": 1}
    if how == "due":
        options["delay"] = 1
    if how == "behind":
        await queue.enqueue("head", "a", {}, concurrency_key="lane")
        options["concurrency_key"] = "lane"
    if how == "inline":
        row = queue.new_row(None, "a", {}, concurrency_key="lane", origin="inline")
        there = (await queue.take(row, "w", 1, insert=True, reopen=False))[1]
        assert there is not None
        return [there.run_id]
    runs = [str((await queue.enqueue(None, "a", {}, **options)).run_id) for _ in range(20)]
    if how == "lease":
        assert len(await queue.claim("w", 1, limit=20)) == 20
    return runs


def dues(server: RedisServer, queue: RedisQueue) -> int:
    return int(server.ask("ZCARD", f"{queue.engine.place.tag}:due"))


async def test_of_many_runs_that_are_due_at_once_the_greatest_priorities_come_first(
    redis_url: str, redis_server: RedisServer
) -> None:
    clock = VirtualClock()
    queue = RedisQueue(redis_url, clock=clock)
    try:
        await queue.enqueue(None, "a", {}, priority=3)
        delayed = [*[0, 1] * 300, 9, 5, 2**31 - 1, -1]
        await asyncio.gather(*(queue.enqueue(None, "a", {}, priority=each, delay=5) for each in delayed))
        clock.advance(10)
        await queue.enqueue(None, "a", {}, priority=2, delay=5)
        first = await queue.claim("w", 60)
        assert first.priority == 2**31 - 1
        assert dues(redis_server, queue) == len(delayed) + 1 - 256
        await queue.requeue_for_retry(first.run_id, "w", None, delay_seconds=1)
        assert [(await queue.claim("w", 60)).priority for _ in range(302)] == [9, 5, 3, *[1] * 299]
        clock.advance(5)
        assert (await queue.claim("w", 60)).run_id == first.run_id
        rest = [(await queue.claim("w", 60)).priority for _ in range(303)]
        assert rest == [2, 1, *[0] * 300, -1]
        assert await queue.claim("w", 60) is None
        left = redis_server.ask("KEYS", f"{queue.engine.place.tag}:due:*")
        assert left == [], "nothing is due for ever"
    finally:
        await queue.close()


async def test_a_claim_makes_a_megabyte_of_due_runs_ready(redis_url: str, redis_server: RedisServer) -> None:
    clock = VirtualClock()
    queue = RedisQueue(redis_url, clock=clock)
    try:
        runs = [(await queue.enqueue(None, "a", {"x": "x" * 300_000}, delay=1)).run_id for _ in range(10)]
        clock.advance(5)
        assert (await queue.claim("w", 60)).run_id == runs[0]
        assert dues(redis_server, queue) == 6
        assert [(await queue.claim("w", 60)).run_id for _ in range(9)] == runs[1:]
    finally:
        await queue.close()


async def test_a_claim_loads_no_more_runs_than_it_takes(redis_url: str, redis_server: RedisServer) -> None:
    clock = VirtualClock()
    queue = RedisQueue(redis_url, clock=clock)
    try:
        for agent in ("a", "b"):
            await asyncio.gather(*(queue.enqueue(None, agent, {}) for _ in range(20)))
        assert len(await queue.claim("w", 1, limit=40)) == 40
        clock.advance(5)

        def loads() -> int:
            return int(re.findall(r"calls=(\d+)", redis_server.info("commandstats")["cmdstat_get"])[0])

        before = loads()
        taken = await queue.claim("w2", 60, limit=3)
        assert loads() - before <= 3
        rest = await queue.claim("w2", 60, limit=40)
        assert len({run.run_id for run in (*taken, *rest)}) == 40
    finally:
        await queue.close()


@pytest.mark.parametrize("how", ["ready", "due", "lease", "behind", "inline"])
async def test_rows_that_were_deleted_by_hand_stand_in_the_way_of_no_other(how: str) -> None:
    clock = VirtualClock()
    with RedisServer() as server:
        queue = RedisQueue(server.url, clock=clock)
        try:
            gone = await fill(queue, clock, how)
            lane: dict[str, Any] = {"concurrency_key": "lane"} if how == "behind" else {}
            last = await queue.enqueue("last", "a", {}, **lane)
            server.ask("DEL", *(f"{{arc}}:run:{run}" for run in gone))
            clock.advance(5)
            claimed = await queue.claim("w2", 60)
            if how == "behind":
                await queue.release("head", "w2", True)
                claimed = await queue.claim("w2", 60)
            assert claimed.run_id == last.run_id
            assert await queue.claim("w2", 60) is None
            assert await queue.next_due() is None, "nothing is due for ever"
            again = await queue.enqueue(gone[0], "a", {})
            row: RunRow = (await queue.claim("w2", 60)).row
            assert (row.run_id, row.attempt) == (str(again.run_id), 1)
        finally:
            await queue.close()
