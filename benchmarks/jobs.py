"""Many jobs at once in one process, beside a group commit of the same shape: each step suspends once, then commits."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.steps import Step, StepExecutor

from .floor import GroupCommit, Hold, Line, Size, in_turns

JOBS, STEPS = 200, 10
LEAST = 0.25
LONGEST = 5.0  # milliseconds
AT_ONCE = 8  # jobs started in one turn of the loop: all at once would hold it, whatever they run on


async def _small(ctx: Any, state: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"ok": True, "n": 1}


class _Job(AgentRuntime):
    key = "job"

    def __init__(self, jobs: int, *, together: bool) -> None:
        self.ready, self.finished = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.starts = [asyncio.Event() for _ in range(jobs)]
        self.end = asyncio.Event()
        if not together:
            self.end.set()
            for start in self.starts:
                start.set()

    async def run(self, ctx: RunContext) -> RunResult:
        self.ready.release()
        await self.starts[ctx.params["number"]].wait()
        await StepExecutor(ctx).run([Step(f"step-{n}", _small) for n in range(STEPS)])
        self.finished.release()
        await self.end.wait()
        return RunResult()


async def _few_at_once(jobs: int, start: Callable[[int], Any]) -> list[Any]:
    started = []
    for number in range(jobs):
        started.append(start(number))
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
    return started


class Jobs:
    """One pass of all jobs: how many steps a second, and how long the loop was held meanwhile."""

    def __init__(self, size: Size, synchronous: str, jobs: int) -> None:
        self.size, self.synchronous, self.jobs = size, synchronous, jobs
        self.holds: list[float] = []
        self.whole_holds: list[float] = []

    def _measured(self, pass_: Callable[[Path], Awaitable[float]]) -> float:
        async def rate() -> float:
            with self.size.file() as path:
                return self.jobs * STEPS / await pass_(path)

        return asyncio.run(rate())

    def ours(self) -> float:
        """Between the start of the first job's first step and the last job's last record; all are open before."""
        return self._measured(self._ours)

    async def _ours(self, path: Path) -> float:
        agent = _Job(self.jobs, together=True)
        async with AgentRunner.open(path) as runner:
            running = await _few_at_once(self.jobs, lambda number: self._job(runner, agent, number))
            for _ in running:
                await agent.ready.acquire()
            async with Hold() as hold:
                await asyncio.sleep(0.01)
                since = time.perf_counter()
                await _few_at_once(self.jobs, lambda number: agent.starts[number].set())
                for _ in running:
                    await agent.finished.acquire()
                took = time.perf_counter() - since
            agent.end.set()
            await asyncio.gather(*running)
        self.holds.append(hold.longest * 1000)
        return took

    def ours_whole(self) -> float:
        """With the opening and the ending of each job counted in."""
        return self._measured(self._ours_whole)

    async def _ours_whole(self, path: Path) -> float:
        agent = _Job(self.jobs, together=False)
        async with AgentRunner.open(path) as runner, Hold() as hold:
            since = time.perf_counter()
            await asyncio.gather(*await _few_at_once(self.jobs, lambda number: self._job(runner, agent, number)))
            took = time.perf_counter() - since
        self.whole_holds.append(hold.longest * 1000)
        return took

    @staticmethod
    def _job(runner: AgentRunner, agent: AgentRuntime, number: int) -> asyncio.Future[RunResult]:
        return asyncio.ensure_future(
            runner.execute(agent, f"job-{number}", {"params": {"number": number}}, raise_on_error=True)
        )

    def floor(self) -> float:
        return self._measured(lambda path: self._grouped(path, STEPS))

    def floor_whole(self) -> float:
        """The floor with a record for each job's opening and one for its ending."""
        return self._measured(lambda path: self._grouped(path, STEPS + 2))

    async def _grouped(self, path: Path, records: int) -> float:
        group = GroupCommit(path, self.synchronous)

        async def job(number: int) -> None:
            for n in range(records):
                await group.insert(f"job-{number}", n, json.dumps(await _small(None, None)))

        try:
            since = time.perf_counter()
            await asyncio.gather(*(job(number) for number in range(self.jobs)))
            return time.perf_counter() - since
        finally:
            group.close()


def rows(size: Size) -> Iterator[Line]:
    jobs = size.of(JOBS, 4)
    for synchronous in ("FULL", "NORMAL"):
        configure(durability=synchronous.lower())
        round_ = Jobs(size, synchronous, jobs)
        ours, floor, whole, whole_floor = in_turns(
            size.rounds(7), round_.ours, round_.floor, round_.ours_whole, round_.floor_whole
        )
        name = f"{jobs} jobs of {STEPS} steps {synchronous}"
        yield Line(name, ours, "steps/s", floor, least=LEAST)
        yield _hold(f"{name}, loop held", round_.holds)
        yield Line(f"{name}, opening and ending counted in", whole, "steps/s", whole_floor, least=LEAST)
        yield _hold(f"{name}, opening and ending counted in, loop held", round_.whole_holds)


def _hold(name: str, holds: list[float]) -> Line:
    return Line(name, statistics.median(holds), "ms", most=LONGEST, note=f"worst of all rounds {max(holds):.1f} ms")
