"""A run whose model cannot be asked now is put off: it costs no attempt, and goes on from its records."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import CircuitOpen, RateLimited
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.fault_runs import KINDS, settings, store, until
from tests.support.scripted_model import Scripted, asks, call

pytestmark = pytest.mark.parametrize("kind", KINDS)
INPUT = {"messages": [{"role": "user", "content": "hello"}]}


def model() -> Scripted:
    refused = [CircuitOpen("not now", after=30.0), CircuitOpen("not now", after=60.0)]
    return Scripted(asks(call("note", {"text": "a"})), *refused, "done")


def agent(client: Scripted, ran: list[str]) -> Any:
    tools = ToolRegistry()

    def note(text: str) -> str:
        ran.append(text)
        return text

    tools.register(Tool.from_function(note))

    async def run(ctx: Any) -> Any:
        return (await run_turn_loop(ctx, client, tools)).text

    return run


async def test_a_worker_gives_it_back_until_it_is_time(kind: str, tmp_path: Path) -> None:
    clock, client, ran = VirtualClock(), model(), list[str]()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", agent(client, ran))
        runner = here.runner(settings(max_retries=1))
        run_id = await runner.submit("a", INPUT)
        for wait in (30.0, 60.0):
            assert await runner.run_once()
            info = await runner.get_run(run_id)
            assert (info.status, info.attempt, info.reason) == (RunStatus.PENDING, 1, "CircuitOpen")
            assert info.scheduled_at is not None
            assert wait <= info.scheduled_at.timestamp() - clock.wall() <= wait * 1.2 + 0.1
            assert not await runner.run_once(), "it is not time yet"
            clock.advance(wait * 1.2 + 1)
        assert await runner.run_once()
        result = await runner.wait(run_id)
        assert result.final_output == {"value": "done"}
        assert (await runner.get_run(run_id)).attempt == 1
        told = [event.event_type for event in await runner.event_bus.get_events(run_id)]
        assert (told.count("run.started"), told.count("run.resumed")) == (1, 2)
    assert ran == ["a"]
    assert len(client.asked) == 4


async def test_in_place_it_waits(kind: str, tmp_path: Path) -> None:
    clock, client, ran = VirtualClock(), model(), list[str]()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", agent(client, ran))
        # The clock advances while the store works, and with a server that takes a while.
        runner = here.runner(settings(max_retries=1, run_timeout_seconds=math.inf))
        running = asyncio.ensure_future(runner.execute("a", "r", INPUT))
        await until(lambda: len(client.asked) == 2)
        while not running.done():
            clock.advance(31)
            await asyncio.sleep(0.001)
        result = await running
        assert result.final_output == {"value": "done"}
        assert (await runner.get_run("r")).attempt == 1
    assert ran == ["a"]
    assert len(client.asked) == 4


async def test_a_provider_that_says_how_long_it_is_asked_too_much_is_waited_for(kind: str, tmp_path: Path) -> None:
    clock, ran = VirtualClock(), list[str]()
    refused = [RateLimited("slow down", retry_after=90.0) for _ in range(2)]
    client = Scripted(asks(call("note", {"text": "a"})), *refused, "done")
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", agent(client, ran))
        runner = here.runner(settings(max_retries=1))
        run_id = await runner.submit("a", INPUT)
        for _ in refused:
            assert await runner.run_once()
            info = await runner.get_run(run_id)
            assert (info.status, info.attempt, info.reason) == (RunStatus.PENDING, 1, "RateLimited")
            assert info.scheduled_at is not None
            assert info.scheduled_at.timestamp() - clock.wall() >= 90.0
            clock.advance(90.0 * 1.2 + 1)
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "done"}
        assert (await runner.get_run(run_id)).attempt == 1
    assert ran == ["a"]
    assert len(client.asked) == 4


@pytest.mark.parametrize("seconds", [None, 0.0, 301.0])
async def test_else_that_is_a_failure(kind: str, seconds: float | None, tmp_path: Path) -> None:
    clock, client = VirtualClock(), Scripted(RateLimited("slow down", retry_after=seconds), "done")
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", agent(client, []))
        runner = here.runner(settings(max_retries=1))
        run_id = await runner.submit("a", INPUT)
        assert await runner.run_once()
        assert (await runner.get_run(run_id)).status is RunStatus.FAILED
