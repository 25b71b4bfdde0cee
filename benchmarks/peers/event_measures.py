"""What is measured of an event bus; each in a process that `drive` starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from .buses import Bus
from .contenders import ALL
from .processes import samples, started

AT_ONCE = 100  # published together
PAYLOAD = {"text": "a word or two", "n": 1}


def _bus(name: str, where: str, run_id: str | None = None) -> Bus:
    bus: Bus = ALL["bus"][name].load(where)
    bus.run_id = run_id or str(uuid4())
    return bus


async def _count(stream: AsyncIterator[object], count: int) -> None:
    async for _ in stream:
        count -= 1
        if not count:
            return


async def _publish(bus: Bus, count: int) -> None:
    for start in range(0, count, AT_ONCE):
        await bus.publish([{**PAYLOAD, "n": n} for n in range(start, min(start + AT_ONCE, count))])


async def live(name: str, where: str, subscribers: int, count: int) -> dict[str, Any]:
    """Deliveries a second in this process, published meanwhile and that counted in."""
    bus = _bus(name, where)
    streams = [await bus.subscribe() for _ in range(subscribers)]
    await bus.publish([PAYLOAD])
    for stream in streams:
        await anext(stream)
    following = [asyncio.ensure_future(_count(stream, count)) for stream in streams]
    await asyncio.sleep(0)
    since = time.perf_counter()
    await _publish(bus, count)
    await asyncio.gather(*following)
    took = time.perf_counter() - since
    await bus.close()
    return {"value": subscribers * count / took}


async def replay(name: str, where: str, count: int) -> dict[str, Any]:
    """Deliveries a second, to one that subscribes after all is published."""
    bus = _bus(name, where)
    await _publish(bus, count)
    since = time.perf_counter()
    await _count(await bus.subscribe(), count)
    took = time.perf_counter() - since
    await bus.close()
    return {"value": count / took}


async def across(name: str, where: str, count: int, seconds: float) -> dict[str, Any]:
    """Milliseconds from publish here to delivery in another process."""
    bus = _bus(name, where)
    with started(1, "listen", name, where, bus.run_id) as (other,):
        taken = await samples(count, seconds, lambda: bus.publish([PAYLOAD]), other)
    await bus.close()
    return {"samples": taken}


async def listen(name: str, where: str, run_id: str) -> None:
    """The other process of `across`: it says when each event came, until it is ended."""
    stream = await _bus(name, where, run_id).subscribe()
    print("ready", flush=True)
    async for _ in stream:
        print(time.monotonic(), flush=True)
