"""Whether a value fits a JSON Schema."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime_core.schema import misfit

PERSON = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 5}, "tags": {"items": {"type": "string"}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (1, {}),
        (None, {"type": "null"}),
        (1, {"type": "integer"}),
        (1, {"type": "number"}),
        (1.5, {"type": ["string", "number"]}),
        (True, {"type": "boolean"}),
        (True, {"enum": [True, False]}),
        ([], {"type": "array"}),
        ("a", {"enum": ["a", "b"]}),
        ("a", {"const": "a"}),
        (5, {"minimum": 5, "maximum": 5}),
        ([1, 2], {"items": {"type": "integer"}}),
        (1, {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        ({"name": "ada", "tags": ["x"]}, PERSON),
        ({"more": 1}, {"type": "object"}),
        ("anything", {"type": "unheard of", "format": "email"} | {"type": ["string", "unheard of"]}),
    ],
)
def test_what_fits(value: Any, schema: dict[str, Any]) -> None:
    assert misfit(value, schema) is None


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        (True, {"type": "integer"}, "$ is bool, the schema wants integer"),
        (1.5, {"type": "integer"}, "$ is float, the schema wants integer"),
        ("1", {"type": ["integer", "null"]}, "$ is str, the schema wants ['integer', 'null']"),
        ("c", {"enum": ["a", "b"]}, "$ is 'c', the schema wants one of ['a', 'b']"),
        ("c", {"const": "a"}, "$ is 'c', the schema wants 'a'"),
        ([1], {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "$ fits none of the schemas in anyOf"),
        ({}, PERSON, "$ lacks 'name'"),
        ({"name": "a", "x": 1}, PERSON, "$ has 'x', which the schema does not know"),
        ({"name": ""}, PERSON, "$.name is '', below 1"),
        ({"name": "longer"}, PERSON, "$.name is 'longer', above 5"),
        ({"name": "a", "tags": ["x", 2]}, PERSON, "$.tags[1] is int, the schema wants string"),
        (4, {"minimum": 5}, "$ is 4, below 5"),
        (6.5, {"maximum": 6}, "$ is 6.5, above 6"),
    ],
)
def test_what_does_not_fit_is_told_with_its_path(value: Any, schema: dict[str, Any], said: str) -> None:
    assert misfit(value, schema) == said
