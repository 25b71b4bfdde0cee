"""Events to subscribers, beside one asyncio.Queue per subscriber."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from agent_runtime_core.config import configure
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.events.base import EventBus

from .floor import Line, Size, in_turns, percentile

LIVE = (("memory", 1, 5000), ("memory", 100, 2000), ("sqlite", 1, 3000), ("sqlite", 100, 1000))
LEAST = {("memory", 100): 4e6}  # deliveries a second
REPLAYED = {"memory": 1e6, "sqlite": 40e3}
ACROSS = 2.0  # milliseconds
PAYLOAD = {"text": "a word or two", "n": 1}


async def _queues(subscribers: int, count: int) -> float:
    queues: list[asyncio.Queue[object]] = [asyncio.Queue() for _ in range(subscribers)]

    async def follow(queue: asyncio.Queue[object]) -> None:
        for _ in range(count):
            await queue.get()

    following = [asyncio.ensure_future(follow(queue)) for queue in queues]
    await asyncio.sleep(0)
    since = time.perf_counter()
    for n in range(count):
        for queue in queues:
            queue.put_nowait({**PAYLOAD, "n": n})
        await asyncio.sleep(0)
    await asyncio.gather(*following)
    return subscribers * count / (time.perf_counter() - since)


async def _follow(bus: EventBus, run_id: str, count: int, ready: asyncio.Event | None = None) -> None:
    seen = 0
    async for event in bus.subscribe(run_id, 0):
        assert event.sequence == seen, f"event {event.sequence} came instead of {seen}"
        if not seen and ready is not None:
            ready.set()
        seen += 1
        if seen == count:
            return


async def _publish(bus: EventBus, run_id: str, count: int) -> None:
    """By the public way, a hundred calls at a time; each call costs more than all its deliveries."""
    for start in range(0, count, 100):
        await asyncio.gather(*(bus.publish(run_id, "word", PAYLOAD) for _ in range(min(100, count - start))))


async def _live(bus: EventBus, subscribers: int, count: int) -> float:
    run_id = str(uuid4())
    ready = [asyncio.Event() for _ in range(subscribers)]
    following = [asyncio.ensure_future(_follow(bus, run_id, count + 1, each)) for each in ready]
    await bus.publish(run_id, "word", PAYLOAD)
    for each in ready:
        await each.wait()
    since = time.perf_counter()
    await _publish(bus, run_id, count)
    await asyncio.gather(*following)
    took = time.perf_counter() - since
    await bus.close()
    return subscribers * count / took


async def _replayed(bus: EventBus, count: int) -> float:
    run_id = str(uuid4())
    await _publish(bus, run_id, count)
    since = time.perf_counter()
    await _follow(bus, run_id, count)
    took = time.perf_counter() - since
    await bus.close()
    return count / took


_FOLLOWER = """
import asyncio, sys, time
from agent_runtime_core.events import get_event_bus

async def main(path, run_id, count):
    bus = get_event_bus("sqlite", path=path)
    async for event in bus.subscribe(run_id, 0):
        print(time.monotonic(), flush=True)
        if event.sequence == count:
            break
    await bus.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def _across(path: str, count: int) -> list[float]:
    """Milliseconds from publish to delivery in another process."""
    bus, run_id = get_event_bus("sqlite", path=path), str(uuid4())
    follower = subprocess.Popen(  # noqa: ASYNC220 - nobody else is on this loop
        [sys.executable, "-c", _FOLLOWER, path, run_id, str(count)], stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None
    taken: list[float] = []
    try:
        await bus.publish(run_id, "word", PAYLOAD)
        await asyncio.to_thread(follower.stdout.readline)
        for _ in range(count):
            await asyncio.sleep(0.02)
            since = time.monotonic()
            await bus.publish(run_id, "word", PAYLOAD)
            taken.append((float(await asyncio.to_thread(follower.stdout.readline)) - since) * 1000)
    finally:
        follower.kill()
        follower.communicate()
        await bus.close()
    return taken


def _bus(backend: str, path: Path) -> EventBus:
    return get_event_bus(backend, **({"path": path} if backend == "sqlite" else {}))


def _live_row(size: Size, backend: str, subscribers: int, count: int) -> Line:
    def ours() -> float:
        with size.file() as path:
            return asyncio.run(_live(_bus(backend, path), subscribers, count))

    live, floor = in_turns(size.rounds(5), ours, lambda: asyncio.run(_queues(subscribers, count)))
    least = None if size.tiny else LEAST.get((backend, subscribers))
    name = f"events {backend} to {subscribers}, while they are published"
    return Line(name, live, "/s", least=least, beside=floor, note="beside: an asyncio.Queue for each")


def _replay_row(size: Size, backend: str) -> Line:
    def ours() -> float:
        with size.file() as path:
            return asyncio.run(_replayed(_bus(backend, path), size.of(20_000, 20)))

    (rate,) = in_turns(size.rounds(5), ours)
    least = None if size.tiny else REPLAYED[backend]
    return Line(f"events {backend} to 1, from the start", rate, "/s", least=least)


def rows(size: Size) -> Iterator[Line]:
    configure(durability="full")
    for backend, subscribers, count in LIVE:
        yield _live_row(size, backend, size.of(subscribers, min(subscribers, 3)), size.of(count, 20))
    for backend in ("memory", "sqlite"):
        yield _replay_row(size, backend)
    with size.file() as path:
        taken = asyncio.run(_across(str(path), size.of(100, 3)))
    note = f"p99 {percentile(taken, 0.99):.1f} ms"
    yield Line("events sqlite to another process, p50", statistics.median(taken), "ms", most=ACROSS, note=note)
