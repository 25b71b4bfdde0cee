"""Envelopes and payloads of turns: what is written is read, what does not fit is refused by the name of its field."""

from __future__ import annotations

import datetime as _dt
import json
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidTurn
from agent_runtime_core.turns import AuditEvent, EventEnvelope, PlanRequest, StepEvent, StepResultChunk, TurnEvent
from agent_runtime_core.turns.events import Payload
from tests.support.cases import for_each

SAID = [{"role": "user", "content": "hello"}]
NOW = _dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=_dt.UTC)
PAYLOADS: list[Payload] = [
    TurnEvent(messages=SAID, turn_id="t", user_id="u", params={"a": 1}),
    PlanRequest(prompt="p", tools=["calculator"]),
    StepEvent(step_number=1, kind="tool_call", tool_name="calculator", tool_input={"expression": "1"}, depends_on=[]),
    StepResultChunk(step_number=1, final=True, status="completed", result={"a": [1, None]}, metrics={"latency_ms": 1}),
    AuditEvent(action="turn.started", details={"x": "y"}),
]


def _envelope(payload: Payload) -> EventEnvelope:
    return EventEnvelope(
        topic=payload.topic, event_id="e", type=payload.type, payload=payload, timestamp=NOW, trace_id="tr",
        turn_id="t", step_id="s",
    )  # fmt: skip


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda each: each.type)
def test_an_envelope_is_read_as_it_was_written(payload: Payload) -> None:
    envelope = _envelope(payload)
    text = json.dumps(envelope.to_dict())
    assert EventEnvelope.from_dict(json.loads(text)) == envelope


def test_an_envelope_has_the_fields_of_the_spec_and_no_others() -> None:
    told = _envelope(PAYLOADS[0]).to_dict()
    assert list(told) == [
        "topic", "event_id", "type", "trace_id", "turn_id", "step_id", "timestamp", "payload", "version",
    ]  # fmt: skip
    assert told["version"] == 1
    assert told["timestamp"] == "2026-01-02T03:04:05+00:00"


@for_each(
    ("change", "field"),
    [
        ({"topic": "agent.turn"}, "topic"),
        ({"type": "nothing"}, "type"),
        ({"version": 2}, "version"),
        ({"timestamp": "yesterday"}, "timestamp"),
        ({"timestamp": None}, "timestamp"),
        ({"event_id": ""}, "event_id"),
        ({"event_id": None}, "event_id"),
        ({"event_id": "a\nb"}, "event_id"),
        ({"step_id": 7}, "step_id"),
        ({"payload": None}, "payload"),
        ({"payload": {"messages": []}}, "messages"),
        ({"extra": 1}, "extra"),
    ],
)
def test_an_envelope_that_does_not_fit_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidTurn) as refused:
        EventEnvelope.from_dict(_envelope(PAYLOADS[0]).to_dict() | change)
    assert refused.value.field == field


@for_each(
    ("turn", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*SAID, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "  "}]}, "messages[0].content"),
        ({"messages": [*SAID, {"role": "assistant", "content": "hi"}]}, "messages"),
        ({"text": ""}, "text"),
        ({"text": None}, "text"),
        ("  ", "text"),
        ({"text": "a", "messages": SAID}, "text"),
        ({"text": "a", "user": "bob"}, "user"),
        ({"text": "a", "user_id": 7}, "user_id"),
        ({"text": "a", "user_id": True}, "user_id"),
        ({"text": "a", "conversation_id": ""}, "conversation_id"),
        ({"text": "a", "trace_id": "x" * 201}, "trace_id"),
        ({"text": "a", "params": [1]}, "params"),
        ({"text": "a", "metadata": None}, "metadata"),
        (17, "turn"),
        (None, "turn"),
    ],
)
def test_a_malformed_turn_is_a_422_with_its_field(turn: Any, field: str) -> None:
    with pytest.raises(InvalidTurn) as refused:
        TurnEvent.of(turn)
    assert refused.value.field == field
    assert refused.value.status_code == 422
    assert str(refused.value).startswith((f"{field}: ", f"{field} must "))


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"final": True}, "status"),
        ({"final": True, "status": "running"}, "status"),
        ({"final": True, "status": "done"}, "status"),
        ({"metrics": {"latency_ms": "5"}}, "metrics.latency_ms"),
        ({"metrics": {"cost_usd": True}}, "metrics.cost_usd"),
    ],
)
def test_a_result_that_no_turn_could_take_in_is_refused_by_field(said: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidTurn) as refused:
        StepResultChunk(step_number=1, **said)
    assert refused.value.field == field


def test_a_field_that_is_nearly_right_is_named() -> None:
    with pytest.raises(InvalidTurn, match="'conversation_id'"):
        TurnEvent.of({"text": "a", "conversation": "c"})


def test_a_turn_is_asked_for_in_three_ways() -> None:
    assert TurnEvent.of("hello") == TurnEvent.of({"text": "hello"}) == TurnEvent(messages=SAID)


def test_the_prompt_is_what_the_user_said_last() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "two"}]
    event = TurnEvent(messages=[*SAID, {"role": "user", "content": parts}, {"role": "tool", "content": "x"}])
    assert event.prompt == "one\n\ntwo"
