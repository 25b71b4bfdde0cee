"""One run that grows: its state, its number of steps, its messages, and one large result."""

from __future__ import annotations

import asyncio
import base64
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from agent_runtime_core.config import configure
from agent_runtime_core.runner import open_run
from agent_runtime_core.steps import Step, StepExecutor

from .floor import Hold, Line, Size, in_turns, size_on_disk
from .loop import pages_read

STATE_STEPS = 800, 100  # large and small
STATE_MS, STATE_DISK = 1.0, 10.0  # milliseconds a step, MB
LONG_STEPS = 100_000, 10_000
LONG_FLAT = 1.2
RESUMED = 2.5  # seconds
WINDOW = 1_000  # steps at the end of a long run, and from step 100 on
HISTORY_PAGES, HISTORY_CHARACTERS, HISTORY_DISK = 95, 4_100, 0.75  # MB
SDK_PAGES, SDK_CHARACTERS, SDK_DISK = 100, 5_000, 1.3  # times the text
LARGE, SMALL = 10_000_000, 1_000  # characters of a result
LARGE_HOLD = 10.0  # milliseconds


def noise(seed: int, characters: int) -> str:
    """Return random words in base64, which compression shortens by a quarter at most."""
    text = base64.b64encode(Random(seed).randbytes(characters)).decode()
    return " ".join(text[start : start + 9] for start in range(0, len(text), 9))[:characters]


# -- state


def _adding(number: int) -> Callable[[Any, Any], Awaitable[dict[str, Any]]]:
    async def add(ctx: Any, state: Any) -> dict[str, Any]:
        state[f"part-{number}"] = noise(number, 1_000)
        return {}

    return add


async def _add_state(path: Path, count: int) -> float:
    """Return the milliseconds of a step, on average."""
    async with open_run(path, "bench") as ctx:
        steps = [Step(f"step-{n}", _adding(n)) for n in range(count)]
        since = time.perf_counter()
        await StepExecutor(ctx).run(steps)
        return (time.perf_counter() - since) / count * 1e3


def _memory(path: Path, count: int) -> float:
    """Return the MB that the run had allocated at most."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        asyncio.run(_add_state(path, count))
        return (tracemalloc.get_traced_memory()[1] - before) / 1e6
    finally:
        tracemalloc.stop()


def state(size: Size) -> Iterator[Line]:
    """A state to which each step adds 1 KB."""
    configure(durability="normal")
    large, small = (size.of(count, count // 20) for count in STATE_STEPS)
    disk: dict[int, float] = {}

    def measure(count: int) -> float:
        with size.file() as path:
            took = asyncio.run(_add_state(path, count))
            disk[count] = size_on_disk(path) / 1e6
        return took

    mine, fewer = in_turns(size.rounds(3), lambda: measure(large), lambda: measure(small))
    yield Line(f"step {large} with 1 KB of state each", mine, "ms/step", most=size.bar(STATE_MS), beside=fewer,
               note=f"{small} steps")  # fmt: skip
    yield Line(f"store after {large} KB of state", disk[large], "MB", most=size.bar(STATE_DISK), beside=disk[small],
               note=f"{small} steps")  # fmt: skip
    with size.file() as path, size.file() as other:
        used, less = _memory(path, large), _memory(other, small)
    yield Line(f"memory of a run that adds {large} KB of state", used, "MB", beside=less, note=f"{small} steps")


# -- many steps


class _Times:
    """Keeps the times at which the steps of a run began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    async def step(self, ctx: Any, state: Any) -> dict[str, Any]:
        self.began.append(time.perf_counter())
        return {"ok": True, "n": 1}

    async def call(self, n: int) -> dict[str, Any]:
        self.began.append(time.perf_counter())
        return {"ok": True, "n": n}


async def _listed(ctx: Any, count: int, times: _Times) -> None:
    await StepExecutor(ctx).run([Step(f"step-{n}", times.step) for n in range(count)])


async def _called(ctx: Any, count: int, times: _Times) -> None:
    for n in range(count):
        await ctx.step(f"step-{n}", times.call, n)


_WAYS = {"StepExecutor": _listed, "ctx.step": _called}


def _interrupted(path: Path, way: str, count: int) -> _Times:
    """Record so many steps of a run, and interrupt it after them."""

    async def run(times: _Times) -> None:
        async with open_run(path, "bench") as ctx:
            await _WAYS[way](ctx, count, times)
            raise asyncio.CancelledError

    times = _Times()
    try:
        asyncio.run(run(times))
    except asyncio.CancelledError:
        return times
    raise AssertionError("the run was not interrupted")


async def _resumed(path: Path, way: str, count: int) -> float:
    """Return the seconds from before the run is opened until all recorded steps are passed."""
    since = time.perf_counter()
    async with open_run(path, "bench") as ctx:
        times = _Times()
        await _WAYS[way](ctx, count, times)
        took = time.perf_counter() - since
    assert not times.began, "a recorded step ran again"
    return took


def _typical(began: list[float]) -> float:
    """The median of the time between two steps, in microseconds: one slow flush does not count."""
    return statistics.median(later - earlier for earlier, later in pairwise(began)) * 1e6


def long(size: Size) -> Iterator[Line]:
    """One run of very many steps, and its resumption in a fresh runner."""
    configure(durability="normal")
    many, few = (size.of(count, count // 1_000) for count in LONG_STEPS)
    window, start = size.of(WINDOW, 5), size.of(100, 3)
    for way in _WAYS:
        with size.file() as path, size.file() as other:
            began = _interrupted(path, way, many).began
            _interrupted(other, way, few)
            last, early = _typical(began[-1 - window :]), _typical(began[start : start + window + 1])
            taken, less = in_turns(
                size.rounds(3),
                lambda: asyncio.run(_resumed(path, way, many)),  # noqa: B023
                lambda: asyncio.run(_resumed(other, way, few)),  # noqa: B023
            )
        yield Line(f"{way}, the last {window} of {many} steps against {start} to {start + window}",
                   last, "µs/step", early, most=size.bar(LONG_FLAT))  # fmt: skip
        yield Line(f"{way}, resume with {many} recorded", taken, "s", most=size.bar(RESUMED), beside=less,
                   note=f"{few} recorded")  # fmt: skip


# -- messages


def _agent(size: Size, pages: int, characters: int) -> tuple[float, float, float]:
    """MB of text and of the file, and seconds, of an agent that reads so many pages."""
    configure(durability="normal")

    async def page(number: int) -> str:
        """A page of text."""
        return noise(number, characters)

    with size.file() as path:
        since = time.perf_counter()
        text = asyncio.run(pages_read(path, pages, page))
        took = time.perf_counter() - since
        return text / 1e6, size_on_disk(path) / 1e6, took


def history(size: Size) -> Iterator[Line]:
    """An agent's history of text that compresses little."""
    text, disk, _ = _agent(size, size.of(HISTORY_PAGES, 3), HISTORY_CHARACTERS)
    yield Line(f"store of a history of {text:.2f} MB that compresses little", disk, "MB", most=size.bar(HISTORY_DISK))


def sdk890(size: Size) -> Iterator[Line]:
    """Model calls with tool results of 5 KB in one run, as in temporalio/sdk-python#1890."""
    pages = size.of(SDK_PAGES, 3)
    text, disk, took = _agent(size, pages, SDK_CHARACTERS)
    row = f"{pages + 1} model calls with 5 KB tool results"
    yield Line(f"{row}, store against text", disk, "MB", text, most=size.bar(SDK_DISK))
    yield Line(f"{row}, time", took, "s")


# -- one large result


async def _returns(characters: int) -> dict[str, Any]:
    return {"text": "x" * characters}


async def _held(path: Path, characters: int) -> float:
    """Milliseconds that the loop was held by a step with so large a result."""
    async with open_run(path, "bench") as ctx:
        await ctx.step("before", _returns, 1)
        async with Hold() as hold:
            await asyncio.sleep(0.01)
            await ctx.step("measured", _returns, characters, max_result_bytes=16 * 1024 * 1024)
            await asyncio.sleep(0.01)
        return hold.longest * 1e3


def large(size: Size) -> Iterator[Line]:
    """A step with a result of 10 MB."""
    configure(durability="full")
    characters = size.of(LARGE, SMALL)

    def held(characters: int) -> float:
        with size.file() as path:
            return asyncio.run(_held(path, characters))

    mine, floor = in_turns(size.rounds(9), lambda: held(characters), lambda: held(SMALL))
    yield Line(f"loop held by a step with a result of {characters / 1e6:g} MB", mine, "ms", most=size.bar(LARGE_HOLD),
               beside=floor, note="a result of 1 KB")  # fmt: skip
