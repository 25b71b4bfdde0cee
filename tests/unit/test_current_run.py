"""`current_run()` and `from_thread` reach the run from everywhere its code runs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    MockLLMClient,
    MockLLMResponse,
    RunContext,
    RunResult,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
    current_run,
    open_run,
    open_run_sync,
)
from agent_runtime_core.errors import PortalMisuse
from agent_runtime_core.portal import from_thread, in_thread


class Everywhere(AgentRuntime):
    key = "everywhere"

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    async def run(self, ctx: RunContext) -> RunResult:
        self.note("run")
        await ctx.step("async", self.in_step)
        await ctx.step("plain", self.note, "plain step")
        await asyncio.create_task(self.in_task())
        await asyncio.to_thread(self.note, "to_thread")
        await in_thread(self.note, "in_thread")
        for name, found in self.seen.items():
            assert found is ctx, name
        await ctx.call(Inner(self), {})
        assert self.seen["child"] is not ctx
        self.note("after the child")
        assert self.seen["after the child"] is ctx
        return RunResult(final_output={"seen": sorted(self.seen)})

    def note(self, where: str) -> None:
        self.seen[where] = current_run()

    async def in_step(self) -> None:
        self.note("async step")

    async def in_task(self) -> None:
        self.note("task")


class Inner(AgentRuntime):
    key = "inner"

    def __init__(self, outer: Everywhere) -> None:
        self.outer = outer

    async def run(self, ctx: RunContext) -> RunResult:
        self.outer.note("child")
        assert current_run() is ctx
        return RunResult()


async def test_code_of_a_run_finds_its_context() -> None:
    async with AgentRunner.open("memory://") as runner:
        result = await runner.execute(Everywhere(), input_data={}, raise_on_error=True)
    assert len(result.final_output["seen"]) == 8
    assert current_run() is None


async def test_a_tool_finds_its_context() -> None:
    seen: list[object] = []

    def look() -> str:
        """Look."""
        seen.append(current_run())
        return "seen"

    class Looking(ToolCallingAgent):
        key = "looking"
        system_prompt = "Look."
        tools = ToolRegistry()

        def get_llm_client(self) -> MockLLMClient:
            return MockLLMClient([MockLLMResponse("", tool_calls=[{"name": "look", "arguments": {}}]), "done"])

        async def before_run(self, ctx: RunContext) -> None:
            seen.append(ctx)

    Looking.tools.register(Tool.from_function(look))
    async with AgentRunner.open("memory://") as runner:
        messages = [{"role": "user", "content": "look"}]
        await runner.execute(Looking(), input_data={"messages": messages}, raise_on_error=True)
    assert seen[0] is seen[1]


async def test_a_plain_agent_finds_its_context_and_makes_steps() -> None:
    class Plain(AgentRuntime):
        key = "plain"

        def run(self, ctx: Any) -> RunResult:
            found = current_run()
            assert found is not None
            assert found.run_id == ctx.run_id
            return RunResult(final_output={"value": from_thread(found.step, "one", lambda: 1)})

    async with AgentRunner.open("memory://") as runner:
        result = await runner.execute(Plain(), input_data={}, raise_on_error=True)
    assert result.final_output == {"value": 1}


async def test_a_thread_of_asyncio_makes_steps_of_the_run(tmp_path: Path) -> None:
    """As a synchronous framework does that runs in asyncio.to_thread."""
    calls: list[int] = []

    def fetch(number: int) -> int:
        calls.append(number)
        return number * 2

    def framework() -> list[int]:
        ctx = current_run()
        assert ctx is not None
        return [from_thread(ctx.step, "fetch", fetch, number, key=str(number)) for number in range(3)]

    class Sync(AgentRuntime):
        key = "sync"

        async def run(self, ctx: RunContext) -> RunResult:
            return RunResult(final_output={"out": await asyncio.to_thread(framework)})

    for _ in range(2):
        async with AgentRunner.open(tmp_path / "a.db") as runner:
            result = await runner.execute(Sync(), "r", {}, raise_on_error=True)
    assert result.final_output == {"out": [0, 2, 4]}
    assert calls == [0, 1, 2]


async def test_a_block_of_open_run_is_a_run(tmp_path: Path) -> None:
    async with open_run(tmp_path / "a.db", "r") as ctx:
        assert current_run() is ctx
        assert await asyncio.to_thread(lambda: from_thread(ctx.step, "one", lambda: 1)) == 1
        async with open_run(tmp_path / "b.db", "r") as inner:
            assert current_run() is inner
        assert current_run() is ctx
    assert current_run() is None


def test_a_plain_block_of_open_run_is_a_run(tmp_path: Path) -> None:
    with open_run_sync(tmp_path / "a.db", "r") as run:
        assert current_run() is run.ctx
        assert run.sync_ctx.step("look", current_run_id) == str(run.ctx.run_id)
    assert current_run() is None


def current_run_id() -> str:
    ctx = current_run()
    assert ctx is not None
    return str(ctx.run_id)


async def test_concurrent_runs_find_their_own_contexts() -> None:
    class Mine(AgentRuntime):
        key = "mine"

        async def run(self, ctx: RunContext) -> RunResult:
            for number in range(5):
                await ctx.step(f"s{number}", self.check)
            return RunResult()

        async def check(self, ctx: RunContext) -> None:
            await asyncio.sleep(0)
            assert current_run() is ctx

    async with AgentRunner.open("memory://") as runner:
        await asyncio.gather(*(runner.execute(Mine(), input_data={}, raise_on_error=True) for _ in range(10)))


def test_outside_of_runs_there_is_none_and_from_thread_says_where_it_works() -> None:
    errors: list[BaseException] = []

    def misuse() -> None:
        assert current_run() is None
        try:
            from_thread(print)
        except PortalMisuse as error:
            errors.append(error)

    thread = threading.Thread(target=misuse)
    thread.start()
    thread.join()
    assert "must be called in a thread of a run" in str(errors[0])
    with pytest.raises(PortalMisuse):
        from_thread(print)
