"""An agent that is a model with tools."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.interfaces import LLMClient, LLMResponse, RunContext, RunResult
from agent_runtime_core.llm import use_llm_client
from agent_runtime_core.loop import CancellationToken, agent_tool
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.scripted_model import Scripted, asks, call

HELLO = [{"role": "user", "content": "how warm is it?"}]


def weather(city: str) -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "degrees": 21}


class Agent(ToolCallingAgent):
    key = "weather"
    system_prompt = "You know the weather."
    tools = ToolRegistry()
    tools.register(Tool.from_function(weather))
    client: LLMClient | None = None

    def get_llm_client(self) -> LLMClient:
        return self.client if self.client is not None else super().get_llm_client()


def agent(client: LLMClient | None = None, **changes: Any) -> Agent:
    made: Agent = type("Changed", (Agent,), changes)()
    made.client = client
    return made


def script() -> Scripted:
    return Scripted(asks(call("weather", {"city": "Ulm"}, "c1")), "21 degrees")


async def test_it_answers_and_tells_what_it_does() -> None:
    client, ctx = script(), MockRunContext(HELLO)
    result = await agent(client).run(ctx)
    assert result.final_output == {"response": "21 degrees"}
    assert client.asked[0] == [{"role": "system", "content": "You know the weather."}, *HELLO]
    assert [m["role"] for m in result.final_messages] == ["user", "assistant", "tool", "assistant"]
    assert result.final_messages[2]["content"] == '{"city": "Ulm", "degrees": 21}'
    assert result.usage["total_tokens"] == 240, "of all calls, not the last one"
    assert ctx.get_events() == [
        ("tool.call", {"tool_name": "weather", "tool_args": {"city": "Ulm"}, "tool_call_id": "c1"}),
        ("tool.result", {"tool_name": "weather", "tool_call_id": "c1", "result": {"city": "Ulm", "degrees": 21}}),
        ("assistant.message", {"content": "21 degrees"}),
    ]


async def test_its_hooks() -> None:
    seen: list[Any] = []

    async def before_run(self: Any, ctx: RunContext) -> None:
        seen.append("before")

    async def after_run(self: Any, ctx: RunContext, result: RunResult) -> RunResult:
        result.artifacts["seen"] = True
        return result

    async def on_tool_call(self: Any, ctx: RunContext, name: str, args: dict[str, Any]) -> None:
        seen.append((name, args))

    async def on_tool_result(self: Any, ctx: RunContext, name: str, result: Any) -> Any:
        seen.append((name, result["degrees"]))
        return "cold"

    made = agent(
        script(), before_run=before_run, after_run=after_run, on_tool_call=on_tool_call, on_tool_result=on_tool_result
    )
    ctx = MockRunContext(HELLO)
    result = await made.run(ctx)
    assert seen == ["before", ("weather", {"city": "Ulm"}), ("weather", 21)]
    assert result.artifacts == {"seen": True}
    assert result.final_messages[2]["content"] == "cold"
    assert ctx.get_events("tool.result")[0][1]["result"] == "cold"


async def test_its_hooks_may_be_plain_functions() -> None:
    seen: list[str] = []

    def before_run(self: Any, ctx: RunContext) -> None:
        seen.append("before")

    def on_tool_call(self: Any, ctx: RunContext, name: str, args: dict[str, Any]) -> None:
        seen.append(name)

    def on_tool_result(self: Any, ctx: RunContext, name: str, result: Any) -> Any:
        return "cold"

    def after_run(self: Any, ctx: RunContext, result: RunResult) -> RunResult:
        result.artifacts["seen"] = True
        return result

    made = agent(
        script(), before_run=before_run, after_run=after_run, on_tool_call=on_tool_call, on_tool_result=on_tool_result
    )
    result = await made.run(MockRunContext(HELLO))
    assert seen == ["before", "weather"]
    assert (result.final_messages[2]["content"], result.artifacts) == ("cold", {"seen": True})


@pytest.mark.sentence("004", "calls provider (`stream` preferred, with fallback to `complete`)")
@pytest.mark.parametrize("stream", [True, False])
async def test_deltas_are_told_only_if_it_streams(stream: bool, tmp_path: Path) -> None:
    async with AgentRunner.open("memory://") as runner:
        by_run = await runner.execute(agent(script()), "r1", {"messages": HELLO, "params": {"stream": stream}})
        by_class = await runner.execute(agent(script(), stream=stream), "r2", {"messages": HELLO})
        for result, run in ((by_run, "r1"), (by_class, "r2")):
            assert result.final_output == {"response": "21 degrees"}
            told = [e.payload for e in await runner.event_bus.get_events(run) if e.event_type == "assistant.delta"]
            assert ("".join(each["delta"] for each in told) == "21 degrees") is stream


async def test_at_max_iterations_the_run_fails_with_what_there_is(tmp_path: Path) -> None:
    client = Scripted(say=lambda messages: asks(call("weather", {"city": "Ulm"}), content="looking"))
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(agent(client, max_iterations=3), "r", {"messages": HELLO})
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert (result.error.type, result.error.details["limit"]) == ("LimitExceeded", "max_turns")
    assert result.final_output == {"response": "looking"}
    assert result.final_messages[0] == HELLO[0]
    assert len(client.asked) == 3
    with pytest.raises(InvalidArgument, match="agent 'weather': max_iterations must be an integer above 0, got 0"):
        await agent(client, max_iterations=0).run(MockRunContext(HELLO))


async def test_the_stricter_of_its_limits_wins() -> None:
    client = Scripted(say=lambda messages: asks(call("weather", {"city": "Ulm"})))
    result = await agent(client, limits={"max_turns": 2, "max_tool_calls": 50}).run(MockRunContext(HELLO))
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert len(client.asked) == 2


async def test_a_typed_answer_is_plain_json() -> None:
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    result = await agent(Scripted('{"degrees": 21}'), output_type=schema).run(MockRunContext(HELLO))
    assert result.final_output == {"response": {"degrees": 21}}


async def test_a_typed_answer_may_be_none() -> None:
    result = await agent(Scripted("null"), output_type=int | None).run(MockRunContext(HELLO))
    assert result.final_output == {"response": None}


async def test_a_typed_answer_of_another_agent_stays_what_it_is(tmp_path: Path) -> None:
    helper = agent(Scripted('{"degrees": 21}'), key="helper", output_type=dict[str, int])
    tools = ToolRegistry()
    tools.register(agent_tool(helper, handoff=True))
    manager = agent(Scripted(asks(call("helper", {"task": "go"}, "h"))), key="manager", tools=tools)
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(manager, "m", {"messages": HELLO})
    assert result.final_output == {"response": {"degrees": 21}}
    assert result.final_messages[-1]["content"] == '{"degrees":21}'


async def test_it_asks_the_client_that_is_in_use() -> None:
    client = script()
    with use_llm_client(client):
        result = await agent().run(MockRunContext(HELLO))
    assert result.final_output == {"response": "21 degrees"}


class Configured(Scripted):
    """The client of somebody else's package."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        super().__init__(say=lambda messages: "21 degrees")


async def test_runs_share_the_configured_client_until_something_else_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Configured, "made", 0)

    async def asked() -> int:
        for _ in range(3):
            result = await agent().run(MockRunContext(HELLO))
            assert result.final_output == {"response": "21 degrees"}
        return Configured.made

    provider = f"{__name__}:Configured"
    configure(model_provider=provider)
    assert await asked() == 1
    with use_llm_client(script()) as used:
        assert agent().get_llm_client() is used
    assert await asked() == 1
    configure(model_provider=provider, default_model="another")
    assert await asked() == 2
    reset_config()
    monkeypatch.setenv("AGENT_RUNTIME_MODEL_PROVIDER", provider)
    assert await asked() == 3
    monkeypatch.setenv("OPENAI_BASE_URL", "https://models.example/v1")
    assert await asked() == 4


def test_the_configured_client_goes_with_its_configuration() -> None:
    configure(model_provider=f"{__name__}:Configured")
    client = weakref.ref(agent().get_llm_client())
    assert client() is agent().get_llm_client()
    reset_config()
    gc.collect()
    assert client() is None


async def test_its_model_and_temperature_are_asked_for() -> None:
    client = script()
    await agent(client, model="m-1", temperature=0.3).run(MockRunContext(HELLO))
    assert (client.options[0]["model"], client.options[0]["temperature"]) == ("m-1", 0.3)


async def test_a_loop_that_a_token_ended_says_nothing() -> None:
    token = CancellationToken()
    token.cancel()
    ctx = MockRunContext(HELLO)
    result = await agent(script(), cancellation=lambda self, ctx: token).run(ctx)
    assert (result.final_output, result.artifacts) == ({"response": None}, {"state": "cancelled"})
    assert ctx.get_events() == []


async def test_the_client_gets_what_it_is_asked_by_name() -> None:
    client = AsyncMock()
    client.generate.return_value = LLMResponse({"role": "assistant", "content": "21 degrees"})
    await agent(client, model="m", temperature=0.5).run(MockRunContext(HELLO))
    given = client.generate.call_args.kwargs
    assert given["messages"][1:2] == HELLO
    assert [tool["function"]["name"] for tool in given["tools"]] == ["weather"]
    assert (given["model"], given["temperature"]) == ("m", 0.5)
