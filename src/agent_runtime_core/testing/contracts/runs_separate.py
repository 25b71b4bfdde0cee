"""A run on three objects that were opened separately on one store, as settings that name each of them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import InvalidArgument
from ...events.base import EventBus
from ...queue.base import RunQueue
from ...state.base import StateStore
from ...steps.executor import StepExecutor
from .checks import same
from .runs_fixtures import LEASE, Make, Scripted, opened, steps

Backends = tuple[RunQueue, EventBus, StateStore]
Again = Callable[[Backends], Backends]


async def separate_objects_run_or_are_refused(make: Make, again: Again) -> None:
    """They keep the promises of a run, or are refused before the first run, which is not StorageCorrupt."""
    originals: list[Backends] = []

    def separately(**options: Any) -> Backends:
        queue = make(**options)
        bus, state = again(queue), again(queue)
        originals.extend((queue, bus, state))
        return queue[0], bus[1], state[2]

    try:
        async with opened(separately) as bench:
            log: list[str] = []

            async def body(ctx: Any) -> Any:
                await StepExecutor(ctx).run(steps(log, "one"))
                if ctx.attempt < 3:
                    raise RuntimeError(f"attempt {ctx.attempt}")
                return ctx.attempt

            async def at_once(ctx: Any) -> Any:
                return await StepExecutor(ctx).run(steps(log, "two"))

            agents = Scripted("agent", body), Scripted("inline", at_once)
            try:
                first, second = bench.runner(*agents), bench.runner(*agents)
                run_id = await first.submit("agent")
                for number, worker in enumerate((first, second, first), 1):
                    same(await worker.run_once(), True, f"run_once of attempt {number} on separate objects")
                    bench.clock.advance(LEASE)
                inline = await second.execute("inline", raise_on_error=False)
            except InvalidArgument:
                return
            await bench.ended(run_id, "succeeded", 3)
            same(log, ["one", "two"], "the executed steps")
            same(inline.final_output, {"answer": {"two": "two"}}, "the result of a run of execute")
    finally:
        for each in originals:
            for backend in each:
                await backend.close()


CASES = (separate_objects_run_or_are_refused,)
