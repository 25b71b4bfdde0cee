"""Cases of runs with several queues, event buses and state stores on one store, as in several processes.

`again(backends)` opens another queue, event bus and state store on the same store, each on its own, as from one URL.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ...events.base import EventBus
from ...queue.base import RunQueue
from ...state.base import StateStore
from .checks import same
from .runs_fixtures import LEASE, Bench, Make, Scripted, opened

Three = tuple[RunQueue, EventBus, StateStore]
Again = Callable[[Three], Three]
Case = Callable[[Make, Again], Awaitable[None]]


@contextlib.asynccontextmanager
async def two_processes(make: Make, again: Again) -> AsyncIterator[tuple[Bench, Bench]]:
    """Open two benches on one store with one clock."""
    async with opened(make) as first, opened(lambda **_: again(first.backends)) as second:
        second.clock = first.clock
        yield first, second


async def a_run_of_one_process_is_executed_by_another(make: Make, again: Again) -> None:
    async with two_processes(make, again) as (first, second):
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            await ctx.step("one", log.append, "one")
            await ctx.emit("hello", {"n": 1})
            return await ctx.wait_for_signal("go")

        sender, worker = first.runner(Scripted("agent", body)), second.runner(Scripted("agent", body))
        run_id = await sender.submit("agent")
        same(await worker.run_once(), True, "run_once of the other process")
        same((await sender.get_run(run_id)).status, "waiting", "the status that the first process reads")
        await sender.signal(run_id, "go", 7)
        same(await worker.run_once(), True, "run_once of the other process after the signal")
        for bench in (first, second):
            await bench.ended(run_id, "succeeded", 7)
        same(log, ["one"], "the executed steps")
        same(await first.event_types(run_id), await second.event_types(run_id), "the events that both processes read")


async def a_run_of_a_crashed_process_is_resumed_by_another(make: Make, again: Again) -> None:
    async with two_processes(make, again) as (first, second):
        log: list[str] = []
        inside, wake = asyncio.Event(), asyncio.Event()

        def agent(sleeps: bool) -> Scripted:
            async def body(ctx: Any) -> Any:
                await ctx.step("one", log.append, "one")
                if sleeps:
                    inside.set()
                    await wake.wait()
                await ctx.step("two", lambda: ctx.attempt)
                await ctx.checkpoint({"attempt": ctx.attempt})
                return ctx.attempt

            return Scripted("agent", body)

        crashed, worker = first.runner(agent(True)), second.runner(agent(False))
        run_id = await crashed.submit("agent")
        driving = asyncio.ensure_future(crashed.run_once())
        await inside.wait()
        crashed.heartbeat.stop()
        first.clock.advance(LEASE + 1)
        same(await worker.run_once(), True, "run_once of the other process")
        await second.ended(run_id, "succeeded", 2)
        types, journal = await second.event_types(run_id), await second.state.records(run_id)
        wake.set()
        await driving
        same(log, ["one"], "how often the recorded step was executed")
        for bench in (first, second):
            same(await bench.event_types(run_id), types, "the events after the crashed process continued")
            same(await bench.state.records(run_id), journal, "the journal after it continued")
            same(await bench.state.get_checkpoint(run_id), {"attempt": 2}, "the checkpoint after it continued")
            await bench.ended(run_id, "succeeded", 2)


PROCESSES: tuple[Case, ...] = (
    a_run_of_one_process_is_executed_by_another,
    a_run_of_a_crashed_process_is_resumed_by_another,
)
