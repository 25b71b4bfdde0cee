"""Durable steps on SQLite beside a bare commit of one small record in the same mode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from agent_runtime_core.config import configure
from agent_runtime_core.runner import open_run
from agent_runtime_core.steps import Step, StepExecutor

from .floor import Line, Size, bare_commits, in_turns, size_on_disk

LENGTHS = ((10, 40), (100, 15), (1000, 7))  # steps, rounds
FLAT = 1.2
PAUSE = 200e-6  # seconds
KEPT = 0.4e6  # bytes for 1000 small steps


async def _small(ctx: Any, state: Any) -> dict[str, Any]:
    return {"ok": True, "n": 1}


async def chain(ctx: Any, count: int) -> None:
    await StepExecutor(ctx).run([Step(f"step-{n}", _small) for n in range(count)])


def imperative(on_in_doubt: str) -> Callable[[Any, int], Awaitable[None]]:
    async def steps(ctx: Any, count: int) -> None:
        for n in range(count):
            await ctx.step(f"step-{n}", _value, n, on_in_doubt=on_in_doubt)

    return steps


async def _value(n: int) -> dict[str, Any]:
    return {"ok": True, "n": n}


def seconds(path: Path, run: Callable[[Any, int], Awaitable[None]], count: int, run_id: str = "bench") -> float:
    """Seconds from the first step to the last one's record, in a run that is open."""

    async def measured() -> float:
        async with open_run(path, run_id) as ctx:
            since = time.perf_counter()
            await run(ctx, count)
            return time.perf_counter() - since

    return asyncio.run(measured())


def _pair(
    size: Size, synchronous: str, rounds: int, count: int, run: Callable[[Any, int], Awaitable[None]]
) -> tuple[float, float]:
    """Microseconds per step, ours and the floor's."""

    def ours() -> float:
        with size.file() as path:
            return seconds(path, run, count)

    def bare() -> float:
        with size.file() as path:
            return bare_commits(path, synchronous, count)

    configure(durability=synchronous.lower())
    mine, floor = in_turns(size.rounds(rounds), ours, bare)
    return mine / count * 1e6, floor / count * 1e6


def rows(size: Size) -> Iterator[Line]:
    for synchronous, bars in (("FULL", (2.0, 2.0, 2.5)), ("NORMAL", (6.0, 6.0, 6.0))):
        measured: list[float] = []
        for (count, rounds), bar in zip(LENGTHS, bars, strict=True):
            count = size.of(count, 5 + len(measured))
            mine, floor = _pair(size, synchronous, rounds, count, chain)
            measured.append(mine)
            yield Line(f"chain {synchronous} of {count}", mine, "µs/step", floor, most=bar)
        yield Line(f"chain {synchronous}, longest against shortest", measured[-1], "µs/step", measured[0], most=FLAT)
    yield _paused(size)
    for policy, bar in (("retry", 2.0), ("fail", 3.0)):
        for synchronous in ("FULL", "NORMAL"):
            mine, floor = _pair(size, synchronous, 15, size.of(100, 5), imperative(policy))
            note = "" if synchronous == "FULL" else "no bar"
            most = bar if synchronous == "FULL" else None
            yield Line(f"ctx.step {synchronous} on_in_doubt={policy!r}", mine, "µs/step", floor, most=most, note=note)
    yield store(size)


def _paused(size: Size) -> Line:
    """What a pause between two flushes costs: steps have one, the floor has none."""
    count = size.of(500, 5)

    def commits(pause: float) -> float:
        with size.file() as path:
            return bare_commits(path, "FULL", count, pause=pause)

    paused, bare = in_turns(size.rounds(7), lambda: commits(PAUSE), lambda: commits(0.0))
    row = f"a bare commit in FULL, {PAUSE * 1e6:.0f} µs after the one before"
    return Line(row, paused / count * 1e6, "µs", bare / count * 1e6, note="what the disk makes of a pause")


def store(size: Size) -> Line:
    """What a thousand small steps leave on disk, once the file is closed."""
    count = size.of(1000, 100)
    configure(durability="normal")
    with size.file() as path:
        seconds(path, chain, 0, "nothing")
        before = size_on_disk(path)
        seconds(path, chain, count)
        grown = size_on_disk(path) - before
    return Line(f"store after {count} steps", grown / 1e6, "MB", most=KEPT * count / 1000 / 1e6)
