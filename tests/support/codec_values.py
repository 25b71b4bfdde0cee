"""Values, types and the one question for the tests of the codec: does it come back the same?"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import json
import math
import typing
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from agent_runtime_core._core.codec.json import decode, encode
from agent_runtime_core._core.codec.tagged import HALVES
from agent_runtime_core._core.codec.typed import register_type
from agent_runtime_core.errors import UnserialisableResult

# Split over the properties that use them.
VALUES, MANY_VALUES = 1_000, 10_000
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
        encode(value, exact=True, **options)
    return caught.value


texts = st.one_of(
    st.text(st.characters(codec=None, categories=None), max_size=20),
    st.text(
        st.sampled_from('\0\ufeff\ud83d\ude00\U0001f600"\\a'), max_size=6
    ),  # halves meet, which by chance they never do
)
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
kept_keys = keys.filter(lambda key: not HALVES.search(key))
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
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(kept_keys, inner, max_size=6)),
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
        text = encode(value, exact=True)
    except UnserialisableResult as error:
        return not says_where(error)
    assert text.isascii()
    json.loads(text)
    back = decode(text)
    assert same(back, value)
    assert text == encode(back, exact=True) == encode(value)
    return True
