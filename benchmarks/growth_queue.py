"""A file with very many runs: the time of lists, claims and wake-ups, and the time until it is open."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core._core.ids import run_uuid
from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.queue.records import COLUMNS, RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig

from .floor import Line, Size, in_turns

LISTED = 100_000
LIST = 2.0  # milliseconds
QUEUED, PARKED, FEW = 2_000_000, 50_000, 1_000
FLAT = 1.3
OPEN = 100.0  # milliseconds
SAMPLES = 40
RARE = 20  # runs of the rarest status
_INSERT = f"INSERT INTO arc_runs ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"


class _Ends(AgentRuntime):
    key = "ends"

    async def run(self, ctx: RunContext) -> RunResult:
        if ctx.params.get("fails"):
            raise ValueError("the rare case")
        return RunResult()


class _Waits(AgentRuntime):
    key = "waits"

    def __init__(self) -> None:
        self.woken: asyncio.Future[float] | None = None

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.wait_for_signal("go")
        if self.woken is not None:
            self.woken.set_result(time.perf_counter())
        return RunResult()


async def _row(runner: AgentRunner, run_id: Any) -> RunRow:
    return await runner.queue.require(run_id)


def _copy(path: Path, copies: Iterable[tuple[RunRow, int]]) -> None:
    """Store so many copies of each row that the library wrote, each as another run."""
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        for pragma in ("journal_mode=DELETE", "journal_mode=OFF", "synchronous=OFF", "cache_size=-1000000"):
            conn.execute(f"PRAGMA {pragma}")
        number = conn.execute("SELECT max(n) FROM arc_runs").fetchone()[0]
        conn.execute("BEGIN")
        for row, count in copies:
            conn.executemany(_INSERT, _copies_of(row, number, count))
            number += count
        conn.execute("COMMIT")
        conn.execute("PRAGMA journal_mode=WAL")


def _copies_of(row: RunRow, number: int, count: int) -> Iterator[RunRow]:
    for n in range(number + 1, number + count + 1):
        yield row.with_values(run_id=str(run_uuid(None, SYSTEM)[0]), created_at=row.created_at + n / 1e4, arrival=n)


def _runner(path: Path, *agents: AgentRuntime, park_after: float = 5.0) -> AgentRunner:
    registry = Registry()
    for agent in agents:
        registry.register(agent)
    config = RunnerConfig(max_retries=1, park_after=park_after)
    return AgentRunner.open(path, registry=registry, config=config)


# -- listing


async def _finished(path: Path) -> list[RunRow]:
    """Return the rows of a run that succeeded and of one that failed."""
    agent = _Ends()
    async with _runner(path, agent) as runner:
        for run_id, fails in (("succeeded", False), ("failed", True)):
            await runner.execute(agent, run_id, {"params": {"fails": fails}})
        return [await _row(runner, run_id) for run_id in ("succeeded", "failed")]


def _filled(path: Path, count: int) -> None:
    succeeded, failed = asyncio.run(_finished(path))
    _copy(path, [(succeeded, count // 2), (failed, RARE), (succeeded, count // 2 - RARE)])


async def _list(runner: AgentRunner, newest_first: bool) -> float:
    since = time.perf_counter()
    found = await runner.runs(status="failed", newest_first=newest_first)
    took = time.perf_counter() - since
    assert len(found) == RARE + 1
    return took * 1e3


def listing(size: Size) -> Iterator[Line]:
    """A list of the runs with the rarest status."""
    count, few = size.of(LISTED, 200), size.of(FEW, 100)
    with size.file() as path, size.file() as other, asyncio.Runner() as loop:
        _filled(path, count)
        _filled(other, few)
        many, less = _runner(path), _runner(other)
        for newest_first in (False, True):
            taken, floor = in_turns(
                size.rounds(SAMPLES),
                lambda: loop.run(_list(many, newest_first)),  # noqa: B023
                lambda: loop.run(_list(less, newest_first)),  # noqa: B023
            )
            order = ", newest first" if newest_first else ""
            yield Line(f"list of {RARE + 1} failed runs of {count}{order}", taken, "ms", most=size.bar(LIST),
                       beside=floor, note=f"of {few}")  # fmt: skip
        loop.run(many.close())
        loop.run(less.close())


# -- queued


class _Backlog:
    """A file with queued runs, and a worker for runs that wait in it."""

    def __init__(self, path: Path, queued: int, parked: int, samples: int) -> None:
        self.path, self.samples = path, samples
        self.ends, self.waits = _Ends(), _Waits()
        self.parked: list[Any] = []
        asyncio.run(self._fill(queued, parked))

    async def _fill(self, queued: int, parked: int) -> None:
        """Park some runs, queue one, and copy both."""
        async with self._open() as runner:
            self.parked = [await runner.submit(self.waits) for _ in range(self.samples)]
            queued_id = await runner.submit(self.ends)
            working = asyncio.create_task(runner.run_loop(concurrency=self.samples, handle_signals=False))
            while len(await runner.runs(status="waiting")) < self.samples:  # noqa: ASYNC110 - no event says it
                await asyncio.sleep(0.05)
            runner.stop()
            await working
            rows = [await _row(runner, queued_id), await _row(runner, self.parked[0])]
        _copy(self.path, zip(rows, (queued, parked), strict=True))

    def _open(self) -> AgentRunner:
        return _runner(self.path, self.waits, park_after=0.01)

    async def opened(self) -> float:
        """Return the milliseconds until a fresh runner has read a run."""
        since = time.perf_counter()
        runner = self._open()
        await runner.get_run(self.parked[0])
        took = time.perf_counter() - since
        await runner.close()
        return took * 1e3

    async def begin(self) -> None:
        self.runner = self._open()
        self.working = asyncio.create_task(self.runner.run_loop(handle_signals=False))
        await asyncio.sleep(0)

    async def claimed(self) -> float:
        """Return the milliseconds of a claim."""
        queue = self.runner.queue
        since = time.perf_counter()
        run = await queue.claim("bench", agent_keys=[self.ends.key])
        took = time.perf_counter() - since
        assert run is not None
        await queue.release(run.run_id, "bench", True)
        return took * 1e3

    async def woken(self) -> float:
        """Return the milliseconds from a signal to the next line of a parked run."""
        self.waits.woken = asyncio.get_running_loop().create_future()
        run_id = self.parked.pop()
        since = time.perf_counter()
        await self.runner.signal(run_id, "go")
        took = await self.waits.woken - since
        await self.runner.wait(run_id)
        return took * 1e3

    async def end(self) -> None:
        self.runner.stop()
        await self.working
        await self.runner.close()


def queued(size: Size) -> Iterator[Line]:
    """Claims, wake-ups and opening of a file with very many runs."""
    configure(durability="normal")
    count, parked, few = size.of(QUEUED, 400), size.of(PARKED, 10), size.of(FEW, 40)
    samples = size.of(SAMPLES, 2)
    with size.file() as path, size.file() as other, asyncio.Runner() as loop:
        long = _Backlog(path, count, parked, samples)
        short = _Backlog(other, few, few * parked // count, samples)
        name = f"{count} queued and {parked} parked runs"
        taken, floor = in_turns(size.rounds(9), *(lambda of=of: loop.run(of.opened()) for of in (long, short)))
        yield Line(f"open a file of {name}", taken, "ms", most=size.bar(OPEN), beside=floor, note=f"{few} queued")
        for each in (long, short):
            loop.run(each.begin())
        for what in ("claimed", "woken"):
            taken, floor = in_turns(
                samples,
                *(lambda of=of: loop.run(getattr(of, what)()) for of in (long, short)),  # noqa: B023
            )
            row = {"claimed": "claim", "woken": "wake a parked run"}[what]
            yield Line(f"{row} among {name}, against {few}", taken, "ms", floor, most=size.bar(FLAT))
        for each in (long, short):
            loop.run(each.end())
