"""Agents with a guarded step, which count how often it is executed; and the rows of effects that a store has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.runs import Body
from tests.support.scripted_model import Scripted, asks, call

Way = Callable[["Paid"], Body]


class Paid:
    """Payments that were made, each by the run that made it."""

    def __init__(self) -> None:
        self.by: list[str] = []
        self.fails = False

    async def pay(self, run_id: Any, amount: int = 1) -> dict[str, Any]:
        if self.fails:
            raise ConnectionError("no route")
        self.by.append(str(run_id))
        return {"paid": amount, "number": len(self.by)}


def nothing_known() -> None:
    """A check function: the step did not happen."""


def by_step(paid: Paid, on_in_doubt: Any = "fail", **how: Any) -> Body:
    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        return await ctx.step("pay", lambda: paid.pay(ctx.run_id), on_in_doubt=on_in_doubt, **how)

    return body


def by_list(paid: Paid, **how: Any) -> Body:
    async def body(ctx: Any) -> Any:
        async def first(ctx: Any, state: Any) -> int:
            return 1

        async def pay(ctx: Any, state: Any) -> Any:
            return await paid.pay(ctx.run_id)

        steps = [Step("first", first), Step("pay", pay, on_in_doubt="fail", **how)]
        return (await StepExecutor(ctx).run(steps))["pay"]

    return body


def by_map(paid: Paid) -> Body:
    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def pay(amount: int) -> Any:
            return await paid.pay(ctx.run_id, amount)

        [found] = await StepExecutor(ctx).map("pay", pay, [5], key=str, on_in_doubt="fail")
        return found

    return body


def by_model(paid: Paid, *turns: Any) -> Body:
    """A loop whose model makes these calls, one in each turn."""

    async def body(ctx: Any) -> Any:
        async def pay(amount: int) -> Any:
            """Pay."""
            return await paid.pay(ctx.run_id, amount)

        await ctx.step("first", lambda: 1)
        tools = ToolRegistry()
        tools.register(Tool.from_function(pay, has_side_effects=True))
        tools.register(Tool.from_function(pay, name="ask", has_side_effects=True, requires_confirmation=True))
        tools.register(Tool.from_function(str, name="look", parameters={"type": "object", "properties": {}}))
        model = Scripted(say=lambda said: asks(turns[n]) if (n := len(said) // 2) < len(turns) else "done")
        done = await run_turn_loop(ctx, model, tools, messages=[{"role": "user", "content": "pay"}])
        return {"number": len(paid.by), "text": done.text}

    return body


def by_tool(paid: Paid) -> Body:
    return by_model(paid, call("pay", {"amount": 5}, "c"))


def inside_another_step(paid: Paid) -> Body:
    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def outer() -> Any:
            return await ctx.step("pay", lambda: paid.pay(ctx.run_id), on_in_doubt="fail")

        return await ctx.step("outer", outer, retries=2)

    return body


WAYS: dict[str, Way] = {
    "fail": by_step,
    "review": lambda paid: by_step(paid, "review"),
    "check": lambda paid: by_step(paid, nothing_known),
    "key": lambda paid: by_step(paid, key="mine"),
    "list": by_list,
    "graph": lambda paid: by_list(paid, depends_on=["first"]),
    "no checkpoint": lambda paid: by_list(paid, checkpoint=False),
    "map": by_map,
    "tool": by_tool,
    "inside": inside_another_step,
}


def stored_effects(table: dict[str, Any]) -> int:
    """Return how many rows the table of an engine in memory has."""
    return sum(len(rows) for of in table.values() for digests in of.values() for rows in digests.values())
