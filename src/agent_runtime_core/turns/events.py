"""The events of turns: envelopes and their payloads."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from .._core.codec.typed import Policy, to_plain
from .._core.validation import nearest_name
from ..errors import InvalidTurn, UnserialisableResult, brief

TURNS, STEPS, RESULTS, AUDIT = "agent.turns", "agent.steps", "agent.step_results", "agent.audit"
TOPICS = (TURNS, STEPS, RESULTS, AUDIT)
VERSION = 1

_MAX_ID_LENGTH = 200
_FINAL_STATUSES = ("completed", "failed", "skipped", "cancelled")
_ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Base class of payloads. Unknown fields and values of another type raise InvalidTurn."""

    type: ClassVar[str]
    topic: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can represent."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return the payload for the output of `to_dict`, or for a dict written by hand.

        Raises:
            InvalidTurn: Names the field that is unknown, missing or of another type.
        """
        known = {each.name: each for each in dataclasses.fields(cls)}
        _check_names("payload", cls.type, data, known)
        for name, each in known.items():
            if name not in data and each.default is each.default_factory is dataclasses.MISSING:
                raise InvalidTurn(name, f"required by {cls.type}")
        return cls(**data)

    def __post_init__(self) -> None:
        try:
            to_plain(self, type(self), _CHECKED)
        except UnserialisableResult as error:
            raise InvalidTurn(error.path.removeprefix("$."), error.reason) from None


_CHECKED: Final = Policy(strict={float: (float, int)})


def _check_names(field_: str, what: str, data: Any, known: Collection[str]) -> None:
    if not isinstance(data, Mapping):
        raise InvalidTurn(field_, f"{what} must be an object, got {brief(data)}")
    for name in data:
        if name not in known:
            raise InvalidTurn(str(name)[:80], f"{what} has no such field: {nearest_name(name, known)}")


def _check_id(what: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_ID_LENGTH or not value.isprintable():
        raise InvalidTurn(what, f"must be 1 to {_MAX_ID_LENGTH} printable characters, got {brief(value)}")


@dataclass(frozen=True, kw_only=True)
class TurnEvent(Payload):
    """Requests a turn. `messages` are in chat format, the user's last.

    A second event with the same `turn_id` requests the same turn. `trace_id` is the trace of the caller: the turn has
    its own, and stores this one in its metadata.
    """

    type: ClassVar[str] = "turn.requested"
    topic: ClassVar[str] = TURNS

    messages: list[Any]
    turn_id: str | None = None
    conversation_id: str | None = None
    user_id: str | None = None
    personality: str | None = None
    trace_id: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, asked: TurnEvent | Mapping[str, Any] | str) -> TurnEvent:
        """Return the event for an event, its dict, or the text of a user message.

        In a dict, `text` may replace `messages` by one user message.

        Raises:
            InvalidTurn: Names the field that is invalid.
        """
        if isinstance(asked, TurnEvent):
            return asked
        if isinstance(asked, str):
            return cls(messages=[_message_of("text", asked)])
        if not isinstance(asked, Mapping):
            raise InvalidTurn("turn", f"must be a TurnEvent, its dict or a string, got {brief(asked)}")
        data = dict(asked)
        if "text" in data:
            text = data.pop("text")
            if "messages" in data:
                raise InvalidTurn("text", "must not be combined with messages. Pass one of the two")
            data["messages"] = [_message_of("text", text)]
        return cls.from_dict(data)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("turn_id", "conversation_id", "user_id", "personality", "trace_id"):
            _check_id(name, getattr(self, name))
        if not self.messages:
            raise InvalidTurn("messages", "must have at least one message, got none")
        for index, each in enumerate(self.messages):
            _check_message(f"messages[{index}]", each)
        if self.messages[-1]["role"] == "assistant":
            raise InvalidTurn("messages", "must not end with a message of the assistant, which needs no answer")

    @property
    def prompt(self) -> str:
        """The text of the user's last message."""
        last = next((each for each in reversed(self.messages) if each["role"] == "user"), self.messages[-1])
        content = last.get("content") or ""
        if isinstance(content, str):
            return content
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping)).strip()


def _message_of(field_: str, text: Any) -> dict[str, Any]:
    """Return the user message of a text that the caller passed as `field_`."""
    if not isinstance(text, (str, list)):
        raise InvalidTurn(field_, f"must be a string or a list of parts, got {brief(text)}")
    if not text or (isinstance(text, str) and not text.strip()):
        raise InvalidTurn(field_, f"must not be empty, got {brief(text)}")
    return {"role": "user", "content": text}


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise InvalidTurn(where, f"must be an object with role and content, got {brief(message)}")
    if message.get("role") not in _ROLES:
        raise InvalidTurn(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {brief(message.get('role'))}")
    content = message.get("content")
    if not isinstance(content, (str, list)) and not (content is None and message["role"] == "assistant"):
        raise InvalidTurn(f"{where}.content", f"must be a string or a list of parts, got {brief(content)}")
    if message["role"] == "user" and (not content or (isinstance(content, str) and not content.strip())):
        raise InvalidTurn(f"{where}.content", "must not be empty")


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Payload):
    """Requests the plan of a turn. `tools` are the names of the allowed tools."""

    type: ClassVar[str] = "plan.requested"
    topic: ClassVar[str] = AUDIT

    prompt: str
    tools: list[Any]
    personality: str = "default"
    system_prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class StepEvent(Payload):
    """Announces one step of a plan. `position` is its index in an order that respects all dependencies."""

    type: ClassVar[str] = "step.planned"
    topic: ClassVar[str] = STEPS

    step_number: int
    kind: str
    tool_name: str = ""
    tool_input: dict[str, Any] = field(default_factory=dict)
    depends_on: list[Any] = field(default_factory=list)
    reasoning: str = ""
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class StepResultChunk(Payload):
    """A piece of a step's answer, or with `final` the step's outcome. `index` counts the pieces of one attempt."""

    type: ClassVar[str] = "step.result"
    topic: ClassVar[str] = RESULTS

    step_number: int
    index: int = 0
    delta: str = ""
    final: bool = False
    status: str | None = None
    result: Any = None
    error: str | None = None
    attempt: int = 1
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final:
            _check_choice("status", self.status, _FINAL_STATUSES)
        for name, value in self.metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
                raise InvalidTurn(f"metrics.{name:.80}", f"must be a number, got {brief(value)}")


@dataclass(frozen=True, kw_only=True)
class AuditEvent(Payload):
    """An entry of the audit trail: `action` was done."""

    type: ClassVar[str] = "audit"
    topic: ClassVar[str] = AUDIT

    action: str
    details: dict[str, Any] = field(default_factory=dict)


PAYLOADS: dict[str, type[Payload]] = {
    each.type: each for each in (TurnEvent, PlanRequest, StepEvent, StepResultChunk, AuditEvent)
}


@dataclass(frozen=True, kw_only=True)
class EventEnvelope:
    """An event of a topic. Events with the same `event_id` are published once.

    `offset` is the position in the topic, None for an event that was not read from one.
    """

    topic: str
    event_id: str
    type: str
    payload: Payload
    timestamp: _dt.datetime
    trace_id: str | None = None
    turn_id: str | None = None
    step_id: str | None = None
    version: int = VERSION
    offset: int | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can represent, without the offset."""
        return {
            "topic": self.topic, "event_id": self.event_id, "type": self.type, "trace_id": self.trace_id,
            "turn_id": self.turn_id, "step_id": self.step_id, "timestamp": self.timestamp.isoformat(),
            "payload": self.payload.to_dict(), "version": self.version,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any, offset: int | None = None) -> EventEnvelope:
        """Return the envelope that `to_dict` wrote.

        Raises:
            InvalidTurn: Names the field that is invalid.
        """
        known = [each.name for each in dataclasses.fields(cls) if each.name != "offset"]
        _check_names("envelope", "an envelope", data, known)
        if data.get("version", VERSION) != VERSION:
            raise InvalidTurn("version", f"must be {VERSION}, got {brief(data['version'])}, written by a later release")
        _check_choice("topic", data.get("topic"), TOPICS)
        _check_choice("type", data.get("type"), tuple(PAYLOADS))
        ids: dict[str, Any] = {name: data.get(name) for name in ("trace_id", "turn_id", "step_id")}
        for name, value in {**ids, "event_id": data.get("event_id") or ""}.items():
            _check_id(name, value)
        return cls(
            topic=data["topic"], event_id=data["event_id"], type=data["type"], offset=offset,
            timestamp=_timestamp(data.get("timestamp")),
            payload=PAYLOADS[data["type"]].from_dict(data.get("payload")), **ids,
        )  # fmt: skip


def _check_choice(field_: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidTurn(field_, f"must be one of {', '.join(known)}, got {brief(value)}")


def _timestamp(value: Any) -> _dt.datetime:
    try:
        found = _dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidTurn("timestamp", f"must be a time in ISO 8601, got {brief(value)}") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=_dt.UTC)
