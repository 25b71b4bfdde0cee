"""Schemas that providers accept: each array has `items`, and the root is an object with properties."""

from __future__ import annotations

import copy
from collections import abc
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict

import pytest

from agent_runtime_core import Tool
from agent_runtime_core.tools import BaseTool, ToolRegistry, ToolResult
from agent_runtime_core.tools.portable_schema import complete, complete_parameters
from agent_runtime_core.tools.structured_output import Output


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


@pytest.mark.parametrize(
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
    assert not lacking(tool.to_openai_format())
    assert not lacking(Output(hint).schema)


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
    made = complete(given)
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
    assert complete_parameters(parameters) == {"type": "object", "properties": {}}


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
    for each in tools.to_openai_format():
        assert each["function"]["parameters"] == complete(GIVEN)
    assert all(tool.parameters is GIVEN for tool in tools.list_tools())
