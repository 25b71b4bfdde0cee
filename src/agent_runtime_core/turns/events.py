"""What turns tell each other and the world: envelopes, and what may be in them."""

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

_LONGEST_ID = 200
_ENDS = ("completed", "failed", "skipped", "cancelled")
_ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A typed payload: `from_dict` refuses what it does not know, and what has another type, as InvalidTurn."""

    type: ClassVar[str]
    topic: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The payload that `to_dict` wrote, or one written by hand."""
        known = {each.name: each for each in dataclasses.fields(cls)}
        _check_names("payload", cls.type, data, known)
        for name, each in known.items():
            if name not in data and each.default is each.default_factory is dataclasses.MISSING:
                raise InvalidTurn(name, f"{cls.type} needs it")
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


def _named(what: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_ID or not value.isprintable():
        raise InvalidTurn(what, f"must be 1 to {_LONGEST_ID} printable characters, got {brief(value)}")


@dataclass(frozen=True, kw_only=True)
class TurnEvent(Payload):
    """Asks for a turn: `messages` in chat format, the user's last. The same `turn_id` is the same turn.

    `trace_id` is the trace of the caller; the turn has one of its own, and keeps this one in its metadata.
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
        """Any way to ask for a turn: an event, its dict (`text` stands for one message of the user), or the text."""
        if isinstance(asked, TurnEvent):
            return asked
        if isinstance(asked, str):
            return cls(messages=[{"role": "user", "content": asked}])
        if not isinstance(asked, Mapping):
            raise InvalidTurn("turn", f"is a TurnEvent, its dict or a text, not {brief(asked)}")
        given = dict(asked)
        if "text" in given:
            text = given.pop("text")
            if "messages" in given:
                raise InvalidTurn("text", "stands for messages: give one of the two")
            given["messages"] = [{"role": "user", "content": text}]
        return cls.from_dict(given)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("turn_id", "conversation_id", "user_id", "personality", "trace_id"):
            _named(name, getattr(self, name))
        if not self.messages:
            raise InvalidTurn("messages", "there is none: a turn answers at least one message")
        for place, each in enumerate(self.messages):
            _check_message(f"messages[{place}]", each)
        if self.messages[-1]["role"] == "assistant":
            raise InvalidTurn("messages", "the last one is the assistant's: there is nothing to answer")

    @property
    def prompt(self) -> str:
        """What the user said last, as text."""
        said = next((each for each in reversed(self.messages) if each["role"] == "user"), self.messages[-1])
        content = said.get("content") or ""
        if isinstance(content, str):
            return content
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping)).strip()


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise InvalidTurn(where, f"is an object with role and content, not {brief(message)}")
    if message.get("role") not in _ROLES:
        raise InvalidTurn(f"{where}.role", f"is one of {', '.join(_ROLES)}, not {brief(message.get('role'))}")
    content = message.get("content")
    if not isinstance(content, (str, list)) and not (content is None and message["role"] == "assistant"):
        raise InvalidTurn(f"{where}.content", f"is a text or a list of parts, not {brief(content)}")
    if message["role"] == "user" and (not content or (isinstance(content, str) and not content.strip())):
        raise InvalidTurn(f"{where}.content", "is empty")


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Payload):
    """Asks for the plan of a turn; `tools` are the names that may be used."""

    type: ClassVar[str] = "plan.requested"
    topic: ClassVar[str] = AUDIT

    prompt: str
    tools: list[Any]
    personality: str = "default"
    system_prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class StepEvent(Payload):
    """One step of a plan, in the order in which the steps can be done."""

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
    """A piece of a step's answer, or with `final` how the step ended; `index` counts the pieces of one try from 0."""

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
            _one_of("status", self.status, _ENDS)
        for name, value in self.metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
                raise InvalidTurn(f"metrics.{name:.80}", f"is a number, not {brief(value)}")


@dataclass(frozen=True, kw_only=True)
class AuditEvent(Payload):
    """What was done, for those who have to know later."""

    type: ClassVar[str] = "audit"
    topic: ClassVar[str] = AUDIT

    action: str
    details: dict[str, Any] = field(default_factory=dict)


PAYLOADS: dict[str, type[Payload]] = {
    each.type: each for each in (TurnEvent, PlanRequest, StepEvent, StepResultChunk, AuditEvent)
}


@dataclass(frozen=True, kw_only=True)
class EventEnvelope:
    """An event of a topic. The same `event_id` is the same event: it is published once.

    `offset` is its place in its topic, where it was read from one.
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
        """Plain values that JSON can hold, without the offset."""
        return {
            "topic": self.topic, "event_id": self.event_id, "type": self.type, "trace_id": self.trace_id,
            "turn_id": self.turn_id, "step_id": self.step_id, "timestamp": self.timestamp.isoformat(),
            "payload": self.payload.to_dict(), "version": self.version,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any, offset: int | None = None) -> EventEnvelope:
        """The envelope that `to_dict` wrote; InvalidTurn names the field that does not fit."""
        known = [each.name for each in dataclasses.fields(cls) if each.name != "offset"]
        _check_names("envelope", "an envelope", data, known)
        if data.get("version", VERSION) != VERSION:
            raise InvalidTurn("version", f"is {VERSION}, not {brief(data['version'])}: a later release wrote this")
        _one_of("topic", data.get("topic"), TOPICS)
        _one_of("type", data.get("type"), tuple(PAYLOADS))
        ids: dict[str, Any] = {name: data.get(name) for name in ("trace_id", "turn_id", "step_id")}
        for name, value in {**ids, "event_id": data.get("event_id") or ""}.items():
            _named(name, value)
        return cls(
            topic=data["topic"], event_id=data["event_id"], type=data["type"], timestamp=_when(data.get("timestamp")),
            payload=PAYLOADS[data["type"]].from_dict(data.get("payload")), offset=offset, **ids,
        )  # fmt: skip


def _one_of(field_: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidTurn(field_, f"is one of {', '.join(known)}, not {brief(value)}")


def _when(value: Any) -> _dt.datetime:
    try:
        found = _dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidTurn("timestamp", f"is a time in ISO 8601, not {brief(value)}") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=_dt.UTC)
