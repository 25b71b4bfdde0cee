"""The package `jsonschema`, if it is installed, checks the keywords that the library itself does not."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime_core._core import json_schema
from agent_runtime_core._core.json_schema import misfit, misfits

pytest.importorskip("jsonschema")

MISFITS: list[tuple[Any, dict[str, Any], str]] = [
    (3, {"oneOf": [{"type": "integer"}, {"minimum": 1}]}, "$ must match only one schema in oneOf, got 3"),
    (
        {"a": {"b": 1}},
        {"properties": {"a": {"patternProperties": {"^b": {"type": "string"}}}}},
        "$.a.b must be a string, got 1",
    ),
    (
        [["x"]],
        {"items": {"not": {"contains": {"const": "x"}}}},
        "$[0] must not match {'contains': {'const': 'x'}}, got an array",
    ),
    ({"a": 1}, {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "$: missing required property 'b'"),
    (
        [1],
        {"$ref": "#rows", "$defs": {"r": {"$anchor": "rows", "contains": {"type": "null"}}}},
        "$ must have an item that matches {'type': 'null'}, got an array",
    ),
    ({"a": 1}, {"dependentRequired": {"a": ["b"]}}, "$ must match dependentRequired {'a': ['b']}, got an object"),
]


@pytest.mark.parametrize(("value", "schema", "message"), MISFITS)
def test_other_keywords_are_checked(value: Any, schema: dict[str, Any], message: str) -> None:
    found = misfit(value, schema)
    assert found == message


@pytest.mark.parametrize(("value", "schema", "_"), MISFITS)
def test_they_are_ignored_without_the_package(
    value: Any, schema: dict[str, Any], _: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_schema, "_jsonschema", lambda: None)
    assert misfit(value, schema) is None


def test_the_mismatches_that_the_library_finds_keep_its_words() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "minProperties": 3}
    assert list(misfits({"age": "x"}, schema)) == ["$.age must be an integer, got 'x'"]


@pytest.mark.parametrize("schema", [{"not": {"pattern": r"\p{Lu}("}}, {"not": {"type": "unheard of"}}])
def test_a_schema_that_the_package_rejects_is_checked_as_far_as_the_library_understands_it(schema: Any) -> None:
    assert misfit("x", schema) is None


def test_the_arguments_of_a_call_are_named_without_a_path() -> None:
    found = list(misfits({"a": 1}, {"type": "object", "minProperties": 2}, ""))
    assert found == ["arguments must have at least 2 properties, got an object"]


def test_a_parameter_that_is_a_set_accepts_equal_items() -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}}, "minProperties": 1}
    assert misfit({"a": [1, 1]}, schema) is None
