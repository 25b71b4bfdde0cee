"""One publisher and a hundred followers, of which some go and come again, some come late, and one is slow; and a
publisher, or a server, that is killed again and again.

The long forms, 100,000 events, and a million over 50 kills: pytest tests/fault/test_subscribers.py -m slow
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import tracemalloc
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core.errors import StorageError
from agent_runtime_core.events import Event, EventBus, InMemoryEventBus, get_event_bus
from agent_runtime_core.events.subscriptions import PAGE, WINDOW
from agent_runtime_core.runner.backends import open_url
from tests.support.backends import POSTGRES, SERVERS
from tests.support.processes import Child
from tests.support.redis_servers import RedisServer

FOLLOWERS = 100
AT_ONCE = 50  # events of one commit
GROWTH = 10 * 2**20  # bytes that a slow follower may cost

KINDS = ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES]


@pytest.fixture(params=KINDS)
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> EventBus:
    where: dict[str, Any] = {}
    if request.param == "sqlite":
        where = {"path": tmp_path / "events.db", "durability": "normal"}
    elif request.param in SERVERS:
        where = {"url": request.getfixturevalue(f"{request.param}_url")}
    return get_event_bus(request.param, **where)


async def publish(bus: EventBus, run: UUID, start: int, stop: int) -> None:
    for first in range(start, stop, AT_ONCE):
        events = [(f"e{n}", "counted", {"n": n}) for n in range(first, min(first + AT_ONCE, stop))]
        await bus.commit(None, [bus.publishing(run, events)])
        await asyncio.sleep(0)


async def follow(bus: EventBus, run: UUID, count: int, seed: int) -> int:
    """Read it all, gone now and then; how often it came back."""
    rng, cursor, back = random.Random(seed), 0, 0
    while cursor < count:
        stay = rng.randrange(1, count) if seed % 2 else count
        async for event in bus.subscribe(run, cursor):
            assert (event.sequence, event.event_type) == (cursor, "counted"), "a gap, a repeat, or out of order"
            if event.sequence % 97 == 0:
                assert event.payload == {"n": cursor}
            cursor += 1
            stay -= 1
            if cursor == count or stay == 0:
                break
        back += cursor < count
    return back


async def crowd(bus: EventBus, count: int) -> None:
    run = uuid4()
    early = [asyncio.ensure_future(follow(bus, run, count, n)) for n in range(FOLLOWERS - 10)]
    await publish(bus, run, 0, count // 2)
    rest = asyncio.ensure_future(publish(bus, run, count // 2, count))
    late = [asyncio.ensure_future(follow(bus, run, count, n)) for n in range(10)]
    came_back = sum(await asyncio.gather(*early, *late))
    await rest
    assert came_back > FOLLOWERS / 4
    assert [event.sequence for event in await bus.get_events(run, count - 5)] == list(range(count - 5, count))
    await bus.close()


async def one_more(events: AsyncGenerator[Event, None], n: int) -> None:
    event = await anext(events)
    assert (event.sequence, event.payload) == (n, {"n": n})


def kept() -> int:
    """How many events there are in this process, in windows and in hands."""
    return sum(type(each) is Event for each in gc.get_objects())


async def slow(bus: EventBus, count: int) -> None:
    """A follower that reads one event of a hundred that are published, beside one that keeps up, costs no memory and
    misses nothing."""
    run, looks = uuid4(), count // AT_ONCE // 10 * AT_ONCE
    events = bus.subscribe(run, 0)
    await publish(bus, run, 0, AT_ONCE)
    await one_more(events, 0)
    fast = asyncio.ensure_future(follow(bus, run, count, 0))
    gc.collect()
    others, most = kept(), 0
    tracemalloc.start()
    try:
        before, cursor = tracemalloc.get_traced_memory()[0], 1
        for first in range(AT_ONCE, count, AT_ONCE):
            await publish(bus, run, first, first + AT_ONCE)
            if cursor < first // 100:
                await one_more(events, cursor)
                cursor += 1
            if first % looks == 0:
                most = max(most, kept())
        assert await fast == 0
        most = max(most, kept())
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0 < most - others <= 2 * WINDOW + 2 * PAGE
    # In memory the log itself is in this process.
    assert grown < GROWTH + (count * 1500 if isinstance(bus, InMemoryEventBus) else 0)
    while cursor < count:
        await one_more(events, cursor)
        cursor += 1
    await events.aclose()
    await bus.close()


async def through(bus: EventBus, run: UUID, count: int, seed: int) -> None:
    """Read it all, gone now and then, and whenever the store is; it goes on behind what it read last."""
    rng, cursor = random.Random(seed), 0
    while cursor < count:
        stay = rng.randrange(1, 1000) if seed else count
        with contextlib.suppress(StorageError):
            async for event in bus.subscribe(run, cursor):
                assert (event.sequence, event.payload) == (cursor, {"n": cursor}), "a gap, a repeat, or out of order"
                cursor += 1
                stay -= 1
                if cursor == count or stay == 0:
                    break


async def killed(url: str, count: int, kills: int, server: RedisServer | None = None) -> None:
    """A publisher that dies in a commit, and the next one at once; the server too, each second time."""
    run, backends = uuid4(), open_url(url)
    following = [asyncio.ensure_future(through(backends.bus, run, count, seed)) for seed in range(3)]
    try:
        for n in range(1, kills + 2):
            dies_at = n * count // (kills + 1) if n <= kills else -1
            with Child("tells", url, run, count, AT_ONCE, dies_at) as child:
                assert await child.aended() == (-signal.SIGKILL if n <= kills else 0)
            if server is not None and n % 2:
                await asyncio.to_thread(server.write_out)
                await asyncio.to_thread(server.restart)
        await asyncio.gather(*following)
        assert await backends.bus.head(run) == count
    finally:
        for each in following:
            each.cancel()
        await backends.close()


async def test_followers_miss_nothing_of_publishers_that_are_killed(tmp_path: Path) -> None:
    await killed(str(tmp_path / "all.db"), 3_000, 2)


@pytest.mark.redis
async def test_followers_miss_nothing_where_redis_is_killed_too() -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        await killed(server.url, 3_000, 2, server)


@pytest.mark.slow
async def test_a_million_events_over_50_kills(tmp_path: Path) -> None:
    await killed(str(tmp_path / "all.db"), 1_000_000, 50)


@pytest.mark.redis
@pytest.mark.slow
async def test_a_million_events_on_redis_over_50_kills() -> None:
    with RedisServer(appendonly="yes", appendfsync="everysec") as server:
        await killed(server.url, 1_000_000, 50, server)


async def test_a_hundred_followers_miss_nothing(bus: EventBus) -> None:
    await crowd(bus, 2_500)


async def test_a_slow_follower_costs_little(bus: EventBus) -> None:
    await slow(bus, 5_000)


@pytest.mark.slow
async def test_a_hundred_followers_of_a_hundred_thousand_events(bus: EventBus) -> None:
    await crowd(bus, 100_000)


@pytest.mark.slow
async def test_a_slow_follower_of_a_hundred_thousand_events(bus: EventBus) -> None:
    await slow(bus, 100_000)
