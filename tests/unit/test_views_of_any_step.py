"""Views of runs whose own steps have the names of the library's steps, and return values of any shape."""

from __future__ import annotations

from typing import Any

from agent_runtime_core import AgentRunner
from agent_runtime_core._views.compare import compare_view
from agent_runtime_core._views.messages import messages_view
from agent_runtime_core._views.plan import plan_view
from agent_runtime_core._views.runs import run_view, usage_view
from agent_runtime_core._views.timeline import timeline_view
from agent_runtime_core.inspector import run_html
from agent_runtime_core.registry import Registry
from tests.support.cases import for_each
from tests.support.runs import Script

NAMES = ("model", "tool", "history", "plan", "call:x", "signal:x", "sleep", "task", "map")
VALUES: tuple[Any, ...] = (
    {"message": "hi"}, {"message": {"tool_calls": 7}}, {"message": {"tool_calls": [7]}}, {"usage": 3},
    {"usage": {"total_tokens": "x"}, "cost_usd": "z", "message": {"role": 5}}, {"doubted": 3},
    {"asked": 7, "message": {}}, {"asked": {"said": 5, "received": {"a": 1}}, "message": {}}, [1], "x", None,
    {"leaf": "x"}, {"leaf": 7}, {"plan": 7}, {"steps": [1]}, {"model": {"a": 1}, "message": {}}, {"error": 7},
    {"ok": False, "content": {"a": 1}}, {"run_id": "x", "status": 7},
)  # fmt: skip


async def _steps(ctx: Any) -> str:
    for name in NAMES:
        for key in ("", "k:l:0:0", "l:0:0"):
            await ctx.step(name, lambda: ctx.params["value"], key=key or None)
    return "done"


@for_each("value", VALUES, ids=range(len(VALUES)))
async def test_a_step_may_have_any_name_and_result(value: Any) -> None:
    registry = Registry()
    registry.register(Script(_steps, "steps"))
    given = {"params": {"value": value}, "conversation_id": "no UUID"}
    async with AgentRunner.open("memory://", registry=registry) as runner:
        assert (await runner.execute("steps", "r", given)).status == "succeeded"
        row = await runner.queue.require("r")
        records = await runner.state_store.records(row.run_id)
        assert {each["name"] for each in (await run_view(runner, row))["steps"]} == {*NAMES}
        assert len(timeline_view(row, records)["items"]) == 3 * len(NAMES)
        await messages_view(runner, row)
        await plan_view(runner, row)
        await compare_view(runner, row, row)
        await usage_view(runner, "model")
        assert "steps" in await run_html(runner, "r")
