"""Descriptions, bounds and defaults of parameters that type hints contain."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypedDict

import pytest

from agent_runtime_core import ToolRegistry
from agent_runtime_core.errors import BadArguments, InvalidArgument
from agent_runtime_core.tools import Tool
from agent_runtime_core.tools.structured_output import Output
from tests.support.cases import for_each


class About:
    """An object with attributes, like pydantic's FieldInfo and msgspec's Meta."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class PydanticUndefinedType: ...


def Field(default: Any = PydanticUndefinedType(), **attributes: Any) -> Any:  # noqa: B008
    nested = [About(**{name: value}) for name, value in attributes.items() if name not in ("description", "title")]
    texts = {name: attributes.get(name) for name in ("description", "title")}
    given = {"default_factory": attributes.get("default_factory")}
    return About(default=default, metadata=nested, **texts, **given)


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: Annotated[int, About(ge=1, description="across")] = 1
    label: str = None  # type: ignore[assignment]


class Options(TypedDict):
    limit: Annotated[int, About(le=5)]


def tool(hint: Any, *default: Any) -> Tool:
    def fn(a): ...  # type: ignore[no-untyped-def]

    def fn_with_default(a=default[0] if default else None):  # type: ignore[no-untyped-def]
        return a

    chosen = fn_with_default if default else fn
    chosen.__annotations__ = {"a": hint}
    return Tool.from_function(chosen, name="fn")


def schema(hint: Any, *default: Any) -> Any:
    return tool(hint, *default).parameters["properties"]["a"]


async def run(made: Tool, **arguments: Any) -> Any:
    tools = ToolRegistry()
    tools.register(made)
    return await tools.execute("fn", arguments)


@for_each(
    ("hint", "expected"),
    [
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (Annotated[int, About(description="how many", ge=1, le=10)],
         {"type": "integer", "description": "how many", "minimum": 1, "maximum": 10}),
        (Annotated[float, About(gt=0.5), About(lt=9, multiple_of=0.5)],
         {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 9, "multipleOf": 0.5}),
        (Annotated[str, About(min_length=1, max_length=5, pattern="^a", title="A", examples=["ab"])],
         {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^a", "title": "A", "examples": ["ab"]}),
        (Annotated[str, About(pattern=re.compile("^a"))], {"type": "string", "pattern": "^a"}),
        (Annotated[list[int], About(min_length=1, max_length=5)],
         {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5}),
        (list[Annotated[int, About(ge=1)]], {"type": "array", "items": {"type": "integer", "minimum": 1}}),
        (Annotated[int | None, About(ge=1)], {"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 1}),
        (Annotated[str | None, About(max_length=5)],
         {"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 5}),
        (Annotated[int, Field(description="how many", ge=1)],
         {"type": "integer", "description": "how many", "minimum": 1}),
        (Annotated[int, "first", About(description="second")], {"type": "integer", "description": "second"}),
        (Annotated[int, About(documentation="how many")], {"type": "integer", "description": "how many"}),
        (Annotated[int, 3, object(), About, About(description=None, ge=None, le="x", pattern=3, min_length=True)],
         {"type": "integer"}),
    ],
)  # fmt: skip
def test_metadata_of_a_hint_is_part_of_its_schema(hint: Any, expected: dict[str, Any]) -> None:
    assert schema(hint) == expected


@pytest.mark.parametrize(
    ("hint", "good", "bad", "problem"),
    [
        (Annotated[int, About(ge=1, le=10)], [1, 10], [0, 11], "must be at"),
        (Annotated[float, About(gt=0, lt=1)], [0.5], [0, 1.0], "must be (above 0|below 1), got"),
        (Annotated[int, About(multiple_of=5)], [10], [7], "be a multiple of 5"),
        (Annotated[str, About(min_length=1, max_length=2)], ["a"], ["", "abc"], "must have at"),
        (Annotated[str, About(pattern="^[a-z]+$")], ["abc"], ["A"], "must match the pattern"),
        (Annotated[list[int], About(min_length=1)], [[1]], [[]], "at least 1"),
        (Annotated[int | None, About(ge=1)], [None, 1], [0], "must be at least 1, got 0"),
        (Options, [{"limit": 5}], [{"limit": 6}], "must be at most 5, got 6"),
    ],
)
async def test_bounds_are_checked_before_the_call(hint: Any, good: list[Any], bad: list[Any], problem: str) -> None:
    made = tool(hint, Field())
    assert made.parameters["required"] == ["a"]
    for value in good:
        assert await run(made, a=value) == value
    for value in bad:
        with pytest.raises(BadArguments, match=problem):
            await run(made, a=value)
    with pytest.raises(BadArguments, match="missing required argument 'a'"):
        await run(made)


async def test_a_field_as_the_default() -> None:
    made = tool(int, Field(3, description="how many", ge=1))
    assert made.parameters["properties"]["a"] == {
        "type": "integer", "description": "how many", "minimum": 1, "default": 3,
    }  # fmt: skip
    assert made.parameters["required"] == []
    assert await run(made) == 3
    assert await run(made, a=4) == 4
    factory = tool(list, Field(default_factory=list, description="rows"))
    assert factory.parameters["properties"]["a"] == {"type": "array", "items": {}, "description": "rows"}
    assert (await run(factory)) == []
    assert await run(tool(str, Field(None, description="unit"))) is None
    for none in (Field(), Field(...)):
        assert tool(int, none).parameters["required"] == ["a"]
        by_hand = Tool("fn", "", {"type": "object"}, tool(int, none).handler)
        with pytest.raises(InvalidArgument, match="missing required argument 'a'"):
            await run(by_hand)


@for_each(
    ("hint", "default", "expected"),
    [
        (str, None, {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}),
        (str | int, None, {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}], "default": None}),
        (str | None, None, {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}),
        (Annotated[str, "the unit"], None,
         {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "the unit", "default": None}),
        (int, "all", {"anyOf": [{"type": "integer"}, {"enum": ["all"]}], "default": "all"}),
        (int, False, {"anyOf": [{"type": "integer"}, {"enum": [False]}], "default": False}),
        (Colour, None, {"anyOf": [{"enum": ["red"], "type": "string"}, {"type": "null"}], "default": None}),
        (Annotated[int, About(ge=1)], 0, {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": [0]}], "default": 0}),
        (float, 1, {"type": "number", "default": 1}),
        (list[int], None,
         {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": None}),
        (Point, None, None),
        (Any, None, {"default": None}),
    ],
)  # fmt: skip
async def test_a_default_of_another_type_is_a_valid_value(hint: Any, default: Any, expected: Any) -> None:
    made = tool(hint, default)
    if expected is not None:
        assert made.parameters["properties"]["a"] == expected
    assert await run(made, a=default) == default
    assert await run(made) == default


async def test_a_default_that_json_cannot_express() -> None:
    missing = object()
    made = tool(str, missing)
    assert made.parameters["properties"]["a"] == {"type": "string"}
    assert await run(made) is missing


async def test_bounds_and_defaults_of_the_fields_of_a_dataclass() -> None:
    made = tool(Point, Field())
    assert await run(made, a={"x": 2, "label": None}) == Point(2)
    with pytest.raises(BadArguments, match="must be at least 1, got 0"):
        await run(made, a={"x": 0})
    assert Output(Point).values('{"x": 2, "label": null}')[0] == Point(2)


def test_the_metadata_of_a_dataclass_field_describes_it() -> None:
    @dataclass
    class Place:
        city: str = field(metadata={"description": "The city.", "other": 1})

    properties = tool(Place).parameters["properties"]["a"]["properties"]
    assert properties == {"city": {"type": "string", "description": "The city."}}


async def test_pydantic_and_annotated_types() -> None:
    pydantic = pytest.importorskip("pydantic")
    types = pytest.importorskip("annotated_types")
    field = pydantic.Field(description="how many", ge=1, le=10, examples=[3])
    full = {"type": "integer", "description": "how many", "minimum": 1, "maximum": 10, "examples": [3]}
    assert schema(Annotated[int, field]) == full
    assert schema(int, pydantic.Field(2, description="how many", ge=1, le=10, examples=[3])) == {**full, "default": 2}
    assert tool(int, pydantic.Field(description="how many")).parameters["required"] == ["a"]
    assert tool(int, pydantic.Field(..., description="how many")).parameters["required"] == ["a"]
    assert await run(tool(list, pydantic.Field(default_factory=lambda: [1], description="rows"))) == [1]
    pattern = pydantic.Field(pattern="^a$", min_length=1)
    assert schema(Annotated[str, pattern]) == {"type": "string", "pattern": "^a$", "minLength": 1}
    interval = Annotated[int, types.Interval(ge=1, lt=5)]
    assert schema(interval) == {"type": "integer", "minimum": 1, "exclusiveMaximum": 5}
    assert schema(Annotated[list[int], types.Len(1, 5)])["maxItems"] == 5
    constraints = pydantic.StringConstraints(max_length=5, pattern="^a")
    assert schema(Annotated[str, constraints]) == {"type": "string", "maxLength": 5, "pattern": "^a"}
