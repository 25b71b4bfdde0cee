"""An agent with a `ToolNode` of LangGraph whose model calls and tool calls survive kill -9.

    python examples/langgraph_tools.py [--slow 1] [--db langgraph.db]

It needs no key: a script replaces the model. Kill it and start it again: no call with a saved result is repeated, not
even if the other calls of its `ToolNode` have not ended.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, DurableChatModel, durable_tool, run_graph

PRICES = {"apples": 2, "pears": 1}


class Script(BaseChatModel):
    """Asks for all prices, then orders, then says what was ordered."""

    @property
    def _llm_type(self) -> str:
        return "script"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        results = [str(each.content) for each in messages if isinstance(each, ToolMessage)]
        print(f"model call with {len(results)} results")
        calls: list[Any] = []
        if not results:
            calls = [{"name": "price", "args": {"fruit": fruit}, "id": fruit} for fruit in PRICES]
        elif len(results) == len(PRICES):
            calls = [{"name": "order", "args": {"total": sum(map(int, results))}, "id": "order"}]
        message = AIMessage("" if calls else f"I have {results[-1]}.", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


class Shopper(AgentRuntime):
    """Looks up the prices of fruits at the same time, and orders."""

    key = "tool-shopper"

    def __init__(self, db: str, slow: float) -> None:
        self.db = db
        self.slow = slow

    async def price(self, fruit: str) -> int:
        """Return the price of a fruit."""
        await asyncio.sleep(self.slow)
        print(f"  price({fruit!r})")
        return PRICES[fruit]

    async def order(self, total: int) -> str:
        """Order everything."""
        await asyncio.sleep(self.slow)
        print(f"  order(total={total})")
        return f"ordered for {total}"

    async def run(self, ctx: RunContext) -> RunResult:
        """Build the graph and run it."""
        model = DurableChatModel(model=Script())

        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        tools = ToolNode([durable_tool(self.price), durable_tool(self.order)])
        builder = StateGraph(MessagesState).add_node("ask", ask).add_node("tools", tools)
        builder.add_edge(START, "ask").add_conditional_edges("ask", tools_condition).add_edge("tools", "ask")
        async with AgentRuntimeSaver(self.db) as saver:
            given = {"messages": [("user", "Buy fruits.")]}
            state = await run_graph(ctx, builder.compile(checkpointer=saver), given)
        return RunResult(final_output={"response": state["messages"][-1].content})


async def main() -> None:
    """Run the graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="langgraph.db")
    parser.add_argument("--run-id", default="tools-1")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each call takes")
    args = parser.parse_args()
    async with AgentRunner.open(args.db) as runner:
        result = await runner.execute(Shopper(args.db, args.slow), run_id=args.run_id)
    print(result.final_output.get("response") or result.error)


if __name__ == "__main__":
    asyncio.run(main())
