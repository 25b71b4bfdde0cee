"""Retries and time limits of tools, in the agent loop and outside of it, and hooks after tools with side effects."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunContext, RunnerConfig, ToolCallingAgent, ToolRegistry, tool
from agent_runtime_core.errors import BadArguments, InvalidArgument, LimitExceeded, ToolFailed, ToolTimeout
from agent_runtime_core.interfaces import ToolCallDict
from agent_runtime_core.retry import Backoff
from agent_runtime_core.testing import MockLLMClient, MockLLMResponse, MockRunContext
from agent_runtime_core.tools import BaseTool, Tool, ToolResult, answer_call
from tests.support.cases import for_each

HELLO = [{"role": "user", "content": "hi"}]


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def agent(*tools: Tool | BaseTool, calls: int = 1, name: str = "flaky", **members: Any) -> ToolCallingAgent:
    """An agent whose model calls the tool, and then answers with the text that it got."""
    registry = ToolRegistry()
    for each in tools:
        registry.register(each)

    def answer(messages: list[dict[str, Any]]) -> Any:
        if sum(each["role"] == "tool" for each in messages) < calls:
            return MockLLMResponse(None, tool_calls=[call(name)])
        return messages[-1]["content"]

    attributes = {
        "key": "a", "system_prompt": "s", "tools": registry,
        "get_llm_client": lambda self: MockLLMClient(response_fn=answer), **members,
    }  # fmt: skip
    made: ToolCallingAgent = type("A", (ToolCallingAgent,), attributes)()
    return made


class Flaky:
    """Fails some times, then succeeds."""

    def __init__(self, failures: int, error: BaseException | None = None) -> None:
        self.failures, self.error = failures, error or ConnectionError("no route")
        self.keys: list[str] = []

    def tool(self, **options: Any) -> Tool:
        def flaky(ctx: RunContext | None = None) -> str:
            self.keys.append("" if ctx is None else getattr(ctx, "idempotency_key", ""))
            if len(self.keys) <= self.failures:
                raise self.error
            return "done"

        return Tool.from_function(flaky, **({"retry_delay": 0} | options))


# -- settings


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"retries": -1}, "tool 'flaky': retries must be an integer of at least 0, got -1"),
        ({"retries": True}, "tool 'flaky': retries must be an integer"),
        ({"retries": "3"}, "tool 'flaky': retries must be an integer"),
        ({"retry_delay": -1}, "tool 'flaky': retry_delay must be a number of seconds"),
        ({"retry_on": 3}, "tool 'flaky': retry_on must be an exception class"),
        ({"retry_on": (ValueError, int)}, "tool 'flaky': retry_on must be an exception class"),
        ({"timeout": 0}, "tool 'flaky': timeout must be a number of seconds above 0"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        Flaky(0).tool(**options)


# -- outside of the loop


async def test_execute_retries() -> None:
    for failures, retries in ((2, 2), (0, 0), (1, 5)):
        flaky, tools = Flaky(failures), ToolRegistry()
        tools.register(flaky.tool(retries=retries))
        assert await tools.execute("flaky", {}) == "done"
        assert len(flaky.keys) == failures + 1


async def test_the_last_error_is_raised() -> None:
    flaky, tools = Flaky(9), ToolRegistry()
    tools.register(flaky.tool(retries=2))
    with pytest.raises(ConnectionError):
        await tools.execute("flaky", {})
    assert len(flaky.keys) == 3
    answer = await answer_call(tools, ToolCallDict(call("flaky")), MockRunContext())
    assert (answer.ok, answer.content) == (False, "Error: ConnectionError: no route")
    assert len(flaky.keys) == 6


@for_each(
    ("error", "retry_on", "attempts"),
    [
        (ConnectionError(), ConnectionError, 3),
        (ConnectionError(), (KeyError, OSError), 3),
        (ExceptionGroup("", [ConnectionError(), ConnectionError()]), ConnectionError, 3),
        (ExceptionGroup("", [ConnectionError(), KeyError()]), ConnectionError, 1),
        (KeyError(), ConnectionError, 1),
        (ConnectionError("again"), lambda error: "again" in str(error), 3),
        (ConnectionError(), lambda error: 1 / 0, 1),
        (InvalidArgument("wrong"), Exception, 1),
        (BadArguments("wrong", "other"), Exception, 1),
        (LimitExceeded("max_turns", 1, 1, "x"), Exception, 1),
        (ToolFailed("flaky", "busy"), Exception, 3),
    ],
)
async def test_which_errors_are_retried(error: BaseException, retry_on: Any, attempts: int) -> None:
    flaky, tools = Flaky(9, error), ToolRegistry()
    tools.register(flaky.tool(retries=2, retry_on=retry_on))
    with pytest.raises(type(error)):
        await tools.execute("flaky", {})
    assert len(flaky.keys) == attempts
    looped = Flaky(9, error)
    async with AgentRunner(config=RunnerConfig(max_retries=1)) as runner:
        await runner.execute(agent(looped.tool(retries=2, retry_on=retry_on)), input_data={"messages": HELLO})
    assert len(looped.keys) == attempts


async def test_invalid_arguments_are_never_retried_and_a_retry_gets_them_unchanged() -> None:
    seen: list[list[int]] = []

    @tool(retries=2, retry_delay=0)
    def change(items: list[int]) -> str:
        seen.append(list(items))
        items.append(0)
        raise ConnectionError

    tools = ToolRegistry()
    tools.register(change)
    with pytest.raises(BadArguments):
        await tools.execute("change", {"items": 1})
    assert seen == []
    with pytest.raises(ConnectionError):
        await tools.execute("change", {"items": [1]})
    assert seen == [[1]] * 3


async def test_the_delay_may_be_a_function() -> None:
    delays: list[float] = []

    class Clock:
        random = None

        async def sleep(self, seconds: float) -> None:
            delays.append(seconds)

    ctx = type("Ctx", (), {"clock": Clock()})()
    tools = ToolRegistry()
    tools.register(Flaky(3).tool(retries=3, retry_delay=Backoff(base=2, jitter="none")))
    assert await tools.execute("flaky", {}, ctx) == "done"
    assert delays == [2, 4, 8]


class Busy(BaseTool):
    retries = 2
    retry_delay = 0

    def __init__(self) -> None:
        self.calls = 0

    def name(self) -> str:
        return "flaky"

    def description(self) -> str:
        return "Is busy at first."

    def parameters(self) -> dict[str, Any]:
        return {}

    async def execute(self) -> ToolResult:
        self.calls += 1
        return ToolResult(self.calls == 3, "done", "busy")


# -- in the loop


@pytest.mark.parametrize("has_side_effects", [False, True])
async def test_each_attempt_of_a_call_is_recorded(tmp_path: Path, has_side_effects: bool) -> None:
    flaky = Flaky(2)
    made = agent(flaky.tool(retries=2, has_side_effects=has_side_effects))
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = (await runner.execute(made, "r", {"messages": HELLO})).raise_for_status()
        events = [event.event_type for event in await runner.event_bus.get_events("r")]
    assert result.final_output == {"response": "done"}
    assert len(flaky.keys) == 3
    assert len(set(flaky.keys)) == 1, "each attempt has the same idempotency key"
    assert events.count("step.retrying") == 2
    assert events.count("tool.result") == 1
    assert result.usage["tool_calls"] == 1


async def test_the_model_gets_the_error_of_the_last_attempt(tmp_path: Path) -> None:
    flaky = Flaky(9)
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(agent(flaky.tool(retries=1)), "r", {"messages": HELLO})
        again = await runner.execute(agent(flaky.tool(retries=1)), "r", {"messages": HELLO})
    assert result.final_output == again.final_output == {"response": "Error: ConnectionError: no route"}
    assert len(flaky.keys) == 2


async def test_a_base_tool_is_retried_when_it_has_no_success() -> None:
    tools = ToolRegistry()
    tools.register(Busy())
    assert await tools.execute("flaky", {}) == "done"
    async with AgentRunner() as runner:
        result = await runner.execute(agent(Busy()), input_data={"messages": HELLO})
    assert result.final_output == {"response": "done"}


@pytest.mark.parametrize("plain", [False, True])
async def test_a_time_limit_is_that_of_one_attempt(plain: bool) -> None:
    retried: list[BaseException] = []
    release = threading.Event()

    def blocked() -> str:
        release.wait(30)
        return "late"

    async def waits() -> str:
        await asyncio.Event().wait()
        return "late"

    def note(error: BaseException) -> bool:
        retried.append(error)
        return True

    made = tool(name="flaky", timeout=0.05, retries=1, retry_delay=0, retry_on=note)(blocked if plain else waits)
    async with AgentRunner() as runner:
        result = await runner.execute(agent(made), input_data={"messages": HELLO})
    response = result.final_output["response"]
    assert response.startswith("Error: tool 'flaky' took longer than 0.05 s")
    assert [type(each) for each in retried] == [ToolTimeout, ToolTimeout]
    tools = ToolRegistry()
    tools.register(made)
    with pytest.raises(ToolTimeout):
        await tools.execute("flaky", {})
    assert len(retried) == 3  # outside of a run, the last error is not asked about
    release.set()


# -- results and hooks of tools with side effects


class Receipt: ...


@pytest.mark.parametrize("made", ["agent", "hook"])
async def test_a_result_without_a_json_form_repeats_no_effect(tmp_path: Path, made: str) -> None:
    paid: list[int] = []

    @tool(has_side_effects=True, name="flaky")
    def pay() -> Any:
        paid.append(5)
        return Receipt() if made == "agent" else "paid"

    async def on_tool_result(self: Any, ctx: Any, name: str, result: Any) -> Any:
        return Receipt()

    members: Any = {"on_tool_result": on_tool_result} if made == "hook" else {}
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = (await runner.execute(agent(pay, **members), "r", {"messages": HELLO})).raise_for_status()
    assert paid == [5]
    assert result.final_output["response"].startswith(
        "Tool 'flaky' ran, but its result of type Receipt cannot be stored: "
    )
    answers = [each for each in result.final_messages if each["role"] == "tool"]
    assert "metadata" not in answers[0], "the call is no error"


@pytest.mark.parametrize("has_side_effects", [True, False])
async def test_a_hook_that_fails_fails_the_run_and_repeats_no_effect(tmp_path: Path, has_side_effects: bool) -> None:
    paid: list[int] = []
    failed: list[int] = []

    @tool(has_side_effects=has_side_effects, name="flaky")
    def pay() -> str:
        paid.append(5)
        return "paid"

    async def on_tool_result(self: Any, ctx: Any, name: str, result: Any) -> Any:
        failed.append(1)
        if len(failed) == 1:
            raise ValueError("no such column")
        return result

    made = agent(pay, on_tool_result=on_tool_result)
    config = RunnerConfig(retry_backoff_base=0)
    async with AgentRunner.open(tmp_path / "runs.db", config=config) as runner:
        result = (await runner.execute(made, "r", {"messages": HELLO})).raise_for_status()
        assert (await runner.get_run("r")).attempt == 2
    if has_side_effects:
        assert paid == [5]
        assert result.final_output["response"].startswith("Tool 'flaky' ran, but the hook that follows it raised ")
    else:
        assert paid == [5, 5]
        assert result.final_output == {"response": "paid"}


async def test_a_call_that_a_limit_interrupts_is_not_reported_as_not_run() -> None:
    @tool(has_side_effects=True, name="flaky")
    async def endless() -> str:
        await asyncio.Event().wait()
        return "late"

    made = agent(endless, limits={"turn_timeout": 0.05})
    async with AgentRunner() as runner:
        result = await runner.execute(made, input_data={"messages": HELLO})
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert result.final_messages[-1]["content"] == (
        "Error: the call was interrupted before it had a result. It may have taken effect"
    )
