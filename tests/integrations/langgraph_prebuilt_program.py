"""An agent with durable tools, built by LangGraph or LangChain, in one run. Usage: see framework_kills.py.

The name of the store tells how the agent is built: `node` with a `ToolNode`, `react` by `create_react_agent`, `agent`
by `create_agent`. With `plain` before it, such as `plain-node`, its tools are no steps.
"""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, DurableChatModel, durable_tool, run_graph
from tests.integrations.langgraph_program import Scripted
from tests.support.framework_kills import begin, called, finish


class Calling(Scripted):
    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return RunnableLambda(lambda messages: messages).bind()


def price(item: str) -> str:
    """Return the price of an item."""
    called(f"price {item}")
    return f"price of {item}: {len(item)}"


async def order(item: str) -> str:
    """Order an item."""
    called(f"order {item}")
    return f"order of {item}: {len(item)}"


model = DurableChatModel(model=Calling())


async def ask(state: MessagesState) -> dict[str, Any]:
    return {"messages": [await model.ainvoke(state["messages"])]}


turn = asyncio.Lock()


async def one_at_a_time(request: Any, execute: Any) -> Any:
    """Let the next call of a `ToolNode` begin when this one is recorded."""
    async with turn:
        return await execute(request)


def built(kind: str, saver: AgentRuntimeSaver, tools: list[Any]) -> Any:
    if kind == "agent":
        return importlib.import_module("langchain.agents").create_agent(model, tools, checkpointer=saver)
    if kind == "react":
        from langgraph.prebuilt import create_react_agent

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it moved to LangChain
            return create_react_agent(model, tools, checkpointer=saver)
    node = ToolNode(tools, awrap_tool_call=one_at_a_time)
    builder = StateGraph(MessagesState).add_node("model", ask).add_node("tools", node)
    builder.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    return builder.compile(checkpointer=saver)


class Shop(AgentRuntime):
    key = "shop"

    def __init__(self, store: str, kind: str) -> None:
        self.store, self.kind = store, kind

    async def run(self, ctx: RunContext) -> RunResult:
        tools: list[Any] = [price, order]
        if not self.kind.startswith("plain-"):
            tools = [durable_tool(each) for each in tools]
        async with AgentRuntimeSaver(self.store) as saver:
            graph = built(self.kind.removeprefix("plain-"), saver, tools)
            # One task at a time, so that the order of the calls is the same in each process.
            config: Any = {"max_concurrency": 1}
            state = await run_graph(ctx, graph, {"messages": [HumanMessage("Order tea.", id="q")]}, config)
        return RunResult({"text": state["messages"][-1].content, "messages": len(state["messages"])})


async def main() -> None:
    store = begin()
    async with AgentRunner.open(store) as runner:
        result = await runner.execute(Shop(store, Path(store).stem), "shop-1", raise_on_error=True)
    finish(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
