"""What is measured of a queue; each in a process that `drive` starts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from .base import Queue
from .contenders import ALL
from .processes import go, samples, started

LOOK = 0.01  # seconds between two looks at what is left


@contextlib.asynccontextmanager
async def _opened(name: str, where: str) -> AsyncIterator[Queue]:
    queue: Queue = ALL["queue"][name].load(where)
    await queue.open()
    try:
        yield queue
    finally:
        await queue.close()


async def _left_after(queue: Queue, count: int, seconds: float) -> tuple[int, float]:
    """Jobs with no record of their end, and how long that took; 0, or what is left after `seconds`."""
    since = time.perf_counter()
    while await queue.left(1):
        if time.perf_counter() - since > seconds:
            return await queue.left(count), time.perf_counter() - since
        await asyncio.sleep(LOOK)
    return 0, time.perf_counter() - since


async def drain(name: str, where: str, processes: int, concurrency: int, count: int, seconds: float) -> dict[str, Any]:
    """Jobs a second from the word to begin to the last one's record, or to the end of `seconds`.

    All are enqueued before, and the processes have imported and connected.
    """
    async with _opened(name, where) as queue:
        await queue.fill(count)
        if (there := await queue.left(count)) != count:
            raise RuntimeError(f"{there} jobs are queued, not {count}")
        with started(processes, "work", name, where, str(concurrency)) as workers:
            go(workers)
            left, took = await _left_after(queue, count, seconds)
    if left == count:
        raise RuntimeError(f"none of {count} jobs has a record after {took:.0f} s")
    return {"value": (count - left) / took}


async def enqueue(name: str, where: str, count: int, seconds: float) -> dict[str, Any]:
    """Jobs a second, one after the other by one caller."""
    async with _opened(name, where) as queue:
        await queue.enqueue("nothing")
        since, done = time.perf_counter(), 0
        while done < count and time.perf_counter() - since < seconds:
            await queue.enqueue("nothing")
            done += 1
        return {"value": done / (time.perf_counter() - since)}


async def chain(name: str, where: str, count: int) -> dict[str, Any]:
    """Microseconds a step of one job of so many steps."""
    async with _opened(name, where) as queue:
        return {"value": await queue.chain(count) / count * 1e6}


async def idle(name: str, where: str, count: int, seconds: float) -> dict[str, Any]:
    """Milliseconds from enqueue here to the first line of the job in a process that had nothing to do."""
    async with _opened(name, where) as queue:
        with started(1, "work", name, where, "16") as workers:
            go(workers)
            return {"samples": await samples(count, seconds, lambda: queue.enqueue("tell"), workers[0])}
