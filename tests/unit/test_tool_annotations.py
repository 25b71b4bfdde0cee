"""Values of a type from JSON, and what a type's schema refuses to say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Required, TypedDict

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools import Tool, ToolRegistry, tool
from agent_runtime_core.tools.annotations import schema_of, typed
from tests.support.cases import for_each

if TYPE_CHECKING:
    from decimal import Decimal

    from agent_runtime_core.interfaces import RunContext


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(Enum):
    ONE = 1
    TWO = 2


@dataclass
class Point:
    x: int
    y: float = 0.0
    made: str = field(default="here", init=False)


@dataclass
class Knot:
    value: int
    inner: Knot | None = None


@dataclass
class Lazy:
    price: Decimal
    count: int = 0


@dataclass
class Needs:
    seed: InitVar[int]
    x: int = 0


class Keys(TypedDict, total=False):
    at: Required[Point]
    size: Size


UserId = NewType("UserId", int)
POINT = Point(1)


@for_each(
    ("value", "hint", "wanted"),
    [
        (3.0, int, 3),
        (3.5, int, 3.5),
        (True, int, True),
        (3, float, 3.0),
        (True, float, True),
        (3.0, UserId, 3),
        (3.0, Annotated[int, ["unhashable"]], 3),
        ("x", str, "x"),
        (None, int, None),
        (3.0, Any, 3.0),
        ("red", Colour, Colour.RED),
        ("RED", Colour, Colour.RED),
        (Colour.RED, Colour, Colour.RED),
        (1.0, Size, Size.ONE),
        (1.0, Literal[1, "a"], 1),
        ("b", Literal[1, "a"], "b"),
        ("blue", Literal[Colour.BLUE], Colour.BLUE),
        (["red", "blue"], list[Colour], [Colour.RED, Colour.BLUE]),
        (["red"], Sequence[Colour], [Colour.RED]),
        (["red"], set[Colour], {Colour.RED}),
        (["red"], frozenset[Colour], frozenset({Colour.RED})),
        (["red", 2], tuple[Colour, float], (Colour.RED, 2.0)),
        (["red", 2, 3], tuple[Colour, float], (Colour.RED, 2.0, 3)),
        (["red"], tuple, ("red",)),
        (["red"], list, ["red"]),
        ("red", list[Colour], "red"),
        ({"a": "red"}, dict[str, Colour], {"a": Colour.RED}),
        ({"a": "red"}, Mapping[str, Colour], {"a": Colour.RED}),
        ({"a": "red"}, dict, {"a": "red"}),
        ([1], dict[str, Colour], [1]),
        ({"x": 1.0, "y": 2, "made": "there", "more": 1}, Point, Point(1, 2.0)),
        (POINT, Point, POINT),
        ({"value": 1, "inner": {"value": 2}}, Knot, Knot(1, Knot(2))),
        ({"price": "1", "count": 2.0}, Lazy, Lazy("1", 2)),  # type: ignore[arg-type]
        ({"at": {"x": 1}, "size": 2}, Keys, {"at": Point(1), "size": Size.TWO}),
        ([], Keys, []),
        ({"x": 1}, Point | None, Point(1)),
        ("red", Colour | str, Colour.RED),
        ("red", str | Colour, "red"),
        ("green", Colour | str, "green"),
        (3.0, int | float, 3.0),
        (3, float | int, 3),
        (3.0, int | str, 3),
        ({"x": 1}, Knot | Point, Point(1)),
        ({"x": 1}, datetime | Point, Point(1)),
        ("noon", datetime | Point, "noon"),
        ("noon", datetime, "noon"),
    ],
)
def test_a_value_is_built_by_its_type(value: Any, hint: Any, wanted: Any) -> None:
    found = typed(value, hint)
    assert (found, type(found), repr(found)) == (wanted, type(wanted), repr(wanted))


@pytest.mark.parametrize(
    ("value", "hint", "why"),
    [
        ("green", Colour, r"\$: unknown Colour 'green'\. Known: blue, red"),
        (True, Size, r"\$: unknown Size True\. Known: 1, 2"),
        ([{}], list[Point], r"\$\[0\]: Point needs 'x', which is missing"),
        (
            {"a": 1},
            dict[str, Point],
            r"\$\.a: the annotation says Point, got an int\. Correct the annotation or the value",
        ),
        ({"x": 1}, Needs, r"could not be constructed: TypeError: Needs\.__init__\(\) missing 1 required positional"),
        ([[1]], set[list[int]], r"\$: no set can hold these: "),
        (10**400, float, r"\$: must fit a float"),
    ],
)
def test_what_no_value_can_be_built_of_is_told_with_its_path(value: Any, hint: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        typed(value, hint)


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        (Needs, "parameter 'seed' of Needs must be a field or have a default"),
        (Lazy, "a type hint of Lazy must name a type .* Define 'Decimal' at the top of its module"),
        (Knot, "Knot must not contain itself, got a field of its own type"),
        (bytes, " must have a type with a JSON Schema, got bytes"),
    ],
)
def test_a_class_that_no_model_could_fill_is_refused_at_once(hint: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"here.*{why}|here{why}"):
        schema_of(hint, "here")


def test_a_default_that_is_no_json_is_not_told() -> None:
    def fn(a: float = float("nan"), b: float = 1.5) -> None: ...

    properties = Tool.from_function(fn).parameters["properties"]
    assert properties == {"a": {"type": "number"}, "b": {"type": "number", "default": 1.5}}


# -- the decorator


def test_the_decorator_makes_a_tool() -> None:
    @tool
    def double(x: int) -> int:
        """Twice as much."""
        return 2 * x

    assert isinstance(double, Tool)
    assert (double.name, double.description, double.timeout) == ("double", "Twice as much.", None)
    assert double.parameters["required"] == ["x"]
    assert double(4) == double(x=4) == 8


def test_the_decorator_takes_the_options_of_from_function() -> None:
    @tool(
        name="wire", has_side_effects=True, requires_confirmation=True, timeout=2.5, metadata={"k": 1}, description="d"
    )
    def fn(x: int) -> int:
        return x

    assert (fn.name, fn.description, fn.has_side_effects, fn.requires_confirmation) == ("wire", "d", True, True)
    assert (fn.timeout, fn.metadata) == (2.5, {"k": 1})
    with pytest.raises(TypeError):
        tool(colour="red")(len)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="fn must be a function, got 'wire'"):
        tool("wire")  # type: ignore[call-overload]


async def test_calling_an_async_tool_gives_its_coroutine() -> None:
    @tool
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x

    assert await later(3) == 3


async def test_a_tool_may_be_the_handler_of_a_tool() -> None:
    @tool
    async def inner(x: int, ctx: RunContext) -> Any:
        return x, ctx.run_id

    ctx, registry = MockRunContext(), ToolRegistry()
    registry.register(Tool("outer", "", inner.parameters, inner.handler))
    assert await registry.execute("outer", {"x": 1}, ctx) == (1, ctx.run_id)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "3"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(
        InvalidArgument, match="tool 't': timeout must be a number of seconds above 0, or None for no limit, got "
    ):
        Tool("t", "", {}, print, timeout=timeout)
    with pytest.raises(InvalidArgument, match="timeout"):
        Tool.from_function(lambda: 1, name="t", timeout=timeout)


# -- what the registry adds


async def test_what_the_caller_adds_counts_as_given_and_is_not_checked() -> None:
    def fn(a: int, when: datetime | None = None, shelf: Any = None) -> Any:
        return a, when, shelf

    registry = ToolRegistry()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "shelf"]}
    registry.register(Tool("t", "", {**schema, "additionalProperties": False}, fn))
    thing = object()
    assert await registry.execute("t", {"a": 1}, shelf=thing, when=thing) == (1, thing, thing)
    with pytest.raises(InvalidArgument, match=r"missing required argument 'shelf'"):
        await registry.execute("t", {"a": 1}, when=thing)


async def test_a_handler_that_is_replaced_is_read_again() -> None:
    registry = ToolRegistry()
    made = Tool("t", "", {}, lambda a: ("first", a))
    registry.register(made)
    assert await registry.execute("t", {"a": 1}) == ("first", 1)

    def second(b: Colour) -> Any:
        return "second", b

    made.handler = second
    assert await registry.execute("t", {"b": "red"}) == ("second", Colour.RED)
    registry.register(Tool("t", "", {}, lambda: "third"))
    assert await registry.execute("t", {}) == "third"


async def test_parameters_that_are_no_schema_check_nothing() -> None:
    registry = ToolRegistry()
    registry.register(Tool("t", "", None, lambda a: a))  # type: ignore[arg-type]
    assert await registry.execute("t", {"a": "x"}) == "x"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "tool 't': missing required argument 'a'"),
        ({"a": 1, "b": 2}, "tool 't': got an unexpected keyword argument 'b'"),
    ],
)
async def test_a_tool_made_by_hand_is_not_called_with_what_its_handler_does_not_take(arguments: Any, why: str) -> None:
    registry, called = ToolRegistry(), []
    registry.register(Tool("t", "", {"type": "object"}, lambda a: called.append(a)))
    with pytest.raises(InvalidArgument, match=why):
        await registry.execute("t", arguments)
    assert called == []
