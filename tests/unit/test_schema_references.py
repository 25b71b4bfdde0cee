"""References in a JSON Schema: by $anchor and $id, and those that name nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_runtime_core import open_run
from agent_runtime_core._core.json_schema import misfit, require_references
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.tools import Tool
from agent_runtime_core.tools.structured_output import Output

ANCHORED = {
    "type": "object",
    "properties": {"age": {"$ref": "#whole"}},
    "$defs": {"any": {"$anchor": "whole", "type": "integer"}},
}
BROKEN = ["#nowhere", "#/$defs/nowhere", "https://example.com/schema", "#/anyOf/7", "other.json#/a"]


def test_an_anchor_is_the_part_that_has_it_and_not_the_root() -> None:
    assert misfit({"age": 3}, ANCHORED) is None
    assert misfit({"age": "x"}, ANCHORED) == "$.age must be an integer, got 'x'"
    require_references(ANCHORED, "schema")


@pytest.mark.parametrize("reference", BROKEN)
def test_a_reference_that_names_nothing_is_an_error_where_the_schema_is_declared(reference: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": reference}}, "anyOf": [{}]}
    with pytest.raises(InvalidArgument) as of_tool:
        Tool(name="look", description="", parameters=schema, handler=print)
    assert str(of_tool.value).startswith(
        f"tool 'look': parameters: $ref must name a part of the schema, got '{reference}'"
    )
    with pytest.raises(InvalidArgument, match=r"output_type: .ref must name a part of the schema") as of_output:
        Output(schema)
    assert reference in str(of_output.value)


@pytest.mark.parametrize("reference", BROKEN)
def test_nothing_matches_a_reference_that_names_nothing(reference: str) -> None:
    found = misfit("x", {"$ref": reference})
    assert found == f"$ cannot be checked: the schema does not contain {reference!r}"


def test_an_approval_with_such_a_schema_is_not_asked(tmp_path: Path) -> None:
    async def ask() -> None:
        async with open_run(tmp_path / "runs.db", "r") as ctx:
            await ctx.approve("pay", schema={"$ref": "#nowhere"})

    with pytest.raises(InvalidArgument, match=r"approval 'pay': schema: .*#nowhere"):
        asyncio.run(ask())


def test_values_are_not_searched_for_references() -> None:
    require_references({"const": {"$ref": "#a"}, "enum": [{"$ref": "#b"}], "properties": {"$ref": {}}}, "schema")
