"""Many runs at once in one process: the time of a step, the longest hold of the loop, and the slowest waits."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agent_runtime_core.cli.worker import THRESHOLDS
from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner

from .floor import Line, Size, in_turns, percentile
from .jobs import STEPS, Jobs

AT_ONCE = 100, 1_000, 4_000  # runs
FLAT = 1.3
HELD = 20.0  # milliseconds
BUSY, SAMPLES = 16, 300
P99 = 10.0  # milliseconds
IN_PLACE = 0.02  # seconds after which the run waits for what follows


# -- many


@contextmanager
def _collector(thresholds: tuple[int, int, int]) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def many(size: Size) -> Iterator[Line]:
    """The steps of few and of very many runs at once."""
    configure(durability="normal")
    counts = [size.of(count, 4 * (n + 1)) for n, count in enumerate(AT_ONCE)]
    for thresholds, name in ((gc.get_threshold(), ""), (THRESHOLDS, ", collector of a worker")):
        each = [Jobs(size, "NORMAL", count) for count in counts]
        with _collector(thresholds):
            rates = in_turns(size.rounds(5), *(jobs.ours for jobs in each))
        costs = [1e6 / rate for rate in rates]
        for jobs, cost in zip(each, costs, strict=True):
            last = jobs is each[-1]
            row = f"{jobs.jobs} runs of {STEPS} steps at once{name}"
            yield Line(row, cost, "µs/step", costs[0], most=size.bar(FLAT) if last else None)
            yield Line(f"{row}, loop held", statistics.median(jobs.holds), "ms", most=size.bar(HELD),
                       note=f"worst of all rounds {max(jobs.holds):.1f} ms")  # fmt: skip


# -- tails


class _Busy(AgentRuntime):
    """Runs steps until it is stopped, and keeps the milliseconds of each."""

    key = "busy"

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.begun = asyncio.Semaphore(0)
        self.stopped = False

    async def run(self, ctx: RunContext) -> RunResult:
        self.begun.release()
        number = 0
        while not self.stopped:
            since = time.perf_counter()
            await ctx.step("work", _small, number, key=str(number))
            self.taken.append((time.perf_counter() - since) * 1e3)
            number += 1
        return RunResult()


async def _small(number: int) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"ok": True, "n": number}


class _Asks(AgentRuntime):
    """Keeps the times of its start, of its wake-up by a signal, and of the step after an approval."""

    key = "asks"

    def __init__(self) -> None:
        self.reached: dict[str, asyncio.Future[float]] = {}

    def after(self, what: str) -> asyncio.Future[float]:
        """Return a future for the time at which the run reaches a point."""
        return self.reached.setdefault(what, asyncio.get_running_loop().create_future())

    async def run(self, ctx: RunContext) -> RunResult:
        self._at("start")
        await ctx.wait_for_signal("go")
        self._at("signal")
        await ctx.approve("pay")
        await ctx.step("pay", self._paid)
        return RunResult()

    async def _paid(self) -> None:
        self._at("approve")

    def _at(self, what: str) -> None:
        self.after(what).set_result(time.perf_counter())


@asynccontextmanager
async def _worker(path: Path) -> AsyncIterator[tuple[AgentRunner, _Busy, _Asks]]:
    """A worker with busy runs."""
    busy, asks, registry = _Busy(), _Asks(), Registry()
    registry.register(busy)
    registry.register(asks)
    async with AgentRunner.open(path, registry=registry) as runner:
        for _ in range(BUSY):
            await runner.submit(busy)
        working = asyncio.create_task(runner.run_loop(concurrency=2 * BUSY, handle_signals=False))
        for _ in range(BUSY):
            await busy.begun.acquire()
        try:
            yield runner, busy, asks
        finally:
            busy.stopped = True
            runner.stop()
            await working


async def _samples(path: Path, count: int) -> dict[str, list[float]]:
    """Milliseconds of each kind of wait."""
    taken: dict[str, list[float]] = {"submit -> start": [], "signal -> wake": [], "approve -> next step": []}
    async with _worker(path) as (runner, busy, asks):

        async def measured(name: str, what: str, action: Callable[[], Awaitable[Any]]) -> Any:
            since = time.perf_counter()
            value = await action()
            taken[name].append((await asks.after(what) - since) * 1e3)
            return value

        for number in range(count):
            asks.reached.clear()
            run_id = await measured("submit -> start", "start", lambda: runner.submit(asks))
            await asyncio.sleep(IN_PLACE)
            await measured("signal -> wake", "signal", lambda: runner.signal(run_id, "go"))  # noqa: B023
            await asyncio.sleep(IN_PLACE)
            await measured("approve -> next step", "approve", lambda: runner.approve(run_id, "pay"))  # noqa: B023
            await asyncio.sleep(0.001 * (number % 7))
        return {"a durable step": busy.taken, **taken}


def tails(size: Size) -> Iterator[Line]:
    """The waits of one run under busy ones, at p50 and p99."""
    for durability in ("full", "normal"):
        configure(durability=durability)
        with size.file() as path:
            found = asyncio.run(_samples(path, size.of(SAMPLES, 3)))
        for name, taken in found.items():
            yield Line(f"{name} under {BUSY} busy runs, {durability.upper()}, p99", percentile(taken, 0.99), "ms",
                       most=size.bar(P99), note=f"p50 {statistics.median(taken):.2f} ms")  # fmt: skip
