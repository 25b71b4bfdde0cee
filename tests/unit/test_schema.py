"""Whether a value fits a JSON Schema."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime_core.schema import misfit, misfits

PERSON = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 5}, "tags": {"items": {"type": "string"}}},
    "additionalProperties": False,
}
TREE = {
    "anyOf": [{"$ref": "#/$defs/a~1b/node"}, {"$ref": "#/$defs/other"}, {"type": "integer"}],
    "$defs": {
        "a/b": {"node": {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}},
        "other": {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}, "required": ["z"]},
    },
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
        (3.0, {"type": "integer"}),
        (1.0, {"enum": [1]}),
        ("x", {"minimum": 5, "prefixItems": [False], "required": ["a"]}),
        (True, {"minimum": 5}),
        (6, {"multipleOf": 3}),
        (0.3, {"multipleOf": 0.1}),
        (10**400, {"multipleOf": 0.1}),
        (True, {"multipleOf": 3}),
        ("a-1", {"pattern": r"^[a-z]-\d$"}),
        ("xay", {"pattern": "a"}),
        (1, {"pattern": "a"}),
        ("x", {"pattern": r"\p{Lu}("}),
        ([1, "a", None], {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}}),
        ([1, 2], {"minItems": 2, "maxItems": 2}),
        ({"a": 1, "b": 2}, {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}),
        ({"a": 1}, {"properties": {"b": False}}),
        (3, {"allOf": [{"minimum": 3}, {"exclusiveMaximum": 4}]}),
        (3, {"oneOf": [{"type": "string"}, {"type": "integer"}]}),
        ({"left": 1, "right": {"left": {}}}, TREE),
        ("x", {"$ref": "https://example.com/schema"}),
        ("x", {"$ref": "#/nowhere/at/all"}),
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
        ([1], {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "$ is list, the schema wants string or integer"),
        ({}, PERSON, "$ lacks 'name', the schema wants string there"),
        ({"name": "a", "x": 1}, PERSON, "$ has 'x', which the schema does not know: it knows 'name', 'tags'"),
        ({"name": ""}, PERSON, "$.name is '', below 1"),
        ({"name": "longer"}, PERSON, "$.name is 'longer', above 5"),
        ({"name": "a", "tags": ["x", 2]}, PERSON, "$.tags[1] is int, the schema wants string"),
        (4, {"minimum": 5}, "$ is 4, below 5"),
        (6.5, {"maximum": 6}, "$ is 6.5, above 6"),
        (4, {"exclusiveMinimum": 4}, "$ is 4, not above 4"),
        (4, {"exclusiveMaximum": 4}, "$ is 4, not below 4"),
        (7, {"multipleOf": 3}, "$ is 7, not a multiple of 3"),
        (0.35, {"multipleOf": 0.1}, "$ is 0.35, not a multiple of 0.1"),
        ("b", {"pattern": "^a"}, "$ is 'b', which does not match the pattern '^a'"),
        (1e300, {"type": "integer"}, "$ is float, the schema wants integer"),
        (True, {"enum": [1, 0]}, "$ is True, the schema wants one of [1, 0]"),
        (1, {"const": True}, "$ is 1, the schema wants True"),
        ([1], {"minItems": 2}, "$ has 1 items, the schema wants at least 2"),
        ([1], {"maxItems": 0}, "$ has 1 items, the schema wants at most 0"),
        ([1, 2], {"prefixItems": [{}, {"type": "string"}]}, "$[1] is int, the schema wants string"),
        ([1, 2], {"prefixItems": [{}], "items": False}, "$[1] is there, the schema wants nothing there"),
        ({"b c": "x"}, {"additionalProperties": {"type": "null"}}, "$['b c'] is str, the schema wants null"),
        ({"b": 1}, {"additionalProperties": False}, "$ has 'b', which the schema does not know"),
        ({"nam": "a"}, {**PERSON, "required": []}, "$ has 'nam', which the schema does not know: did you mean 'name'?"),
        ({}, {"required": ["a"]}, "$ lacks 'a'"),
        (
            {},
            {"required": ["a"], "properties": {"a": {"anyOf": [{"type": "null"}, {"enum": [1]}]}}},
            "$ lacks 'a', the schema wants null or one of [1] there",
        ),
        (3, {"allOf": [{"type": "integer"}, {"minimum": 4}]}, "$ is 3, below 4"),
        (
            {"a": {"b": 1}},
            {"properties": {"a": {"anyOf": [{"type": "null"}, {"properties": {"b": {"type": "null"}}}]}}},
            "$.a.b is int, the schema wants null",
        ),
        (
            {"a": 1},
            {"oneOf": [{"required": ["b", "c"]}, {"required": ["d"]}]},
            "$ fits none of the schemas in oneOf: $ lacks 'd'",
        ),
        ("x", TREE, "$ fits none of the schemas in anyOf"),
        (
            {"left": {"right": {"left": "x"}}},
            {
                "$ref": "#/$defs/t",
                "$defs": {
                    "t": {
                        "properties": {"left": {"$ref": "#/$defs/t"}, "right": {"$ref": "#/$defs/t"}},
                        "type": "object",
                    }
                },
            },
            "$.left.right.left is str, the schema wants object",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_its_path(value: Any, schema: dict[str, Any], said: str) -> None:
    assert misfit(value, schema) == said


def test_all_that_does_not_fit_is_told_in_order() -> None:
    value = {"name": 1, "tags": ["x", 2, 3], "z": 1}
    assert list(misfits(value, PERSON, "$.who")) == [
        "$.who.name is int, the schema wants string",
        "$.who.tags[1] is int, the schema wants string",
        "$.who.tags[2] is int, the schema wants string",
        "$.who has 'z', which the schema does not know: it knows 'name', 'tags'",
    ]


def test_alternatives_that_refer_to_themselves_take_no_exponential_time() -> None:
    value: Any = "wrong"
    for _ in range(60):
        value = {"left": value, "right": 1}
    assert misfit(value, TREE) == "$ fits none of the schemas in anyOf: $.left fits none of the schemas in anyOf"


def test_what_is_too_deep_to_be_checked_does_not_pass() -> None:
    value: Any = 1
    for _ in range(5_000):
        value = [value]
    rows: Any = {"items": {"$ref": "#"}, "maxItems": 1}
    either: Any = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]}
    for schema in (rows, either, {"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}):
        assert str(misfit(value, schema)).endswith("is nested too deeply to be checked")


def test_a_long_name_is_cut_before_it_is_compared() -> None:
    assert len(str(misfit({"k" * 10**6: 1}, PERSON | {"required": []}))) < 200


def test_a_number_that_cannot_be_written_is_told_all_the_same() -> None:
    assert misfit(10**5000, {"maximum": 5}) == f"$ is <int of {(10**5000).bit_length()} bits>, above 5"
