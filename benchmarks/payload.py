"""Steps with results of 100 KB, beside encoding and committing the same, and how long one of 10 MB holds the loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_runtime_core.config import configure
from agent_runtime_core.runner import open_run
from agent_runtime_core.steps import Step, StepExecutor

from .floor import Hold, Line, Size, bare_commits, in_turns

STEPS = 50
MOST = 1.5
LONGEST = 10.0  # milliseconds
_SENTENCE = 'The quick brown fox jumps over the lazy dog, and says "hello"; the dog does not care.\n'
RESULT = {"text": (_SENTENCE * (100_000 // len(_SENTENCE) + 1))[:100_000]}


async def _large(ctx: Any, state: Any) -> dict[str, Any]:
    return dict(RESULT)


def _steps(path: Path, count: int) -> float:
    async def ours() -> float:
        async with open_run(path, "bench") as ctx:
            since = time.perf_counter()
            await StepExecutor(ctx).run([Step(f"step-{n}", _large) for n in range(count)])
            return time.perf_counter() - since

    return asyncio.run(ours())


def _held(path: Path, value: Any) -> float:
    """Return how late the loop was at most, in milliseconds, while a step returned the value and it was stored."""

    async def late() -> float:
        async with open_run(path, "bench") as ctx, Hold() as hold:
            await asyncio.sleep(0.01)
            hold.longest = 0.0
            await ctx.step("large", lambda: value, max_result_bytes=16 * 1024 * 1024)
            await asyncio.sleep(0.01)
            return hold.longest * 1000

    return asyncio.run(late())


def _idle() -> float:
    """Return the same of a loop that only waits: how late other programs make it."""

    async def late() -> float:
        async with Hold() as hold:
            await asyncio.sleep(0.2)
            return hold.longest * 1000

    return asyncio.run(late())


def _large_results(size: Size) -> Iterator[Line]:
    configure(durability="full")
    items = size.of(35_000, 3_500)
    for name, value in (
        ("one string", "x" * (items * 280)),
        ("a list of small dicts", [{"n": n, "text": "x" * 230} for n in range(items)]),
    ):

        def held(value: Any = value) -> float:
            with size.file() as path:
                return _held(path, value)

        late, idle = in_turns(size.rounds(5), held, _idle)
        row = f"loop held by a result of {items // 3500} MB, {name}"
        yield Line(row, late, "ms", most=LONGEST, beside=idle, note="beside: a loop that only waits")


def rows(size: Size) -> Iterator[Line]:
    yield from _large_results(size)
    count = size.of(STEPS, 3)
    for synchronous in ("FULL", "NORMAL"):
        configure(durability=synchronous.lower())

        def ours() -> float:
            with size.file() as path:
                return _steps(path, count)

        def floor(synchronous: str = synchronous) -> float:
            with size.file() as path:
                return bare_commits(path, synchronous, count, lambda: json.dumps(RESULT))

        mine, bare = in_turns(size.rounds(9), ours, floor)
        most = MOST if synchronous == "FULL" else None
        note = "" if synchronous == "FULL" else "no bar"
        name = f"{count} results of 100 KB {synchronous}"
        yield Line(name, mine / count * 1e6, "µs/step", bare / count * 1e6, most=most, note=note)
