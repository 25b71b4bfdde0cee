"""Tools: the schema a model sees, and the call that comes back."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, NotRequired, Optional, Required, TypedDict, Union

import pytest

from agent_runtime_core.errors import AgentRuntimeError, InvalidArgument
from agent_runtime_core.interfaces import ToolCallDict
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools import Tool, ToolDefinition, ToolRegistry, UnknownTool
from agent_runtime_core.tools.schema import context_parameter, place_context
from tests.support.cases import for_each
from tests.support.runs import soon

if TYPE_CHECKING:
    from agent_runtime_core import interfaces
    from agent_runtime_core.interfaces import RunContext


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0
    tags: list[str] = field(default_factory=list)


@dataclass
class Stamp:
    at: Colour
    label: str = field(default="", init=False)


@dataclass
class Line:
    start: Point
    end: Point | None = None


@dataclass
class Knot:
    inner: Knot | None = None


class Options(TypedDict):
    limit: int
    deep: NotRequired[bool]


UserId = NewType("UserId", str)


def get_weather(location: str) -> str:
    """Get the current weather for a location."""
    return f"sunny in {location}"


def search(query: str, limit: int = 10, *, exact: bool = False) -> list[str]:
    """Search the web.

    Looks everywhere.

    Args:
        query: What to look for,
            in any language.
        limit (int): The most results to give.
        exact:

    Returns:
        limit: not a parameter's description.
    """
    return [query] * limit


def with_context(text: str, ctx: RunContext, times: int = 1) -> str:
    """Say it."""
    return f"{ctx.run_id}:{text * times}"


def _property(hint: Any) -> Any:
    def fn(a): ...  # type: ignore[no-untyped-def]

    fn.__annotations__ = {"a": hint}
    return Tool.from_function(fn).parameters["properties"]["a"]


def _registry(*functions: Callable[..., Any]) -> ToolRegistry:
    registry = ToolRegistry()
    for fn in functions:
        registry.register(Tool.from_function(fn))
    return registry


def test_a_tool_keeps_what_it_is_given() -> None:
    handler = lambda **given: given  # noqa: E731
    tool = Tool(
        name="t",
        description="d",
        parameters={"type": "object"},
        handler=handler,
        has_side_effects=True,
        requires_confirmation=True,
        metadata={"a": 1},
    )
    tool.metadata["b"] = 2
    assert (tool.handler, tool.metadata) == (handler, {"a": 1, "b": 2})
    plain = Tool("t", "d", {}, handler)
    assert (plain.has_side_effects, plain.requires_confirmation, plain.metadata) == (False, False, {})
    assert ToolDefinition is Tool


def test_from_function_reads_name_docstring_and_hints() -> None:
    tool = Tool.from_function(get_weather)
    assert (tool.name, tool.description) == ("get_weather", "Get the current weather for a location.")
    assert tool.handler is get_weather
    assert tool.parameters == {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
        "additionalProperties": False,
    }


def test_a_google_docstring_describes_the_parameters() -> None:
    tool = Tool.from_function(search)
    assert tool.description == "Search the web.\n\nLooks everywhere."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in any language."},
            "limit": {"type": "integer", "default": 10, "description": "The most results to give."},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_what_from_function_is_told_wins() -> None:
    tool = Tool.from_function(
        lambda a: a,
        name="echo",
        description="",
        parameters={"type": "object"},
        has_side_effects=True,
        metadata={"k": 1},
    )
    assert (tool.name, tool.description, tool.parameters) == ("echo", "", {"type": "object"})
    assert (tool.has_side_effects, tool.requires_confirmation, tool.metadata) == (True, False, {"k": 1})


@for_each(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list, {"type": "array", "items": {}}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (Sequence[str], {"type": "array", "items": {"type": "string"}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
        (dict, {"type": "object"}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Mapping[str, Any], {"type": "object", "additionalProperties": True}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Literal["a", "b"], {"enum": ["a", "b"], "type": "string"}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Colour, {"enum": ["red", "blue"], "type": "string"}),
        (UserId, {"type": "string"}),
        (Annotated[int, "how many", 3], {"type": "integer", "description": "how many"}),
        (
            Options,
            {
                "type": "object",
                "properties": {"limit": {"type": "integer"}, "deep": {"type": "boolean"}},
                "required": ["limit"],
                "additionalProperties": False,
            },
        ),
        (
            Stamp,
            {
                "type": "object",
                "properties": {"at": {"enum": ["red", "blue"], "type": "string"}},
                "required": ["at"],
                "additionalProperties": False,
            },
        ),
        (
            Point,
            {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "y": {"type": "integer", "default": 0},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["x"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_json_schema_of_a_type(hint: Any, schema: dict[str, Any]) -> None:
    assert _property(hint) == schema


def test_required_and_optional_keys_are_told_apart_in_both_kinds_of_dict() -> None:
    class Loose(TypedDict, total=False):
        must: Required[int]
        may: int

    assert _property(Loose)["required"] == ["must"]


@pytest.mark.parametrize("hint", [datetime, object(), dict[int, str], list[bytes], Knot, Literal[b"a"]])
def test_a_type_without_a_schema_is_refused_by_name(hint: Any) -> None:
    with pytest.raises(InvalidArgument, match="parameter 'a' of "):
        _property(hint)


def test_defaults_are_told_where_json_can_say_them() -> None:
    def fn(a: Colour = Colour.RED, b: Any = datetime, c: list[int] | None = None, d: dict[str, int] = {"x": 1}) -> None:  # noqa: B006
        """Do."""

    schema = Tool.from_function(fn).parameters
    assert schema["required"] == []
    defaults = {name: about.get("default", "untold") for name, about in schema["properties"].items()}
    assert defaults == {"a": "red", "b": "untold", "c": None, "d": {"x": 1}}


def test_a_parameter_without_a_hint_may_be_anything() -> None:
    tool = Tool.from_function(lambda a, b=[1]: (a, b), name="t")
    assert tool.parameters["properties"] == {"a": {}, "b": {"default": [1]}}


def test_parameters_a_model_cannot_name_are_refused() -> None:
    def positional(a: int, /) -> None: ...
    def many(*a: int) -> None: ...

    for fn in (positional, many):
        with pytest.raises(InvalidArgument, match="must accept an argument by name"):
            Tool.from_function(fn)


def test_any_keyword_is_said_so() -> None:
    def fn(**rest: int) -> None: ...
    def loose(**rest): ...  # type: ignore[no-untyped-def]

    for each, others in ((fn, {"type": "integer"}), (loose, True)):
        assert Tool.from_function(each).parameters == {
            "type": "object",
            "properties": {},
            "required": [],
            "additionalProperties": others,
        }


def test_a_hint_nobody_can_resolve_is_named() -> None:
    def fn(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidArgument, match="Define 'Nowhere' at the top of its module"):
        Tool.from_function(fn)


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="Pass name="):
        Tool.from_function(lambda a: a)
    with pytest.raises(InvalidArgument, match="fn must be a function, got 3"):
        Tool.from_function(3)  # type: ignore[arg-type]


def test_methods_partials_and_callable_objects_are_functions_too() -> None:
    class Shop:
        def price(self, item: Options) -> int:
            """What it costs."""
            return 1

        def __call__(self, item: str) -> int:
            return 2

    tool = Tool.from_function(Shop().price)
    assert (tool.name, list(tool.parameters["properties"])) == ("price", ["item"])
    assert Tool.from_function(Shop(), name="shop").parameters["required"] == ["item"]
    bound = Tool.from_function(functools.partial(search, limit=3))
    assert (bound.name, bound.description) == ("search", "Search the web.\n\nLooks everywhere.")
    assert bound.parameters["properties"]["query"]["description"] == "What to look for, in any language."


class Binding(functools.partial[Any]):
    """One that functools.partial does not merge with another."""


@functools.wraps(bound_twice := Binding(functools.partial(search, limit=3), exact=True))
def wrapped(**arguments: Any) -> Any:
    return bound_twice(**arguments)


@pytest.mark.parametrize(
    ("fn", "bound", "left"),
    [
        (functools.partial(search, limit=3), ["limit"], ["query", "exact"]),
        (functools.partial(functools.partial(search, limit=3), exact=True), ["limit", "exact"], ["query"]),
        (bound_twice, ["limit", "exact"], ["query"]),
        (wrapped, ["limit", "exact"], ["query"]),
        (functools.partial(search, "cats"), ["query"], ["limit", "exact"]),
        (functools.partial(search, "cats", 3), ["query", "limit"], ["exact"]),
        (functools.partial(dict, user="alice"), ["user"], None),
    ],
)
async def test_what_is_bound_is_neither_shown_nor_given(
    fn: Callable[..., Any], bound: list[str], left: list[str] | None
) -> None:
    registry = ToolRegistry()
    registry.register(Tool("by_hand", "", {}, fn))
    given = {"query": "dogs"} if left and "query" in left else {}
    if left is not None:
        tool = Tool.from_function(fn, name="found")
        assert list(tool.parameters["properties"]) == left
        registry.register(tool)
    for name in bound:
        with pytest.raises(InvalidArgument, match=f"{name} must not be an argument of the call"):
            await registry.execute("by_hand", {**given, name: "forged"})
        if left is not None:
            with pytest.raises(InvalidArgument, match=rf"unexpected argument '{name}'"):
                await registry.execute("found", {**given, name: "forged"})
    assert await registry.execute("by_hand", given) == fn(**given)


async def test_what_is_bound_is_not_overridden_as_one_of_any_keywords() -> None:
    def note(user_id: str, **others: int) -> str:
        return f"{user_id}: {others}"

    registry = ToolRegistry()
    for bound in (functools.partial(note, user_id="alice"), functools.partial(note, "alice")):
        tool = Tool.from_function(bound)
        assert tool.parameters["properties"] == {}
        registry.register(tool)
        assert await registry.execute("note", {"a": 1}) == "alice: {'a': 1}"
        with pytest.raises(InvalidArgument, match="user_id must not be an argument of the call"):
            await registry.execute("note", {"user_id": 1})


def test_the_context_is_left_out_of_the_schema() -> None:
    assert list(Tool.from_function(with_context).parameters["properties"]) == ["text", "times"]


def test_the_context_is_recognised_however_it_is_written() -> None:
    def dotted(ctx: interfaces.RunContext) -> None: ...
    def optional(ctx: RunContext | None = None) -> None: ...
    def old(ctx: Optional[RunContext] = None) -> None: ...  # noqa: UP045
    def none(ctx: MockRunContext) -> None: ...
    def resolved(ctx: Any) -> None: ...

    resolved.__annotations__ = {"ctx": type("RunContext", (), {})}
    assert [context_parameter(fn) for fn in (dotted, optional, old, resolved)] == ["ctx"] * 4
    assert context_parameter(none) is None
    assert context_parameter(get_weather) is None
    assert context_parameter(int) is None


def test_the_context_is_placed_among_positional_arguments() -> None:
    assert place_context(with_context, "CTX", ("a", 2)) == ("a", "CTX", 2)
    assert place_context(get_weather, "CTX", ("a",)) == ("a",)
    with pytest.raises(InvalidArgument, match="with_context must have 1 argument"):
        place_context(with_context, "CTX", ())


@pytest.mark.sentence("003", "`ToolRegistry.register` and `get_tool`; an unknown tool is an error")
def test_a_registry_keeps_order_and_replaces_by_name() -> None:
    registry = _registry(get_weather, search)
    other = Tool("get_weather", "", {}, get_weather)
    registry.register(other)
    assert registry.get("get_weather") is other
    assert registry.get("nothing") is None
    assert [tool.name for tool in registry.list_tools()] == ["get_weather", "search"]


def test_the_openai_format() -> None:
    registry = _registry(get_weather)
    tool = registry.list_tools()[0]
    wanted = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
    ]
    assert registry.to_openai_format() == wanted
    assert registry.get_tool_definitions() == wanted


async def test_arguments_are_a_dict_or_its_json_text() -> None:
    registry = _registry(get_weather)
    assert await registry.execute("get_weather", {"location": "Oslo"}) == "sunny in Oslo"
    assert await registry.execute("get_weather", '{"location": "Oslo"}') == "sunny in Oslo"


async def test_a_tool_without_parameters_needs_no_text() -> None:
    def ping() -> str:
        return "pong"

    given: list[Any] = [None, "", "  ", "{}", {}]
    for nothing in given:
        assert await _registry(ping).execute("ping", nothing) == "pong"


async def test_plain_functions_run_in_a_thread_and_coroutines_on_the_loop() -> None:
    here = threading.get_ident()

    def plain() -> int:
        return threading.get_ident()

    async def coroutine() -> int:
        return threading.get_ident()

    class Async:
        async def __call__(self) -> int:
            return threading.get_ident()

    registry = _registry(plain, coroutine)
    registry.register(Tool("object", "", {}, Async()))
    registry.register(Tool("partial", "", {}, functools.partial(coroutine)))
    registry.register(Tool("lambda", "", {}, lambda: coroutine()))
    assert await registry.execute("plain", {}) != here
    for name in ("coroutine", "object", "partial", "lambda"):
        assert await registry.execute(name, {}) == here


async def test_a_thread_that_goes_on_after_its_call_was_cancelled_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent_runtime_core._core.timeouts.GRACE", 0.01)
    begun, gate = threading.Event(), threading.Event()

    def digs() -> None:
        begun.set()
        gate.wait()

    call = asyncio.ensure_future(_registry(digs).execute("digs", {}))
    await soon(begun.is_set)
    call.cancel()
    await soon(lambda: bool(caplog.messages))
    gate.set()
    assert caplog.messages == [
        "tool 'digs' did not stop within 0.01 s of being cancelled: it runs on in its thread and may still have effects"
    ]


async def test_an_unknown_name_is_a_key_error_that_names_what_is_near() -> None:
    registry = _registry(get_weather, search)
    with pytest.raises(KeyError, match=r"unknown tool 'get_wether'. Did you mean 'get_weather'\?") as caught:
        await registry.execute("get_wether", {})
    assert isinstance(caught.value, UnknownTool)
    assert isinstance(caught.value, AgentRuntimeError)
    with pytest.raises(UnknownTool, match=r"Known: get_weather, search"):
        await registry.execute("zzz", {})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"location": ', "invalid JSON arguments"),
        ("[1]", "must be a JSON object, got"),
        ("[" * 100_000, "must be nested at most 98 levels deep"),
        ({}, r"missing required argument 'location' \(string\)"),
        ({"location": "a", "place": "b"}, r"unexpected argument 'place'"),
    ],
)
async def test_arguments_that_do_not_fit_name_the_tool(arguments: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"tool 'get_weather': .*{why}"):
        await _registry(get_weather).execute("get_weather", arguments)


async def test_a_handler_s_own_error_comes_through() -> None:
    def broken(a: int = 0) -> None:
        raise TypeError("inside")

    with pytest.raises(TypeError, match=r"^inside$"):
        await _registry(broken).execute("broken", {})


async def test_dataclasses_and_enums_are_rebuilt() -> None:
    seen: list[Any] = []

    def draw(line: Line, colour: Colour, points: list[Point], options: Options, width: float = 1) -> None:
        seen.extend([line, colour, points, options, width])

    arguments = {"line": {"start": {"x": 1}}, "colour": "red", "points": [{"x": 2, "y": 3}], "width": 2}
    arguments["options"] = {"limit": 3}
    await _registry(draw).execute("draw", arguments)
    assert seen == [Line(Point(1)), Colour.RED, [Point(2, 3)], {"limit": 3}, 2]
    with pytest.raises(InvalidArgument, match=r"tool 'draw': colour must be one of 'red', 'blue', got 'green'"):
        await _registry(draw).execute("draw", arguments | {"colour": "green"})


async def test_a_tool_made_by_hand_gets_what_the_model_sent() -> None:
    def handler(when: datetime, mystery: Nowhere) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return when, mystery

    registry = ToolRegistry()
    registry.register(Tool("t", "", {}, handler))
    registry.register(Tool("silent", "", {}, dict))
    assert await registry.execute("silent", {"a": 1}) == {"a": 1}
    assert await registry.execute("t", {"when": "noon", "mystery": 1}) == ("noon", 1)


async def test_the_context_reaches_the_handler_and_only_from_the_caller() -> None:
    ctx = MockRunContext()
    registry = _registry(with_context, get_weather)
    assert await registry.execute("with_context", {"text": "a", "times": 2}, ctx) == f"{ctx.run_id}:aa"
    assert await registry.execute("with_context", {"text": "a"}, ctx=ctx) == f"{ctx.run_id}:a"
    assert await registry.execute("get_weather", {"location": "a"}, ctx) == "sunny in a"
    with pytest.raises(InvalidArgument, match=r"must be called with a RunContext, got None. Pass ctx="):
        await registry.execute("with_context", {"text": "a"})
    with pytest.raises(InvalidArgument, match=r"unexpected argument 'ctx'"):
        await registry.execute("with_context", {"text": "a", "ctx": "forged"}, ctx)
    registry.register(Tool("by_hand", "", {}, with_context))
    with pytest.raises(InvalidArgument, match="ctx must not be an argument of the call"):
        await registry.execute("by_hand", {"text": "a", "ctx": "forged"}, ctx)


async def test_an_optional_context_may_be_missing() -> None:
    def maybe(ctx: RunContext | None = None) -> bool:
        return ctx is None

    assert await _registry(maybe).execute("maybe", {}) is True
    assert await _registry(maybe).execute("maybe", {}, MockRunContext()) is False


async def test_execute_with_events_tells_of_the_call_and_the_result() -> None:
    ctx = MockRunContext()
    call = SimpleNamespace(id="c1", name="get_weather", arguments={"location": "Oslo"})
    assert await _registry(get_weather).execute_with_events(call, ctx) == "sunny in Oslo"
    assert ctx.events == [
        ("tool.call", {"tool_name": "get_weather", "tool_args": {"location": "Oslo"}, "tool_call_id": "c1"}),
        ("tool.result", {"tool_name": "get_weather", "tool_call_id": "c1", "result": "sunny in Oslo"}),
    ]


async def test_execute_with_events_takes_a_model_s_call_passes_the_context_and_more() -> None:
    ctx = MockRunContext()
    call = ToolCallDict(id="c1", function={"name": "with_context", "arguments": '{"text": "a"}'})
    assert await _registry(with_context).execute_with_events(call, ctx, times=3) == f"{ctx.run_id}:aaa"
    assert ctx.events[0][1]["tool_args"] == {"text": "a"}


async def test_a_tool_that_fails_has_no_result_event() -> None:
    ctx = MockRunContext()
    with pytest.raises(UnknownTool):
        await ToolRegistry().execute_with_events(SimpleNamespace(id="c", name="x", arguments={}), ctx)
    assert [event for event, _ in ctx.events] == ["tool.call"]


@pytest.mark.parametrize("wrong", [get_weather, "get_weather", {"type": "function"}, None])
def test_what_is_no_tool_is_not_registered(wrong: Any) -> None:
    tools = ToolRegistry()
    with pytest.raises(InvalidArgument, match=r"tool must be a Tool or a BaseTool object, .*Tool\.from_function"):
        tools.register(wrong)
    assert tools.list_tools() == []


def test_a_generator_is_no_tool() -> None:
    def numbers() -> Any:
        yield 1

    async def pages() -> Any:
        yield 1

    for fn in (numbers, pages, functools.partial(numbers)):
        with pytest.raises(InvalidArgument, match="a tool must return its result, got the generator"):
            Tool.from_function(fn)


def test_the_function_of_a_class_is_no_tool() -> None:
    class Shop:
        def buy(self, item: str) -> str:
            """Buy."""
            return item

    with pytest.raises(InvalidArgument, match=r"Shop\.buy must be a method of an object, got the function of a class"):
        Tool.from_function(Shop.buy)
    assert list(Tool.from_function(Shop().buy).parameters["properties"]) == ["item"]
    assert list(Tool.from_function(functools.partial(Shop.buy, Shop())).parameters["properties"]) == ["item"]
