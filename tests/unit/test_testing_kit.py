"""The doubles that drive an agent in a test."""

from __future__ import annotations

import asyncio
import threading
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, Step, StepExecutor, ToolCallingAgent, run_turn_loop, tool
from agent_runtime_core._core.clock import Clock
from agent_runtime_core.errors import (
    InvalidArgument,
    LimitExceeded,
    NotSupported,
    RunFailed,
    UnknownAgent,
    UnserialisableResult,
    WaitTimeout,
)
from agent_runtime_core.interfaces import AgentRuntime, ErrorInfo, EventType, RunContext, RunResult, Tool, ToolRegistry
from agent_runtime_core.registry import register_runtime
from agent_runtime_core.testing import MockLLMClient, MockRunContext, create_test_context, run_agent_test


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Agent(AgentRuntime):
    key = "echo"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.emit(EventType.ASSISTANT_MESSAGE, {"content": ctx.input_messages[-1]["content"]})
        tools = [tool.name for tool in ctx.tools.list_tools()]
        return RunResult({"response": ctx.input_messages[-1]["content"], "tools": tools, "metadata": ctx.metadata})


class Frozen(Clock):
    def wall(self) -> float:
        return 86400.0


def test_a_fresh_context_is_empty_and_has_an_id_of_its_own() -> None:
    ctx = MockRunContext()
    assert isinstance(ctx.run_id, UUID)
    assert isinstance(ctx.run_id, UUID)
    assert ctx.run_id != MockRunContext().run_id
    assert (ctx.input_messages, ctx.params, ctx.metadata, ctx.conversation_id) == ([], {}, {}, None)
    assert ctx.tools is ctx.tool_registry
    assert ctx.tools.list_tools() == []
    assert (ctx.attempt, ctx.step_id, ctx.idempotency_key, ctx.run_key) == (1, None, None, None)
    assert len(ctx.trace_id) == 32


def test_a_context_keeps_what_it_is_given() -> None:
    messages, params, metadata, tools = [{"role": "user"}], {"p": 1}, {"m": 1}, ToolRegistry()
    ctx = MockRunContext(messages, params, metadata, UUID(int=7), UUID(int=8), tools)
    assert (ctx.input_messages, ctx.params, ctx.metadata) == (messages, params, metadata)
    assert (ctx.run_id, ctx.conversation_id, ctx.tool_registry) == (UUID(int=7), UUID(int=8), tools)
    assert MockRunContext(run_id="nightly").run_key == "nightly"
    assert MockRunContext(run_id="nightly").run_id == MockRunContext(run_id="nightly").run_id


async def test_events_are_tuples_of_text_and_payload() -> None:
    ctx = MockRunContext()
    payload: dict[str, Any] = {"content": "a", "parts": ["a"]}
    await ctx.emit(EventType.ASSISTANT_MESSAGE, payload)
    await ctx.emit("mine", {})
    payload["content"] = "changed"
    payload["parts"].append("changed")
    assert ctx.get_events() == [("assistant.message", {"content": "a", "parts": ["a"]}), ("mine", {})]
    assert ctx.get_events("assistant.message") == ctx.get_events(EventType.ASSISTANT_MESSAGE) == ctx.get_events()[:1]
    assert ctx.get_events("none") == []
    assert type(ctx.get_events()[0][0]) is str
    assert ctx.get_events(type=EventType.ASSISTANT_MESSAGE) == ctx.get_events("assistant.message") != []


async def test_checkpoints_are_copies() -> None:
    ctx = MockRunContext()
    assert await ctx.get_state() is None
    state: dict[str, Any] = {"done": [1]}
    await ctx.checkpoint(state)
    state["done"].append(2)
    await ctx.checkpoint(state)
    assert ctx.get_checkpoints() == [{"done": [1]}, {"done": [1, 2]}]
    last = await ctx.get_state()
    assert last == {"done": [1, 2]}
    last["done"].clear()
    assert await ctx.get_state() == {"done": [1, 2]}


async def test_what_cannot_be_copied_is_stored_as_in_a_real_run_or_refused_with_the_reason() -> None:
    ctx = MockRunContext()
    await ctx.emit("told", {"view": MappingProxyType({"a": (1,)})})
    assert ctx.get_events() == [("told", {"view": {"a": (1,)}})]
    with pytest.raises(UnserialisableResult, match=r"^\$\.lock"):
        await ctx.emit("told", {"lock": threading.Lock()})


async def test_clear_forgets_and_un_cancels() -> None:
    ctx = MockRunContext()
    assert (ctx.cancelled(), ctx.is_cancelled()) == (False, False)
    ctx.cancel()
    assert (ctx.cancelled(), ctx.is_cancelled()) == (True, True)
    await ctx.emit("a", {})
    await ctx.checkpoint({})
    await ctx.sleep(1)
    ctx.signal("s", 1)
    ctx.clear()
    assert (ctx.get_events(), ctx.get_checkpoints(), ctx.sleeps, ctx.cancelled()) == ([], [], [], False)
    with pytest.raises(WaitTimeout):
        await ctx.wait_for_signal("s")


async def test_steps_run_once_with_the_context_where_they_want_it() -> None:
    ctx = MockRunContext()

    async def fetch(page: int, ctx: RunContext) -> tuple[int, UUID]:
        return page, ctx.run_id

    assert await ctx.step("fetch", fetch, 3, key="p3", retries=2) == (3, ctx.run_id)
    assert await ctx.step("add", add, 1, 2) == 3


async def test_time_and_chance_come_from_the_clock() -> None:
    ctx, twin = MockRunContext(clock=Frozen(seed=1)), MockRunContext(clock=Frozen(seed=1))
    assert (await ctx.now()).isoformat() == "1970-01-02T00:00:00+00:00"
    assert ctx.run_id == twin.run_id
    assert (await ctx.random(), await ctx.uuid4()) == (await twin.random(), await twin.uuid4())
    assert (await ctx.uuid4()).version == 4
    await ctx.sleep(3600)
    assert ctx.sleeps == [3600]


async def test_waits_are_answered_by_earlier_signals_in_order() -> None:
    ctx = MockRunContext()
    ctx.signal("go", 1)
    ctx.signal("go", 2)
    ctx.signal("deploy", {"approved": True})
    assert [await ctx.wait_for_signal("go"), await ctx.wait_for_signal("go", timeout=5)] == [1, 2]
    assert await ctx.approve("deploy", {"what": "all"}) == {"approved": True}
    with pytest.raises(WaitTimeout, match=r"Call ctx\.signal\('go', payload\)"):
        await ctx.wait_for_signal("go")


async def test_call_runs_another_agent_in_a_context_of_its_own() -> None:
    ctx = MockRunContext()
    register_runtime(Agent())
    question = {"messages": [{"role": "user", "content": "hi"}]}
    for agent in ("echo", Agent()):
        assert (await ctx.call(agent, question)).final_output["response"] == "hi"
    assert ctx.events == []
    with pytest.raises(UnknownAgent, match="'nobody'"):
        await ctx.call("nobody", {})


class Failing(AgentRuntime):
    key = "failing"

    def __init__(self, end: RunResult | Exception) -> None:
        self.end = end

    async def run(self, ctx: RunContext) -> RunResult:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


async def test_an_agent_that_fails_fails_its_call_as_in_a_real_run() -> None:
    partial = RunResult({"response": "half"})
    limit = LimitExceeded("max_turns", 1, 1)
    limit.result = RunResult({"response": "half"})
    told = RunResult({"response": "half"}, error=ErrorInfo("LimitExceeded", "max_turns=1 is reached"))
    for end, why in (
        (ValueError("broken"), "ValueError: broken"),
        (limit, "the run failed: LimitExceeded: limit reached: max_turns=1, used 1"),
        (told, "LimitExceeded: max_turns=1"),
    ):
        with pytest.raises(RunFailed, match=why) as caught:
            await MockRunContext().call(Failing(end), {})
        assert isinstance(caught.value.result, RunResult)
        assert caught.value.result.final_output == ({} if isinstance(end, ValueError) else partial.final_output)


async def test_what_the_double_cannot_do_it_says() -> None:
    with pytest.raises(NotSupported, match="SQLite"):
        await MockRunContext().transaction("t", add, 1)


def test_create_test_context_takes_a_message_or_messages() -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    tool = Tool.from_function(add)
    ctx = create_test_context("Hello!", tools=[tool], metadata={"m": 1}, params={"p": 1})
    assert (ctx.input_messages, ctx.metadata, ctx.params) == (messages, {"m": 1}, {"p": 1})
    assert ctx.tools.list_tools() == [tool]
    assert create_test_context(input_messages=messages).input_messages == messages
    assert create_test_context().input_messages == []
    registry = ToolRegistry()
    assert create_test_context("a", tools=registry).tools is registry
    with pytest.raises(InvalidArgument, match="input_messages must be None if message is passed"):
        create_test_context("a", input_messages=messages)


async def test_run_agent_test_on_a_text_gives_result_and_context() -> None:
    result, ctx = await run_agent_test(Agent(), "Hello!", tools=[Tool.from_function(add)], metadata={"m": 1})
    assert result.final_output == {"response": "Hello!", "tools": ["add"], "metadata": {"m": 1}}
    assert ctx.get_events() == [("assistant.message", {"content": "Hello!"})]


async def test_run_agent_test_on_a_context_gives_the_result() -> None:
    ctx = create_test_context(input_messages=[{"role": "user", "content": "Hello!"}])
    result = await run_agent_test(Agent(), ctx)
    assert isinstance(result, RunResult)
    assert result.final_output["response"] == "Hello!"
    wrong: Any = run_agent_test
    with pytest.raises(InvalidArgument, match="tools must be None if a context is passed"):
        await wrong(Agent(), ctx, tools=[])


async def test_an_agent_s_own_tools_are_there() -> None:
    class Armed(Agent):
        tools = ToolRegistry()

    Armed.tools.register(Tool.from_function(add))
    result, _ = await run_agent_test(Armed(), "a")
    assert result.final_output["tools"] == ["add"]
    result, _ = await run_agent_test(Armed(), "a", tools=[])
    assert result.final_output["tools"] == []


async def test_an_agent_s_error_comes_through() -> None:
    class Broken(Agent):
        async def run(self, ctx: RunContext) -> RunResult:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_agent_test(Broken(), "a")


def _keys_of_agents(seen: list[tuple[str, str | None, str | None]]) -> list[Any]:
    """Agents whose tools and steps append their ids to `seen`, by each way to call them."""

    def note(what: str, ctx: Any) -> str:
        seen.append((what, ctx.step_id, ctx.idempotency_key))
        return what

    @tool
    def pay(ctx: RunContext, n: int = 0) -> str:
        """Pay."""
        return note("tool", ctx)

    @tool
    async def nested(ctx: RunContext) -> str:
        """Pay in a step."""
        return await ctx.step("inside", note, "nested", ctx)

    registry = ToolRegistry()
    registry.register(pay)
    registry.register(nested)
    calls: list[Any] = [MockLLMClient.calls("pay", n=1), MockLLMClient.calls(("pay", {"n": 2}), ("nested", {})), "done"]

    class Payer(ToolCallingAgent):
        key = "payer"
        system_prompt = ""
        tools = registry

        def get_llm_client(self) -> Any:
            return MockLLMClient([*calls])

    class Loops(AgentRuntime):
        key = "loops"

        async def run(self, ctx: Any) -> RunResult:
            for _ in range(2):
                await run_turn_loop(ctx, MockLLMClient([*calls]), registry)
            return RunResult()

    class Stepper(AgentRuntime):
        key = "stepper"

        async def run(self, ctx: Any) -> RunResult:
            for key in (None, None, "mine"):
                await ctx.step("pay", note, "step", ctx, key=key)
            await asyncio.gather(*(ctx.step("pay", self.two, ctx, key=f"{n}") for n in range(2)))
            return RunResult()

        async def two(self, ctx: Any) -> None:
            for _ in range(2):
                await ctx.step("inside", note, "nested", ctx)
            note("step", ctx)

    class Plain(AgentRuntime):
        key = "plain"

        def run(self, ctx: Any) -> RunResult:
            for _ in range(2):
                ctx.step("pay", note, "plain", ctx)
            return RunResult()

    class Listed(AgentRuntime):
        key = "listed"

        async def run(self, ctx: Any) -> RunResult:
            async def one(ctx: RunContext, state: Any) -> None:
                note("list", ctx)

            await StepExecutor(ctx).run([Step("one", one), Step("two", one)])
            return RunResult()

    return [Payer(), Loops(), Stepper(), Plain(), Listed()]


@pytest.mark.parametrize("position", range(5))
async def test_tools_and_steps_have_the_keys_of_a_run(position: int) -> None:
    seen: list[tuple[str, str | None, str | None]] = []
    agent = _keys_of_agents(seen)[position]
    async with AgentRunner.open("memory://") as runner:
        real = await runner.execute(agent, run_id="r", input_data={"messages": [{"role": "user", "content": "pay"}]})
    real.raise_for_status()
    expected, seen[:] = sorted(seen, key=str), []
    ctx = MockRunContext([{"role": "user", "content": "pay"}], run_id="r")
    await run_agent_test(agent, ctx)
    assert (ctx.step_id, ctx.idempotency_key) == (None, None)
    assert sorted(seen, key=str) == expected
    assert len({key for _, _, key in seen}) == len(seen) > 0
    assert all(key == f"{ctx.run_id}:{step}" for _, step, key in seen)
