"""Schemas that OpenAI accepts: each array has `items`, and the root of parameters is a plain object."""

from __future__ import annotations

import copy
from collections import abc
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict

import pytest

from agent_runtime_core import Tool
from agent_runtime_core.llm._schemas import tool_parameters, with_schemas
from agent_runtime_core.tools import BaseTool, ToolRegistry, ToolResult
from agent_runtime_core.tools.structured_output import Output
from tests.support.cases import for_each


class Tagged(TypedDict):
    tags: list  # type: ignore[type-arg]


@dataclass
class Row:
    cells: list[tuple]  # type: ignore[type-arg]
    extra: dict[str, set] = field(default_factory=dict)  # type: ignore[type-arg]


def lacking(schema: Any) -> bool:
    """Return whether some array has no items, as OpenAI looks for it."""
    if isinstance(schema, list):
        return any(map(lacking, schema))
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    if (kinds == "array" or (isinstance(kinds, list) and "array" in kinds)) and not isinstance(
        schema.get("items"), dict
    ):
        return True
    return any(map(lacking, schema.values()))


@for_each(
    "hint",
    [
        list, set, frozenset, tuple, list[Any], list[list], tuple[list, int], tuple[int, ...],  # type: ignore[type-arg]
        dict[str, list], abc.Sequence, abc.Iterable[Any], list | None, Tagged, Row,  # type: ignore[type-arg]
        list[Row | Tagged | list],  # type: ignore[type-arg]
    ],
)  # fmt: skip
def test_each_array_of_a_hint_has_items(hint: Any) -> None:
    def fn(a): ...  # type: ignore[no-untyped-def]

    fn.__annotations__ = {"a": hint}
    tool = Tool.from_function(fn)
    arguments = {"tools": [tool.to_openai_format()], "response_format": Output(hint).response_format}
    assert not lacking(with_schemas(arguments, "openai"))


GIVEN = {
    "type": "object",
    "properties": {
        "type": {"type": "array"},
        "maybe": {"type": ["array", "null"]},
        "pair": {"type": "array", "prefixItems": [{"type": "array"}, {"type": "integer"}], "items": False},
        "either": {"anyOf": [{"type": "array"}, {"type": "object", "additionalProperties": {"type": "array"}}]},
        "named": {"$ref": "#/$defs/rows"},
        "kept": {"enum": [{"type": "array"}], "default": {"type": "array"}},
    },
    "$defs": {"rows": {"type": "array", "items": {"type": "array"}}},
}


def test_a_given_schema_is_completed_in_a_copy() -> None:
    given = copy.deepcopy(GIVEN)
    made = tool_parameters(given, "openai")
    assert given == GIVEN
    assert made["properties"] == {
        "type": {"type": "array", "items": {}},
        "maybe": {"type": ["array", "null"], "items": {}},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "array", "items": {}}, {"type": "integer"}],
            "items": {"anyOf": [{"type": "array", "items": {}}, {"type": "integer"}]},
        },
        "either": {
            "anyOf": [
                {"type": "array", "items": {}},
                {"type": "object", "additionalProperties": {"type": "array", "items": {}}},
            ]
        },
        "named": {"$ref": "#/$defs/rows"},
        "kept": {"enum": [{"type": "array"}], "default": {"type": "array"}},
    }
    assert made["$defs"]["rows"] == {"type": "array", "items": {"type": "array", "items": {}}}


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, MappingProxyType({"type": "object"})])
def test_arguments_have_properties(parameters: Any) -> None:
    tool = Tool("t", "", parameters, print).to_openai_format()
    (sent,) = with_schemas({"tools": [tool]}, "openai")["tools"]
    assert sent["function"]["parameters"] == {"type": "object", "properties": {}}


def test_every_way_of_defining_a_tool() -> None:
    class Listed(BaseTool):
        def name(self) -> str:
            return "listed"

        def description(self) -> str:
            return "Takes a list."

        def parameters(self) -> dict[str, Any]:
            return GIVEN

        async def execute(self, **given: Any) -> ToolResult:
            return ToolResult(True)

    tools = ToolRegistry()
    tools.register(Tool("by_hand", "", GIVEN, print))
    tools.register(Tool.from_function(print, name="given", parameters=GIVEN))
    tools.register(Listed())
    for each in with_schemas({"tools": tools.to_openai_format()}, "openai")["tools"]:
        assert each["function"]["parameters"] == tool_parameters(GIVEN, "openai")
    assert all(tool.parameters is GIVEN for tool in tools.list_tools())


PLAIN = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("given", "required"),
    [
        ({"anyOf": [PLAIN, {"type": "object", "properties": {"b": {"type": "array"}}}]}, None),
        ({"type": "object", "oneOf": [PLAIN]}, None),
        ({"allOf": [PLAIN, {"properties": {"b": {"type": "array"}}}]}, ["a"]),
        ({"allOf": [{"allOf": [PLAIN, {"required": ["a"]}]}, {"anyOf": [{"properties": {"b": {}}}]}]}, ["a"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": PLAIN}}, ["a"]),
        ({"$ref": "#/$defs/B", "$defs": {"A": PLAIN, "B": {"anyOf": [{"$ref": "#/$defs/A"}]}}}, None),
        ({**PLAIN, "not": {"required": ["b"]}, "enum": [{"a": "x"}]}, ["a"]),
    ],
)
def test_the_root_of_parameters_is_a_plain_object(given: dict[str, Any], required: list[str] | None) -> None:
    before = copy.deepcopy(given)
    sent = tool_parameters(given, "openai")
    assert given == before
    assert sent["type"] == "object"
    assert not sent.keys() & {"anyOf", "oneOf", "allOf", "$ref", "not", "enum", "const"}
    assert sent["properties"]["a"] == {"type": "string"}
    assert sent.get("required") == required
    assert not lacking(sent)


def test_parameters_that_refer_to_themselves_accept_everything() -> None:
    given = {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, PLAIN]}}}
    sent = tool_parameters(given, "openai")
    assert (sent["type"], sent["properties"]) == ("object", {})
