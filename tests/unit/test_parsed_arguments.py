"""Arrays and objects that a model sends as JSON text: parsed where the schema allows no text, and nowhere else."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime_core import (
    AgentRunner,
    MockLLMClient,
    MockLLMResponse,
    RunContext,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
)
from agent_runtime_core.llm import use_llm_client
from agent_runtime_core.tools.arguments import check_arguments, parsed_arguments

Schema = dict[str, Any]
INPUT = {"messages": [{"role": "user", "content": "hi"}]}

SCALARS = st.sampled_from(
    [({"type": "string"}, "[1]"), ({"type": "integer"}, 3), ({"type": "boolean"}, True), ({}, '{"a": 1}')]
)


def _array(each: tuple[Schema, Any]) -> tuple[Schema, Any]:
    return {"type": "array", "items": each[0]}, [each[1], each[1]]


def _object(each: tuple[Schema, Any]) -> tuple[Schema, Any]:
    return {"type": "object", "properties": {"x": each[0]}, "required": ["x"]}, {"x": each[1]}


def _open_object(each: tuple[Schema, Any]) -> tuple[Schema, Any]:
    return {"type": "object", "additionalProperties": each[0]}, {"some": each[1]}


def _nullable(each: tuple[Schema, Any]) -> tuple[Schema, Any]:
    return {"anyOf": [each[0], {"type": "null"}], "description": "maybe"}, each[1]


def _combined(each: tuple[Schema, Any]) -> tuple[Schema, Any]:
    return {"allOf": [each[0]]}, each[1]


#: A schema, and a value that matches it.
TYPED = st.recursive(
    SCALARS,
    lambda inner: st.one_of(*(inner.map(make) for make in (_array, _object, _open_object, _nullable, _combined))),
    max_leaves=6,
)


def encoded(value: Any, draw: Any) -> Any:
    """Return the value with some of its arrays and objects as JSON text."""
    if isinstance(value, dict):
        value = {name: encoded(each, draw) for name, each in value.items()}
    elif isinstance(value, list):
        value = [encoded(each, draw) for each in value]
    else:
        return value
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        value = json.dumps(value, indent=draw(st.sampled_from([None, 1])))
    return value


@settings(deadline=None)
@given(TYPED, st.data())
def test_what_was_encoded_is_parsed(typed: tuple[Schema, Any], data: st.DataObject) -> None:
    schema, value = typed
    parameters = {"type": "object", "properties": {"a": schema}}
    check_arguments(parameters, {"a": value})
    sent = {"a": encoded(value, data.draw)}
    before = copy.deepcopy(sent)
    assert parsed_arguments(parameters, sent) == {"a": value}
    assert sent == before


@settings(deadline=None)
@given(TYPED)
def test_text_that_the_schema_allows_stays_text(typed: tuple[Schema, Any]) -> None:
    schema, value = typed
    text = json.dumps(value)
    for options in ({"anyOf": [schema, {"type": "string"}]}, {"oneOf": [{"enum": [text]}, schema]}, {"default": 1}):
        sent = {"a": text}
        assert parsed_arguments({"type": "object", "properties": {"a": options}}, sent) == {"a": text}


REFERRING = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/Tree"}, "rows": {"type": ["array", "null"], "prefixItems": [{}, True]}},
    "$defs": {
        "Tree": {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}
    },
}


@pytest.mark.parametrize(
    ("sent", "parsed"),
    [
        ({"tree": '{"below": ["{\\"below\\": \\"[]\\"}"]}'}, {"tree": {"below": [{"below": []}]}}),
        ({"rows": ' [1, "[2]"]'}, {"rows": [1, "[2]"]}),
        ({"rows": "null"}, {"rows": "null"}),
        ({"rows": "[1, 2"}, {"rows": "[1, 2"}),
        ({"rows": "[NaN]"}, {"rows": "[NaN]"}),
        ({"rows": '{"a": 1}'}, {"rows": '{"a": 1}'}),
        ({"tree": '{"below": [], "below": []}'}, {"tree": '{"below": [], "below": []}'}),
        ({"unknown": "[1]"}, {"unknown": "[1]"}),
        ({"tree": {}}, {"tree": {}}),
    ],
)
def test_what_cannot_be_parsed_stays(sent: dict[str, Any], parsed: dict[str, Any]) -> None:
    assert parsed_arguments(REFERRING, sent) == parsed


class Ordering(ToolCallingAgent):
    key = "ordering"
    system_prompt = "s"
    tools = ToolRegistry()
    hooked: list[Any]

    async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> None:
        self.hooked.append(copy.deepcopy(tool_args))


@pytest.mark.parametrize("confirmed", [False, True])
async def test_hooks_approvals_and_tools_get_parsed_arguments(confirmed: bool) -> None:
    got: list[Any] = []

    def order(items: list[dict[str, int]], note: str) -> str:
        got.append({"items": items, "note": note})
        return "ordered"

    call = {"name": "order", "arguments": {"items": '[{"apple": 2}]', "note": "[urgent]"}}
    client = MockLLMClient(responses=[MockLLMResponse("", tool_calls=[call]), "done"])
    agent, parsed = Ordering(), {"items": [{"apple": 2}], "note": "[urgent]"}
    agent.hooked, agent.tools = [], ToolRegistry()
    agent.tools.register(Tool.from_function(order, has_side_effects=True, requires_confirmation=confirmed))
    shown: list[Any] = []

    async def approve() -> None:
        async for event in runner.stream("r"):
            if event.event_type == "approval.requested":
                shown.append(event.payload["details"]["tool_args"])
                await runner.approve("r", "tool:order", True)

    async with AgentRunner() as runner:
        with use_llm_client(client):
            running = asyncio.ensure_future(runner.execute(agent, input_data=INPUT, run_id="r"))
            await asyncio.gather(running, approve())
    assert running.result().final_output == {"response": "done"}
    assert (got, agent.hooked, shown) == ([parsed], [parsed], [parsed] if confirmed else [])


async def test_a_tool_that_is_called_without_a_loop_gets_parsed_arguments() -> None:
    tools = ToolRegistry()
    tools.register(Tool.from_function(sum_of))
    assert await tools.execute("sum_of", '{"numbers": "[1, 2]"}') == 3


def sum_of(numbers: list[int]) -> int:
    return sum(numbers)


def test_a_mutable_default_does_not_change_the_schema() -> None:
    def collect(item: str, into: list[str] = [], about: dict[str, list[int]] = {"a": [1]}) -> list[str]:  # noqa: B006
        into.append(item)
        about["a"].append(2)
        return into

    made = Tool.from_function(collect)
    before = copy.deepcopy(made.parameters)
    made("x")
    made("y")
    assert made.parameters == before
    assert before["properties"]["into"]["default"] == []
