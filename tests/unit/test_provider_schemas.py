"""JSON schemas as providers accept them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agent_runtime_core._core.json_schema import misfit
from agent_runtime_core.llm._schemas import dialect_of, output_schema, tool_parameters, with_schemas
from tests.support.cases import for_each

# What Anthropic's documentation of structured outputs accepts.
ACCEPTED = {
    "type", "title", "description", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items",
    "minItems", "format", "$ref", "$defs",
}  # fmt: skip
TEXT = {"type": "string"}


def schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for name in ("properties", "$defs"):
        for each in schema.get(name, {}).values():
            yield from schemas_in(each)
    for each in schema.get("anyOf", ()):
        yield from schemas_in(each)
    if isinstance(schema.get("items"), dict):
        yield from schemas_in(schema["items"])


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 1, "maximum": 5}, "{minimum: 1, maximum: 5}"),
    ({"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.5}, "{exclusiveMinimum: 0, multipleOf: 0.5}"),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "{exclusiveMinimum: 0}"),
    ({"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^a"}, "{minLength: 1, maxLength: 9, pattern: ^a}"),
    ({"type": "string", "format": "ipv9"}, "{format: ipv9}"),
    ({"type": "array", "items": TEXT, "minItems": 2, "uniqueItems": True}, "{minItems: 2, uniqueItems: true}"),
    ({"type": "array", "items": TEXT, "maxItems": 4}, "{maxItems: 4}"),
    ({"type": "string", "default": "é", "examples": ["a"]}, '{default: é, examples: ["a"]}'),
    ({"type": ["string", "null"], "maxLength": 2}, "{maxLength: 2}"),
]


@pytest.mark.parametrize(("schema", "words"), BOUNDS, ids=range(len(BOUNDS)))
def test_bounds_become_words_of_the_description_wherever_they_are(schema: dict[str, Any], words: str) -> None:
    before = json.dumps(schema)
    places: list[dict[str, Any]] = [
        schema,
        {"type": "object", "properties": {"minimum": schema, "b": {"type": "array", "items": schema}}},
        {"anyOf": [schema, {"type": "null"}]},
        {"oneOf": [{"type": "object", "properties": {"a": schema}}, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": schema}},
        {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/definitions/A"}]}}, "definitions": {"A": schema}},
        {"type": "array", "items": {"type": "array", "prefixItems": [schema, TEXT]}},
    ]
    for place in places:
        found = output_schema(place, "anthropic")
        assert found is not None
        assert [each for each in schemas_in(found) if not ACCEPTED.issuperset(each)] == []
        assert [
            each for each in schemas_in(found) if each.get("type") == "object" and each["additionalProperties"]
        ] == []
        assert any(each.get("description") == words for each in schemas_in(found))
    assert json.dumps(schema) == before
    described = output_schema({**schema, "description": "One."}, "anthropic")
    assert described is not None
    assert described["description"] == f"One.\n\n{words}"


def test_names_and_data_are_not_keywords() -> None:
    names = dict.fromkeys(("minimum", "maxItems", "format", "pattern", "$ref", "type", "items", "properties"), TEXT)
    schema = {**closed(**names), "required": list(names)}
    assert output_schema(schema, "anthropic") == schema
    schema = closed(a={"enum": ["minimum", "maximum"], "type": "string"}, b={"const": "pattern"})
    assert output_schema(schema, "anthropic") == schema
    assert tool_parameters({**schema, "default": {"type": "array"}}, "openai")["default"] == {"type": "array"}


@for_each(
    ("schema", "sent"),
    [
        ({"type": "string", "format": "date"}, None),
        ({"type": "array", "items": TEXT, "minItems": 1}, None),
        (
            {"type": "array", "items": TEXT, "minItems": 0},
            {"type": "array", "items": TEXT, "description": "{minItems: 0}"},
        ),
        ({"properties": {"a": TEXT}}, closed(a=TEXT)),
        ({"type": "object", "properties": {}}, closed()),
        ({"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}, closed(a=TEXT)),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": TEXT}}}}, closed(a=TEXT)),
        (
            {"type": "array", "prefixItems": [TEXT, {"type": "integer"}], "items": {}, "minItems": 2, "maxItems": 2},
            {
                "type": "array",
                "items": {"anyOf": [TEXT, {"type": "integer"}]},
                "minItems": 1,
                "description": '{prefixItems: [{"type": "string"}, {"type": "integer"}], minItems: 2, maxItems: 2}',
            },
        ),
        (
            {"type": "array", "prefixItems": [TEXT], "items": {"type": "null"}},
            {
                "type": "array",
                "items": {"anyOf": [TEXT, {"type": "null"}]},
                "description": '{prefixItems: [{"type": "string"}]}',
            },
        ),
        (
            {"type": "array", "items": [TEXT]},
            {"type": "array", "items": TEXT, "description": '{prefixItems: [{"type": "string"}]}'},
        ),
    ],
    ids=range(10),
)
def test_an_answer_as_anthropic_accepts_it(schema: dict[str, Any], sent: dict[str, Any] | None) -> None:
    assert output_schema(schema, "anthropic") == (sent or schema)


@for_each(
    "inner",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT},
        {"type": "object", "patternProperties": {"^a": TEXT}},
        {"type": "object"},
        {"type": "object", "properties": {"a": TEXT}, "required": ["b"]},
        {},
        {"minimum": 1},
        {"enum": [{"a": 1}]},
        {"type": "array"},
        {"type": "array", "items": {}},
        {"type": "array", "items": True},
        {"allOf": [{"type": "object", "properties": {"a": TEXT}}, {"type": "object", "properties": {"b": TEXT}}]},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/None"},
        {"$ref": "#"},
        {"type": "any"},
    ],
    ids=range(16),
)
def test_a_schema_without_an_equivalent_has_none_wherever_it_is(inner: dict[str, Any]) -> None:
    for schema in (inner, closed(a=inner), closed(a={"type": "array", "items": {"anyOf": [inner, TEXT]}})):
        assert output_schema(schema, "anthropic") is None


def test_a_schema_that_refers_to_itself() -> None:
    node = {"type": "object", "properties": {"child": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    assert output_schema(schema, "anthropic") is None
    assert tool_parameters(schema, "anthropic") == tool_parameters(schema, "openai") == schema
    found = tool_parameters(schema, "gemini")
    assert found["properties"]["a"]["properties"]["child"] == {"nullable": True, "type": "object"}
    twice = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/$defs/A"}},
        "$defs": {"A": TEXT},
    }
    assert output_schema(twice, "anthropic") == {**twice, "additionalProperties": False}


# Tools.


@for_each("dialect", ["openai", "anthropic", "gemini"])
@for_each(
    ("schema", "properties", "required"),
    [
        (None, {}, None),
        ({}, {}, None),
        ({"properties": {"a": TEXT}}, {"a": TEXT}, None),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": TEXT}}}}, {"a": TEXT}, None),
        (
            {"allOf": [{"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": TEXT}}]},
            {"a": TEXT, "b": TEXT},
            ["a"],
        ),
        (
            {"anyOf": [{"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": TEXT}}]},
            {"a": TEXT, "b": TEXT},
            None,
        ),
        ({"type": ["object", "null"], "properties": {"a": TEXT}}, {"a": TEXT}, None),
        ({"$ref": "#/$defs/A"}, {}, None),
    ],
    ids=range(8),
)
def test_the_root_of_parameters_is_a_plain_object(
    dialect: Any, schema: Any, properties: dict[str, Any], required: list[str] | None
) -> None:
    before = json.dumps(schema)
    found = tool_parameters(schema, dialect)
    assert (found["type"], found.get("properties", {}), found.get("required")) == ("object", properties, required)
    assert not found.keys() & {"allOf", "anyOf", "oneOf", "$ref"}
    assert json.dumps(schema) == before


def test_bounds_of_parameters_are_kept_where_they_are_accepted() -> None:
    schema = closed(a={"type": "integer", "minimum": 1}, b={"type": "array", "items": TEXT, "minItems": 2})
    assert tool_parameters(schema, "anthropic") == tool_parameters(schema, "openai") == schema


def test_arrays_have_items_for_openai() -> None:
    any_items = {"type": "array", "items": {}}
    array = {"type": "array"}
    schema = closed(
        a=array,
        b={"type": ["array", "null"]},
        c={"type": "array", "items": array},
        d={"type": "array", "prefixItems": [array]},
        e={"type": "array", "items": [TEXT]},
    )
    properties = {
        "a": any_items,
        "b": {"type": ["array", "null"], "items": {}},
        "c": {"type": "array", "items": any_items},
        "d": {"type": "array", "prefixItems": [any_items], "items": {}},
        "e": {"type": "array", "prefixItems": [TEXT], "items": {}},
    }
    assert tool_parameters(schema, "openai") == closed(**properties)
    assert output_schema({"type": "array"}, "openai") == any_items


GEMINI: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"const": "x"}, {"type": "string", "enum": ["x"]}),
    ({"enum": ["a", None]}, {"type": "string", "enum": ["a"], "nullable": True}),
    ({"type": "integer", "enum": [1, 2]}, {"type": "integer", "description": "{enum: [1, 2]}"}),
    ({"enum": ["", "a"], "type": "string"}, {"type": "string", "description": '{enum: ["", "a"]}'}),
    ({"type": ["string", "null"]}, {"type": "string", "nullable": True}),
    ({"type": ["string", "integer"]}, {"anyOf": [TEXT, {"type": "integer"}]}),
    ({"anyOf": [TEXT, {"type": "null"}], "description": "d"}, {**TEXT, "nullable": True, "description": "d"}),
    ({"oneOf": [TEXT, {"type": "integer"}]}, {"anyOf": [TEXT, {"type": "integer"}]}),
    ({"type": "string", "format": "uri"}, {"type": "string", "description": "{format: uri}"}),
    ({"type": "string", "format": "date-time"}, {"type": "string", "format": "date-time"}),
    ({"type": "array"}, {"type": "array", "items": TEXT}),
    (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        {"type": "number", "maximum": 2, "description": "{exclusiveMinimum: 0}"},
    ),
    ({"type": "object", "additionalProperties": False}, {"type": "object"}),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "description": '{additionalProperties: {"type": "integer"}}'},
    ),
    (
        {"type": "object", "properties": {"a": TEXT}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
    ),
    ({"$ref": "#/$defs/A", "description": "d"}, {"type": "integer", "minimum": 1, "description": "d"}),
    ({"allOf": [{"$ref": "#/$defs/A"}]}, {"type": "integer", "minimum": 1}),
]


@for_each(("schema", "sent"), GEMINI, ids=range(len(GEMINI)))
def test_keywords_that_gemini_rejects(schema: dict[str, Any], sent: dict[str, Any]) -> None:
    root = {**closed(const=schema), "$schema": "x", "$defs": {"A": {"type": "integer", "minimum": 1}}}
    before = json.dumps(root)
    wanted = {"type": "object", "properties": {"const": sent}}
    assert tool_parameters(root, "gemini") == output_schema(root, "gemini") == wanted
    assert json.dumps(root) == before


@pytest.mark.parametrize(
    ("url", "dialect"),
    [
        ("https://generativelanguage.googleapis.com/v1beta/openai/", "gemini"),
        ("https://eu-aiplatform.googleapis.com/v1/projects/x/endpoints/openapi", "gemini"),
        ("https://api.openai.com/v1", "openai"),
        ("https://example.com/googleapis.com", "openai"),
        ("https://evilgoogleapis.com", "openai"),
        ("", "openai"),
    ],
)
def test_the_dialect_of_a_server(url: str, dialect: str) -> None:
    assert dialect_of(url) == dialect


def test_an_answer_within_the_sent_schema_may_still_break_a_bound() -> None:
    """So the caller checks the answer against the full schema."""
    schema = closed(score={"type": "integer", "minimum": 1, "maximum": 5})
    sent = output_schema(schema, "anthropic")
    assert sent is not None
    assert misfit({"score": 9}, sent) is None
    assert misfit({"score": 9}, schema) is not None


def test_the_arguments_of_a_chat_completion() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "additionalProperties": False}
    native = {"type": "custom", "custom": {"name": "c"}}
    arguments = {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}, native],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    before = json.dumps(arguments)
    for dialect, items, rest in (("openai", {}, {"additionalProperties": False}), ("gemini", TEXT, {})):
        sent = {"type": "object", "properties": {"a": {"type": "array", "items": items}}, **rest}
        assert with_schemas(arguments, dialect) == {  # type: ignore[arg-type]
            "model": "m",
            "tools": [{"type": "function", "function": {"name": "a", "parameters": sent}}, native],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": sent}},
        }
    assert json.dumps(arguments) == before
    for plain in ({"tools": None}, {"response_format": {"type": "json_object"}}):
        assert with_schemas(plain, "gemini") == plain
