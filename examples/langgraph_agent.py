"""A graph of LangGraph that survives kill -9.

    python examples/langgraph_agent.py [--slow 1] [--db langgraph.db]

It needs no model and no key. Kill it and start it again: no price is looked up twice, no order is placed twice, and you
are asked again only if you have not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send, interrupt

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult, current_run
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, run_graph

PRICES = {"apples": 2, "pears": 1}


class Shopping(TypedDict):
    """What the nodes share: the prices so far, and what was done."""

    prices: Annotated[dict[str, int], operator.or_]
    done: str


class Shopper(AgentRuntime):
    """Looks up the prices of fruits at the same time, asks a person, and buys."""

    key = "shopper"

    def __init__(self, db: str, slow: float) -> None:
        self.db = db
        self.slow = slow

    async def look_up(self, fruit: str) -> int:
        """Return the price of a fruit."""
        await asyncio.sleep(self.slow)
        print(f"  look_up({fruit!r})")
        return PRICES[fruit]

    async def order(self, total: int) -> str:
        """Order everything."""
        await asyncio.sleep(self.slow)
        print(f"  order(total={total})")
        return f"ordered for {total}"

    async def price(self, fruit: str) -> dict[str, Any]:
        """The node for one fruit; LangGraph runs one for each fruit at the same time."""
        return {"prices": {fruit: await _run().step("look up", self.look_up, fruit)}}

    async def buy(self, state: Shopping) -> dict[str, Any]:
        """The node that asks, and then orders."""
        total = sum(state["prices"].values())
        if interrupt(f"Order for {total}?") != "yes":
            return {"done": "nothing ordered"}
        return {"done": await _run().step("order", self.order, total)}

    async def run(self, ctx: RunContext) -> RunResult:
        """Build the graph and run it."""
        builder = StateGraph(Shopping)
        builder.add_node("price", self.price)  # pyright: ignore[reportArgumentType]
        builder.add_node("buy", self.buy)
        builder.add_conditional_edges(START, lambda state: [Send("price", fruit) for fruit in PRICES], ["price"])
        builder.add_edge("price", "buy")
        builder.add_edge("buy", END)
        async with AgentRuntimeSaver(self.db) as saver:
            state = await run_graph(ctx, builder.compile(checkpointer=saver), {"prices": {}, "done": ""})
        return RunResult(final_output={"response": state["done"], "prices": state["prices"]})


def _run() -> RunContext:
    ctx = current_run()
    assert ctx is not None, "the graph must run inside a run"
    return ctx


async def answer_questions(runner: AgentRunner, yes: bool) -> None:
    """Ask on the terminal whatever a run asks."""
    while True:
        for question in await runner.approvals():
            answer = "yes" if yes or await asyncio.to_thread(input, f"{question.details} [y/N] ") == "y" else "no"
            await runner.approve(question.run_id, question.name, answer, request_id=question.request_id)
        await asyncio.sleep(0.05)


async def main() -> None:
    """Run the graph, and answer its questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="langgraph.db")
    parser.add_argument("--run-id", default="shopping-1")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each call takes")
    parser.add_argument("--yes", action="store_true", help="answer all questions with yes")
    args = parser.parse_args()
    async with AgentRunner.open(args.db) as runner:
        questions = asyncio.create_task(answer_questions(runner, args.yes))
        result = await runner.execute(Shopper(args.db, args.slow), run_id=args.run_id)
        questions.cancel()
    print(result.final_output.get("response") or result.error)


if __name__ == "__main__":
    asyncio.run(main())
