"""A worker with nothing to do: how soon it hears of a run from another process, and what waiting costs it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agent_runtime_core.config import configure
from agent_runtime_core.queue import RunQueue, get_queue

from .floor import SMALL, Line, Size, connect, percentile

GRACE = 1.5  # milliseconds beside two commits
CPU = 1.0  # percent of a core

_WORKER = """
import asyncio, sys, time
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner

class Tell(AgentRuntime):
    key = "tell"
    async def run(self, ctx):
        print(time.monotonic(), flush=True)
        return RunResult()

async def main(path, seconds):
    registry = Registry()
    registry.register(Tell())
    async with AgentRunner.open(path, registry=registry) as runner:
        working = asyncio.ensure_future(runner.run_loop())
        await asyncio.sleep(0.3)
        print("ready", flush=True)
        if seconds:
            since, used = time.monotonic(), time.process_time()
            await asyncio.sleep(seconds)
            print((time.process_time() - used) / (time.monotonic() - since), flush=True)
            runner.stop()
        await working

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


def worker(where: Path | str, seconds: float = 0) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(where), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    if started.stdout.readline() != "ready\n":
        started.kill()
        raise AssertionError(f"the worker did not start: {started.wait()}")
    return started


async def wake_ups(
    queue: RunQueue, where: Path | str, count: int, baseline: Callable[[int], object]
) -> tuple[list[float], list[float]]:
    """Milliseconds from enqueue to start in another process, and of a call of `baseline`, in turns."""
    starts: list[float] = []
    baselines: list[float] = []
    idle = worker(where)
    assert idle.stdout is not None
    try:
        for n in range(count):
            await asyncio.sleep(0.03)
            since = time.monotonic()
            await queue.enqueue(None, "tell", {})
            starts.append((float(await asyncio.to_thread(idle.stdout.readline)) - since) * 1000)
            await asyncio.sleep(0.03)
            begun = time.perf_counter()
            baseline(n)
            baselines.append((time.perf_counter() - begun) * 1000)
    finally:
        idle.terminate()
        idle.communicate()
        await queue.close()
    return starts, baselines


async def _on_sqlite(path: Path, bare: Path, count: int) -> tuple[list[float], list[float]]:
    with contextlib.closing(connect(bare, "FULL")) as conn:
        insert = "INSERT INTO record VALUES ('run', ?, ?)"
        return await wake_ups(get_queue("sqlite", path=path), path, count, lambda n: conn.execute(insert, (n, SMALL)))


def rows(size: Size) -> Iterator[Line]:
    configure(durability="full")
    with size.file() as path, size.file() as bare:
        starts, commits = asyncio.run(_on_sqlite(path, bare, size.of(120, 3)))
    allowed = 2 * statistics.median(commits) + GRACE
    note = f"p99 {percentile(starts, 0.99):.1f} ms; a commit {statistics.median(commits):.2f} ms"
    median = statistics.median(starts)
    yield Line("idle enqueue to start in another process, p50", median, "ms", allowed, most=1.0, note=note)
    with size.file() as path:
        share, _ = worker(path, seconds=size.of(5, 1)).communicate(timeout=60)
    yield Line("idle worker", float(share) * 100, "% of a core", most=CPU)
