"""`ctx.charge`: model calls of other libraries count against the limits of a run, once, also when it resumes."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    ErrorInfo,
    LimitExceeded,
    MockLLMClient,
    MockLLMResponse,
    MockRunContext,
    RunContext,
    RunLimits,
    RunnerConfig,
    RunResult,
    RunStatus,
    StepExecutor,
    SyncRunContext,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
    agent_tool,
    configure,
    current_run,
    open_run,
)
from agent_runtime_core._execution.context import Context
from agent_runtime_core._views.attempts import step_views
from agent_runtime_core._views.runs import usage_view
from agent_runtime_core._views.timeline import timeline_view
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.integrations._steps import ModelUsage, model_step
from agent_runtime_core.interfaces import TraceSink
from agent_runtime_core.limits import Budget
from agent_runtime_core.registry import Registry
from agent_runtime_core.steps import Step


class Calls(AgentRuntime):
    """Makes model calls of 4,000 tokens each, as `how` says."""

    key = "calls"

    def __init__(self, how: str = "charge", count: int = 3, *, fail_at: int = 0) -> None:
        self.how, self.count, self.fail_at = how, count, fail_at
        self.made = 0

    async def run(self, ctx: RunContext) -> RunResult:
        answers = [await self.call(ctx) for _ in range(self.count)]
        return RunResult(final_output={"answers": answers})

    async def call(self, ctx: RunContext) -> str:
        if self.how == "model_step":
            used = ModelUsage("m-1", 3000, 1000)
            return await model_step(ctx, "ask", self.model, usage=lambda _: used)
        answer: str = await ctx.step("ask", self.charging)
        return answer

    async def charging(self, ctx: RunContext) -> str:
        answer = await self.model()
        ctx.charge(model="m-1", input_tokens=3000, output_tokens=1000)
        if self.made == self.fail_at:
            self.fail_at = 0
            raise ConnectionError("cut")
        return answer

    async def model(self) -> str:
        self.made += 1
        return f"answer {self.made}"


def runner_at(path: Any, agent: AgentRuntime, **limits: Any) -> AgentRunner:
    registry = Registry()
    registry.register(agent)
    config = RunnerConfig(limits=RunLimits(**limits), max_retries=1)
    return AgentRunner.open(path, registry=registry, config=config)


@pytest.mark.parametrize(("how", "made"), [("charge", 1), ("model_step", 1)])
async def test_a_run_that_exceeds_its_tokens_is_stopped(how: str, made: int) -> None:
    agent = Calls(how)
    async with runner_at("memory://", agent, max_tokens=3000) as runner:
        result = await runner.execute(agent, input_data={})
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert agent.made == made
    assert result.usage["total_tokens"] == 4000


async def test_what_is_charged_is_stored_as_decimal_text(tmp_path: Path) -> None:
    configure(model_prices={"m-1": {"input": 0.1, "output": 0.2}})
    agent = Calls()
    async with runner_at(tmp_path / "a.db", agent) as runner:
        result = await runner.execute(agent, input_data={})
        assert result.run_id is not None
        records = await runner.state_store.records(result.run_id)
    charged = [json.loads(each.info)["charged"]["m-1"] for each in records if each.info and '"charged"' in each.info]
    assert [each["cost_usd"] for each in charged] == ["0.0005"] * 3
    assert result.usage["cost_usd"] == 0.0015


async def test_turns_are_limited() -> None:
    agent = Calls("model_step")
    async with runner_at("memory://", agent, max_turns=2) as runner:
        result = await runner.execute(agent, input_data={})
    assert (agent.made, result.error and result.error.type) == (2, "LimitExceeded")


async def test_what_is_charged_is_the_usage_of_the_result() -> None:
    configure(model_prices={"m-1": {"input": 1.0, "output": 2.0}})
    agent = Calls()
    async with runner_at("memory://", agent) as runner:
        result = await runner.execute(agent, input_data={})
    assert result.usage == {
        "prompt_tokens": 9000, "completion_tokens": 3000, "total_tokens": 12000, "turns": 3, "tool_calls": 0,
        "cost_usd": pytest.approx(0.015),
    }  # fmt: skip


@pytest.mark.parametrize("how", ["charge", "model_step"])
async def test_a_resumed_run_counts_recorded_calls_once(how: str, tmp_path: Path) -> None:
    agent = Calls(how, 3)
    async with runner_at(tmp_path / "a.db", agent, max_turns=2) as runner:
        first = await runner.execute(agent, "r", {})
        second = await runner.resume(first.run_id or "", limits={"max_turns": 4})
        assert second is not None
        result = await runner.execute(agent, "r", {})
    assert first.usage["total_tokens"] == 8000 + 4000 * (how == "charge")
    assert result.status is RunStatus.SUCCEEDED
    assert result.usage["total_tokens"] == 12000 + 4000 * (how == "charge")


async def test_a_resumed_run_stops_at_the_same_call_unless_its_limit_was_raised(tmp_path: Path) -> None:
    agent = Calls("model_step", 3)
    async with runner_at(tmp_path / "a.db", agent, max_turns=2) as runner:
        await runner.execute(agent, "r", {})
        again = await runner.execute(agent, "r", {})
    assert (agent.made, again.status) == (2, RunStatus.FAILED)


async def test_a_failed_step_keeps_what_it_has_charged(tmp_path: Path) -> None:
    agent = Calls("charge", 2, fail_at=1)
    async with runner_at(tmp_path / "a.db", agent) as runner:
        failed = await runner.execute(agent, "r", {})
        assert failed.error is not None
        assert failed.usage["total_tokens"] == 4000
        result = await runner.execute(agent, "r", {})
    assert result.usage["total_tokens"] == 12000  # two answers, and the one that was lost


async def test_steps_inside_a_recorded_step_count_once(tmp_path: Path) -> None:
    class Nested(AgentRuntime):
        key = "nested"
        crash = True

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.step("outer", self.outer)
            if Nested.crash:
                raise ConnectionError("cut")
            return RunResult()

        async def outer(self, ctx: RunContext) -> None:
            await ctx.step("inner", self.inner)

        def inner(self, ctx: SyncRunContext) -> None:  # in a thread
            ctx.charge(input_tokens=10)

    agent = Nested()
    async with runner_at(tmp_path / "a.db", agent) as runner:
        await runner.execute(agent, "r", {})
        Nested.crash = False
        result = await runner.execute(agent, "r", {})
    assert result.usage["total_tokens"] == 10


async def test_steps_of_a_list_and_of_a_map_charge_too(tmp_path: Path) -> None:
    class Lists(AgentRuntime):
        key = "lists"
        crash = True

        async def run(self, ctx: RunContext) -> RunResult:
            steps = StepExecutor(ctx)
            await steps.run([Step("a", self.charge), Step("b", self.charge)])
            await steps.map("items", self.item, [1, 2, 3])
            if Lists.crash:
                raise ConnectionError("cut")
            return RunResult()

        async def charge(self, ctx: RunContext, state: dict[str, Any]) -> None:
            ctx.charge(input_tokens=1)

        async def item(self, item: int) -> int:
            ctx = current_run()
            assert ctx is not None
            ctx.charge(input_tokens=10)
            return item

    agent = Lists()
    async with runner_at(tmp_path / "a.db", agent) as runner:
        first = await runner.execute(agent, "r", {})
        assert first.usage["total_tokens"] == 32
        Lists.crash = False
        result = await runner.execute(agent, "r", {})
    assert result.usage["total_tokens"] == 32


async def test_a_called_child_counts_against_its_own_limits() -> None:
    class Parent(AgentRuntime):
        key = "parent"

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.call(Calls(count=1), {})
            await ctx.call(Calls(count=1), {})
            return RunResult()

    async with runner_at("memory://", Parent()) as runner:
        result = await runner.execute(Parent(), input_data={})
        children = await runner.runs(agent="calls")
        used = [(await runner.wait(each.run_id)).usage["total_tokens"] for each in children]
    assert result.usage == {}  # as of children with a loop of this library: each has the limits of the runner
    assert used == [4000, 4000]


async def test_a_resumed_run_counts_a_called_child_of_a_step_no_more_than_before(tmp_path: Path) -> None:
    class Parent(AgentRuntime):
        key = "parent"
        crash = True

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.step("outer", self.outer)
            if Parent.crash:
                raise ConnectionError("cut")
            return RunResult()

        async def outer(self, ctx: RunContext) -> None:
            await ctx.call(Calls(count=1), {})
            ctx.charge(input_tokens=1)

    async with runner_at(tmp_path / "a.db", Parent()) as runner:
        first = await runner.execute(Parent(), "r", {})
        Parent.crash = False
        result = await runner.execute(Parent(), "r", {})
    assert first.usage["total_tokens"] == result.usage["total_tokens"] == 1


async def test_a_fork_does_not_count_copied_steps(tmp_path: Path) -> None:
    agent = Calls(count=2)
    async with runner_at(tmp_path / "a.db", agent) as runner:
        first = await runner.execute(agent, "r", {})
        assert first.run_id is not None
        fork = await runner.fork(first.run_id, ("ask", 0))
        assert await runner.run_once()
        result = await runner.wait(fork)
    assert result.usage["total_tokens"] == 4000


async def test_a_charge_between_steps_is_rejected(tmp_path: Path) -> None:
    async with open_run(tmp_path / "a.db", "r") as ctx:
        with pytest.raises(InvalidArgument, match=r"ctx\.charge\(\) must be called inside a step"):
            ctx.charge(input_tokens=1)


@pytest.mark.parametrize("wrong", [{"input_tokens": -1}, {"cost_usd": -0.1}, {"turns": 1.5}, {"tool_calls": True}])
async def test_wrong_numbers_are_rejected(wrong: dict[str, Any], tmp_path: Path) -> None:
    async with open_run(tmp_path / "a.db", "r") as ctx:

        async def charge() -> str:
            with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))} must"):
                ctx.charge(**wrong)
            return "rejected"

        assert await ctx.step("charge", charge) == "rejected"


async def test_a_charge_is_traced_as_a_model_call() -> None:
    seen: list[dict[str, Any]] = []

    class Sink(TraceSink):
        async def trace(self, event: dict[str, Any]) -> None:
            if event["type"] == "llm.call":
                seen.append(event)

    agent = Calls(count=1)
    async with AgentRunner.open("memory://", trace_sinks=[Sink()]) as runner:
        await runner.execute(agent, input_data={})
    [call] = seen
    assert call["model"] == "m-1"
    assert call["usage"] == {"prompt_tokens": 3000, "completion_tokens": 1000, "total_tokens": 4000}


async def test_a_test_context_counts_charges() -> None:
    ctx = MockRunContext()
    ctx.charge(input_tokens=5, output_tokens=1)
    ctx.charge(turns=0, tool_calls=2)
    ctx.check_limits()
    assert ctx.usage == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6, "turns": 1, "tool_calls": 2}


async def test_the_error_of_a_charge_can_be_caught_and_the_answer_kept() -> None:
    class Keeping(AgentRuntime):
        key = "keeping"

        async def run(self, ctx: RunContext) -> RunResult:
            answer = await ctx.step("ask", self.ask)
            return RunResult(final_output={"answer": answer})

        async def ask(self, ctx: RunContext) -> str:
            await asyncio.sleep(0)
            try:
                ctx.charge(input_tokens=5000)
            except LimitExceeded:
                return "kept"
            return "not reached"

    async with runner_at("memory://", Keeping(), max_tokens=3000) as runner:
        result = await runner.execute(Keeping(), input_data={})
    assert result.final_output == {"answer": "kept"}
    assert not isinstance(result.error, ErrorInfo)


async def test_code_that_continues_after_a_limit_does_not_repeat_the_call(tmp_path: Path) -> None:
    class Falling(Calls):
        key = "falling"
        crash = True

        async def run(self, ctx: RunContext) -> RunResult:
            try:
                await self.call(ctx)
            except LimitExceeded as error:
                limit = error.limit
            await ctx.step("fall back", lambda: None)
            if Falling.crash:
                raise ConnectionError("cut")
            return RunResult(final_output={"limit": limit})

    agent = Falling()
    async with runner_at(tmp_path / "a.db", agent, max_tokens=3000) as runner:
        await runner.execute(agent, "r", {})
        Falling.crash = False
        result = await runner.execute(agent, "r", {})
    assert result.final_output == {"limit": "max_tokens"}
    assert agent.made == 1
    assert result.usage["total_tokens"] == 4000


class Looker(ToolCallingAgent):
    """Its tool makes a model call of 1,000 tokens of its own; its two model calls have 30 each."""

    key = "looker"
    system_prompt = "Look."
    tools = ToolRegistry()
    crash = False

    def get_llm_client(self) -> MockLLMClient:
        return MockLLMClient([MockLLMResponse("", tool_calls=[{"name": "look", "arguments": {}}]), "done"])

    async def after_run(self, ctx: RunContext, result: RunResult) -> RunResult:
        if Looker.crash:
            raise ConnectionError("cut")
        return result


def look() -> str:
    """Look."""
    ctx = current_run()
    assert ctx is not None
    ctx.charge(model="m-1", input_tokens=1000)
    return "seen"


Looker.tools.register(Tool.from_function(look))
LOOK = {"messages": [{"role": "user", "content": "look"}]}


async def test_what_a_tool_charges_is_in_the_usage_of_its_agent(tmp_path: Path) -> None:
    agent = Looker()
    async with runner_at(tmp_path / "a.db", agent) as runner:
        once = await runner.execute(agent, "once", LOOK)
        Looker.crash = True
        try:
            failed = await runner.execute(agent, "twice", LOOK)
        finally:
            Looker.crash = False
        resumed = await runner.execute(agent, "twice", LOOK)
    assert once.usage["total_tokens"] == 1060
    assert once.usage["turns"] == 3
    assert failed.status is RunStatus.FAILED
    assert failed.usage["total_tokens"] == resumed.usage["total_tokens"] == 1060


async def test_the_partial_result_of_a_limit_has_what_tools_charged() -> None:
    agent = Looker()
    async with runner_at("memory://", agent, max_tokens=500) as runner:
        result = await runner.execute(agent, input_data=LOOK)
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert result.usage["total_tokens"] == 1030


async def test_a_child_of_an_agent_loop_charges_the_limits_of_its_parent() -> None:
    class Parent(ToolCallingAgent):
        key = "parent"
        system_prompt = "Delegate."
        tools = ToolRegistry()

        def get_llm_client(self) -> MockLLMClient:
            call = {"name": "looker", "arguments": {"task": "look"}}
            return MockLLMClient([MockLLMResponse("", tool_calls=[call]), "done"])

    Parent.tools.register(agent_tool(Looker(), description="Looks."))
    agent = Parent()
    async with runner_at("memory://", agent) as runner:
        unlimited = await runner.execute(agent, input_data=LOOK)
    async with runner_at("memory://", agent, max_tokens=1050) as runner:
        limited = await runner.execute(agent, input_data=LOOK)
    assert unlimited.usage["total_tokens"] == 1060 + 60
    assert limited.error is not None
    assert (limited.error.type, limited.error.details["limit"]) == ("LimitExceeded", "max_tokens")


async def test_a_usage_that_an_agent_reports_itself_is_kept() -> None:
    class Own(Calls):
        key = "own"

        async def run(self, ctx: RunContext) -> RunResult:
            await self.call(ctx)
            return RunResult(usage={"total_tokens": 9000, "searches": 2})

    async with runner_at("memory://", Own()) as runner:
        result = await runner.execute(Own(), input_data={})
    assert result.usage == {"total_tokens": 9000, "searches": 2}


async def test_views_show_what_steps_have_charged(tmp_path: Path) -> None:
    agent = Calls("charge", 2, fail_at=1)
    async with runner_at(tmp_path / "a.db", agent) as runner:
        first = await runner.execute(agent, "r", {})
        row = await runner.queue.row(str(first.run_id))
        assert row is not None
        records = await runner.state_store.records(row.run_id)
        [failed] = step_views(row, records)["items"]
        assert (failed["state"], failed["usage"]["total_tokens"]) == ("failed", 4000)
        await runner.execute(agent, "r", {})
        records = await runner.state_store.records(row.run_id)
        items = step_views(row, records)["items"]
        by_model = await usage_view(runner, "model")
        by_agent = await usage_view(runner, "agent")
        timeline = timeline_view(row, records)["items"]
    assert [each["usage"]["total_tokens"] for each in items] == [8000, 4000]  # the failed attempt used as much
    assert [each["tokens"] for each in timeline] == [8000, 4000]
    assert [(each["model"], each["runs"], each["tokens"]) for each in by_model["items"]] == [("m-1", 1, 12000)]
    assert by_agent["total"]["tokens"] == 12000


async def test_a_step_may_charge_calls_of_several_models(tmp_path: Path) -> None:
    async def ask(ctx: RunContext) -> None:
        ctx.charge(model="m-1", input_tokens=10)
        ctx.charge(model="m-2", input_tokens=5)
        ctx.charge(model="m-1", output_tokens=1)
        ctx.charge(input_tokens=2)

    class Several(AgentRuntime):
        key = "several"

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.step("model", ask)  # as the model calls of the library's own loop are named
            return RunResult()

    async with runner_at(tmp_path / "a.db", Several()) as runner:
        result = await runner.execute(Several(), "r", {})
        found = await usage_view(runner, "model")
    assert result.usage["total_tokens"] == 18
    assert result.usage["turns"] == 4
    assert {each["model"]: each["tokens"] for each in found["items"]} == {"m-1": 11, "m-2": 5, "unknown": 2}


async def test_code_that_runs_after_its_step_cannot_charge() -> None:
    """No record would have the charge, so a resumed run would not count it."""

    class Late(AgentRuntime):
        key = "late"

        async def run(self, ctx: RunContext) -> RunResult:
            ended = asyncio.Event()

            async def charge_later() -> None:
                await ended.wait()
                ctx.charge(input_tokens=5)

            async def leave_a_task() -> None:
                self.task = asyncio.create_task(charge_later())

            await ctx.step("leave", leave_a_task)
            ended.set()
            with pytest.raises(InvalidArgument, match="inside a step, got a call after its step has ended"):
                await self.task
            return RunResult(final_output={"usage": ctx.usage})  # type: ignore[attr-defined]

    async with runner_at("memory://", Late()) as runner:
        result = await runner.execute(Late(), input_data={}, raise_on_error=True)
    assert result.final_output == {"usage": {}}


async def test_threads_charge_on_the_event_loop_of_the_run() -> None:
    """Otherwise two of them could lose a charge, because counting is no atomic operation."""
    threads: set[int] = set()

    class Counting(Budget):
        def recalled(self, usage: Any) -> None:
            threads.add(threading.get_ident())
            super().recalled(usage)

    class Threads(AgentRuntime):
        key = "threads"

        async def run(self, ctx: RunContext) -> RunResult:
            assert isinstance(ctx, Context)
            ctx._budget = Counting(RunLimits(max_tokens=3))
            await ctx.step("plain", self.plain)
            try:
                await ctx.step("framework", self.framework)
            except LimitExceeded as error:
                return RunResult(final_output={"limit": error.limit})
            return RunResult()

        def plain(self) -> None:
            self.charge()

        async def framework(self) -> None:
            await asyncio.gather(*(asyncio.to_thread(self.charge) for _ in range(3)))

        def charge(self) -> None:
            ctx = current_run()
            assert ctx is not None
            ctx.charge(input_tokens=1)

    async with runner_at("memory://", Threads()) as runner:
        result = await runner.execute(Threads(), input_data={}, raise_on_error=True)
    assert threads == {threading.get_ident()}
    assert result.final_output == {"limit": "max_tokens"}
    assert result.usage["total_tokens"] == 4
