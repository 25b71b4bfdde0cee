from __future__ import annotations

import collections
import datetime as dt
import enum
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime_core._core.codec import json as _json
from agent_runtime_core._core.codec.json import MAX_PARSED, MAX_WHOLE, arguments_digest, decode, decode_all, encode
from agent_runtime_core._core.codec.tagged import REVIVE
from agent_runtime_core._core.event_types import EventType
from agent_runtime_core.errors import UnserialisableResult
from agent_runtime_core.interfaces import ToolCallDict
from agent_runtime_core.persistence import TaskState
from agent_runtime_core.status import StepStatus
from tests.support.cases import for_each
from tests.support.codec_values import (
    MANY_VALUES,
    QUICK,
    VALUES,
    Color,
    Key,
    Level,
    Modes,
    Mood,
    Named,
    Pair,
    Point,
    Size,
    anything,
    comes_back_or_is_refused,
    json_trees,
    refused,
    same,
    says_where,
    values,
)

# --- round trips


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


def _exact(value: object) -> str:
    return encode(value, max_bytes=_json.MAX_RESULT, exact=True)


written = st.one_of(st.text('[]{}",:$v0123456789.eE+-truefalsn \\u', max_size=60), json_trees.map(json.dumps))


@settings(QUICK, max_examples=VALUES * 15 // 100)
@given(written)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        decode(text)
    except UnserialisableResult as error:
        says_where(error)


NAMES = [f"{cls.__module__}.{cls.__name__}" for cls in (Named, Size, Modes, Key)]
tags = st.sampled_from([*REVIVE, "dict", "a.b", "nope", *NAMES])
tagged = st.recursive(json_trees, lambda inner: st.fixed_dictionaries({"$": tags, "v": inner}), max_leaves=5)


@settings(QUICK, max_examples=VALUES * 5 // 100)
@given(tagged)
def test_corrupt_tags_are_read_or_refused(tree: object) -> None:
    try:
        decode(json.dumps(tree))
    except UnserialisableResult as error:
        says_where(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "values", "share"),
    [
        (test_values_come_back_the_same_or_are_refused, values, 40),
        (test_json_trees_always_come_back_the_same, json_trees, 25),
        (test_foreign_values_are_refused_wherever_they_stand, anything, 20),
        (test_any_text_is_read_or_refused, written, 15),
        (test_corrupt_tags_are_read_or_refused, tagged, 5),
    ],
)
def test_many_values(test: Any, values: st.SearchStrategy[object], share: int) -> None:
    many = settings(QUICK, max_examples=MANY_VALUES * share // 100)
    many(given(values)(test.hypothesis.inner_test))()


@for_each(
    "value",
    [
        True, 0, -0.0, 1e308, 5e-324, 2**63, -(10**4300) + 1, "", "\ud800", "a\0b", "\ufeff", [], {}, (),
        "\ud83d\ude00", "\ude00\ud83d\ude00\ud83d", ["\U0001f600", {"a": "\ud83d\ude00\0"}], {"\ud83d": "\ude00"},
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
        f'"n":{{"$":"{Size.__module__}.Size","v":"SMALL"}},"k":{{"$":"{Size.__module__}.Key","v":{{"n":1}}}},'
        f'"f":{{"$":"{Size.__module__}.Modes","v":1}}}}}}'
    )


def test_a_dict_of_this_library_is_written_as_a_plain_one() -> None:
    call = {"id": "c1", "$": {"name": "add", "arguments": (1,)}}
    assert encode([ToolCallDict(call), {"$": ToolCallDict(call)}]) == encode([call, {"$": call}])


class Ratio(float, enum.Enum):
    HALF = 0.5


class Way(str, enum.Enum):  # noqa: UP042 - as older code has them
    UP = "up"

    def __str__(self) -> str:
        return "another text"


class Bits(enum.IntFlag):
    A = 1
    B = 2


@pytest.mark.parametrize(
    ("member", "value"),
    [
        (Level.HIGH, 2), (Mood.SAD, "sad"), (Ratio.HALF, 0.5), (Way.UP, "up"), (Bits.A | Bits.B, 3),
        (TaskState.COMPLETE, "complete"), (StepStatus.FAILED, "failed"), (EventType.TOOL_CALL, "tool.call"),
    ],
)  # fmt: skip
def test_an_enum_is_told_as_the_value_it_equals(member: Any, value: object) -> None:
    told = decode(encode({"a": [member], "$": (member,)}))
    assert same(told, {"a": [value], "$": (value,)})
    assert told == {"a": [member], "$": (member,)}
    if isinstance(member, str):
        assert encode({member: member}) == encode({value: value})
        assert "the key <" in refused({"a": {member: 1}}).reason


def test_an_enum_that_is_neither_text_nor_number_is_told_by_no_value_and_a_registered_one_comes_back() -> None:
    for write in (encode, _exact):
        with pytest.raises(UnserialisableResult, match=r"register_type\(Color\)"):
            write([Color.RED])
        assert decode(write([Modes.A, Size.SMALL])) == [Modes.A, Size.SMALL]
    assert type(decode(encode(Modes.A))) is Modes


def test_sets_are_written_in_one_order_in_every_process() -> None:
    code = (
        "from agent_runtime_core._core.codec.json import encode;"
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


@for_each(
    ("value", "told"),
    [
        (Widget(), "Use a dict, or make Widget a dataclass"),
        (Widget, r"the class Widget is not JSON-serializable\. Use its name"),
        (Point(1), r"Annotate the return type, pass returns=Point, or call register_type\(Point\)"),
        (Color.RED, r"a Color .* register_type\(Color\)"),
        (Level.LOW, r"register_type\(Level\)"),
        (Mood.SAD, r"register_type\(Mood\)"),
        (Pair(1, 2), r"_asdict\(\)"),
        (collections.OrderedDict(a=1), r"an OrderedDict would be restored as a dict"),
        (collections.defaultdict(list), r"a defaultdict would be restored as a dict"),
        (Text("x"), r"a Text would be restored as a str\. Use str\(value\)"),
        (Number(1), r"a Number would be restored as an int\. Use int\(value\)"),
        (Moment(2024, 1, 1, tzinfo=dt.UTC), "Use a dict, or make Moment a dataclass"),
        (bytearray(b"x"), r"a bytearray is not JSON-serializable\. Use bytes\(value\)"),
        (iter([1]), r"a list_iterator is not JSON-serializable"),
        ({}.keys(), r"a dict_keys is not JSON-serializable\. Use list\(value\)"),
        (1j, r"a complex is not JSON-serializable"),
        (math.nan, r"nan is not JSON-serializable\. Use None or a string"),
        (math.inf, r"inf is not JSON-serializable\. Use None or a string"),
        (-math.inf, r"-inf is not JSON-serializable\. Use None or a string"),
        (Decimal("NaN"), "NaN"),
        (Decimal("-Infinity"), "Infinity"),
        (10**4300, "more than 4,300 digits"),
        (-(10**4300), "more than 4,300 digits"),
        ({1: "a"}, r"the key 1 must be a str, got an int\. Use str\(key\)"),
        ({1: "a", "1": "b"}, r"the key 1 must be a str, got an int\. Use str\(key\)"),
        ({None: 1}, "the key None"),
        ({Text("a"): 1}, r"the key <Text> must be a str, got a Text\. Use str\(key\)"),
        ({("a",): 1}, "the key <tuple>"),
        ({10**5000: 1}, "the key <int>"),
        (dt.datetime(2024, 1, 1, tzinfo=Odd()), "time zone that is an Odd"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_would_not_come_back_is_refused(value: object, told: str) -> None:
    for tree, path in ((value, "$"), ({"items": [0, 1, 2, {"when": value}]}, "$.items[3].when"), ((value,), "$[0]")):
        with pytest.raises(UnserialisableResult, match=told) as caught:
            encode(tree, exact=True)
        assert caught.value.path == path
        assert len(str(caught.value)) < 400


def test_a_key_of_two_halves_is_refused_before_it_is_read_as_another() -> None:
    assert "'utf-16'" in (error := refused({"a": [{"x\ud83d\ude00": 1}]})).reason
    assert error.path == "$.a[0]"
    assert comes_back_or_is_refused({"\ud83d": 1, "a\ude00": 2, "\U0001f600": 3})


def test_a_text_of_halves_has_no_more_parts_than_a_list() -> None:
    text = "\ud83d\ude00" * (MAX_WHOLE // 15)  # 12 characters of JSON each
    with pytest.raises(UnserialisableResult, match="too many parts"):
        encode(text, max_bytes=MAX_WHOLE)


def test_a_coroutine_is_told_to_be_awaited() -> None:
    async def fetch() -> int:
        return 1

    coroutine = fetch()
    try:
        assert "Await it" in refused([coroutine]).reason
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
    assert (error.path, "a cycle back to $.a" in error.reason) == ("$.a.b[1]", True)
    pair: Any = ([],)
    pair[0].append(pair)
    assert "a cycle back to $." in refused(pair).reason


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
        assert error.path == "$"
        assert error.reason.startswith(f"larger than {size - 1:,} bytes as JSON: it has ")
        assert f"{size:,}. Store it elsewhere" in error.reason, "the text was measured"
    assert len(encode("x" * (_json.MAX_BYTES - 2))) == 16 * 1024 * 1024
    refused("x" * (_json.MAX_BYTES - 1))


def test_long_texts_weigh_little_and_parts_much() -> None:
    answer = [{"role": "assistant", "content": "x" * (10 * 2**20)}, *[{"n": n} for n in range(1000)]]
    assert decode(encode(answer)) == answer
    for plain in ([0] * (2**19 - 1), {f"{n:06d}": n % 10 for n in range(87_000)}, [10**4000] * 260):
        assert 2**20 - 2**17 < len(encode(plain)) <= 2**20, "as large as a value of small parts may be"
    keys = {f"{n:06d}": 0 for n in range(2**18)}
    for many in ([0] * (2**19 + 1), keys, [10**4000] * 300, [UUID(int=1)] * 30_000):
        error = refused(many)
        assert error.reason.startswith("of too many parts: at least ")
        assert "larger" not in error.reason
        assert "json.dumps" in error.reason


def test_a_value_that_is_too_large_is_not_called_one_of_too_many_parts() -> None:
    """Which of the two limits a value exceeds is known before its text is written."""
    for large in ("x" * (2**24 + 1), {"a": ["x" * 2**24]}, (b"x" * 2**24,), ["x" * 2**23, {"b": "x" * 2**23}]):
        error = refused(large)
        size = r"(16,777,2|22,369,6)\d\d"
        assert re.match(rf"larger than 16,777,216 bytes as JSON: it has at least {size}\. ", error.reason)
    shared: Any = "x" * 100
    for _ in range(60):
        shared = [shared] * 10
    assert refused(shared).reason.startswith("of too many parts: at least 2")


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
def test_hostile_values_are_refused(make: Callable[[], object]) -> None:
    refused(make())


@for_each(
    "text",
    [
        "", " ", "{", "[1,]", "NaN", "[Infinity]", "-Infinity", "1e999", "[-1e999]", "9" * 5000, "\ufeff1", "1 2",
        "'a'",
        "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"$":' * 100_000 + "1" + "}" * 100_000,
        '[{"$":1,"v":1}]', '{"$":"uuid"}', '{"$":"uuid","v":"x"}', '{"$":"uuid","v":1}', '{"$":"uuid","v":"x","w":1}',
        '{"$":"decimal","v":"NaN"}', '{"$":"decimal","v":"x"}', '{"$":"set","v":[[]]}', '{"$":"bytes","v":"a"}',
        '{"$":"datetime","v":["2024-01-01",0,"No/Where"]}', '{"$":"datetime","v":["2024-01-01",0,"../x"]}',
        '{"$":"datetime","v":["2024-01-01",7,null]}', '{"$":"timedelta","v":[99999999999,0,0]}', '{"$":"dict","v":1}',
        '{"$":"text","v":[1]}', '{"$":"text","v":"a"}',
    ],
    ids=lambda text: ascii(text[:30]),
)  # fmt: skip
def test_text_that_was_not_written_here_is_refused(text: str) -> None:
    with pytest.raises(UnserialisableResult) as caught:
        decode(text)
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


# --- digests


def test_a_digest_is_128_bits_in_hex() -> None:
    assert _json.digest("{}") == "2afb9b83f9314e5d029766197f539792"
    assert _json.digest("\ud800") != _json.digest("\ud801")


def test_arguments_that_are_not_json_are_left_out() -> None:
    assert len(arguments_digest(1, "a", [UUID(int=1)]) or "") == 32
    assert arguments_digest(1, "a", object()) == arguments_digest(1, "a")
    assert arguments_digest(object()) is None
    assert arguments_digest() == _json.digest("{}")
    assert arguments_digest("x", object(), 1) == _json.digest('{"0":"x","2":1}')


def test_each_argument_and_its_place_count_and_the_order_of_its_keys_does_not() -> None:
    digests = [
        arguments_digest(*args)
        for args in (
            (), (1,), (1, 2), (2, 1), (12,), ("1",), ([1, 2],), ((1, 2),), (True,), (1.0,), ("x", object()),
            (object(), "x"),
        )
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert arguments_digest({"a": 1, "b": {"x": 1, "$": 2}}) == arguments_digest({"b": {"$": 2, "x": 1}, "a": 1})


def test_arguments_may_be_larger_than_a_result() -> None:
    assert arguments_digest("x" * (2 * _json.MAX_BYTES)) is not None


def test_a_python_without_the_c_encoder_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"b": [None, True, 1.5, "é"], "a": {}}
    monkeypatch.setattr(json.encoder, "c_make_encoder", None)
    assert "".join(_json._writer(sort_keys=True)(tree, 0)) == encode(tree, sort_keys=True)
    with pytest.raises(TypeError, match="Color"):
        "".join(_json._writer(sort_keys=False)([Color.RED], 0))


# --- cost


@pytest.mark.parametrize(
    "values", [[], [1], [{"a": 1}, "b", None], [{1, 2}, b"x", {"$": 1}], ["x" * MAX_PARSED, {"y": [1]}]]
)
def test_many_texts_are_decoded_as_each_of_them_is(values: list[object]) -> None:
    texts = [encode(value) for value in values]
    assert decode_all(texts) == [decode(text) for text in texts] == values


@pytest.mark.parametrize("texts", [["1", "1,2"], ["[1", "2]"], ["1", ""], ["1", '{"$":"nobody","v":1}']])
def test_of_many_texts_one_that_was_not_written_is_refused_as_by_itself(texts: list[str]) -> None:
    with pytest.raises(UnserialisableResult) as each:
        [decode(text) for text in texts]
    with pytest.raises(UnserialisableResult) as together:
        decode_all(texts)
    assert str(together.value) == str(each.value)
