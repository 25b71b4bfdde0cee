"""Whether a value fits a JSON Schema."""

from __future__ import annotations

from typing import Any

from agent_runtime_core.schema import misfit, misfits
from tests.support.cases import for_each

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


@for_each(
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
        (1, {"$ref": "#whole", "$defs": {"a": {"$anchor": "whole", "type": "integer"}}}),
        (1, {"$ref": "whole", "$defs": {"a": {"$id": "whole", "type": "integer"}}}),
        (1, {"$id": "https://example.com/a", "$ref": "https://example.com/a#/$defs/b", "$defs": {"b": {"maximum": 1}}}),
        (1, {"anyOf": [{"type": "integer"}, {"$ref": "#/anyOf/0"}]}),
        ("x", {"default": {"$ref": "#/no/reference"}}),
        ("anything", {"type": "unheard of", "format": "email"} | {"type": ["string", "unheard of"]}),
    ],
)
def test_what_fits(value: Any, schema: dict[str, Any]) -> None:
    assert misfit(value, schema) is None


@for_each(
    ("value", "schema", "said"),
    [
        (True, {"type": "integer"}, "$ must be an integer, got True"),
        (1.5, {"type": "integer"}, "$ must be an integer, got 1.5"),
        ("1", {"type": ["integer", "null"]}, "$ must be an integer or null, got '1'"),
        ("c", {"enum": ["a", "b"]}, "$ must be one of 'a', 'b', got 'c'"),
        ("c", {"const": "a"}, "$ must be 'a', got 'c'"),
        ([1], {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "$ must be a string or an integer, got an array"),
        ({}, PERSON, "$: missing required property 'name' (string)"),
        ({"name": "a", "x": 1}, PERSON, "$: unexpected property 'x' (known: 'name', 'tags')"),
        ({"name": ""}, PERSON, "$.name must have at least 1 character, got ''"),
        ({"name": "longer"}, PERSON, "$.name must have at most 5 characters, got 'longer'"),
        ({"name": "a", "tags": ["x", 2]}, PERSON, "$.tags[1] must be a string, got 2"),
        (4, {"minimum": 5}, "$ must be at least 5, got 4"),
        (6.5, {"maximum": 6}, "$ must be at most 6, got 6.5"),
        (4, {"exclusiveMinimum": 4}, "$ must be above 4, got 4"),
        (4, {"exclusiveMaximum": 4}, "$ must be below 4, got 4"),
        (7, {"multipleOf": 3}, "$ must be a multiple of 3, got 7"),
        (0.35, {"multipleOf": 0.1}, "$ must be a multiple of 0.1, got 0.35"),
        ("b", {"pattern": "^a"}, "$ must match the pattern '^a', got 'b'"),
        (1e300, {"type": "integer"}, "$ must be an integer, got 1e+300"),
        (True, {"enum": [1, 0]}, "$ must be one of 1, 0, got True"),
        (1, {"const": True}, "$ must be True, got 1"),
        ([1], {"minItems": 2}, "$ must have at least 2 items, got 1"),
        ([1], {"maxItems": 0}, "$ must have at most 0 items, got 1"),
        ([1, 2], {"prefixItems": [{}, {"type": "string"}]}, "$[1] must be a string, got 2"),
        ([1, 2], {"prefixItems": [{}], "items": False}, "$[1] must be left out, got 2"),
        ({"b c": "x"}, {"additionalProperties": {"type": "null"}}, "$['b c'] must be null, got 'x'"),
        ({"b": 1}, {"additionalProperties": False}, "$: unexpected property 'b'"),
        ({"nam": "a"}, {**PERSON, "required": []}, "$: unexpected property 'nam'. Did you mean 'name'?"),
        ({}, {"required": ["a"]}, "$: missing required property 'a'"),
        (
            {},
            {"required": ["a"], "properties": {"a": {"anyOf": [{"type": "null"}, {"enum": [1]}]}}},
            "$: missing required property 'a' (null or 1)",
        ),
        (3, {"allOf": [{"type": "integer"}, {"minimum": 4}]}, "$ must be at least 4, got 3"),
        (
            {"a": {"b": 1}},
            {"properties": {"a": {"anyOf": [{"type": "null"}, {"properties": {"b": {"type": "null"}}}]}}},
            "$.a.b must be null, got 1",
        ),
        (
            {"a": 1},
            {"oneOf": [{"required": ["b", "c"]}, {"required": ["d"]}]},
            "$ must match a schema in oneOf, got an object (nearest: $: missing required property 'd')",
        ),
        ("x", TREE, "$ must match a schema in anyOf, got 'x'"),
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
            "$.left.right.left must be an object, got 'x'",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_its_path(value: Any, schema: dict[str, Any], said: str) -> None:
    assert misfit(value, schema) == said


def test_all_that_does_not_fit_is_told_in_order() -> None:
    value = {"name": 1, "tags": ["x", 2, 3], "z": 1}
    assert list(misfits(value, PERSON, "$.who")) == [
        "$.who.name must be a string, got 1",
        "$.who.tags[1] must be a string, got 2",
        "$.who.tags[2] must be a string, got 3",
        "$.who: unexpected property 'z' (known: 'name', 'tags')",
    ]


def test_alternatives_that_refer_to_themselves_take_no_exponential_time() -> None:
    value: Any = "wrong"
    for _ in range(60):
        value = {"left": value, "right": 1}
    assert (
        misfit(value, TREE)
        == "$ must match a schema in anyOf, got an object (nearest: $.left must match a schema in anyOf, got an object)"
    )


def test_what_is_too_deep_to_be_checked_does_not_pass() -> None:
    value: Any = 1
    for _ in range(5_000):
        value = [value]
    rows: Any = {"items": {"$ref": "#"}, "maxItems": 1}
    either: Any = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]}
    for schema in (rows, either, {"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}):
        assert str(misfit(value, schema)).endswith("must be less deeply nested to be checked, got an array")


def test_a_long_name_is_cut_before_it_is_compared() -> None:
    assert len(str(misfit({"k" * 10**6: 1}, PERSON | {"required": []}))) < 200


def test_a_number_that_cannot_be_written_is_told_all_the_same() -> None:
    assert misfit(10**5000, {"maximum": 5}) == f"$ must be at most 5, got <int of {(10**5000).bit_length()} bits>"
