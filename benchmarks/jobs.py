"""Many jobs at once in one process, beside a group commit of the same shape: each step suspends once, then commits."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

from agent_runtime_core.config import configure
from agent_runtime_core.runner import open_run
from agent_runtime_core.steps import Step, StepExecutor

from .floor import GroupCommit, Hold, Line, Size, in_turns

JOBS, STEPS = 200, 10
LEAST = 0.25
LONGEST = 5.0  # milliseconds


async def _small(ctx: Any, state: Any) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"ok": True, "n": 1}


class _Round:
    """One pass of all jobs: how many steps a second, and how long the loop was held meanwhile."""

    def __init__(self, size: Size, synchronous: str, jobs: int) -> None:
        self.size, self.synchronous, self.jobs = size, synchronous, jobs
        self.holds: list[float] = []
        self.whole: list[float] = []
        self.whole_holds: list[float] = []

    def ours(self) -> float:
        """Steps a second between the last job's opening and the last job's last record."""
        with self.size.file() as path:
            return asyncio.run(self._ours(str(path)))

    async def _ours(self, path: str) -> float:
        opened = 0
        start, finished, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        all_open = asyncio.Event()
        done = 0

        async def job(number: int) -> None:
            nonlocal opened, done
            async with open_run(path, f"job-{number}") as ctx:
                opened += 1
                if opened == self.jobs:
                    all_open.set()
                await start.wait()
                await StepExecutor(ctx).run([Step(f"step-{n}", _small) for n in range(STEPS)])
                done += 1
                if done == self.jobs:
                    finished.set()
                await end.wait()

        tasks = [asyncio.ensure_future(job(number)) for number in range(self.jobs)]
        await all_open.wait()
        async with Hold() as hold:
            await asyncio.sleep(0.01)
            since = time.perf_counter()
            start.set()
            await finished.wait()
            took = time.perf_counter() - since
        self.holds.append(hold.longest * 1000)
        end.set()
        await asyncio.gather(*tasks)
        return self.jobs * STEPS / took

    def ours_whole(self) -> float:
        """Steps a second with the opening and the ending of each job counted in."""
        with self.size.file() as path:
            return asyncio.run(self._ours_whole(str(path)))

    async def _ours_whole(self, path: str) -> float:
        async def job(number: int) -> None:
            async with open_run(path, f"job-{number}") as ctx:
                await StepExecutor(ctx).run([Step(f"step-{n}", _small) for n in range(STEPS)])

        async with open_run(path, "keeps-the-file-open"), Hold() as hold:
            since = time.perf_counter()
            await asyncio.gather(*(job(number) for number in range(self.jobs)))
            took = time.perf_counter() - since
        self.whole_holds.append(hold.longest * 1000)
        return self.jobs * STEPS / took

    def _floor(self, records: int) -> float:
        with self.size.file() as path:
            return asyncio.run(self._grouped(path, records))

    async def _grouped(self, path: Any, records: int) -> float:
        group = GroupCommit(path, self.synchronous)

        async def job(number: int) -> None:
            for n in range(records):
                await group.insert(f"job-{number}", n, json.dumps(await _small(None, None)))

        try:
            since = time.perf_counter()
            await asyncio.gather(*(job(number) for number in range(self.jobs)))
            return self.jobs * STEPS / (time.perf_counter() - since)
        finally:
            group.close()

    def floor(self) -> float:
        return self._floor(STEPS)

    def floor_whole(self) -> float:
        """The floor with a record for each job's opening and one for its ending."""
        return self._floor(STEPS + 2)


def rows(size: Size) -> Iterator[Line]:
    jobs = size.of(JOBS, 4)
    for synchronous in ("FULL", "NORMAL"):
        configure(durability=synchronous.lower())
        round_ = _Round(size, synchronous, jobs)
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
