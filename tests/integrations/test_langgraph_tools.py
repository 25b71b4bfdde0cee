"""Tools in nodes of LangGraph: with `durable_tool` their calls are steps, in whichever way the node is built."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph")

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool, ToolException, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode
from langgraph.types import Command, interrupt
from typing_extensions import Annotated  # noqa: UP035 - as the guides of LangGraph do

from agent_runtime_core import (
    AgentRunner,
    InvalidArgument,
    LimitExceeded,
    RunContext,
    RunLimits,
    RunnerConfig,
    RunResult,
    RunStatus,
    current_run,
    open_run,
)
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, durable_tool, run_graph
from agent_runtime_core.registry import Registry
from tests.support.framework_kills import WAYS, check_kills
from tests.support.runs import Script

PROGRAM = "tests.integrations.langgraph_prebuilt_program"
CALLS = ["model 1", "price tea", "price milk", "model 2", "order tea", "model 3"]

needs_langchain = pytest.mark.skipif(importlib.util.find_spec("langchain") is None, reason="needs langchain")


@WAYS
@pytest.mark.parametrize("kind", ["node", "react", pytest.param("agent", marks=needs_langchain)])
def test_no_recorded_call_is_repeated(tmp_path: Path, kind: str, both_ways: bool) -> None:
    calls = check_kills(PROGRAM, f"{{folder}}/{kind}.db", tmp_path, both_ways=both_ways)
    assert sorted(calls) == sorted(CALLS)


def test_plain_tools_of_one_answer_are_repeated_together(tmp_path: Path) -> None:
    """What the guide says about a `ToolNode` without `durable_tool`."""
    with pytest.raises(AssertionError, match="killed at 3"):
        check_kills(PROGRAM, "{folder}/plain-node.db", tmp_path, both_ways=False)


class Stop(Exception):
    """Ends a block before its run has finished, as a crash does."""


async def in_run(folder: Path, work: Any, *, crash: bool = False) -> Any:
    result = None
    try:
        async with open_run(str(folder / "runs.db"), run_id="one"):
            result = await work()
            if crash:
                raise Stop
    except Stop:
        pass
    return result


def call(name: str, call_id: str = "c", **args: Any) -> dict[str, Any]:
    return {"type": "tool_call", "name": name, "id": call_id, "args": args}


@pytest.mark.parametrize("given", ["a call", "arguments"])
async def test_saved_results_are_what_the_tool_returned(tmp_path: Path, given: str) -> None:
    made: list[str] = []
    values = {
        "text": "sunny",
        "json": {"a": [1, 2.5, None]},
        "message": HumanMessage("hi"),
        "command": Command(update={"messages": [ToolMessage("done", tool_call_id="c")]}, goto="next"),
    }

    @durable_tool
    def make(kind: str) -> Any:
        """Make a value."""
        made.append(kind)
        return values[kind]

    async def work() -> Any:
        inputs = {kind: call("make", kind, kind=kind) if given == "a call" else {"kind": kind} for kind in values}
        return [await make.ainvoke(each) for each in inputs.values()]

    alone = [
        await make.ainvoke(call("make", kind, kind=kind) if given == "a call" else {"kind": kind}) for kind in values
    ]
    made.clear()
    assert await in_run(tmp_path, work, crash=True) == alone
    assert await in_run(tmp_path, work) == alone
    assert made == [*values]


async def test_the_artifact_of_a_result_is_kept(tmp_path: Path) -> None:
    @tool(response_format="content_and_artifact")
    async def search(query: str) -> tuple[str, Any]:
        """Search."""
        return query, {"pages": [1, 2]}

    async def work() -> Any:
        return await durable_tool(search).ainvoke(call("search", query="x"))

    first = await in_run(tmp_path, work, crash=True)
    assert (await in_run(tmp_path, work)) == first
    assert (first.content, first.artifact) == ("x", {"pages": [1, 2]})


async def test_an_error_of_a_tool_is_the_object_that_it_raised(tmp_path: Path) -> None:
    error = ToolException("no such city")

    @durable_tool
    def fail() -> str:
        """Fail."""
        raise error

    async def work() -> Any:
        with pytest.raises(ToolException) as raised:
            await fail.ainvoke(call("fail"))
        ctx = current_run()
        assert ctx is not None
        await ctx.step("later", lambda: None)
        return raised.value

    assert await in_run(tmp_path, work, crash=True) is error
    assert str(await in_run(tmp_path, work)) == "no such city"


async def test_servers_that_repeat_call_ids_get_results_of_their_own_calls(tmp_path: Path) -> None:
    made: list[int] = []

    @durable_tool
    async def count() -> int:
        """Count."""
        made.append(len(made))
        return made[-1]

    async def work() -> Any:
        return [(await count.ainvoke(call("count"))).content for _ in range(2)]

    assert await in_run(tmp_path, work, crash=True) == await in_run(tmp_path, work) == ["0", "1"]


def test_a_durable_tool_looks_like_the_tool() -> None:
    @tool
    def search(query: str) -> str:
        """Search the web."""
        return query

    made = durable_tool(search)
    assert isinstance(made, StructuredTool)
    assert made is not search
    assert (made.name, made.description, made.args) == (search.name, search.description, search.args)
    assert made.invoke({"query": "x"}) == "x"
    with pytest.raises(InvalidArgument, match="'retry', 'fail' or 'review', got 'never'"):
        durable_tool(search, on_in_doubt="never")


async def test_tools_get_the_state_and_ask_people(tmp_path: Path) -> None:
    ran: list[str] = []

    @durable_tool
    def refund(amount: int, state: Annotated[dict[str, Any], InjectedState]) -> str:
        """Refund an amount."""
        ran.append(state["messages"][0].content)
        return f"paid {amount}" if interrupt({"amount": amount}) == "yes" else "refused"

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("", tool_calls=[call("refund", amount=5)])]}

    async def body(ctx: RunContext) -> RunResult:
        builder = StateGraph(MessagesState).add_node(ask).add_node("tools", ToolNode([refund]))
        builder.add_edge(START, "ask").add_edge("ask", "tools")
        async with AgentRuntimeSaver(str(tmp_path / "runs.db")) as saver:
            state = await run_graph(ctx, builder.compile(checkpointer=saver), {"messages": [("user", "Refund!")]})
        return RunResult({"said": state["messages"][-1].content})

    registry, agent = Registry(), Script(body)
    registry.register(agent)
    config = RunnerConfig(park_after=0)
    async with AgentRunner.open(str(tmp_path / "runs.db"), registry=registry, config=config) as runner:
        await runner.submit(agent.key, {}, run_id="one")
        await runner.run_once()
        assert (await runner.get_run("one")).status is RunStatus.WAITING
        [question] = await runner.approvals()
        assert (question.name, question.details) == ("tools", {"amount": 5})
        await runner.approve("one", "tools", "yes", request_id=question.request_id)
        await runner.run_once()
        result = await runner.wait("one", timeout=0)
    assert result.final_output == {"said": "paid 5"}
    assert ran == ["Refund!", "Refund!"]


async def test_calls_count_against_the_limits_of_the_run(tmp_path: Path) -> None:
    made: list[str] = []

    @durable_tool
    def look(city: str) -> str:
        """Look."""
        made.append(city)
        return city

    async def body(ctx: RunContext) -> RunResult:
        await look.ainvoke(call("look", "c1", city="Bern"))
        with pytest.raises(LimitExceeded):
            await look.ainvoke(call("look", "c2", city="Basel"))
        return RunResult({})

    config = RunnerConfig(limits=RunLimits(max_tool_calls=1), max_retries=1)
    async with AgentRunner.open("memory://", config=config) as runner:
        result = await runner.execute(Script(body), run_id="one")
    assert result.error is None, result.error
    assert made == ["Bern"]


async def test_a_plain_node_calls_a_tool_from_its_thread(tmp_path: Path) -> None:
    made: list[str] = []

    @durable_tool
    def look(city: str) -> str:
        """Look."""
        made.append(city)
        return f"{city} is sunny"

    async def work() -> Any:
        return await asyncio.to_thread(look.invoke, {"city": "Bern"})

    assert await in_run(tmp_path, work, crash=True) == await in_run(tmp_path, work) == "Bern is sunny"
    assert made == ["Bern"]
