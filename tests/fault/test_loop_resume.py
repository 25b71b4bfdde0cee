"""Agent loops in several lives of their run, or side by side: the same way, at the same cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime_core import open_run, tool
from agent_runtime_core._execution.context import Context
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.errors import CircuitOpen, LimitExceeded, ProviderError, ProviderUnavailable, RateLimited
from agent_runtime_core.interfaces import AgentRuntime, LLMClient, LLMResponse, LLMStreamChunk, RunContext, RunResult
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.loop import agent_tool, run_turn_loop
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.scripted_model import Scripted, asks, call

ASKED = [{"role": "user", "content": "hello"}]
INPUT = {"messages": ASKED}


def registry_of(*agents: AgentRuntime) -> Registry:
    registry = Registry()
    for agent in agents:
        registry.register(agent)
    return registry


# -- a loop that failed, and what the code did instead


@pytest.mark.parametrize("error", [ProviderUnavailable("down"), CircuitOpen("later", after=60), ValueError("no")])
async def test_a_loop_that_failed_and_was_gone_on_without_fails_again(tmp_path: Path, error: Exception) -> None:
    paid: list[int] = []

    @tool(has_side_effects=True)
    def pay(amount: int) -> str:
        paid.append(amount)
        return "paid"

    tools = ToolRegistry()
    tools.register(pay)
    pays = asks(call("pay", {"amount": 90}))
    first = Scripted(error, pays, "paid by the first model")  # it is up again afterwards
    second = Scripted(pays, "paid by the second model")

    async def life(*, dies: bool) -> str | None:
        async with open_run(tmp_path / "runs.db", run_id="r", input=INPUT) as ctx:
            try:
                done = await run_turn_loop(ctx, first, tools)
            except type(error):
                done = await run_turn_loop(ctx, second, tools)
            if dies:
                raise ConnectionError("once")
            return done.text

    with pytest.raises(ConnectionError):
        await life(dies=True)
    assert await life(dies=False) == "paid by the second model"
    assert paid == [90]


async def test_a_fork_takes_the_same_way_as_well(tmp_path: Path) -> None:
    first, second = Scripted(CircuitOpen("later", after=60), "first"), Scripted("second")

    class Falls(AgentRuntime):
        key = "falls"

        async def run(self, ctx: RunContext) -> RunResult:
            try:
                done = await run_turn_loop(ctx, first, ToolRegistry())
            except ProviderError:
                done = await run_turn_loop(ctx, second, ToolRegistry())
            await ctx.step("later", len, [])
            return RunResult({"text": done.text})

    async with AgentRunner.open(tmp_path / "runs.db", registry=registry_of(Falls())) as runner:
        run_id = await runner.submit("falls", INPUT)
        await runner.run_once()
        other = await runner.fork(run_id, "later")
        await runner.run_once()
        assert (await runner.wait(other, 10)).final_output == {"text": "second"}


async def test_a_loop_whose_failure_ended_its_attempt_asks_again(tmp_path: Path) -> None:
    model = Scripted(RateLimited("busy"), "there")

    class Asks(AgentRuntime):
        key = "asks"

        async def run(self, ctx: RunContext) -> RunResult:
            return RunResult({"text": (await run_turn_loop(ctx, model, ToolRegistry())).text})

    config = RunnerConfig(retry_backoff_base=0)
    async with AgentRunner.open(tmp_path / "runs.db", registry=registry_of(Asks()), config=config) as runner:
        run_id = await runner.submit("asks", INPUT)
        await runner.run_once()
        await runner.run_once()
        assert (await runner.wait(run_id, 10)).final_output == {"text": "there"}


# -- what a step emits that is cut off


class _Slow(LLMClient):
    """Streams three words; the first time it never comes to the last."""

    def __init__(self) -> None:
        self.half = asyncio.Event()

    async def generate(self, messages: Any, **options: Any) -> LLMResponse:
        raise NotImplementedError

    async def stream(self, messages: Any, **options: Any) -> AsyncIterator[LLMStreamChunk]:
        for piece in ("one ", "two ", "three"):
            if piece == "three" and not self.half.is_set():
                self.half.set()
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(0.03)  # longer than deltas are gathered for
            yield LLMStreamChunk(piece)
        whole = LLMResponse({"role": "assistant", "content": "one two three"}, finish_reason="stop")
        yield LLMStreamChunk("", None, "stop", {}, whole)


async def test_deltas_of_a_run_that_a_worker_gave_back_are_told_from_the_start(tmp_path: Path) -> None:
    client = _Slow()

    class Talker(ToolCallingAgent):
        key, system_prompt, tools, stream = "talker", "You talk.", ToolRegistry(), True

        def get_llm_client(self) -> LLMClient:
            return client

    config = RunnerConfig(grace_seconds=0.05)
    async with AgentRunner.open(tmp_path / "runs.db", registry=registry_of(Talker()), config=config) as runner:
        run_id = await runner.submit("talker", INPUT)
        working = asyncio.ensure_future(runner.run_loop(handle_signals=False))
        await asyncio.wait_for(client.half.wait(), 10)
        runner.stop()  # as SIGTERM does
        await working
        await runner.run_once()
        told = await runner.event_bus.get_events(run_id)
    text = ""
    for event in told:
        if event.event_type in ("run.started", "run.resumed"):
            text = ""
        elif event.event_type == "assistant.delta":
            text += event.payload["delta"]
    assert text == "one two three"


# -- children


class _Hangs(Scripted):
    """Never answers the first time."""

    def __init__(self) -> None:
        super().__init__("from the child")
        self.hung = asyncio.Event()

    async def generate(self, messages: Any, **options: Any) -> LLMResponse:
        if not self.hung.is_set():
            self.hung.set()
            await asyncio.get_running_loop().create_future()
        return await super().generate(messages, **options)


@pytest.mark.parametrize("changed", ["prompt", "limits"])
async def test_a_child_that_was_under_way_goes_on_with_what_it_was_called_with(tmp_path: Path, changed: str) -> None:
    model, handoff = _Hangs(), changed == "prompt"
    prompts = ["It is 9:59.", "It is 10:00."]
    limits = [RunLimits(max_tokens=1_000_000), RunLimits(max_tokens=1_000_000 if handoff else 2_000_000)]

    class Child(ToolCallingAgent):
        key, system_prompt, tools = "child", "You help.", ToolRegistry()

        def get_llm_client(self) -> LLMClient:
            return model

    asking = Scripted(asks(call("child", {"task": "x"})), "done")

    class Parent(ToolCallingAgent):
        key = "parent"
        tools = ToolRegistry()
        tools.register(agent_tool(Child(), handoff=handoff))

        @property
        def system_prompt(self) -> str:
            return prompts.pop(0)

        def get_llm_client(self) -> LLMClient:
            return asking

    async def life() -> RunResult:
        config = RunnerConfig(limits=limits.pop(0))
        async with AgentRunner.open(tmp_path / "runs.db", registry=Registry(), config=config) as runner:
            return await runner.execute(Parent(), run_id="r", input_data=INPUT)

    first = asyncio.ensure_future(life())
    await asyncio.wait_for(model.hung.wait(), 10)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    result = await life()
    assert (result.status, result.error) == (RunStatus.SUCCEEDED, None)


@pytest.mark.parametrize("limits", [{"max_tokens": 1_000_000}, {"max_tool_calls": 100}])
@pytest.mark.parametrize("other", ["tool", "child"])
@pytest.mark.parametrize("inline", [True, False])
async def test_a_loop_beside_a_child_has_room_for_what_the_child_does_not_use(
    limits: dict[str, int], other: str, inline: bool
) -> None:
    beside = asyncio.Event()

    class Slow(Scripted):
        async def generate(self, messages: Any, **options: Any) -> LLMResponse:
            await beside.wait()
            return await super().generate(messages, **options)

    class Child(ToolCallingAgent):
        key, system_prompt, tools = "child", "You help.", ToolRegistry()

        def get_llm_client(self) -> LLMClient:
            return Slow("from the child")

    @tool
    async def look() -> str:
        return "seen"

    manager, worker = ToolRegistry(), ToolRegistry()
    manager.register(agent_tool(Child()))
    worker.register(look)

    class Both(AgentRuntime):
        key = "both"

        async def run(self, ctx: RunContext) -> RunResult:
            async def later() -> Any:
                while not cast(Context, ctx).budget._active_calls:  # noqa: ASYNC110 - nobody rings for it
                    await asyncio.sleep(0.001)
                asyncio.get_running_loop().call_later(0.05, beside.set)  # while this waits for room
                if other == "tool":
                    return await run_turn_loop(ctx, Scripted(asks(call("look")), "second"), worker)
                return await run_turn_loop(ctx, Scripted(asks(call("child", {"task": "y"})), "second"), manager)

            first = run_turn_loop(ctx, Scripted(asks(call("child", {"task": "x"})), "first"), manager)
            done = await asyncio.gather(first, later())
            return RunResult({"texts": [each.text for each in done]})

    agent, given = Both(), {"messages": ASKED, "limits": limits}
    async with AgentRunner.open("memory://", registry=registry_of(agent, Child())) as runner:
        if inline:
            result = await runner.execute(agent, input_data=given)
        else:
            run_id = await runner.submit("both", given)
            working = asyncio.ensure_future(runner.run_loop(handle_signals=False))
            result = await runner.wait(run_id, 20)
            runner.stop()
            await working
    assert (result.status, result.error and result.error.message) == (RunStatus.SUCCEEDED, None)
    assert result.final_output == {"texts": ["first", "second"]}


# -- what loops inside recorded steps used


@pytest.mark.parametrize("inside", ["tool", "step", "list", "map", "deep"])
async def test_what_a_loop_inside_a_recorded_step_used_counts_in_later_lives(tmp_path: Path, inside: str) -> None:
    async def research(ctx: RunContext) -> str | None:
        return (await run_turn_loop(ctx, Scripted("found", tokens=(4000, 1000)), ToolRegistry(), messages=ASKED)).text

    tools = ToolRegistry()
    tools.register(Tool.from_function(research, has_side_effects=True))
    told: list[dict[str, Any]] = []

    async def life(*, dies: bool) -> None:
        given = {"messages": ASKED, "limits": {"max_tokens": 5100}}
        async with open_run(tmp_path / "runs.db", run_id="r", input=given) as ctx:

            async def deep() -> Any:
                asking = Scripted(asks(call("research")), "done", tokens=(10, 10))
                return (await run_turn_loop(ctx, asking, tools, max_tokens=1)).text

            async def of_list(ctx: Any, state: Any) -> Any:
                return await research(ctx)

            async def item(_: int) -> Any:
                return await research(ctx)

            match inside:
                case "tool":
                    await deep()
                case "step":
                    await ctx.step("research", research)
                case "list":
                    await StepExecutor(ctx).run([Step("research", of_list)])
                case "map":
                    await StepExecutor(ctx).map("research", item, [1])
                case "deep":
                    await ctx.step("deep", deep)
            told.append(ctx.budget.reported_usage())
            if dies:
                raise ConnectionError("once")
            await run_turn_loop(ctx, Scripted("one more", tokens=(100, 100)), ToolRegistry(), messages=ASKED)
            with pytest.raises(LimitExceeded):
                await run_turn_loop(ctx, Scripted("too much"), ToolRegistry(), messages=ASKED)

    with pytest.raises(ConnectionError):
        await life(dies=True)
    await life(dies=False)
    assert told[0] == told[1]
    assert told[0]["total_tokens"] >= 5000


async def test_a_step_that_is_asked_for_twice_in_a_life_counts_once(tmp_path: Path) -> None:
    async with open_run(tmp_path / "runs.db", run_id="r", input=INPUT) as ctx:

        async def research() -> Any:
            return (await run_turn_loop(ctx, Scripted("found"), ToolRegistry(), messages=ASKED)).text

        await ctx.step("research", research, key="one")
        before = ctx.budget.reported_usage()
        await ctx.step("research", research, key="one")
        assert ctx.budget.reported_usage() == before
