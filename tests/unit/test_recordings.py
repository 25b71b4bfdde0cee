"""A recorded run as a cassette: replayed, the same agent takes the same way with no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.errors import InvalidArgument, UnknownRun
from agent_runtime_core.interfaces import AgentRuntime, LLMClient, RunContext, RunResult
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import Cassette, CassetteMiss, ReplayLLMClient, record
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool

from .scripted import Scripted, asks, call

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


async def test_a_run_that_asked_no_model_is_no_cassette(tmp_path: Path) -> None:
    async with AgentRunner.open("memory://") as runner:
        await runner.execute(Helper(), "quiet", HELLO)
        with pytest.raises(InvalidArgument, match="no recorded call of a model"):
            await record(runner, "quiet")
        with pytest.raises(UnknownRun):
            await record(runner, "nobody")
