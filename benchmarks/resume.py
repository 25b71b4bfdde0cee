"""How long a job of a thousand steps takes to come to its last one, when all others are recorded."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent_runtime_core.config import configure
from agent_runtime_core.runner import open_run
from agent_runtime_core.steps import Step, StepExecutor

from .floor import Line, Size, bare_commits, in_turns

STEPS = 1000
MOST = 10.0  # milliseconds


class _Stopped(Exception):
    pass


async def _small(ctx: Any, state: Any) -> dict[str, Any]:
    return {"ok": True, "n": 1}


async def _job(path: Path, count: int, last: Callable[[], dict[str, Any]]) -> float:
    """When the run was about to be opened."""

    async def end(ctx: Any, state: Any) -> dict[str, Any]:
        return last()

    steps = [*(Step(f"step-{n}", _small) for n in range(count - 1)), Step("last", end)]
    since = time.perf_counter()
    async with open_run(path, "job") as ctx:
        await StepExecutor(ctx).run(steps)
    return since


def _interrupted(path: Path, count: int) -> None:
    """Leave a run behind that was given back before its last step was done."""

    def stop() -> dict[str, Any]:
        raise asyncio.CancelledError

    try:
        asyncio.run(_job(path, count, stop))
    except asyncio.CancelledError:
        return
    raise AssertionError("the job was not interrupted")


def _resumed(path: Path, count: int) -> float:
    reached: list[float] = []

    def last() -> dict[str, Any]:
        reached.append(time.perf_counter())
        return {}

    since = asyncio.run(_job(path, count, last))
    return (reached[0] - since) * 1000


def _copy(source: Path, target: Path) -> None:
    shutil.copy(source, target)
    # Else the first commit of the resumed run would have to flush the copy.
    descriptor = os.open(target, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


def _selected(path: Path) -> float:
    since = time.perf_counter()
    conn = sqlite3.connect(path)
    found = conn.execute("SELECT * FROM record WHERE run = 'run' ORDER BY n").fetchall()
    took = time.perf_counter() - since
    conn.close()
    assert found
    return took * 1000


def rows(size: Size) -> Iterator[Line]:
    configure(durability="full")
    count = size.of(STEPS, 10)
    with size.file() as left, size.file() as bare:
        _interrupted(left, count)
        bare_commits(bare, "NORMAL", count)

        def ours() -> float:
            with size.file() as path:
                _copy(left, path)
                return _resumed(path, count)

        mine, floor = in_turns(size.rounds(25), ours, lambda: _selected(bare))
    most = None if size.tiny else MOST
    yield Line(f"resume with {count - 1} of {count} recorded", mine, "ms", most=most, beside=floor, note="one SELECT")
