from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import functools
import json
import math
import os
import subprocess
import sys
import time
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core import _json
from agent_runtime_core._json import (
    arguments_digest,
    codec_for,
    convert,
    decode,
    encode,
    plain,
    register_type,
    returns_of,
)
from agent_runtime_core.errors import InvalidArgument, UnserialisableResult

if TYPE_CHECKING:
    from nowhere import Unreadable  # type: ignore[import-not-found]

# Split over the properties below.
VALUES = 10_000 if os.environ.get("CI") else 1_000
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


class Color(enum.Enum):
    RED = "r"
    GREEN = "g"
    CRIMSON = "r"  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mood(enum.StrEnum):
    GLAD = "RED"
    SAD = "sad"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


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


class Pair(NamedTuple):
    a: int
    b: int


@register_type
@dataclasses.dataclass
class Named:
    x: int
    inner: Point
    any: Any = None


@register_type
class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@register_type
class Modes(enum.IntFlag):
    A = 1
    B = 2


@register_type
@dataclasses.dataclass(frozen=True, order=True)
class Key:
    n: int


def same(a: object, b: object) -> bool:
    """Equal and of the same types, all the way down; 0.0 and -0.0 differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, list | tuple):
        other = typing.cast("Sequence[object]", b)
        return len(a) == len(other) and all(same(x, y) for x, y in zip(a, other, strict=True))
    if isinstance(a, dict):
        items = list(typing.cast("dict[object, object]", b).items())
        return len(a) == len(items) and all(same(x, y) for x, y in zip(list(a.items()), items, strict=True))
    if isinstance(a, set | frozenset):
        others = {(type(x), x) for x in typing.cast("set[object]", b)}
        return len(a) == len(others) and all((type(x), x) in others for x in a)
    if isinstance(a, dt.datetime | dt.time):
        other_time = typing.cast("dt.time", b)
        return (a, a.fold, str(a.tzinfo), type(a.tzinfo)) == (
            other_time, other_time.fold, str(other_time.tzinfo), type(other_time.tzinfo),
        )  # fmt: skip
    if isinstance(a, Decimal):
        return a.as_tuple() == typing.cast("Decimal", b).as_tuple()
    return a == b


def refused(value: object, **options: Any) -> UnserialisableResult:
    with pytest.raises(UnserialisableResult) as caught:
        encode(value, **options)
    return caught.value


# --- round trips

texts = st.text(st.characters(codec=None, categories=None), max_size=20)
zones = st.one_of(
    st.none(),
    st.just(dt.UTC),
    st.sampled_from(["UTC", "Europe/Paris", "America/New_York"]).map(ZoneInfo),
    st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone),
    st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)), st.text(max_size=5)),
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([4299, 4300]).map(lambda digits: -(10**digits)),  # the second has no repr
    st.floats(),
    texts,
    st.sampled_from(["$", "v", "dict", '"$"']),
    st.uuids(),
    st.datetimes(timezones=zones, allow_imaginary=True),
    st.times(timezones=zones),
    st.dates(),
    st.timedeltas(),
    st.decimals().filter(lambda number: not number.is_snan()),  # has no hash
    st.binary(max_size=30),
    st.sampled_from([Size.SMALL, Size.LARGE, Modes.A | Modes.B, Modes(0)]),
    st.builds(Key, st.integers()),
)
hashables = st.recursive(
    atoms,
    lambda inner: st.one_of(st.frozensets(inner, max_size=4), st.lists(inner, max_size=4).map(tuple)),
    max_leaves=3,
)
keys = st.one_of(texts, st.sampled_from(["$", "v", "items"]))
values = st.recursive(
    st.one_of(hashables, st.sets(hashables, max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
        st.builds(Named, st.integers(), st.builds(Point, st.integers(), st.floats(allow_nan=False)), inner),
    ),
    max_leaves=6,
)
json_trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(keys, inner, max_size=6)),
    max_leaves=12,
)
foreign = st.one_of(
    values,
    st.sampled_from(
        [object(), 1j, bytearray(b"x"), Color.RED, Level.LOW, Mood.SAD, Rights.READ, Pair(1, 2), Point(1), range(3)]
    ),
    st.dictionaries(st.one_of(st.integers(), st.none(), st.booleans()), st.integers(), min_size=1, max_size=2),
)
anything = st.recursive(
    foreign,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=4).map(tuple),
    ),
    max_leaves=4,
)


def says_where(error: UnserialisableResult) -> bool:
    assert error.path.startswith("$")
    assert len(error.reason) > 5
    return True


def comes_back_or_is_refused(value: object) -> bool:
    try:
        text = encode(value)
    except UnserialisableResult as error:
        return not says_where(error)
    assert text.isascii()
    json.loads(text)
    back = decode(text)
    assert same(back, value)
    assert encode(back) == text
    return True


@settings(QUICK, max_examples=VALUES * 40 // 100)
@given(values)
def test_values_come_back_the_same_or_are_refused(value: object) -> None:
    comes_back_or_is_refused(value)


@settings(QUICK, max_examples=VALUES * 25 // 100)
@given(json_trees)
def test_json_trees_always_come_back_the_same(value: object) -> None:
    assert comes_back_or_is_refused(value)


@settings(QUICK, max_examples=VALUES * 20 // 100)
@given(anything)
def test_foreign_values_are_refused_wherever_they_stand(value: object) -> None:
    comes_back_or_is_refused(value)


@settings(QUICK, max_examples=VALUES * 15 // 100)
@given(st.one_of(st.text('[]{}",:$v0123456789.eE+-truefalsn \\u', max_size=60), json_trees.map(json.dumps)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        decode(text)
    except UnserialisableResult as error:
        says_where(error)


NAMES = [f"{__name__}.{cls}" for cls in ("Named", "Size", "Modes", "Key")]
tags = st.sampled_from([*_json._REVIVE, "dict", "a.b", "nope", *NAMES])


@settings(QUICK, max_examples=VALUES * 5 // 100)
@given(st.recursive(json_trees, lambda inner: st.fixed_dictionaries({"$": tags, "v": inner}), max_leaves=5))
def test_corrupt_tags_are_read_or_refused(tree: object) -> None:
    try:
        decode(json.dumps(tree))
    except UnserialisableResult as error:
        says_where(error)


@pytest.mark.parametrize(
    "value",
    [
        True, 0, -0.0, 1e308, 5e-324, 2**63, -(10**4300) + 1, "", "\ud800", "a\0b", "\ufeff", [], {}, (),
        set(), frozenset(),
        {"$": 1}, {"$": "uuid", "v": "x"}, {"$": {"$": {"$": "dict", "v": {}}}}, [{"$": "uuid"}], {"v": ({"$": ()},)},
        UUID(int=0), b"", b"\x00\xff", Decimal("-0.00"), Decimal("1E+999999"), Decimal("1.10"),
        dt.date(1, 1, 1), dt.timedelta.min, dt.timedelta.max, dt.timedelta(microseconds=-1),
        dt.time(23, 59, 59, 999999, dt.UTC), dt.time(1, fold=1), dt.time(1, tzinfo=ZoneInfo("Europe/Paris")),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Paris")),
        dt.datetime.fromisoformat("0001-01-01"),
        dt.datetime.fromisoformat("9999-12-31T23:59:59.999999").replace(fold=1),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=-3723, microseconds=5), "odd \ud800")),
        dt.datetime(2024, 1, 1, fold=1, tzinfo=dt.UTC), dt.time(tzinfo=dt.timezone(dt.timedelta(microseconds=1))),
        {1, "1", (1,), frozenset({None}), 2.5, b"x"}, Modes.A | Modes.B, {Key(1)},
        Named(1, Point(2, 3.0), {"$": [Size.SMALL]}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_these_values_come_back_the_same(value: object) -> None:
    assert comes_back_or_is_refused(value)
    assert comes_back_or_is_refused({"a": [value], "$": (value,)})


def test_utc_comes_back_as_utc_itself() -> None:
    back = decode(encode(dt.datetime(2024, 1, 1, tzinfo=dt.UTC)))
    assert isinstance(back, dt.datetime)
    assert back.tzinfo is dt.UTC


def test_the_text_that_stores_hold_does_not_change() -> None:
    value = {
        "a": [None, True, 1, 1.5, "é"], "$": UUID(int=1), "t": (1,), "s": {"b", "a"}, "b": b"ab", "d": Decimal("1.0"),
        "w": dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "z": dt.datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Paris")),
        "l": dt.timedelta(1), "n": Size.SMALL, "k": Key(1), "f": Modes.A,
    }  # fmt: skip
    assert encode(value) == (
        '{"$":"dict","v":{"a":[null,true,1,1.5,"\\u00e9"],"$":{"$":"uuid","v":"00000000-0000-0000-0000-000000000001"},'
        '"t":{"$":"tuple","v":[1]},"s":{"$":"set","v":["a","b"]},"b":{"$":"bytes","v":"YWI="},'
        '"d":{"$":"decimal","v":"1.0"},"w":{"$":"datetime","v":"2024-01-01T00:00:00+00:00"},'
        '"z":{"$":"datetime","v":["2024-01-01T00:00:00",0,"Europe/Paris"]},"l":{"$":"timedelta","v":[1,0,0]},'
        f'"n":{{"$":"{__name__}.Size","v":"SMALL"}},"k":{{"$":"{__name__}.Key","v":{{"n":1}}}},'
        f'"f":{{"$":"{__name__}.Modes","v":1}}}}}}'
    )


def test_sets_are_written_in_one_order_in_every_process() -> None:
    code = (
        "from agent_runtime_core._json import encode;"
        "print(encode({'one', 'two', 'three', 4, ('five',), frozenset({'six', 'seven'})}))"
    )
    written = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(written) == 1


def test_the_value_itself_is_left_as_it_was() -> None:
    value = {"a": [dt.date(2024, 1, 1)], "$": {"b": (1, [2])}}
    encode(value)
    assert value == {"a": [dt.date(2024, 1, 1)], "$": {"b": (1, [2])}}


# --- refusals

# A tracer, as of coverage, costs more than what it traces.
TRACED = sys.gettrace() is not None
SOON = 0.1 if not TRACED else 5.0


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Moment(dt.datetime):
    pass


class Odd(dt.tzinfo):
    def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(0)

    def dst(self, when: dt.datetime | None) -> None:
        return None

    def tzname(self, when: dt.datetime | None) -> None:
        return None


class Widget:
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Widget(), r"a Widget has no JSON form here: return a dict, or register_type\(Widget\)"),
        (Widget, "the class Widget .* return its name"),
        (Point(1), r"returns=Point, or register_type\(Point\)"),
        (Color.RED, r"a Color .* register_type\(Color\)"),
        (Level.LOW, r"register_type\(Level\)"),
        (Mood.SAD, r"register_type\(Mood\)"),
        (Pair(1, 2), r"_asdict\(\)"),
        (collections.OrderedDict(a=1), r"an OrderedDict would come back as a dict: return dict\(value\)"),
        (collections.defaultdict(list), r"return dict\(value\)"),
        (Text("x"), r"return str\(value\)"),
        (Number(1), r"return int\(value\)"),
        (Moment(2024, 1, 1, tzinfo=dt.UTC), "a Moment has no JSON form"),
        (bytearray(b"x"), r"return bytes\(value\)"),
        (iter([1]), r"return list\(value\)"),
        ({}.keys(), r"return list\(value\)"),
        (1j, "a complex has no"),
        (math.nan, "nan has no JSON form"),
        (math.inf, "inf has no"),
        (-math.inf, "-inf has no"),
        (Decimal("NaN"), "NaN"),
        (Decimal("-Infinity"), "Infinity"),
        (10**4300, "more than 4,300 digits"),
        (-(10**4300), "more than 4,300 digits"),
        ({1: "a"}, "the key 1 is an int"),
        ({1: "a", "1": "b"}, "the key 1 is an int"),
        ({None: 1}, "the key None"),
        ({Text("a"): 1}, "the key <Text> is a Text"),
        ({("a",): 1}, "the key <tuple>"),
        ({10**5000: 1}, "the key <int>"),
        (dt.datetime(2024, 1, 1, tzinfo=Odd()), "time zone that is an Odd"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_would_not_come_back_is_refused(value: object, told: str) -> None:
    for tree, path in ((value, "$"), ({"items": [0, 1, 2, {"when": value}]}, "$.items[3].when"), ((value,), "$[0]")):
        with pytest.raises(UnserialisableResult, match=told) as caught:
            encode(tree)
        assert caught.value.path == path
        assert len(str(caught.value)) < 400


def test_a_coroutine_is_told_to_be_awaited() -> None:
    async def fetch() -> int:
        return 1

    coroutine = fetch()
    try:
        assert "await it" in refused([coroutine]).reason
    finally:
        coroutine.close()


def test_paths_name_odd_keys_and_sets() -> None:
    assert refused({"a b": {"$": {"x" * 100: [math.nan]}}}).path == f"$['a b']['$'][{ascii('x' * 100)[:57]}...'][0]"
    assert refused({"s": {1, (2, Color.RED)}}).path == "$.s[*][1]"


def test_depth_is_limited_and_counts_every_container() -> None:
    for wrap in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}, lambda inner: {"$": inner}):
        value: Any = 1
        for _ in range(100):
            value = wrap(value)
        assert comes_back_or_is_refused(value)
        error = refused(wrap(value))
        assert "deeper than 100 levels" in error.reason
        assert len(error.path) < 100
    value = []
    for _ in range(99):
        value = [value]
    assert comes_back_or_is_refused(value)
    assert "deeper than 100 levels" in refused([value]).reason


def test_cycles_are_named() -> None:
    tree: dict[str, Any] = {"a": {"b": [1]}}
    tree["a"]["b"].append(tree["a"])
    error = refused(tree)
    assert (error.path, "a cycle, back to $.a" in error.reason) == ("$.a.b[1]", True)
    pair: Any = ([],)
    pair[0].append(pair)
    assert "a cycle, back to $:" in refused(pair).reason
    node = Tree("a")
    node.children.append(node)
    with pytest.raises(UnserialisableResult, match="cycle"):
        plain(node, Tree)


def test_oversize_is_measured_on_the_text() -> None:
    for value in (
        "x" * 98,
        ["x" * 94, 1],
        {"a": "x" * 92},
        "é" * 16 + "xx",
        list(range(40)),
        b"x" * 50,
        {"n": 1023},
        {"n": 10**60},
    ):
        size = len(encode(value))
        assert len(encode(value, max_bytes=size)) == size
        error = refused(value, max_bytes=size - 1)
        assert (error.path, "larger than" in error.reason) == ("$", True)
    assert len(encode("x" * (_json.MAX_BYTES - 2))) == 1024 * 1024
    refused("x" * (_json.MAX_BYTES - 1))


def _deep(levels: int) -> object:
    value: object = []
    for _ in range(levels):
        value = [value]
    return value


def _bomb(leaf: object) -> object:
    for _ in range(60):
        leaf = [leaf] * 10
    return leaf


@pytest.mark.parametrize(
    "make",
    [
        lambda: _deep(100_000),
        lambda: ["x" * 1_000_000] * 100,
        lambda: "x" * 100_000_000,
        lambda: [{"k" * 1_000_000: 1}] * 100,
        lambda: [(b"x" * 1_000_000,)] * 100,
        lambda: [10**4000] * 100_000,
        lambda: _bomb("leaf"),
    ],
    ids=["depth", "shared text", "text", "keys", "bytes", "digits", "bomb"],
)
def test_hostile_values_are_refused_soon(make: Callable[[], object]) -> None:
    value = make()
    taken = []
    for _ in range(3):
        start = time.process_time()
        refused(value)
        taken.append(time.process_time() - start)
    assert min(taken) < SOON


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", "[1,]", "NaN", "[Infinity]", "-Infinity", "1e999", "[-1e999]", "9" * 5000, "\ufeff1", "1 2",
        "'a'",
        "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"$":' * 100_000 + "1" + "}" * 100_000,
        '[{"$":1,"v":1}]', '{"$":"uuid"}', '{"$":"uuid","v":"x"}', '{"$":"uuid","v":1}', '{"$":"uuid","v":"x","w":1}',
        '{"$":"decimal","v":"NaN"}', '{"$":"decimal","v":"x"}', '{"$":"set","v":[[]]}', '{"$":"bytes","v":"a"}',
        '{"$":"datetime","v":["2024-01-01",0,"No/Where"]}', '{"$":"datetime","v":["2024-01-01",0,"../x"]}',
        '{"$":"datetime","v":["2024-01-01",7,null]}', '{"$":"timedelta","v":[99999999999,0,0]}', '{"$":"dict","v":1}',
    ],
    ids=lambda text: ascii(text[:30]),
)  # fmt: skip
def test_text_that_was_not_written_here_is_refused(text: str) -> None:
    start = time.process_time()
    with pytest.raises(UnserialisableResult) as caught:
        decode(text)
    assert time.process_time() - start < SOON
    assert caught.value.path.startswith("$")
    assert len(str(caught.value)) < 400


def test_a_type_this_process_does_not_know_is_named_with_the_way_out() -> None:
    with pytest.raises(UnserialisableResult, match=r"'app\.Widget' .* register_type\(Widget\)") as caught:
        decode('{"a":[0,{"$":"app.Widget","v":{}}]}')
    assert caught.value.path == "$.a[1]"
    with pytest.raises(UnserialisableResult, match="later version"):
        decode('{"$":"colour","v":1}')


def test_foreign_white_space_and_plain_text_are_read() -> None:
    assert decode(' { "$" : "uuid", "v": "00000000-0000-0000-0000-000000000000" } ') == UUID(int=0)
    assert decode('["$"]') == ["$"]


# --- annotations

OPTIONAL = Optional[Point]  # noqa: UP045 - this spelling too
Ids = typing.NewType("Ids", int)
TREE = Tree(
    "root", [Color.GREEN], [Tree("leaf", any=(1, UUID(int=3)))], Point(1, 2.0), {"$": Point(1), "b": Point(2)},
    (Color.RED, Point(5)), frozenset({Spot(Color.RED, (1, 2)), Spot(Color.GREEN, (0, 0))}),
    dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
)  # fmt: skip


@pytest.mark.parametrize(
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
        (Point | Literal["none"], "none"), (Named, Named(1, Point(2), Size.LARGE)), (Point, Named(1, Point(2))),
        (Color, Size.SMALL),
        (Point | Named, Named(1, Point(2))), (list[Any], [1, (2,)]), (dict[str, int], {"a": b"x"}), (int, "x"),
        (Ids, 1),
        (Area, Area(3)), (None, {"a": (1,)}), (type(None), None), (tuple[int, int] | None, (1, 2)), (object, [1]),
        (HalfReadable, HalfReadable(Point(1), {"a": 1})),
    ],
    ids=str,
)  # fmt: skip
def test_what_an_annotation_names_comes_back(annotation: object, value: object) -> None:
    write, read = codec_for(annotation)
    back = read(write(value))
    assert back == value
    assert type(back) is type(value)
    assert convert(decode(encode(plain(value, annotation))), annotation) == value


def test_an_annotated_result_is_plain_json_in_the_store() -> None:
    assert codec_for(Tree)[0](Tree("a", [Color.RED], pair=(Color.RED, Point(1)))) == (
        '{"name":"a","colors":["RED"],"children":[],"where":null,"by_name":{},"pair":["RED",{"x":1,"y":0.0}],'
        '"spots":{"$":"frozenset","v":[]},"when":null,"any":null}'
    )


@pytest.mark.parametrize(
    "annotation",
    [None, Any, int, dict, list[int], dict[str, Any], dict[str, list[int]], str | None, int | str, tuple[int, ...],
     set[str], object, UUID, type(None), Literal["a"], Ids, tuple[int, int] | list[int], Annotated[int, []]],
)  # fmt: skip
def test_an_annotation_that_adds_nothing_gives_the_bare_functions(annotation: object) -> None:
    assert codec_for(annotation) == (encode, decode)


def test_codecs_are_made_once_and_keep_the_limit() -> None:
    assert codec_for(list[Point]) is codec_for(list[Point])
    with pytest.raises(UnserialisableResult, match="larger than 5 bytes"):
        codec_for(Point)[0](Point(1), max_bytes=5)
    with pytest.raises(InvalidArgument, match="pass the type itself"):
        codec_for("Point")


@pytest.mark.parametrize(
    ("annotation", "value", "path", "told"),
    [
        (Point, {"x": 1}, "$", "says Point, this is a dict"),
        (Point, Twin(1), "$", "says Point, this is a Twin"),
        (Color, "RED", "$", "says Color, this is a str"),
        (list[Point], [Point(1), {"x": 1}], "$[1]", "says Point"),
        (tuple[Point, int], [Point(1), 1], "$", "says tuple, this is a list"),
        (Tree, dataclasses.replace(TREE, by_name={"k": Twin(1)}), "$.by_name.k", "says Point"),  # type: ignore[dict-item]
        (Point | Twin, Point(1), "$", r"fits more than one of Point \| Twin: register_type\(Point\)"),
        (Point | dict[str, Any], Point(1), "$", "fits more than one"),
        (Point | dict[str, Any], {"x": 1}, "$", "fits more than one"),
        (Color | str, "RED", "$", "fits more than one"),
        (Color | Mood, Color.GREEN, "$", "no fit"),
        (list[Color] | list[str], [Color.RED], "$", "fits more than one"),
        (Point | Spot, "text", "$", "this is a str"),
        (int, Point(1), "$", r"register_type\(Point\)"),
        (None, Point(1), "$", r"register_type\(Point\)"),
        (list[Point], (Point(1), Color.RED), "$[1]", "says Point"),
        (Tree, Tree("a", any=Point(1)), "$.any", r"register_type\(Point\)"),
        (set[Spot], {Spot(Color.RED, (1, object()))}, "$[*]", "object"),  # type: ignore[arg-type]
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
    assert convert({"x": 1}, Point) == Point(1, 0.0)
    assert convert({"x": 1, "gone": 2}, Point) == Point(1)
    assert convert([1, [2]], tuple[int, list[int]]) == (1, [2])
    assert convert([[1, 2], [1, 2]], set[tuple[int, int]]) == {(1, 2)}
    assert convert("g", Color) is Color.GREEN
    assert convert({"a": {"color": "RED", "points": [{"x": 1}]}}, dict[str, Card]) == {
        "a": {"color": Color.RED, "points": [Point(1)]}
    }
    assert convert({"color": "RED", "at": [1, 2]}, Point | Spot) == Spot(Color.RED, (1, 2))
    unread = {"a": [1]}
    assert convert(unread, dict[str, list[int]]) is unread


@pytest.mark.parametrize(
    ("annotation", "value", "path", "told"),
    [
        (list[Point], [{"y": 1}], "$[0]", "Point needs 'x'"),
        (list[Point], [[]], "$[0]", "says Point"),
        (dict[str, Color], {"a": "BLUE"}, "$.a", "'BLUE' is no member of Color"),
        (Rights, 8, "$", "bits that Rights does not know"),
        (Picky, {"x": -1}, "$", "Picky would not be built: LookupError: below zero"),
        (Point | Twin, {"x": 1}, "$", "more than one"),
        (Point | Spot, {"z": 1}, "$", "this is a dict"),
        (set[Any], [[]], "$", "no set can hold"),
    ],
)
def test_convert_says_what_does_not_fit(annotation: object, value: object, path: str, told: str) -> None:
    with pytest.raises(UnserialisableResult, match=told) as caught:
        convert(value, annotation)
    assert caught.value.path == path


def test_fields_come_back_as_they_were_not_as_the_constructor_makes_them() -> None:
    area = Area(3)
    area.size = 7
    write, read = codec_for(Area)
    back = read(write(area))
    assert isinstance(back, Area)
    assert (back.width, back.size) == (6, 7)


@settings(QUICK, max_examples=100)
@given(st.data())
def test_plain_and_convert_are_inverse(data: st.DataObject) -> None:
    points = st.builds(Point, st.integers(), st.floats(allow_nan=False, allow_infinity=False))
    spots = st.builds(Spot, st.sampled_from(Color), st.tuples(st.integers(), st.integers()))
    leaves = st.builds(
        Tree, texts, st.lists(st.sampled_from(Color)), any=json_trees, when=st.none() | st.datetimes(timezones=zones)
    )
    trees = st.builds(
        Tree, texts, children=st.lists(leaves, max_size=3), where=st.none() | points,
        by_name=st.dictionaries(keys, points),
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


def test_register_type_refuses_what_it_cannot_rebuild() -> None:
    for wrong in (Widget, Point(1), int, Pair, "Point", Color.RED):
        with pytest.raises(InvalidArgument, match="a dataclass or an Enum class"):
            register_type(wrong)  # type: ignore[type-var]
    with pytest.raises(InvalidArgument, match="seed is an InitVar"):
        register_type(NeedsMore)
    with pytest.raises(InvalidArgument, match="in a field"):
        register_type(dataclasses.make_dataclass("Listing", [("x", int)], bases=(list,)))


def test_a_name_is_registered_once() -> None:
    assert register_type(Named) is Named
    with pytest.raises(InvalidArgument, match=r"another class named .*Named is registered"):
        register_type(type("Named", (Point,), {"__module__": __name__, "__qualname__": "Named"}))
    assert comes_back_or_is_refused(Named(1, Point(1)))


def test_a_subclass_of_a_registered_type_is_not_registered() -> None:
    @dataclasses.dataclass
    class Lower(Named):
        more: int = 0

    assert r"register_type(Lower)" in refused([Lower(1, Point(1))]).reason


def test_fields_added_later_take_their_default() -> None:
    assert decode(f'{{"$":"{__name__}.Named","v":{{"x":1,"inner":{{"x":2}},"gone":3}}}}') == Named(1, Point(2))
    with pytest.raises(UnserialisableResult, match="Size"):
        decode(f'{{"$":"{__name__}.Size","v":"HUGE"}}')


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


@pytest.mark.parametrize(
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


# --- digests


def test_a_digest_is_128_bits_in_hex() -> None:
    assert _json.digest("{}") == "2afb9b83f9314e5d029766197f539792"
    assert _json.digest("\ud800") != _json.digest("\ud801")


def test_arguments_that_are_no_json_stay_out_by_name() -> None:
    whole, none = arguments_digest((1, "a"), {"k": [UUID(int=1)]})
    assert (len(whole or ""), none) == (32, ())
    assert arguments_digest((1, object(), "a"), {"k": 1, "fn": len}) == (
        arguments_digest((1, object(), "a"), {"k": 1})[0],
        ("1", "fn"),
    )
    assert arguments_digest((object(),), {"client": object()}) == (None, ("0", "client"))
    assert arguments_digest((), {}) == (_json.digest("{}"), ())


def test_arguments_are_told_apart_and_their_order_by_name_is_not() -> None:
    digests = [
        arguments_digest(args, kwargs)[0]
        for args, kwargs in (
            ((), {}), ((1,), {}), ((1, 2), {}), ((2, 1), {}), ((12,), {}), (("1",), {}), ((), {"a": 1}), ((), {"b": 1}),
            (([1, 2],), {}), (((1, 2),), {}), ((True,), {}), ((1.0,), {}), (("x", object()), {}), ((object(), "x"), {}),
        )
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert arguments_digest((), {"a": 1, "b": {"x": 1, "$": 2}}) == arguments_digest(
        (), {"b": {"$": 2, "x": 1}, "a": 1}
    )


def test_arguments_may_be_larger_than_a_result() -> None:
    assert arguments_digest(("x" * (2 * _json.MAX_BYTES),), {})[1] == ()


# --- cost


@pytest.mark.skipif(TRACED, reason="measures the tracer")
def test_the_walk_costs_little_beside_json_itself() -> None:
    def cost(call: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(7):
            start = time.process_time()
            for _ in range(times):
                call()
            taken.append(time.process_time() - start)
        return min(taken) / times

    text, small = "x" * 100_000, {"ok": True, "n": 3}
    written = encode({"t": text})
    assert cost(lambda: encode(text), 50) < 2 * cost(lambda: json.dumps(text), 50)
    assert cost(lambda: decode(written), 50) < 2 * cost(lambda: json.loads(written), 50)
    assert cost(lambda: encode(small), 2000) < 2 * cost(lambda: json.dumps(small), 2000)
    assert cost(lambda: decode('{"ok":true,"n":3}'), 2000) < 2 * cost(lambda: json.loads('{"ok":true,"n":3}'), 2000)
