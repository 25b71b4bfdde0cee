"""Agents of other frameworks in the nodes of a graph of LangGraph, whose run resumes in the middle of the graph."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("agents")
pytest.importorskip("pydantic_ai")

from agents import Agent, set_tracing_disabled
from agents.testing import assistant_message
from langgraph.graph import START, StateGraph
from pydantic_ai import Agent as TypedAgent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from typing_extensions import TypedDict

from agent_runtime_core import open_run
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, run_graph
from agent_runtime_core.integrations.openai_agents import run_agent
from agent_runtime_core.integrations.pydantic_ai import Durable
from tests.support.openai_models import FakeModel

set_tracing_disabled(True)

Ask = Callable[[], Awaitable[str]]


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


def of_openai(answer: Callable[[], str]) -> Ask:
    agent = Agent(name="clerk", model=FakeModel(lambda items: [assistant_message(answer())]))

    async def ask() -> str:
        return str((await run_agent(agent, "Go!")).final_output)

    return ask


def of_pydantic_ai(answer: Callable[[], str]) -> Ask:
    def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return ModelResponse([TextPart(answer())])

    agent = TypedAgent(FunctionModel(respond), name="clerk", capabilities=[Durable()])

    async def ask() -> str:
        return (await agent.run("Go!")).output

    return ask


@pytest.mark.parametrize("make", [of_openai, of_pydantic_ai])
async def test_an_agent_does_not_get_the_answers_of_an_earlier_node(tmp_path: Path, make: Callable[..., Ask]) -> None:
    given: list[str] = []
    fails = [True]

    def answer() -> str:
        given.append(f"answer {len(given)}")
        return given[-1]

    ask = make(answer)

    async def first(state: Log) -> Any:
        return {"log": [await ask()]}

    async def second(state: Log) -> Any:
        said = [await ask(), await ask()]
        if fails.pop():
            raise ConnectionError("the network is down")
        return {"log": said}

    async def work() -> list[str]:
        url = str(tmp_path / "runs.db")
        async with AgentRuntimeSaver(url) as saver, open_run(url, run_id="one") as ctx:
            builder: Any = StateGraph(Log).add_node(first).add_node(second)
            builder.add_edge(START, "first").add_edge("first", "second")
            state = await run_graph(ctx, builder.compile(checkpointer=saver), {"log": []})
            return list(state["log"])

    with pytest.raises(ConnectionError):
        await work()
    fails.append(False)
    assert await work() == given == ["answer 0", "answer 1", "answer 2"]
