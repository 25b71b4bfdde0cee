from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
import gc
import importlib
import re
import subprocess
import sys
import typing
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import GenericAlias, MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime_core._core.codec import typed
from agent_runtime_core._core.codec.json import decode, encode
from agent_runtime_core._core.codec.tagged import OWN
from agent_runtime_core._core.codec.type_hints import returns_of
from agent_runtime_core._core.codec.typed import build, codec_for, register_type
from agent_runtime_core.errors import InvalidArgument, UnserialisableResult
from agent_runtime_core.interfaces import LLMResponse
from agent_runtime_core.limits import ModelLimits, SpendPool
from agent_runtime_core.persistence import Task, TaskState
from tests.support.cases import for_each
from tests.support.codec_values import (
    QUICK,
    Color,
    Key,
    Level,
    Mood,
    Named,
    Pair,
    Point,
    Rights,
    Size,
    comes_back_or_is_refused,
    json_trees,
    kept_keys,
    refused,
    texts,
    zones,
)

if TYPE_CHECKING:
    from nowhere import Unreadable  # type: ignore[import-not-found]


@dataclasses.dataclass(frozen=True)
class Spot:
    color: Color
    at: tuple[int, int]


@dataclasses.dataclass
class Tree:
    name: str
    colors: list[Color] = dataclasses.field(default_factory=list)
    children: list[Tree] = dataclasses.field(default_factory=list)
    where: Point | None = None
    by_name: dict[str, Point] = dataclasses.field(default_factory=dict)
    pair: tuple[Color, Point] | None = None
    spots: frozenset[Spot] = frozenset()
    when: dt.datetime | None = None
    any: Any = None


@dataclasses.dataclass
class Area:
    width: int
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.width *= 2
        self.size = self.width**2


@dataclasses.dataclass
class HalfReadable:
    point: Point
    other: Unreadable


@dataclasses.dataclass
class NeedsMore:
    x: int
    seed: dataclasses.InitVar[int]


@dataclasses.dataclass
class Twin:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Picky:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise LookupError("below zero")


class Card(TypedDict):
    color: Color
    points: list[Point]
    note: NotRequired[str]


class Widget:
    pass


# --- annotations

OPTIONAL = Optional[Point]  # noqa: UP045 - this spelling too
Ids = typing.NewType("Ids", int)
TREE = Tree(
    "root", [Color.GREEN], [Tree("leaf", any=(1, UUID(int=3)))], Point(1, 2.0), {"$": Point(1), "b": Point(2)},
    (Color.RED, Point(5)), frozenset({Spot(Color.RED, (1, 2)), Spot(Color.GREEN, (0, 0))}),
    dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
)  # fmt: skip


@for_each(
    ("annotation", "value"),
    [
        (Point, Point(1, 2.5)), (Tree, TREE), (list[Tree], [TREE, TREE]), (Color, Color.CRIMSON), (Level, Level.HIGH),
        (Mood, Mood.GLAD), (Rights, Rights.READ | Rights.WRITE), (Rights, Rights(0)), (Point | None, None),
        (OPTIONAL, Point(1)), (Point, None), (dict[str, Color], {"$": Color.RED, "b": Color.GREEN}),
        (Mapping[str, list[Point]], {"a": [Point(1)]}), (Sequence[Color], (Color.RED,)), (Sequence[Color], [Color.RED]),
        (tuple[Color, ...], (Color.RED, Color.GREEN)), (tuple[int, Point], (1, Point(1))),
        (tuple[Point], (Point(1), 2)),
        (set[Color], {Color.RED, Color.GREEN}), (frozenset[Spot], frozenset({Spot(Color.RED, (1, 2))})),
        (list[Color], "text"),
        (Card, {"color": Color.RED, "points": [Point(1)]}), (Card, {"color": Color.RED, "extra": UUID(int=1)}),
        (Annotated[Point, "note"], Point(1)), (Annotated[list[Point], []], [Point(1)]), (list[Card], []),
        (Point | Color, Point(1)), (Point | Color | None, Color.RED), (Point | int | None, 3), (float | Color, 3),
        (Point | Spot, Spot(Color.RED, (1, 2))), (Color | list[Color], [Color.RED]), (list[Point] | list[Color], []),
        (Point | Literal["none"], "none"), (Point | dict[str, Any], Point(1)), (list[Color] | list[str], [Color.RED]),
        (Named, Named(1, Point(2), Size.LARGE)), (Point, Named(1, Point(2))),
        (Color, Size.SMALL),
        (Point | Named, Named(1, Point(2))), (list[Any], [1, (2,)]), (dict[str, int], {"a": b"x"}), (int, "x"),
        (Ids, 1),
        (Area, Area(3)), (None, {"a": (1,)}), (type(None), None), (tuple[int, int] | None, (1, 2)), (object, [1]),
        (HalfReadable, HalfReadable(Point(1), {"a": 1})),
    ],
    # A set has another order in every process, and all that share the work have to name its tests alike.
    ids=lambda each: re.sub(r"\{.*\}", "{}", str(each)),
)  # fmt: skip
def test_what_an_annotation_names_comes_back(annotation: object, value: object) -> None:
    write, read = codec_for(annotation)
    back = read(write(value))
    assert back == value
    assert type(back) is type(value)
    assert build(decode(write(value)), annotation) == value


def test_a_dict_of_this_library_takes_the_annotation_of_a_plain_one() -> None:
    write, read = codec_for(dict[str, Color])
    assert read(write(MappingProxyType({"a": Color.RED}))) == {"a": Color.RED}


def test_an_annotated_result_is_plain_json_in_the_store() -> None:
    assert codec_for(Tree)[0](Tree("a", [Color.RED], pair=(Color.RED, Point(1)))) == (
        '{"name":"a","colors":["RED"],"children":[],"where":null,"by_name":{},"pair":["RED",{"x":1,"y":0.0}],'
        '"spots":{"$":"frozenset","v":[]},"when":null,"any":null}'
    )


@for_each(
    "annotation",
    [None, Any, int, dict, list[int], dict[str, Any], dict[str, list[int]], str | None, int | str, tuple[int, ...],
     set[str], object, UUID, type(None), Literal["a"], Ids, tuple[int, int] | list[int], Annotated[int, []]],
)  # fmt: skip
def test_an_annotation_that_adds_nothing_gives_the_same_functions(annotation: object) -> None:
    assert codec_for(annotation) == (codec_for(None)[0], decode)


def test_a_result_may_be_as_large_as_is_said() -> None:
    long, longer = "x" * 2**20, "x" * (2**24 - 1)
    for annotation in (None, list[Point]):
        with pytest.raises(UnserialisableResult, match="larger than 1,048,576 bytes"):
            codec_for(annotation)[0]([long] if annotation is None else [Point(long)])  # type: ignore[arg-type]
    write, read = codec_for(None, 2**24)
    assert read(write(long)) == long
    with pytest.raises(UnserialisableResult, match="larger than 16,777,216 bytes"):
        write(longer)
    for wrong in (0, -1, 2**24 + 1, True, 1e6, "1"):
        with pytest.raises(InvalidArgument, match="max_result_bytes must be an integer from 1 to 16,777,216"):
            codec_for(None, wrong)  # type: ignore[arg-type]


def test_codecs_keep_the_limit_and_want_the_type_itself() -> None:
    with pytest.raises(UnserialisableResult, match="of too many parts"):
        codec_for(list[Point])[0]([Point(1)] * 100_000)
    with pytest.raises(
        InvalidArgument,
        match=r"the type of a result must be a type, got 'Point'\. Pass the type itself, without quotes",
    ):
        codec_for("Point")


@for_each(
    ("annotation", "value", "path", "told"),
    [
        (Point, {"x": 1}, "$", r"\$: the annotation says Point, got a dict\. Correct the annotation or the value"),
        (Point, Twin(1), "$", r"\$: the annotation says Point, got a Twin\. Correct the annotation or the value"),
        (Color, "RED", "$", r"\$: the annotation says Color, got a str\. Correct the annotation or the value"),
        (list[Point], [Point(1), {"x": 1}], "$[1]", "says Point"),
        (
            tuple[Point, int],
            [Point(1), 1],
            "$",
            r"\$: the annotation says tuple, got a list\. Correct the annotation or the value",
        ),
        (Tree, dataclasses.replace(TREE, by_name={"k": Twin(1)}), "$.by_name.k", "says Point"),  # type: ignore[dict-item]
        (
            Point | Twin,
            Point(1),
            "$",
            r"\$: the JSON of a Point fits more than one of Point \| Twin\. Call register_type\(Point\)",
        ),
        (Point | dict[str, Any], {"x": 1}, "$", r"Annotate Any, and register_type\(Point\)"),
        (
            Color | str,
            "RED",
            "$",
            r"\$: the JSON of a str fits more than one of Color \| str\. Annotate Any, and register_type\(Color\)",
        ),
        (Color | Mood, Color.GREEN, "$", "no fit"),
        (list[Color] | list[str], ["RED"], "$", "Annotate Any, and register_type the dataclasses and Enums in it"),
        (Point | Twin, Twin(1), "$", r"register_type\(Twin\)"),
        (
            Point | Spot,
            "text",
            "$",
            r"\$: the annotation says Point \| Spot, got a str\. Correct the annotation or the value",
        ),
        (int, Point(1), "$", r"register_type\(Point\)"),
        (None, Point(1), "$", r"register_type\(Point\)"),
        (list[Point], (Point(1), Color.RED), "$[1]", "says Point"),
        (Tree, Tree("a", any=Point(1)), "$.any", r"register_type\(Point\)"),
        (set[Spot], {Spot(Color.RED, (1, object()))}, "$[0].at[1]", "object"),  # type: ignore[arg-type]
    ],
)
def test_what_the_annotation_does_not_say_is_refused(annotation: object, value: object, path: str, told: str) -> None:
    if told == "no fit":  # nothing of Mood is called GREEN, so this one is told apart
        assert codec_for(annotation)[1](codec_for(annotation)[0](value)) is value
        return
    with pytest.raises(UnserialisableResult, match=told) as caught:
        codec_for(annotation)[0](value)
    assert caught.value.path == path


def test_convert_builds_from_plain_json() -> None:
    assert build({"x": 1}, Point) == Point(1, 0.0)
    assert build({"x": 1, "gone": 2}, Point) == Point(1)
    assert build([1, [2]], tuple[int, list[int]]) == (1, [2])
    assert build([[1, 2], [1, 2]], set[tuple[int, int]]) == {(1, 2)}
    assert build("g", Color) is Color.GREEN
    assert build({"a": {"color": "RED", "points": [{"x": 1}]}}, dict[str, Card]) == {
        "a": {"color": Color.RED, "points": [Point(1)]}
    }
    assert build({"color": "RED", "at": [1, 2]}, Point | Spot) == Spot(Color.RED, (1, 2))
    unread = {"a": [1]}
    assert build(unread, dict[str, list[int]]) is unread


@pytest.mark.parametrize(
    ("annotation", "value", "path", "told"),
    [
        (list[Point], [{"y": 1}], "$[0]", "Point needs 'x', which is missing"),
        (list[Point], [[]], "$[0]", "says Point"),
        (dict[str, Color], {"a": "BLUE"}, "$.a", r"\$\.a: unknown Color 'BLUE'\. Known: GREEN, RED"),
        (Rights, 8, "$", r"\$: unknown Rights 8\. Known: READ, WRITE"),
        (Picky, {"x": -1}, "$", r"\$: Picky could not be constructed: LookupError: below zero"),
        (Point | Twin, {"x": 1}, "$", "more than one"),
        (
            Point | Spot,
            {"z": 1},
            "$",
            r"\$: the annotation says Point \| Spot, got a dict\. Correct the annotation or the value",
        ),
        (set[Any], [[]], "$", "no set can hold"),
    ],
)
def test_convert_says_what_does_not_fit(annotation: object, value: object, path: str, told: str) -> None:
    with pytest.raises(UnserialisableResult, match=told) as caught:
        build(value, annotation)
    assert caught.value.path == path


def test_fields_come_back_as_they_were_not_as_the_constructor_makes_them() -> None:
    area = Area(3)
    area.size = 7
    write, read = codec_for(Area)
    back = read(write(area))
    assert isinstance(back, Area)
    assert (back.width, back.size) == (6, 7)


def test_a_cycle_through_fields_is_refused() -> None:
    node = Tree("a")
    node.children.append(node)
    with pytest.raises(
        UnserialisableResult, match=r"\$\.children\[0\]: a cycle back to \$\. Use a copy without that reference"
    ):
        codec_for(Tree)[0](node)


def test_tuples_within_lists_are_built_too() -> None:
    assert build({"a": [[1, "x"]]}, dict[str, list[tuple[int, str]]]) == {"a": [(1, "x")]}


@settings(QUICK, max_examples=50)
@given(st.data())
def test_any_tree_of_dataclasses_comes_back(data: st.DataObject) -> None:
    points = st.builds(Point, st.integers(), st.floats(allow_nan=False, allow_infinity=False))
    spots = st.builds(Spot, st.sampled_from(Color), st.tuples(st.integers(), st.integers()))
    leaves = st.builds(
        Tree, texts, st.lists(st.sampled_from(Color)), any=json_trees, when=st.none() | st.datetimes(timezones=zones)
    )
    trees = st.builds(
        Tree, texts, children=st.lists(leaves, max_size=3), where=st.none() | points,
        by_name=st.dictionaries(kept_keys, points),
        spots=st.frozensets(spots, max_size=3), pair=st.none() | st.tuples(st.sampled_from(Color), points),
    )  # fmt: skip
    value = data.draw(trees)
    write, read = codec_for(Tree)
    assert read(write(value)) == value


# --- registered types


def test_a_registered_type_may_stand_anywhere_and_hold_others() -> None:
    value = [{"a": (Named(1, Point(2, 3.0), {Key(1), Key(2)}), Size.LARGE)}]
    assert comes_back_or_is_refused(value)
    assert refused([Named(1, Point(2), [Color.RED])]).path == "$[0].any[0]"


def test_annotated_any_a_registered_type_is_told_from_what_has_the_same_json() -> None:
    write, read = codec_for(Any)
    for value in (Size.LARGE, "LARGE", Size.LARGE.value, [Size.LARGE], (Size.LARGE,)):
        assert (read(write(value)), type(read(write(value)))) == (value, type(value))


def _sample(hint: Any) -> Any:
    """Some value of a field that has no default."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is not None:
        if origin in (list, tuple, Sequence):
            return (list if origin is Sequence else origin)([_sample(args[0])])
        return {"a": 1} if origin in (dict, Mapping) else _sample(args[0])
    if hint in SAMPLES:
        return SAMPLES[hint]
    return [*hint][-1] if issubclass(hint, enum.Enum) else _made(hint)


def _made(cls: Any) -> Any:
    bare = [each for each in dataclasses.fields(cls) if each.default is each.default_factory is dataclasses.MISSING]
    hints = typing.get_type_hints(cls)
    return cls(**{each.name: _sample(hints[each.name]) for each in bare if each.init}, **REQUIRED.get(cls, {}))


#: What a class requires that has defaults: one of several fields.
REQUIRED: dict[Any, dict[str, Any]] = {SpendPool: {"usd": 1.0}, ModelLimits: {"requests": 1}}
SAMPLES: dict[Any, Any] = {
    str: "x", int: 1, float: 0.5, bool: True, Any: (UUID(int=1),), UUID: UUID(int=1), dict: {},
    dt.datetime: dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
}  # fmt: skip


@for_each("tag", sorted(OWN))
def test_a_model_of_this_library_is_a_result_without_an_annotation(tag: str) -> None:
    module, _, name = OWN[tag].partition(":")
    cls = getattr(importlib.import_module(module), name)
    write, read = codec_for(None)
    for value in [*cls] if issubclass(cls, enum.Enum) else [_made(cls)]:
        back = read(write({"a": [value]}))
        assert back == {"a": [value]}
        assert type(back["a"][0]) is cls
        for annotation in (cls, GenericAlias(list, (Union[Point, cls],))):  # noqa: UP007 - a class that is a variable
            write_as, read_as = codec_for(annotation)
            given = value if annotation is cls else [value]
            assert read_as(write_as(given)) == given


def test_every_public_enum_is_a_result_without_an_annotation() -> None:
    found = set()
    for name in ("", ".persistence", ".planning", ".loop", ".turns", ".orchestrator", ".steps", ".queue", ".events"):
        package = importlib.import_module(f"agent_runtime_core{name}")
        public = [getattr(package, each) for each in package.__all__]
        found |= {each for each in public if isinstance(each, type) and issubclass(each, enum.Enum)}
    assert {f"{each.__module__}:{each.__qualname__}" for each in found} <= set(OWN.values())
    assert len(found) > 10


def test_a_model_of_this_library_is_read_by_a_process_that_had_not_met_it() -> None:
    text = codec_for(None)[0]([Task(id=UUID(int=1), name="x", state=TaskState.COMPLETE)])
    code = f"from agent_runtime_core._core.codec.json import decode; print(decode({text!r})[0].state)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "TaskState.COMPLETE"


def test_a_class_that_calls_itself_one_of_this_library_is_none() -> None:
    false = type("Task", (Point,), {"__module__": Task.__module__, "__qualname__": "Task"})
    assert "register_type(Task)" in refused(false(1)).reason


def test_what_a_provider_s_package_gave_is_not_stored() -> None:
    answer = LLMResponse({"role": "assistant", "content": "x"}, raw_response=Widget(), cost_usd=0.5)
    for annotation in (None, LLMResponse):
        write, read = codec_for(annotation)
        assert read(write(answer)) == dataclasses.replace(answer, raw_response=None)
    assert build({"message": {}, "raw_response": 1}, LLMResponse) == LLMResponse({})


def test_register_type_refuses_what_it_cannot_rebuild() -> None:
    for wrong in (Widget, Point(1), int, Pair, "Point", Color.RED):
        with pytest.raises(InvalidArgument, match="a dataclass, an Enum class or a model of pydantic"):
            register_type(wrong)  # type: ignore[type-var]
    with pytest.raises(
        InvalidArgument, match="field 'seed' of NeedsMore must be stored or have a default, got an InitVar without one"
    ):
        register_type(NeedsMore)
    with pytest.raises(InvalidArgument, match="in a field"):
        register_type(dataclasses.make_dataclass("Listing", [("x", int)], bases=(list,)))


def test_a_later_definition_replaces_a_type() -> None:
    """As in a notebook cell that runs again, or a module that is reloaded."""

    def cell() -> Any:
        @register_type
        @dataclasses.dataclass
        class Page:
            title: str

        @register_type
        class Kind(enum.Enum):
            SHORT = "short"

        return Page, Kind

    (old_page, old_kind), (page, kind) = cell(), cell()
    stored = encode([old_page("Home"), old_kind.SHORT])  # values that were made before
    assert stored == encode([page("Home"), kind.SHORT])
    assert decode(stored) == [page("Home"), kind.SHORT]


def test_types_of_earlier_definitions_are_not_kept() -> None:
    def cell() -> weakref.ref[type]:
        return weakref.ref(register_type(dataclasses.make_dataclass("Page", [("title", str)])))

    first = cell()
    cell()
    typed._known_codec.cache_clear()  # bounded
    gc.collect()
    assert first() is None


def test_a_subclass_of_a_registered_type_is_not_registered() -> None:
    @dataclasses.dataclass
    class Lower(Named):
        more: int = 0

    assert r"register_type(Lower)" in refused([Lower(1, Point(1))]).reason


def test_fields_added_later_take_their_default() -> None:
    assert decode(f'{{"$":"{Named.__module__}.Named","v":{{"x":1,"inner":{{"x":2}},"gone":3}}}}') == Named(1, Point(2))
    with pytest.raises(UnserialisableResult, match="Size"):
        decode(f'{{"$":"{Named.__module__}.Size","v":"HUGE"}}')


# --- return annotations


async def gives_tree() -> Tree:
    return TREE


def gives_points(point: Unreadable) -> list[Point]:
    return [point]


def gives_unreadable() -> Unreadable:
    return None


def gives_awaitable() -> Awaitable[Point]:
    raise NotImplementedError


def gives_coroutine() -> Coroutine[Any, Any, Color]:
    raise NotImplementedError


@functools.wraps(gives_points)
def wrapped(*args: Any) -> Any:
    return gives_points(*args)


class Worker:
    def method(self) -> Point:
        return Point(1)

    def __call__(self) -> Color:
        return Color.RED


@for_each(
    ("fn", "expected"),
    [
        (gives_tree, Tree), (gives_points, list[Point]), (gives_unreadable, None), (gives_awaitable, Point),
        (gives_coroutine, Color), (wrapped, list[Point]), (functools.partial(gives_points, 1), list[Point]),
        (Worker().method, Point), (Worker(), Color), (lambda: 1, None), (len, None), (print, None), (Widget, None),
    ],
)  # fmt: skip
def test_returns_of_reads_what_a_function_gives(fn: Callable[..., object], expected: object) -> None:
    assert returns_of(fn) == expected


def test_returns_of_knows_classes_of_the_enclosing_function() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    def step() -> Local:
        return Local(1)

    assert returns_of(step) is Local
