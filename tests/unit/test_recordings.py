"""A recorded run as a cassette: replayed, the same agent takes the same way with no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.codec.tagged import REGISTRY
from agent_runtime_core._core.codec.typed import register_type
from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.errors import InvalidArgument, UnknownRun
from agent_runtime_core.interfaces import AgentRuntime, LLMClient, RunContext, RunResult
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import Cassette, CassetteMiss, ReplayLLMClient, record
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.scripted_model import Scripted, asks, call

HELLO = {"messages": [{"role": "user", "content": "hello"}, {"role": "user", "content": "and go"}]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def add(a: int, b: int) -> int:
    return a + b


class Helper(AgentRuntime):
    key = "helper"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"response": "helped"}, usage={"total_tokens": 3})


class Agent(ToolCallingAgent):
    key = "a"
    system_prompt = "You count."
    output_type = SCHEMA
    tools = ToolRegistry()
    tools.register(Tool.from_function(add))
    tools.register(agent_tool("helper"))
    client: LLMClient
    trims = False

    def get_llm_client(self) -> LLMClient:
        return self.client


class Trims(Agent):
    key = "trims"

    def trim(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        head = [*messages[:1], {"role": "system", "content": "shortened"}] if len(messages) > 6 else messages[:1]
        return [*head, *messages[1:]]


class Tail(Agent):
    key = "tail"

    def trim(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return messages if len(messages) < 5 else [messages[0], *messages[3:]]


def lines() -> list[Any]:
    calls = [call("add", {"a": 1, "b": 2}, "c1"), call("add", {"a": "x"}, "c2"), call("nobody", {}, "c3")]
    return [asks(*calls), asks(call("helper", {"task": "help"}, "c4")), "seven", '{"n": 7}']


@pytest.mark.parametrize("kind", [Agent, Trims, Tail])
async def test_a_replayed_run_takes_the_same_way(kind: type[Agent], tmp_path: Path) -> None:
    agents = Registry()
    agents.register(Helper())
    async with AgentRunner.open(tmp_path / "runs.db", registry=agents, config=RunnerConfig(max_retries=1)) as runner:
        agent = kind()
        agent.client = scripted = Scripted(*lines())
        first = await runner.execute(agent, "first", HELLO)
        assert first.status is RunStatus.SUCCEEDED, first.error
        cassette = await record(runner, "first", tmp_path / "first.json")
        assert [each.request["messages"] for each in cassette.exchanges] == scripted.asked
        agent.client = replay = ReplayLLMClient(tmp_path / "first.json")
        again = await runner.execute(agent, "again", HELLO)
        assert again.final_output == first.final_output == {"response": {"n": 7}}
        assert again.final_messages == first.final_messages
        assert again.usage == first.usage
        assert replay.unused == []
        agent.client = ReplayLLMClient(Cassette.load(tmp_path / "first.json"))
        other = await runner.execute(agent, "other", {"messages": [{"role": "user", "content": "hello there"}]})
        assert other.error is not None
        assert other.error.type == CassetteMiss.__name__
        assert "hello there" in other.error.message


class Plain(ToolCallingAgent):
    key = "plain"
    system_prompt = "You talk."
    tools = ToolRegistry()
    client: LLMClient

    def get_llm_client(self) -> LLMClient:
        return self.client


class Informed(Plain):
    key = "informed"

    async def before_run(self, ctx: RunContext) -> None:
        ctx.input_messages[-1]["content"] += " (it is noon)"
        ctx.input_messages.insert(0, {"role": "user", "content": "what we know"})


async def test_what_was_said_before_in_its_conversation_is_part_of_what_the_model_was_asked() -> None:
    agent = Plain()
    agent.client = scripted = Scripted("one", "two", "three")
    async with AgentRunner.open("memory://", persistence=PersistenceManager.open("memory://")) as runner:
        for number in range(3):
            said = {"messages": [{"role": "user", "content": f"question {number}"}], "conversation_id": "talk"}
            assert (await runner.execute(agent, f"r{number}", said)).status is RunStatus.SUCCEEDED
        for number in range(3):
            [only] = (await record(runner, f"r{number}")).exchanges
            assert only.request["messages"] == scripted.asked[number]
            assert len(scripted.asked[number]) == 2 + 2 * number
        await runner.persistence.conversations.delete(conversation_id("talk"))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="Pass another conversation_id, or restore the conversation"):
            await record(runner, "r2")


async def test_what_an_agent_made_of_its_input_is_told_as_the_model_was_asked() -> None:
    agent = Informed()
    agent.client = scripted = Scripted("one")
    async with AgentRunner.open("memory://") as runner:
        await runner.execute(agent, "informed", HELLO)
        [only] = (await record(runner, "informed")).exchanges
    assert only.request["messages"] == scripted.asked[0]
    assert scripted.asked[0][1:] == [
        {"role": "user", "content": "what we know"},
        HELLO["messages"][0],
        {"role": "user", "content": "and go (it is noon)"},
    ]


@register_type
@dataclass
class Weather:
    degrees: int


def weather() -> Weather:
    return Weather(21)


async def test_who_records_a_run_need_not_know_what_its_tools_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Plain()
    agent.tools = ToolRegistry()
    agent.tools.register(Tool.from_function(weather))
    agent.client = scripted = Scripted(asks(call("weather")), "21 degrees")
    async with AgentRunner.open("memory://") as runner:
        done = await runner.execute(agent, "typed", HELLO)
        assert done.status is RunStatus.SUCCEEDED, done.error
        with monkeypatch.context() as elsewhere:
            elsewhere.delitem(REGISTRY.types, f"{__name__}.Weather")
            cassette = await record(runner, "typed")
    assert [each.request["messages"] for each in cassette.exchanges] == scripted.asked


async def test_a_run_that_asked_no_model_is_no_cassette(tmp_path: Path) -> None:
    async with AgentRunner.open("memory://") as runner:
        await runner.execute(Helper(), "quiet", HELLO)
        with pytest.raises(InvalidArgument, match="at least one recorded model call"):
            await record(runner, "quiet")
        with pytest.raises(UnknownRun):
            await record(runner, "nobody")
