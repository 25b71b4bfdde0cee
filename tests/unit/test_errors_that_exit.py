"""Errors whose methods exit while they are described, and interrupts of other threads, fail an attempt and no more."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent_runtime_core import AgentRuntime, RunResult
from agent_runtime_core.errors import is_interrupt
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.cases import for_each
from tests.support.runs import Rig, Script
from tests.support.scripted_model import Scripted, asks, call

Body = Callable[[Any, Callable[[], Exception]], Awaitable[Any]]


def leave(*_: object) -> Any:
    sys.exit(3)


class InStr(Exception):
    __str__ = leave


class InRepr(Exception):
    __repr__ = leave


class InArgs(Exception):
    args = property(leave)


class Value:
    __str__ = __repr__ = leave


def with_attribute() -> Exception:
    error = ValueError("x")
    error.value = Value()  # type: ignore[attr-defined]
    return error


def with_cause() -> Exception:
    error = ValueError("x")
    error.__cause__ = InStr("y")
    return error


ERRORS: dict[str, Callable[[], Exception]] = {
    "str": lambda: InStr("x"),
    "repr": lambda: InRepr("x"),
    "args": lambda: InArgs("x"),
    "argument": lambda: ValueError(Value()),
    "attribute": with_attribute,
    "cause": with_cause,
    "group": lambda: ExceptionGroup("several", [InStr("x"), ValueError(Value())]),
}


def raising(make: Callable[[], Exception]) -> Callable[..., Any]:
    async def fails(*_: object) -> Any:
        raise make()

    return fails


def plainly(make: Callable[[], Exception]) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise make()

    return fails


async def by_tool(ctx: Any, make: Callable[[], Exception]) -> None:
    async def look(amount: int) -> Any:
        """Look."""
        raise make()

    tools = ToolRegistry()
    tools.register(Tool.from_function(look))
    model = Scripted(say=lambda said: "done" if len(said) > 1 else asks(call("look", {"amount": 5}, "c")))
    await run_turn_loop(ctx, model, tools, messages=[{"role": "user", "content": "look"}])
    raise make()


PLACES: dict[str, Body] = {
    "run": lambda ctx, make: raising(make)(),
    "step": lambda ctx, make: ctx.step("s", raising(make)),
    "thread": lambda ctx, make: ctx.step("s", plainly(make)),
    "time limit": lambda ctx, make: ctx.step("s", raising(make), timeout=60),
    "guarded": lambda ctx, make: ctx.step("s", raising(make), on_in_doubt="fail"),
    "retries": lambda ctx, make: ctx.step("s", raising(make), retries=1, retry_delay=0.0),
    "list": lambda ctx, make: StepExecutor(ctx).run([Step("s", raising(make))]),
    "graph": lambda ctx, make: StepExecutor(ctx).run([Step("s", raising(make)), Step("t", leave, depends_on=["s"])]),
    "map": lambda ctx, make: StepExecutor(ctx).map("s", raising(make), [1]),
    "tool": by_tool,
    "result": lambda ctx, make: ctx.step("s", lambda: Value()),
    "name": lambda ctx, make: ctx.step(Value(), leave),
    "event": lambda ctx, make: ctx.emit("a.b", {"x": Value()}),
    "checkpoint": lambda ctx, make: ctx.checkpoint({"x": Value()}),
}


class Fails(AgentRuntime):
    key = "fails"

    def __init__(self, body: Callable[[Any], Awaitable[Any]]) -> None:
        self.body = body

    async def run(self, ctx: Any) -> RunResult:
        await self.body(ctx)
        return RunResult()


class FailsInHook(Fails):
    async def on_error(self, ctx: Any, error: BaseException) -> None:
        raise error


async def failed_alone(agent: AgentRuntime) -> None:
    """The run fails, and the worker executes the next run."""

    async def nothing(ctx: Any) -> None: ...

    async with Rig(max_retries=1) as rig:
        rig.registry.register(agent)
        rig.registry.register(Script(nothing))
        await rig.runner.submit(agent.key, {}, run_id="r")
        working = asyncio.ensure_future(rig.runner.run_loop(handle_signals=False))
        assert (await rig.runner.wait("r", timeout=60)).status is RunStatus.FAILED
        await rig.runner.submit("script", {}, run_id="other")
        assert (await rig.runner.wait("other", timeout=60)).status is RunStatus.SUCCEEDED
        assert not working.done()
        rig.runner.stop()
        await working


@for_each("place", PLACES)
async def test_an_error_that_exits_while_it_is_described_fails_its_run_alone(place: str) -> None:
    for make in ERRORS.values():
        await failed_alone(Fails(lambda ctx, make=make: PLACES[place](ctx, make)))  # type: ignore[misc]


async def test_so_does_such_an_error_of_a_hook() -> None:
    for make in ERRORS.values():
        await failed_alone(FailsInHook(lambda ctx, make=make: raising(make)()))  # type: ignore[misc]


# -- interrupts


def interrupts() -> None:
    raise KeyboardInterrupt


def in_generator() -> Iterator[None]:
    interrupts()
    yield


async def of_own_thread() -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def work() -> None:
        try:
            interrupts()
        except KeyboardInterrupt as error:
            loop.call_soon_threadsafe(future.set_exception, error)

    threading.Thread(target=work).start()
    await future


async def of_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, interrupts)


async def of_pool_of_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        await asyncio.to_thread(lambda: pool.submit(interrupts).result())


THREADS: dict[str, Callable[[], Awaitable[Any]]] = {
    "to_thread": lambda: asyncio.to_thread(interrupts),
    "pool": of_pool,
    "pool of a pool": of_pool_of_pool,
    "own thread": of_own_thread,
}


@pytest.mark.parametrize("thread", THREADS)
async def test_an_interrupt_that_another_thread_raised_fails_the_run_alone(thread: str) -> None:
    await failed_alone(Fails(lambda ctx: THREADS[thread]()))
    await failed_alone(Fails(lambda ctx: ctx.step("s", THREADS[thread])))


async def test_an_interrupt_of_the_main_thread_stays_one() -> None:
    async def inside() -> None:
        await asyncio.sleep(0)
        interrupts()

    async def by_signal() -> None:
        while True:
            signal.raise_signal(signal.SIGINT)

    async def by_generator() -> None:
        next(in_generator())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for make in (inside, by_signal, by_generator):
            with pytest.raises(KeyboardInterrupt) as raised:
                await make()
            assert is_interrupt(raised.value)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not is_interrupt(SystemExit(1))
