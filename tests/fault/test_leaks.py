"""Hundreds of runs through one worker leave nothing in its process: no descriptor, no object, no memory."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import os
import sys
import tracemalloc
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from tests.support.fault_runs import KINDS, Store, settings, store, until

RUNS = 10  # of each kind, in a round
ROUNDS = 4  # what is kept for each run grows in all of them, what else the process does grows in some
BYTES = 256  # for each run of a round, less than any row, record or text of one

DESCRIPTORS = next((place for place in ("/proc/self/fd", "/dev/fd") if os.path.isdir(place)), None)
#: What is not ours and a run is made of.
MADE = (asyncio.Future, types.CoroutineType, types.AsyncGeneratorType, types.GeneratorType, types.FrameType)


class Held:
    """What this process has at one moment."""

    def __init__(self) -> None:
        for cache in _caches():  # bounded, and not full yet
            cache.cache_clear()
        gc.collect()
        self.descriptors = len(os.listdir(DESCRIPTORS)) if DESCRIPTORS else 0
        self.objects = Counter(
            type(each).__qualname__ for each in gc.get_objects() if _is_ours(type(each)) or isinstance(each, MADE)
        )
        self.bytes = tracemalloc.get_traced_memory()[0]


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith("agent_runtime_core")


def _caches() -> Iterator[Any]:
    for name, module in tuple(sys.modules.items()):
        if name.startswith("agent_runtime_core"):
            yield from (each for each in vars(module).values() if isinstance(each, functools._lru_cache_wrapper))


def agents(here: Store) -> None:
    async def plain(ctx: Any) -> int:
        await ctx.emit("said", {"n": 1})
        return len(await asyncio.gather(ctx.step("a", lambda: 1), ctx.step("b", asyncio.sleep, 0)))

    async def parent(ctx: Any) -> Any:
        return (await ctx.call("plain", {})).final_output["value"]

    async def waits(ctx: Any) -> Any:
        return await ctx.wait_for_signal("go")

    async def fails(ctx: Any) -> None:
        raise ValueError("no")

    for code in (plain, parent, waits, fails):
        here.agent(code.__name__, code)


async def followed(runner: AgentRunner, run: UUID) -> str:
    """The type of its last event."""
    return [event.event_type async for event in runner.stream(run)][-1]


async def a_round(runner: AgentRunner) -> None:
    kinds = [kind for kind in ("plain", "parent", "waits", "fails") for _ in range(RUNS)]
    runs = await asyncio.gather(*map(runner.submit, kinds))
    parked = runs[2 * RUNS : 3 * RUNS]
    following = [asyncio.create_task(followed(runner, run)) for run in runs[::6]]
    await asyncio.gather(*(runner.signal(run, "go", 2) for run in parked[::2]))
    await asyncio.gather(*map(runner.cancel, parked[1::2]))
    ends = Counter(result.status for result in await asyncio.gather(*(runner.wait(run, timeout=30) for run in runs)))
    half = RUNS // 2
    assert ends == {RunStatus.SUCCEEDED: 2 * RUNS + half, RunStatus.CANCELLED: half, RunStatus.FAILED: RUNS}
    assert {(await each).split(".")[0] for each in following} == {"run"}
    # In memory the store is in this process too.
    await asyncio.gather(*[runner.discard(info.run_id) for info in await runner.runs(limit=10 * RUNS)])


@pytest.mark.parametrize("kind", KINDS)
async def test_hundreds_of_runs_leave_nothing_in_their_process(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "agent_runtime_core")  # pytest keeps the warning of each failed run
    tracemalloc.start()
    try:
        async with store(kind, tmp_path) as here:
            agents(here)
            runner = here.runner(settings(max_retries=1, park_after=0))
            working = asyncio.create_task(runner.run_loop(handle_signals=False, concurrency=8))
            held = []
            for _ in range(ROUNDS + 1):
                await a_round(runner)
                await until(lambda: not runner._worker._executions)
                held.append(Held())
            runner.stop()
            await working
    finally:
        tracemalloc.stop()
    steps = list(itertools.pairwise(held))
    assert min(after.descriptors - before.descriptors for before, after in steps) <= 0, "descriptors"
    kept = functools.reduce(Counter.__and__, (after.objects - before.objects for before, after in steps))
    assert kept == {}, "objects that there are more of after each round"
    assert min(after.bytes - before.bytes for before, after in steps) < 4 * RUNS * BYTES


async def test_a_run_that_has_ended_is_not_remembered_by_the_connection_that_writes(tmp_path: Path) -> None:
    """Which remembers others for as long as nobody else writes to the file."""
    async with store("sqlite", tmp_path) as here:
        agents(here)
        runner = here.runner(settings(max_retries=1, park_after=0))
        runs = [await runner.submit(kind) for kind in ("plain", "parent", "waits", "fails")]
        await runner.signal(runs[2], "go", 2)
        while await runner.run_once():
            pass
        assert {(await runner.get_run(run)).status.value for run in runs} == {"succeeded", "failed"}
        known: Any = runner.queue.commits.known  # type: ignore[attr-defined]
        ids = set(map(str, runs))
        assert [len(ids & kept.keys()) for kept in (known.fences, known.rows, known.counters)] == [0, 0, 0]
