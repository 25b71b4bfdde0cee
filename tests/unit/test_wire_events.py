"""Events and values as clients receive them: plain JSON, and server-sent events."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import json
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime_core._core.codec.json import decode, encode
from agent_runtime_core._core.codec.typed import register_type
from agent_runtime_core._engines.base import Op
from agent_runtime_core._journal.record import ATTEMPT, DONE, ENDED, Record
from agent_runtime_core._views.events import event_json, sse_frames
from agent_runtime_core._views.plain import plain_json
from agent_runtime_core.errors import StorageCorrupt, UnserialisableResult
from agent_runtime_core.events import Event, EventBus, InMemoryEventBus, SQLiteEventBus
from agent_runtime_core.events.base import PUBLISH
from agent_runtime_core.events.event import lazy_event
from tests.support.cases import for_each
from tests.support.codec_values import QUICK, keys, texts, values

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a01")
START = '{"sequence":0,"type":"tick","time":"1970-01-01T00:00:07.500000+00:00","payload":'


def stored(payload: str, event_type: str = "tick", sequence: int = 0, t: float = 7.5) -> Event:
    return lazy_event(RUN, sequence, ("id", event_type, payload, t))


# -- plain JSON


def is_plain_form(found: Any, value: Any) -> bool:
    """Whether parsed JSON is what a client is to get for a value."""
    if isinstance(value, enum.Enum):
        return bool(found == (value.value if isinstance(value, enum.Flag) else value.name))
    if isinstance(value, bytes):
        return bool(found == base64.b64encode(value).decode())
    if isinstance(value, list | tuple):
        return isinstance(found, list) and len(found) == len(value) and all(map(is_plain_form, found, value))
    if isinstance(value, set | frozenset):
        if not isinstance(found, list) or len(found) != len(value):
            return False
        return all(any(is_plain_form(each, item) for each in found) for item in value)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        if not isinstance(found, dict) or list(found) != list(map(joined, value)):
            return False
        return all(map(is_plain_form, found.values(), value.values()))
    plain = _atom(value)
    return type(found) is type(plain) and bool(found == plain)


def _atom(value: Any) -> Any:
    match value:
        case str():
            return joined(value)
        case UUID() | Decimal():
            return str(value)
        case dt.date() | dt.time():
            return value.isoformat()
        case dt.timedelta():
            return value.total_seconds()
    return value


def joined(text: str) -> str:
    """The text with two lone surrogates in a row as one character, as each JSON parser reads them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


@QUICK
@given(st.dictionaries(keys, values, max_size=4))
def test_a_stored_value_becomes_json_of_its_plain_form(value: dict[str, Any]) -> None:
    try:
        text = encode(value)
    except UnserialisableResult:
        return  # it is not stored
    plain = plain_json(text)
    assert plain.isascii()
    assert plain.isprintable()
    assert is_plain_form(json.loads(plain), decode(text))


def test_text_without_tags_is_returned_unchanged() -> None:
    for value in ({}, {"a": [1, 2.5, None, True, "é\n\u2028\ud800"]}, {"cost": "$5", "v": "$"[:0]}, [1], "x"):
        text = encode(value)
        assert plain_json(text) is text


def test_each_type_has_a_plain_form() -> None:
    paris = dt.timezone(dt.timedelta(hours=1), "Paris")
    value = {
        "uuid": RUN,
        "moment": dt.datetime(2026, 11, 26, 12, 0, 0, 5, tzinfo=dt.UTC),
        "named": dt.datetime(2026, 11, 26, 12, tzinfo=paris),
        "naive": dt.datetime(2026, 11, 26, 12, fold=1),  # noqa: DTZ001 - it is stored, too
        "day": dt.date(2026, 11, 26),
        "time": dt.time(12, 30),
        "took": dt.timedelta(days=1, milliseconds=1500),
        "price": Decimal("1.10"),
        "raw": b"\x00\xff",
        "set": {1},
        "pair": (1, (2,)),
        "halves": "\ud83d\ude00",
        "mine": {"$": "uuid", "v": {"$": b"x"}},
    }
    assert json.loads(plain_json(encode(value))) == {
        "uuid": str(RUN),
        "moment": "2026-11-26T12:00:00.000005+00:00",
        "named": "2026-11-26T12:00:00+01:00",
        "naive": "2026-11-26T12:00:00",
        "day": "2026-11-26",
        "time": "12:30:00",
        "took": 86401.5,
        "price": "1.10",
        "raw": "AP8=",
        "set": [1],
        "pair": [1, [2]],
        "halves": "\U0001f600",
        "mine": {"$": "uuid", "v": {"$": "eA=="}},
    }


@register_type
class Shade(enum.Enum):
    DARK = "d"


@register_type
@dataclasses.dataclass
class Car:
    doors: int
    shade: Shade
    built: dt.date
    more: Any = None


def test_dataclasses_and_enums_become_their_fields_and_names() -> None:
    text = encode({"car": Car(4, Shade.DARK, dt.date(2026, 1, 2), {"raw": b"x"})})
    plain = {"car": {"doors": 4, "shade": "DARK", "built": "2026-01-02", "more": {"raw": "eA=="}}}
    assert json.loads(plain_json(text)) == plain
    gone = text.replace(f"{__name__}.Car", "theirs.Car").replace(f"{__name__}.Shade", "theirs.Shade")
    assert json.loads(plain_json(gone)) == plain, "types that are not registered in this process"


@for_each(
    ("text", "plain"),
    [
        ('{"$":"later","v":[{"$":"uuid","v":"u"}]}', ["u"]),  # a later version of the library wrote it
        ('{"$":"datetime","v":["2026-01-01T00:00:00",0,"No/Where"]}', "2026-01-01T00:00:00"),
        ('{"$":"datetime","v":[1,2]}', [1, 2]),
        ('{"$":"timedelta","v":["x"]}', ["x"]),
        ('{"$":"timedelta","v":[1e9,0,1e99]}', [1e9, 0, 1e99]),
        ('{"$":"text","v":[1]}', [1]),
        ('{"$":"dict","v":[1]}', [1]),
        ('{"$":1,"v":{"$":"uuid","v":"u"}}', {"$": 1, "v": "u"}),
        ('{"$":"uuid","v":"u","w":1}', {"$": "uuid", "v": "u", "w": 1}),
        ('{"$":"uuid","w":"u"}', {"$": "uuid", "w": "u"}),
        ('{"$":["uuid"],"v":"u"}', {"$": ["uuid"], "v": "u"}),
        ('{"a": NaN, "b": [Infinity, -Infinity]}', {"a": None, "b": [None, None]}),
        ('{"a":1e999,"$":1}', {"a": None, "$": 1}),
        ('{\n"a":\r1,"b":"é\u2028"}', {"a": 1, "b": "é\u2028"}),
    ],
)
def test_text_that_this_version_does_not_write_becomes_json_too(text: str, plain: object) -> None:
    found = plain_json(text)
    assert json.loads(found, parse_constant=pytest.fail) == plain
    assert found.isascii()
    assert found.isprintable()


NO_JSON = {"cut": '{"$"', "more": '{"$":"uuid","v":"u"} x', "two": '"$"' * 2, "deep": '{"$":' + "[" * 100_000, "é": "é"}


@pytest.mark.parametrize("text", NO_JSON.values(), ids=NO_JSON)
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(UnserialisableResult, match=r"Restore a backup|nested too deeply"):
        plain_json(text)


# -- events


def test_an_event_has_its_stored_payload() -> None:
    assert event_json(stored('{"a":"\\u00e9"}')).decode() == START + '{"a":"\\u00e9"}}'
    assert event_json(stored('{"a":{"$":"uuid","v":"u"}}')).decode() == START + '{"a":"u"}}'


def test_an_event_is_encoded_once() -> None:
    event = stored("{}")
    assert event_json(event) is event_json(event)
    assert dataclasses.replace(event, sequence=1) != event
    assert json.loads(event_json(dataclasses.replace(event, sequence=1)))["sequence"] == 1


def test_an_event_of_ones_own_has_a_time_in_utc() -> None:
    there = dt.timezone(dt.timedelta(hours=2))
    event = Event(RUN, "tick", {"raw": b"x"}, dt.datetime(2026, 1, 1, 1, tzinfo=there), 3)
    assert json.loads(event_json(event)) == {
        "sequence": 3,
        "type": "tick",
        "time": "2025-12-31T23:00:00+00:00",
        "payload": {"raw": "eA=="},
    }


@pytest.mark.parametrize(
    "change", [{"payload": "{"}, {"payload": "[1]"}, {"payload": '{"$"}'}, {"payload": "{}", "t": 1e300}]
)
def test_a_damaged_event_is_reported(change: dict[str, Any]) -> None:
    with pytest.raises(StorageCorrupt, match=f"run {RUN}: (payload|timestamp) of event 0 .*Restore a backup"):
        event_json(stored(**change))


@pytest.fixture(params=["memory", "sqlite"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> EventBus:
    return InMemoryEventBus() if request.param == "memory" else SQLiteEventBus(tmp_path / "events.db")


async def test_events_of_the_journal_are_json_too(bus: EventBus) -> None:
    info = '{"tool": {"name": "t", "id": "c", "args": {}}}'
    result = '{"ok":true,"result":{"$":"theirs.Odd","v":{"at":{"$":"date","v":"2026-01-01"}}}}'
    output = '{"final_output":{"raw":{"$":"bytes","v":"eA=="}},"usage":{}}'
    records = [
        Record(0, ATTEMPT, "agent", attempt=1, claim_id="01A", t=10.0, nev=1),
        Record(1, DONE, "tool", "0", claim_id="01A", t=20.0, info=info, result=result, nev=1),
        Record(2, ENDED, "succeeded", claim_id="01A", t=30.5, result=output, nev=1),
    ]
    await bus.commit(None, [Op("journal.append", (str(RUN), record)) for record in records])
    [page] = [await anext(bus.pages(RUN))]
    found = [json.loads(event_json(event)) for event in page]
    assert [each["type"] for each in found] == ["run.started", "tool.result", "run.succeeded"]
    assert [each["time"][11:19] for each in found] == ["00:00:10", "00:00:20", "00:00:30"]
    assert found[0]["payload"] == {"agent_key": "agent", "attempt": 1}
    assert found[1]["payload"]["result"] == {"at": "2026-01-01"}
    assert found[2]["payload"] == {"final_output": {"raw": "eA=="}, "usage": {}}
    await bus.close()


# -- server-sent events


def parsed_sse(stream: bytes) -> list[tuple[str, str, str]]:
    """(type, last event id, data) of each event, by the rules of the HTML standard, section 9.2.6."""
    text = stream.decode("utf-8").removeprefix("\ufeff")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    events: list[tuple[str, str, str]] = []
    data, event_type, last_id = "", "", ""
    for line in lines[:-1]:  # the rest after the last line end is not a line
        if line == "":
            if data:
                events.append((event_type or "message", last_id, data.removesuffix("\n")))
            data, event_type = "", ""
            continue
        field, colon, value = line.partition(":")
        if colon and not field:
            continue  # a comment
        value = value.removeprefix(" ")
        if field == "data":
            data += value + "\n"
        elif field == "event":
            event_type = value
        elif field == "id" and "\0" not in value:
            last_id = value
    return events


hostile = st.one_of(
    texts,
    st.text(st.sampled_from("\r\n\0\u2028\u2029\x85\x0b\x0c: \ud800\udc00éa"), max_size=8),
    st.just("x\r\ndata: y\n\nid: 9"),
)
payloads = st.dictionaries(hostile, hostile, max_size=3)


@QUICK
@given(st.lists(st.tuples(hostile, payloads, st.sampled_from([None, 2])), min_size=1, max_size=4), st.booleans())
def test_each_event_is_one_server_sent_event(rows: list[tuple[str, dict[str, str], int | None]], named: bool) -> None:
    events = [
        stored(json.dumps(payload, indent=indent, ensure_ascii=indent is None or not _has_halves(payload)), kind, n)
        for n, (kind, payload, indent) in enumerate(rows, 5)
    ]
    found = parsed_sse(sse_frames(events, named=named))
    assert len(found) == len(rows)
    for n, ((shown_type, last_id, data), (kind, payload, _)) in enumerate(zip(found, rows, strict=True), 5):
        event = json.loads(data)
        assert (last_id, event["sequence"]) == (str(n), n)
        assert event["type"] == json.loads(json.dumps(kind))
        assert event["payload"] == json.loads(json.dumps(payload))
        if not named:
            assert shown_type == "message"
        elif kind.isprintable():
            assert shown_type == (kind or "message")


def _has_halves(payload: dict[str, str]) -> bool:
    return any("\ud800" <= char <= "\udfff" for text in (*payload, *payload.values()) for char in text)


async def test_frames_of_a_page_are_made_once(bus: EventBus) -> None:
    for n in range(3):
        await bus.publish(RUN, "tick", {"n": n})
    await bus.commit(None, [Op(PUBLISH, (str(RUN), (("odd", "a\nb", "{}", 9.0),)))])
    page = await anext(bus.pages(RUN))
    for named in (False, True):
        frames = sse_frames(page, named=named)
        assert frames is sse_frames(page, named=named)
        assert frames == sse_frames(list(page), named=named)
        assert [(last_id, json.loads(data)["sequence"]) for _, last_id, data in parsed_sse(frames)] == [
            (str(n), n) for n in range(4)
        ]
    assert [kind for kind, *_ in parsed_sse(sse_frames(page, named=True))] == ["tick", "tick", "tick", "a\\nb"]
    assert sse_frames(page[:1]) == b"id: 0\ndata: " + event_json(page[0]) + b"\n\n"
    await bus.close()
