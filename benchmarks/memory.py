"""Steps in memory, all their events included, beside a bare cycle of the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from agent_runtime_core.runner import open_run

from .chain import FLAT, chain, imperative
from .floor import Line, Size, in_turns

BAR = 5.0


def _cycles(count: int) -> float:
    async def bare() -> float:
        since = time.perf_counter()
        for _ in range(count):
            await asyncio.sleep(0)
        return time.perf_counter() - since

    return asyncio.run(bare()) / count * 1e6


def _steps(count: int, imperatively: bool = False) -> float:
    async def ours() -> float:
        async with open_run("memory://", "bench") as ctx:
            since = time.perf_counter()
            await (imperative("retry") if imperatively else chain)(ctx, count)
            return time.perf_counter() - since

    return asyncio.run(ours()) / count * 1e6


def rows(size: Size) -> Iterator[Line]:
    short, long = size.of(100, 10), size.of(1000, 20)
    rounds = size.rounds(15)
    brief, cycle = in_turns(rounds, lambda: _steps(short), lambda: _cycles(short))
    yield Line(f"chain in memory of {short}", brief, "µs/step", cycle, most=BAR)
    far, cycle = in_turns(rounds, lambda: _steps(long), lambda: _cycles(long))
    yield Line(f"chain in memory of {long}", far, "µs/step", cycle, most=BAR)
    yield Line("chain in memory, longest against shortest", far, "µs/step", brief, most=FLAT)
    each, cycle = in_turns(rounds, lambda: _steps(long, imperatively=True), lambda: _cycles(long))
    yield Line(f"ctx.step in memory, {long} of them", each, "µs/step", cycle, note="no bar")
