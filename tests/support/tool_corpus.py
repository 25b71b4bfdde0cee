"""Arguments as models send them: over two hundred that no tool may be called with, and those that are right."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NotRequired, TypedDict

from agent_runtime_core.tools import Tool, ToolRegistry


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Swapped(Enum):
    # The value of one is the name of the other.
    UP = "DOWN"
    DOWN = "UP"


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: int
    y: int = 0
    tags: list[str] = field(default_factory=list)


@dataclass
class Line:
    start: Point
    end: Point | None = None


@dataclass
class Circle:
    radius: float


@dataclass
class Square:
    side: float

    def __post_init__(self) -> None:
        if self.side < 0:
            raise ValueError(f"a side of {self.side} is no length")


class Options(TypedDict):
    limit: int
    deep: NotRequired[bool]
    origin: NotRequired[Point]


def city(name: str, days: int = 3, detail: bool = False, ratio: float = 0.5) -> Any:
    return locals()


def paint(colour: Colour, level: Level = Level.LOW, mode: Literal["fast", "slow", 3] = "fast") -> Any:
    return locals()


def turn(way: Swapped) -> Any:
    return locals()


def draw(line: Line, points: list[Point], options: Options, labels: dict[str, int]) -> Any:
    return locals()


def maybe(note: str | None, count: int | None = None, either: int | str | list[int] = 0, exact: int | float = 0) -> Any:
    return locals()


def group(tags: set[str], pair: tuple[int, str], many: tuple[int, ...] = ()) -> Any:
    return locals()


def figure(shape: Circle | Square) -> Any:
    return locals()


def free(anything: Any = None, **more: int) -> Any:
    return locals()


def ping() -> Any:
    return locals()


BY_HAND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 1, "maximum": 9},
        "word": {"type": "string", "minLength": 2, "maxLength": 5},
        "node": {"$ref": "#/$defs/node"},
        "pick": {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
        "row": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 1, "maxItems": 3},
    },
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["name"],
        }
    },
    "additionalProperties": False,
}


def by_hand(**given: Any) -> Any:
    return given


FUNCTIONS: tuple[Callable[..., Any], ...] = (city, paint, turn, draw, maybe, group, figure, free, ping)


def registry(seen: list[Any]) -> ToolRegistry:
    """The tools of the corpus; each notes in `seen` what it was called with, defaults included."""
    made = ToolRegistry()
    for fn in FUNCTIONS:
        made.register(Tool.from_function(_noting(fn, seen)))
    made.register(Tool("by_hand", "", BY_HAND, _noting(by_hand, seen)))
    return made


def _noting(fn: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def noted(**given: Any) -> str:
        seen.append(fn(**given))
        return "done"

    return noted


@dataclass(frozen=True)
class Bad:
    """A call that must not happen; `said` is what the answer has to name."""

    tool: str
    arguments: Any
    said: str


@dataclass(frozen=True)
class Good:
    """A call that happens, with these values."""

    tool: str
    arguments: Any
    values: Mapping[str, Any]


#: Arguments that are right, one parameter of which is then given something else.
RIGHT: dict[str, dict[str, Any]] = {
    "city": {"name": "Oslo"},
    "paint": {"colour": "red"},
    "turn": {"way": "UP"},
    "draw": {"line": {"start": {"x": 1}}, "points": [{"x": 2}], "options": {"limit": 3}, "labels": {"a": 1}},
    "maybe": {"note": None},
    "group": {"tags": ["a"], "pair": [1, "b"]},
    "figure": {"shape": {"radius": 1}},
    "free": {},
    "by_hand": {},
}

_WRONG: list[tuple[str, str, list[Any]]] = [
    ("city", "name", [1, 1.5, True, None, [], {}, ["Oslo"]]),
    ("city", "days", ["3", "three", "", 1.5, -0.1, True, False, None, [], {}, [3], 1e300]),
    ("city", "detail", ["true", "", 0, 1, 1.0, None, [], {}]),
    ("city", "ratio", ["0.5", True, None, [], {}, [0.5], 10**399]),
    ("paint", "colour", ["green", "RED", "Red", "", 1, True, None, ["red"], {"red": 1}]),
    ("paint", "level", [True, "1", 0, 3, 1.5, None, "LOW"]),
    ("paint", "mode", ["FAST", "3", True, 4, None, ["fast"]]),
    ("turn", "way", ["up", 1, None]),
    ("draw", "line", [[], "x", None, 1, {}, {"start": None}, {"start": {"x": 1}, "end": 1}, [{"start": {"x": 1}}]]),
    ("draw", "points", [{}, "x", None, 1, {"x": 1}, [1], [None], [[]], [{"x": 1}, {"x": "1"}], [{"y": 1}]]),
    ("draw", "options", [[], "x", None, {}, {"limit": "3"}, {"limit": 1, "deep": "no"}, {"limit": 1, "origin": {}}]),
    ("draw", "labels", [[], "x", None, 1, {"a": "1"}, {"a": None}, {"a": 1, "b": 1.5}, {"a": {"b": 1}}]),
    ("maybe", "note", [1, False, [], {}]),
    ("maybe", "count", ["1", 1.5, True, [], {}]),
    ("maybe", "either", [1.5, True, None, {}, ["a"], [1, "a"]]),
    ("group", "tags", ["a", {}, None, [1], ["a", None]]),
    ("group", "pair", [[], [1], [1, "a", 2], ["a", 1], [True, "a"], {}, "1a", None]),
    ("group", "many", [[1, "2"], 1, {}, [1.5]]),
    ("figure", "shape", [{}, {"radius": "1"}, {"radius": 1, "side": 1}, [], None, 1]),
    ("free", "other", ["1", 1.5, None, [], {}]),
    ("by_hand", "size", [0, 10, -1, "5", 5.5, True, None]),
    ("by_hand", "word", ["", "a", "sixsix", 5, None]),
    ("by_hand", "row", [[], [1, 2, 3, 4], [0], [-1], ["1"], {}, None]),
    (
        "by_hand",
        "node",
        [1, {}, {"name": 1}, {"name": "a", "next": {}}, {"name": "a", "next": {"name": "b", "next": 3}}],
    ),
    ("by_hand", "pick", [1, None, {}, {"c": 1}, []]),
]

_PLACED: list[tuple[str, Any, str]] = [
    # What is missing, and what nobody asked for.
    ("city", {}, "missing required argument 'name' (string)"),
    ("city", {"days": 3}, "missing required argument 'name'"),
    ("city", {"nme": "Oslo"}, "unexpected argument 'nme'. Did you mean 'name'?"),
    ("city", {"name": "Oslo", "day": 2}, "Did you mean 'days'?"),
    ("city", {"name": "Oslo", "zzzzzz": 2}, "(known: 'name', 'days', 'detail', 'ratio')"),
    ("city", {"Name": "Oslo"}, "Did you mean 'name'?"),
    ("city", {"arguments": {"name": "Oslo"}}, "'arguments'"),
    ("city", {"name": "Oslo", "": 1}, "''"),
    ("city", {"name": "Oslo", "k" * 5000: 1}, "'kkkk"),
    ("city", {"name": 1, "days": "x", "detail": 0}, "detail must be a boolean, got 0"),
    ("paint", {}, "missing required argument 'colour' (one of 'red', 'blue')"),
    ("group", {"tags": []}, "missing required argument 'pair' (array)"),
    ("ping", {"x": 1}, "unexpected argument 'x'"),
    ("draw", {**RIGHT["draw"], "line": {"start": {"x": "1"}}}, "line.start.x must be an integer, got '1'"),
    ("draw", {**RIGHT["draw"], "line": {"start": {"x": 1, "z": 2}}}, "line.start: unexpected property 'z'"),
    ("draw", {**RIGHT["draw"], "line": {"start": {"x": 1}, "end": {"y": 1}}}, "end: missing required property 'x'"),
    ("draw", {**RIGHT["draw"], "points": [{"x": 1}, {"x": 1, "tags": ["a", 2]}]}, "].tags[1] must be a string, got 2"),
    ("draw", {**RIGHT["draw"], "options": {"limit": 1, "deeep": True}}, "options: unexpected property 'deeep'"),
    ("draw", {**RIGHT["draw"], "labels": {"a b": "c"}}, "labels['a b'] must be an integer, got 'c'"),
    ("figure", {"shape": {"side": -1}}, "shape: Square could not be constructed: ValueError: a side of -1.0 is no"),
    ("by_hand", {"sise": 1}, "Did you mean 'size'?"),
    # What is no JSON.
    ("city", "Oslo", "invalid JSON arguments"),
    ("city", "name=Oslo", "invalid JSON arguments"),
    ("city", "{'name': 'Oslo'}", "invalid JSON arguments"),
    ("city", '{name: "Oslo"}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo",}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo"}}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo"} {"name": "Bergen"}', "invalid JSON arguments: Extra data"),
    ("city", '{"name": "Oslo"} // a comment', "invalid JSON arguments"),
    ("city", '```json\n{"name": "Oslo"}\n```', "invalid JSON arguments"),
    ("city", '{"name": "Os\nlo"}', "invalid JSON arguments"),
    ("city", '{"name": "Os\\qlo"}', "invalid JSON arguments"),
    ("city", '{"name": None}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo", "detail": True}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo" "days": 3}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo", "days": 03}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo", "days": +3}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo", "days": 0x10}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo", "days": 1_000}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo", "ratio": .5}', "invalid JSON arguments"),
    ("city", '{"name": "Oslo", "ratio": 5.}', "invalid JSON arguments"),
    ("city", '\ufeff{"name": "Oslo"}', "invalid JSON arguments"),
    ("city", "\x00", "invalid JSON arguments"),
    # JSON, but no object.
    ("city", "[]", "must be a JSON object, got "),
    ("city", '["Oslo"]', "must be a JSON object, got "),
    ("city", '"Oslo"', "must be a JSON object, got "),
    ("city", '"{\\"name\\": \\"Oslo\\"}"', "must be a JSON object, got "),
    ("city", "3", "must be a JSON object, got '3'"),
    ("city", "null", "missing required argument 'name'"),
    ("city", "true", "must be a JSON object, got 'true'"),
    ("city", ["Oslo"], "dict or its JSON text, got ['Oslo']"),
    ("city", 3, "dict or its JSON text, got 3"),
    ("city", b'{"name": "Oslo"}', "dict or its JSON text, got b"),
    # Numbers that are none.
    ("city", '{"name": "Oslo", "ratio": NaN}', "NaN is not a JSON number"),
    ("city", '{"name": "Oslo", "ratio": Infinity}', "Infinity is not a JSON number"),
    ("city", '{"name": "Oslo", "ratio": -Infinity}', "-Infinity is not a JSON number"),
    ("city", '{"name": "Oslo", "ratio": 1e999}', "must fit a float (at most 1.8e+308), got "),
    ("city", '{"name": "Oslo", "ratio": -1e999}', "must fit a float (at most 1.8e+308), got "),
    ("city", '{"name": "Oslo", "days": 1' + "0" * 5000 + "}", "400 digits, got 5001"),
    ("city", {"name": "Oslo", "ratio": float("nan")}, "ratio must be a JSON number, got nan"),
    ("city", {"name": "Oslo", "ratio": float("inf")}, "ratio must be a JSON number, got inf"),
    ("free", {"anything": {"deep": [1, float("nan")]}}, "anything.deep[1] must be a JSON number, got nan"),
    # Keys that come twice: which one counts?
    ("city", '{"name": "Oslo", "name": "Bergen"}', "'name' twice"),
    ("city", '{"name": "Oslo", "name": "Oslo"}', "'name' twice"),
    ("city", '{"name": "Oslo", "n\\u0061me": "Bergen"}', "'name' twice"),
    ("free", '{"anything": {"a": 1, "b": {"c": 1, "c": 2}}}', "'c' twice"),
    ("free", '{"anything": [{"a": 1, "a": 1}]}', "'a' twice"),
    # Halves of characters.
    ("city", '{"name": "\\ud800"}', "name must not contain a lone surrogate"),
    ("city", '{"name": "\\udc00\\ud800"}', "name must not contain a lone surrogate"),
    ("city", '{"name": "\ud800"}', "lone surrogate"),
    ("city", {"name": "a\udfff"}, "name must not contain a lone surrogate"),
    ("free", '{"anything": [["\\ud800"]]}', "anything[0][0] must not contain a lone surrogate"),
    ("free", '{"anything": {"\\ud800": 1}}', "lone surrogate"),
    ("free", {"anything": {"\ud800": 1}}, "lone surrogate"),
    # Too deep, too large.
    ("free", '{"anything": ' + "[" * 98 + "]" * 98 + "}", "must be nested at most 98 levels deep"),
    ("free", '{"anything": ' + '{"a":' * 98 + "1" + "}" * 98 + "}", "must be nested at most 98 levels deep"),
    ("free", "[" * 100_000 + "]" * 100_000, "must be nested at most 98 levels deep"),
    ("free", '{"a":' * 100_000, "must be nested at most 98 levels deep"),
    ("city", '{"name": "' + "a" * 1024 * 1024 + '"}', "must have at most 1,048,576 bytes"),
    ("city", '{"name": "' + "å" * 600 * 1024 + '"}', "must have at most 1,048,576 bytes"),
    # Keys that are no text, which only a dict can have.
    ("city", {"name": "Oslo", 3: 1}, "must have only strings as keys, got 3"),
    ("free", {"anything": {1: 2}}, "anything must have only strings as keys, got 1"),
]

_WHOLE = json.dumps({**RIGHT["draw"], "line": {"start": {"x": 1.5e3, "tags": ["\u00e5", '"']}}})


def _bad() -> Iterator[Bad]:
    for tool, name, values in _WRONG:
        for value in values:
            yield Bad(tool, {**RIGHT[tool], name: value}, name)
    for tool, arguments, said in _PLACED:
        yield Bad(tool, arguments, said)
    for end in range(1, len(_WHOLE)):
        yield Bad("draw", _WHOLE[:end], "invalid JSON arguments")


BAD: list[Bad] = list(_bad())

_CITY: dict[str, Any] = {"name": "Oslo", "days": 3, "detail": False, "ratio": 0.5}
_PAINT: dict[str, Any] = {"colour": Colour.RED, "level": Level.LOW, "mode": "fast"}
_DRAW: dict[str, Any] = {"line": Line(Point(1)), "points": [Point(2)], "options": {"limit": 3}, "labels": {"a": 1}}
_MAYBE: dict[str, Any] = {"note": None, "count": None, "either": 0, "exact": 0}
_GROUP: dict[str, Any] = {"tags": {"a"}, "pair": (1, "b"), "many": ()}

_TAGGED = Line(Point(1), Point(2, 0, ["t"]))

# Tool, what is given beside or instead of RIGHT, what the handler gets of that.
_VARIED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("city", {}, {}),
    ("city", {"name": ""}, {"name": ""}),
    ("city", {"name": "3"}, {"name": "3"}),
    ("city", {"name": "Tromsø 🌌"}, {"name": "Tromsø 🌌"}),
    ("city", {"name": "a\u0000b\n"}, {"name": "a\u0000b\n"}),
    ("city", {"days": 0}, {"days": 0}),
    ("city", {"days": -7}, {"days": -7}),
    ("city", {"days": 3.0}, {"days": 3}),
    ("city", {"days": -0.0}, {"days": 0}),
    ("city", {"days": 2**70}, {"days": 2**70}),
    ("city", {"detail": True}, {"detail": True}),
    ("city", {"ratio": 2}, {"ratio": 2.0}),
    ("city", {"ratio": 1e-300}, {"ratio": 1e-300}),
    ("city", {"days": 1, "detail": True, "ratio": 1}, {"days": 1, "detail": True, "ratio": 1.0}),
    ("paint", {}, {}),
    ("paint", {"colour": "blue"}, {"colour": Colour.BLUE}),
    ("paint", {"level": 2}, {"level": Level.HIGH}),
    ("paint", {"level": 2.0}, {"level": Level.HIGH}),
    ("paint", {"mode": "slow"}, {"mode": "slow"}),
    ("paint", {"mode": 3}, {"mode": 3}),
    ("paint", {"mode": 3.0}, {"mode": 3}),
    ("turn", {}, {"way": Swapped.DOWN}),
    ("turn", {"way": "DOWN"}, {"way": Swapped.UP}),
    ("draw", {}, {}),
    ("draw", {"line": {"start": {"x": 1, "y": 2}}}, {"line": Line(Point(1, 2))}),
    ("draw", {"line": {"start": {"x": 1.0}}}, {"line": Line(Point(1))}),
    ("draw", {"line": {"start": {"x": 1}, "end": None}}, {"line": Line(Point(1))}),
    ("draw", {"line": {"start": {"x": 1}, "end": {"x": 2, "tags": ["t"]}}}, {"line": _TAGGED}),
    ("draw", {"points": []}, {"points": []}),
    ("draw", {"points": [{"x": 1}, {"x": 2, "y": 3}]}, {"points": [Point(1), Point(2, 3)]}),
    ("draw", {"options": {"limit": 1, "deep": True}}, {"options": {"limit": 1, "deep": True}}),
    ("draw", {"options": {"limit": 1, "origin": {"x": 5}}}, {"options": {"limit": 1, "origin": Point(5)}}),
    ("draw", {"labels": {}}, {"labels": {}}),
    ("draw", {"labels": {"": 1, "a b": 2.0}}, {"labels": {"": 1, "a b": 2}}),
    ("maybe", {}, {}),
    ("maybe", {"note": "n"}, {"note": "n"}),
    ("maybe", {"count": None}, {"count": None}),
    ("maybe", {"count": 3}, {"count": 3}),
    ("maybe", {"count": 3.0}, {"count": 3}),
    ("maybe", {"either": "3"}, {"either": "3"}),
    ("maybe", {"either": 3}, {"either": 3}),
    ("maybe", {"either": [1, 2.0]}, {"either": [1, 2]}),
    ("maybe", {"exact": 3.0}, {"exact": 3.0}),
    ("maybe", {"exact": 3}, {"exact": 3}),
    ("group", {}, {}),
    ("group", {"tags": []}, {"tags": set()}),
    ("group", {"tags": ["a", "a"]}, {"tags": {"a"}}),
    ("group", {"pair": [2.0, ""]}, {"pair": (2, "")}),
    ("group", {"many": [1, 2, 3]}, {"many": (1, 2, 3)}),
    ("figure", {}, {"shape": Circle(1.0)}),
    ("figure", {"shape": {"side": 2.5}}, {"shape": Square(2.5)}),
    ("free", {}, {"anything": None, "more": {}}),
    ("free", {"anything": {"a": [1, None, {"b": "c"}]}}, {"anything": {"a": [1, None, {"b": "c"}]}, "more": {}}),
    ("free", {"anything": "x", "one": 1, "two": 2.0}, {"anything": "x", "more": {"one": 1, "two": 2}}),
    ("by_hand", {}, {}),
    ("by_hand", {"size": 1, "word": "word"}, {"size": 1, "word": "word"}),
    ("by_hand", {"size": 9, "row": [0.5, 1]}, {"size": 9, "row": [0.5, 1]}),
    ("by_hand", {"node": {"name": "a", "next": {"name": "b"}}}, {"node": {"name": "a", "next": {"name": "b"}}}),
    ("by_hand", {"pick": {"b": 1}}, {"pick": {"b": 1}}),
]

_FULL: dict[str, dict[str, Any]] = {"city": _CITY, "paint": _PAINT, "draw": _DRAW, "maybe": _MAYBE, "group": _GROUP}

_WRITTEN: list[tuple[str, Any, dict[str, Any]]] = [
    ("ping", None, {}),
    ("ping", "", {}),
    ("ping", "null", {}),
    ("ping", " \n", {}),
    ("ping", "{}", {}),
    ("ping", {}, {}),
    ("city", ' {"name" : "Oslo"}\n', _CITY),
    ("city", '{"name": "\\ud83c\\udf0c"}', {**_CITY, "name": "🌌"}),
    ("city", '{"name": "Oslo", "days": 30e-1}', _CITY),
    ("city", '{"name": "' + "a" * 1000_000 + '"}', {**_CITY, "name": "a" * 1000_000}),
    ("free", '{"anything": ' + "[" * 97 + "]" * 97 + "}", {"anything": json.loads("[" * 97 + "]" * 97), "more": {}}),
]


def _good() -> Iterator[Good]:
    for tool, given, values in _VARIED:
        arguments = {**RIGHT[tool], **given}
        expected = {**_FULL.get(tool, {}), **values}
        yield Good(tool, arguments, expected)
        yield Good(tool, json.dumps(arguments), expected)
    for tool, text, values in _WRITTEN:
        yield Good(tool, text, values)


GOOD: list[Good] = list(_good())
