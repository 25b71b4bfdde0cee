"""Graphs of LangGraph whose run was forked, or whose nodes have changed before the run resumes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

pytest.importorskip("langgraph")

from langgraph.graph import START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from agent_runtime_core import AgentRunner, AgentRuntime, JournalMismatch, RunContext, RunResult, current_run, open_run
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, run_graph

Build = Callable[[Any], object]  # adds nodes and edges to a builder


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


def context() -> RunContext:
    ctx = current_run()
    assert ctx is not None
    return ctx


async def ran(ctx: RunContext, saver: AgentRuntimeSaver, build: Build, config: Any = None) -> Any:
    builder: Any = StateGraph(Log)
    build(builder)
    return await run_graph(ctx, builder.compile(checkpointer=saver), {"log": []}, config)


async def says(state: Any) -> Any:
    return {"log": ["said"]}


async def fails(state: Any) -> Any:
    raise ConnectionError("the network is down")


def chain(builder: Any, **nodes: Any) -> None:
    before = START
    for name, node in nodes.items():
        builder.add_node(name, node).add_edge(before, name)
        before = name


def sending(builder: Any, name: str, node: Any) -> None:
    builder.add_node("a", says).add_node(name, node).add_edge(START, "a")
    builder.add_conditional_edges("a", lambda state: [Send(name, state)], [name])


def joining(builder: Any, name: str, last: Any) -> None:
    builder.add_node("a", says).add_node(name, says).add_node("last", last)
    builder.add_edge(START, "a").add_edge(START, name).add_edge(["a", name], "last")


@pytest.mark.parametrize(
    ("before", "after", "missing"),
    [
        (lambda g: chain(g, a=says, b=fails), lambda g: chain(g, a=says, renamed=says), "the node 'b'"),
        (lambda g: chain(g, a=fails), lambda g: chain(g, renamed=says), "the node 'a'"),
        (lambda g: sending(g, "b", fails), lambda g: sending(g, "renamed", says), "the node 'b'"),
        (lambda g: joining(g, "b", fails), lambda g: joining(g, "renamed", says), "the edge 'a+b:last'"),
    ],
    ids=["next node", "first node", "sent", "joined"],
)
async def test_a_node_that_was_renamed_before_it_ran_is_an_error(
    tmp_path: Path, before: Build, after: Build, missing: str
) -> None:
    """LangGraph itself would end the graph, and the run would succeed with a part of its state."""
    url = str(tmp_path / "runs.db")
    for build, error in ((before, ConnectionError), (after, JournalMismatch)):
        with pytest.raises(error) as raised:
            async with AgentRuntimeSaver(url) as saver, open_run(url, run_id="one") as ctx:
                await ran(ctx, saver, build)
    assert missing in str(raised.value)


async def test_a_node_that_has_run_may_be_renamed(tmp_path: Path) -> None:
    url = str(tmp_path / "runs.db")
    with pytest.raises(ConnectionError):
        async with AgentRuntimeSaver(url) as saver, open_run(url, run_id="one") as ctx:
            await ran(ctx, saver, lambda g: chain(g, a=says, b=fails))
    async with AgentRuntimeSaver(url) as saver, open_run(url, run_id="one") as ctx:
        assert await ran(ctx, saver, lambda g: chain(g, renamed=says, b=says)) == {"log": ["said", "said"]}


class Payer(AgentRuntime):
    """Pays in nodes of a graph: in a step, in a step inside a step, and in a node of a subgraph."""

    key = "payer"

    def __init__(self, url: str, thread: str | None, fail: bool = False) -> None:
        self.url, self.thread, self.fail = url, thread, fail
        self.paid: list[str] = []

    async def pay(self, what: str) -> Any:
        def work() -> str:
            self.paid.append(what)
            return f"receipt {what} {len(self.paid)}"

        return await context().step("pay", work, on_in_doubt="fail")

    async def run(self, ctx: RunContext) -> RunResult:
        async def first(state: Any) -> Any:
            receipts = [await self.pay("a"), await self.pay("b")]
            return {"log": [*receipts, await context().step("outer", lambda: self.pay("c"))]}

        async def second(state: Any) -> Any:
            if self.fail:
                self.fail = False
                raise ConnectionError("the network is down")
            return {"log": [await self.pay("d")]}

        inner: Any = StateGraph(Log)
        chain(inner, inner=second)
        await ctx.step("begin", lambda: None)
        config = None if self.thread is None else {"configurable": {"thread_id": self.thread}}
        async with AgentRuntimeSaver(self.url) as saver:
            state = await ran(ctx, saver, lambda g: chain(g, first=first, sub=inner.compile()), config)
        return RunResult({"log": state["log"]})


@pytest.mark.parametrize("thread", [None, "chat"])
async def test_a_fork_does_not_repeat_a_guarded_step_of_a_node(tmp_path: Path, thread: str | None) -> None:
    agent = Payer(str(tmp_path / "graphs.db"), thread)
    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        first = await runner.execute(agent, run_id="one", raise_on_error=True)
        receipts = ["receipt a 1", "receipt b 2", "receipt c 3", "receipt d 4"]
        assert first.final_output["log"][-4:] == receipts  # the subgraph begins with the log
        refused = await runner.execute(agent, await runner.fork("one", "begin"))
        assert refused.error is not None, refused.final_output
        assert refused.error.type == "EffectAlreadyDone"
        again = await runner.execute(agent, await runner.fork("one", "begin", effects="reuse"), raise_on_error=True)
        assert again.final_output["log"][-4:] == receipts
    assert agent.paid == ["a", "b", "c", "d"]


async def test_a_resumed_run_and_a_fork_of_it_find_the_same_guarded_steps(tmp_path: Path) -> None:
    agent = Payer(str(tmp_path / "graphs.db"), None, fail=True)
    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        for _ in range(2):
            first = await runner.execute(agent, run_id="one")
        assert first.final_output["log"][-4:] == ["receipt a 1", "receipt b 2", "receipt c 3", "receipt d 4"]
        again = await runner.execute(agent, await runner.fork("one", "begin", effects="reuse"), raise_on_error=True)
        assert again.final_output == first.final_output
    assert agent.paid == ["a", "b", "c", "d"]
