"""Processes beside the one that measures, and the time from what happens here to what they say."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAUSE = (0.02, 0.52)  # seconds between two samples, uneven so that none follows the beat of a poll of half a second

Process = subprocess.Popen[str]


@contextlib.contextmanager
def started(count: int, module: str, *arguments: str) -> Iterator[list[Process]]:
    """So many processes that have said they are ready; killed at the end."""
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", *arguments]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for _ in range(count)]
    try:
        for each in processes:
            assert each.stdout is not None
            if each.stdout.readline() != "ready\n":
                raise RuntimeError(f"{module} {' '.join(arguments)} was not ready: code {each.wait(timeout=10)}")
        yield processes
    finally:
        for each in processes:
            each.kill()
        for each in processes:
            each.communicate()


def go(processes: list[Process]) -> None:
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()


async def samples(count: int, seconds: float, act: Callable[[], Awaitable[object]], other: Process) -> list[float]:
    """Milliseconds from before `act()` to the time the other process prints: `count` of them, or what fits.

    One more comes before, which is not counted: with it the other process has begun.
    """
    assert other.stdout is not None
    taken: list[float] = []
    chance, until = random.Random(7), time.monotonic() + seconds
    while len(taken) <= count and (len(taken) < 2 or time.monotonic() < until):
        await asyncio.sleep(chance.uniform(*PAUSE))
        since = time.monotonic()
        await act()
        line = await asyncio.to_thread(other.stdout.readline)
        if not line:
            raise RuntimeError(f"the other process ended with code {other.wait(timeout=10)}")
        taken.append((float(line) - since) * 1000)
    return taken[1:]
