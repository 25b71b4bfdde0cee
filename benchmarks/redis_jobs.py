"""Runs through a queue on Redis: what a run costs the server, and how soon an idle worker starts one."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

from agent_runtime_core._core.lazy_import import load
from agent_runtime_core.errors import MissingDependency
from agent_runtime_core.queue import get_queue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner

from .floor import Line, Size, in_turns, percentile
from .idle import wake_ups
from .peers.server import NoServer, started
from .queue import NoOp

COST = 80.0  # microseconds of the server's processor time for a run: enqueue, claim and end
AT_ONCE, CONCURRENCY = 100, 16


def _used(client: Any) -> float:
    """Seconds of processor time of the server's main thread so far."""
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])


async def _job(url: str, client: Any, count: int) -> float:
    """Microseconds of the server's processor time for a run that does nothing, on an empty database."""
    client.flushdb()
    agent, registry = NoOp(), Registry()
    registry.register(agent)
    async with AgentRunner.open(url, registry=registry) as runner:
        agent.runner, agent.last = runner, count
        since = _used(client)
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(runner.submit(agent.key) for _ in range(min(AT_ONCE, count - start))))
        await runner.run_loop(concurrency=CONCURRENCY, handle_signals=False)
        used = _used(client) - since
        left = [info for info in await runner.runs(limit=count + 1) if info.status != "succeeded"]
        if left or agent.runs != count:
            raise AssertionError(f"{agent.runs} of {count} ran, {len(left)} did not succeed: {left[:1]}")
    return used / count * 1e6


async def _idle(url: str, client: Any, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds from enqueue to start in another process, and of a bare SET, in turns."""
    client.flushdb()
    return await wake_ups(get_queue("redis", url=url), url, count, lambda n: client.set("bare", n))


def rows(size: Size) -> Iterator[Line]:
    count = size.of(2000, 20)
    with contextlib.suppress(NoServer, MissingDependency), started() as url:
        Redis: Any = load("redis:Redis", needed_by="this row")
        with contextlib.closing(Redis.from_url(url)) as client:
            [cost] = in_turns(size.rounds(5), lambda: asyncio.run(_job(url, client, count)))
            most = None if size.tiny else COST
            name = f"Redis, the server's processor time for a run, concurrency {CONCURRENCY}"
            yield Line(name, max(cost, 0.001), "µs", most=most, note="enqueue, claim and end")
            starts, sets = asyncio.run(_idle(url, client, size.of(200, 3)))
        note = f"p99 {percentile(starts, 0.99):.1f} ms; beside: a bare SET"
        median, bare = statistics.median(starts), statistics.median(sets)
        yield Line("Redis, idle enqueue to start in another process, p50", median, "ms", beside=bare, note=note)
