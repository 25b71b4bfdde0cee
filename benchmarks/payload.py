"""Steps with results of 100 KB, beside encoding and committing the same."""

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

from .floor import Line, Size, bare_commits, in_turns

STEPS = 50
MOST = 1.5
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


def rows(size: Size) -> Iterator[Line]:
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
