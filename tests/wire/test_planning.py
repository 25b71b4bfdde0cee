"""A plan by a model, over the real SDKs: an answer that is no plan is mended."""

from __future__ import annotations

import json

import pytest

from agent_runtime_core.planning import LLMPlanner
from agent_runtime_core.tools import CalculatorTool
from tests.wire.server import Aimock
from tests.wire.sides import Side

pytestmark = pytest.mark.wire

PLAN = {
    "final_goal": "the product",
    "steps": [
        {"step_number": 1, "kind": "tool_call", "tool_name": "calculator", "tool_input": {"expression": "6 * 7"}}
    ],
}


async def test_a_plan(server: Aimock, side: Side) -> None:
    unknown = {**PLAN, "steps": [{**PLAN["steps"][0], "tool_name": "abacus"}]}  # type: ignore[dict-item]
    server.script(
        {"match": {"userMessage": "Multiply six by seven"}, "response": {"content": json.dumps(unknown)}},
        {"match": {"userMessage": "unknown tool 'abacus'"}, "response": {"content": json.dumps(PLAN)}},
    )
    async with side.client() as client:
        plan = await LLMPlanner(client).create_plan("Multiply six by seven", [CalculatorTool().as_tool()])
    assert plan.to_dict()["steps"][0]["tool_input"] == {"expression": "6 * 7"}
    first, second = server.sent()
    assert len(second["messages"]) == len(first["messages"]) + 2
    assert "abacus" in second["messages"][-2]["content"]
