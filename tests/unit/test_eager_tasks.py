"""Tasks of the library start in the next iteration of the loop, also where `asyncio.eager_task_factory` is set."""

from __future__ import annotations

import asyncio
import sys
from contextvars import copy_context

import pytest

from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core._core.context_vars import start_soon
from agent_runtime_core.interfaces import RunContext
from tests.support.runs import Rig

FACTORIES = ["no factory", "a factory of the application"]
if sys.version_info >= (3, 12):
    FACTORIES += ["eager", "eager with tasks of the application"]


class OwnTask(asyncio.Task):  # type: ignore[type-arg]
    pass


@pytest.fixture(params=FACTORIES)
def factory(request: pytest.FixtureRequest) -> object:
    if request.param == "no factory":
        return None
    if sys.version_info >= (3, 12) and request.param == "eager":
        return asyncio.eager_task_factory
    if sys.version_info >= (3, 12) and request.param != "a factory of the application":
        return asyncio.create_eager_task_factory(OwnTask)
    return lambda loop, work, **options: OwnTask(work, loop=loop, **options)


async def test_what_is_started_soon_has_not_begun_yet(factory: object) -> None:
    asyncio.get_running_loop().set_task_factory(factory)  # type: ignore[arg-type]
    begun = []

    async def work() -> int:
        begun.append(asyncio.current_task())
        return 1

    task = start_soon(work(), name="mine")
    assert (begun, task.get_name()) == ([], "mine")
    assert await task == 1
    assert begun == [task]
    never = start_soon(work())
    never.cancel()
    await asyncio.wait({never})
    assert never.cancelled()
    assert begun == [task]


async def test_a_task_of_the_context_of_its_maker(factory: object) -> None:
    """An eager task enters its context at once, which fails where its maker runs in that context."""
    loop, context = asyncio.get_running_loop(), copy_context()
    loop.set_task_factory(factory)  # type: ignore[arg-type]

    async def work() -> int:
        return 1

    assert await context.run(lambda: start_soon(work(), context=context)) == 1
    future = loop.create_future()
    future.set_result(2)
    assert await start_soon(future) == 2


async def test_runs_that_are_waited_for_end(factory: object) -> None:
    asyncio.get_running_loop().set_task_factory(factory)  # type: ignore[arg-type]

    async def body(ctx: RunContext) -> object:
        async with asyncio.TaskGroup() as group:
            steps = [group.create_task(ctx.step(f"s{n}", lambda n=n: n)) for n in range(3)]
        return sum([step.result() for step in steps])

    async with Rig(clock=SYSTEM) as rig:  # the waits of 20 callers would let leases expire on a clock that hurries
        rig.register(body)
        working = asyncio.create_task(rig.runner.run_loop(concurrency=4, handle_signals=False))
        ids = [await rig.runner.submit("script", {}) for _ in range(20)]
        results = await asyncio.gather(*(rig.runner.wait(each) for each in ids))
        rig.runner.stop()
        await working
    assert [each.final_output for each in results] == [{"value": 3}] * 20
