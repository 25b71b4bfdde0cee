"""The agents that the deployment examples run: an order that waits for its payment."""

from __future__ import annotations

from agent_runtime_core import AgentRuntime, RunContext, RunResult


class Order(AgentRuntime):
    key = "order"

    async def run(self, ctx: RunContext) -> RunResult:
        price = await ctx.step("price", price_of, ctx.params["article"])
        payment = await ctx.wait_for_signal("paid")
        return RunResult(final_output={"price": price, "payment": payment})


def price_of(article: str) -> int:
    return 10 * len(article)


agents = [Order()]
