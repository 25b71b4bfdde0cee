"""The events of turns: envelopes and their payloads."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self
from uuid import UUID, uuid5

from .._core.arguments import checked_tenant
from .._core.codec.typed import Policy, to_plain
from .._core.validation import Shown, must, sentence, unknown
from ..errors import InvalidArgument, InvalidTurn, UnserialisableResult
from ..events.event import TOPICS as TOPICS

TURNS, STEPS, RESULTS, AUDIT = TOPICS
VERSION = 1

_MAX_ID_LENGTH = 200
_EVENT_IDS: Final = UUID("7c1d2f0e-58c4-5b0b-9d0a-3f6f1d6f2a41")  # the stored ids of events of tenants derive from it
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

        Args:
            data: The fields by name.

        Raises:
            InvalidTurn: Names the field that is unknown, missing or of another type.
        """
        known = {each.name: each for each in dataclasses.fields(cls)}
        _check_names("payload", cls.type, data, known)
        for name, each in known.items():
            if name not in data and each.default is each.default_factory is dataclasses.MISSING:
                raise invalid(name, "be set", Shown("no value"), f"Add it to the payload of {cls.type}")
        return cls(**data)

    def __post_init__(self) -> None:
        try:
            to_plain(self, type(self), _CHECKED)
        except UnserialisableResult as error:
            raise InvalidTurn(error.path.removeprefix("$."), sentence(error.reason)) from None


_CHECKED: Final = Policy(strict={float: (float, int)})


def invalid(field_: str, constraint: str, value: object, fix: str = "") -> InvalidTurn:
    """Return the error for an invalid field of a turn or event. The arguments are the same as for `must`."""
    return InvalidTurn(field_, str(must("", constraint, value, fix)).lstrip())


def _check_names(field_: str, what: str, data: Any, known: Collection[str]) -> None:
    if not isinstance(data, Mapping):
        raise invalid(field_, f"be an object with the fields of {what}", data)
    for name in data:
        if name not in known:
            raise InvalidTurn(str(name)[:80], unknown("field", name, known))


def _check_id(what: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_ID_LENGTH or not value.isprintable():
        raise invalid(what, f"be a string of 1 to {_MAX_ID_LENGTH} printable characters", value)


def _check_tenant(value: object) -> None:
    try:
        checked_tenant(value)
    except InvalidArgument as error:
        raise InvalidTurn("tenant", str(error).removeprefix("tenant ")) from None


def _without_absent_tenant(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a dict without the key "tenant" if its value is None: earlier releases reject an unknown key."""
    return {name: value for name, value in plain.items() if name != "tenant" or value is not None}


@dataclass(frozen=True, kw_only=True)
class TurnEvent(Payload):
    """Requests a turn. `messages` are in chat format, the user's last.

    A second event with the same `turn_id` requests the same turn. `trace_id` is the trace of the caller. The turn
    creates a new trace, and stores the caller's in its metadata. `turn_id` and `conversation_id` are names within the
    `tenant`.

    Attributes:
        type: "turn.requested".
        topic: "agent.turns".
        messages: The messages in chat format, the user's last.
        turn_id: The id of the turn; a second event with the same id requests the same turn. If None, a new id.
        conversation_id: The conversation that the turn belongs to, or None.
        user_id: The user, or None.
        personality: The name of the personality; None for the default personality.
        trace_id: The trace of the caller, or None.
        params: The parameters of the run.
        metadata: Further data of the application, as JSON.
        tenant: Whose turn it is, or None.

    Examples:
        >>> from agent_runtime_core.turns import TurnEvent
        >>> TurnEvent.of("What is 2 + 3?").prompt
        'What is 2 + 3?'
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
    tenant: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return _without_absent_tenant(super().to_dict())

    @classmethod
    def of(cls, asked: TurnEvent | Mapping[str, Any] | str) -> TurnEvent:
        """Return the event for an event, its dict, or the text of a user message.

        In a dict, `text` may replace `messages` by one user message.

        Args:
            asked: The event, its dict or the text.

        Raises:
            InvalidTurn: Names the field that is invalid.
        """
        if isinstance(asked, TurnEvent):
            return asked
        if isinstance(asked, str):
            return cls(messages=[_message_of("text", asked)])
        if not isinstance(asked, Mapping):
            raise invalid("turn", "be a TurnEvent, its dict or a string", asked)
        data = dict(asked)
        if "text" in data:
            text = data.pop("text")
            if "messages" in data:
                raise invalid("text", "not be combined with messages", text, "Pass one of the two")
            data["messages"] = [_message_of("text", text)]
        return cls.from_dict(data)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("turn_id", "conversation_id", "user_id", "personality", "trace_id"):
            _check_id(name, getattr(self, name))
        _check_tenant(self.tenant)
        if not self.messages:
            raise invalid(
                "messages", "have at least one message", self.messages, 'Pass [{"role": "user", "content": "…"}]'
            )
        for index, each in enumerate(self.messages):
            _check_message(f"messages[{index}]", each)
        if self.messages[-1]["role"] == "assistant":
            fix = "Add the message that the turn answers"
            raise invalid("messages", "not end with a message of the assistant", self.messages[-1], fix)

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
        raise invalid(field_, "be a string or a list of parts", text)
    if not text or (isinstance(text, str) and not text.strip()):
        raise invalid(field_, "not be empty", text, "Pass the message of the user")
    return {"role": "user", "content": text}


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise invalid(where, "be an object with role and content", message)
    if message.get("role") not in _ROLES:
        raise invalid(f"{where}.role", f"be one of {', '.join(_ROLES)}", message.get("role"))
    content = message.get("content")
    if not isinstance(content, (str, list)) and not (content is None and message["role"] == "assistant"):
        raise invalid(f"{where}.content", "be a string or a list of parts", content)
    if message["role"] == "user" and (not content or (isinstance(content, str) and not content.strip())):
        raise invalid(f"{where}.content", "not be empty", content, "Pass the message of the user")


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Payload):
    """Requests the plan of a turn. `tools` are the names of the allowed tools.

    Attributes:
        type: "plan.requested".
        topic: "agent.audit".
        prompt: The prompt of the turn.
        tools: The names of the allowed tools.
        personality: The name of the personality.
        system_prompt: The system prompt of the personality.
    """

    type: ClassVar[str] = "plan.requested"
    topic: ClassVar[str] = AUDIT

    prompt: str
    tools: list[Any]
    personality: str = "default"
    system_prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class StepEvent(Payload):
    """Announces one step of a plan. `position` is its index in an order that respects all dependencies.

    Attributes:
        type: "step.planned".
        topic: "agent.steps".
        step_number: The number of the step in its plan.
        kind: The kind of step, as in `StepKind`.
        tool_name: The tool, or memory operation.
        tool_input: The input of the tool.
        depends_on: The numbers of steps that it waits for.
        reasoning: Why the planner chose it.
        position: Its index in an order that respects all dependencies.
    """

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
class StepRequest(Payload):
    """Requests an attempt of a step from provider workers. The steps that it needs have finished.

    Attributes:
        type: "step.requested".
        topic: "agent.steps".
        step_number: Its number in the plan.
        kind: Its kind.
        tool_name: The tool, or memory operation.
        tool_input: Its input, with references replaced by results.
        attempt: Which attempt it is.
        messages: The messages of a model call, with the system prompt.
        options: The options of a model call, such as `model` and `temperature`.
        deadline: When the turn stops waiting, in seconds since 1970.
        results_from: The offset of agent.step_results from which on answers may come.
    """

    type: ClassVar[str] = "step.requested"
    topic: ClassVar[str] = STEPS

    step_number: int
    kind: str
    tool_name: str = ""
    tool_input: dict[str, Any] = field(default_factory=dict)
    attempt: int = 1
    messages: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    deadline: float = 0.0
    results_from: int = 0


@dataclass(frozen=True, kw_only=True)
class StepResultChunk(Payload):
    """A piece of a step's answer, or with `final` the step's outcome. `index` counts the pieces of one attempt.

    Attributes:
        type: "step.result".
        topic: "agent.step_results".
        step_number: The number of the step in its plan.
        index: The number of the piece in its attempt.
        delta: The text of the piece.
        final: Whether this is the outcome of the step.
        status: With `final`: "completed", "failed", "skipped" or "cancelled".
        result: With `final`: what the step returned.
        error: With `final`: why the step failed.
        attempt: The number of the attempt.
        metrics: Numbers by name, such as `latency_ms`.
    """

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
                raise invalid(f"metrics.{name:.80}", "be a number", value)


@dataclass(frozen=True, kw_only=True)
class AuditEvent(Payload):
    """An entry of the audit trail: `action` was done.

    Attributes:
        type: "audit".
        topic: "agent.audit".
        action: What was done.
        details: More about it, as JSON.
    """

    type: ClassVar[str] = "audit"
    topic: ClassVar[str] = AUDIT

    action: str
    details: dict[str, Any] = field(default_factory=dict)


PAYLOADS: dict[str, type[Payload]] = {
    each.type: each for each in (TurnEvent, PlanRequest, StepEvent, StepRequest, StepResultChunk, AuditEvent)
}


@dataclass(frozen=True, kw_only=True)
class EventEnvelope:
    """An event of a topic. Events of the same `tenant` with the same `event_id` are published once.

    `tenant` is the tenant of the turn that the event is about. `event_id` and `turn_id` are names within it. `offset`
    is the position in the topic, None for an event that was not read from a topic.

    Attributes:
        topic: The topic of the event.
        event_id: The id of the event; events of the same tenant with the same id are published once.
        type: The type of the payload.
        payload: The payload.
        timestamp: When the event was made.
        trace_id: The trace of the turn, or None.
        turn_id: The turn that the event is about, or None.
        step_id: The step that the event is about, or None.
        version: The version of the format.
        tenant: The tenant of the turn, or None.
        offset: The position in the topic; None for an event that was not read from a topic.
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
    tenant: str | None = None
    offset: int | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can represent, without the offset."""
        return _without_absent_tenant({
            "topic": self.topic, "event_id": self.event_id, "type": self.type, "trace_id": self.trace_id,
            "turn_id": self.turn_id, "step_id": self.step_id, "timestamp": self.timestamp.isoformat(),
            "payload": self.payload.to_dict(), "version": self.version, "tenant": self.tenant,
        })  # fmt: skip

    @property
    def stored_id(self) -> str:
        """The id under which a topic stores the event. Events of other tenants use different ids."""
        if self.tenant is None:
            return self.event_id
        return str(uuid5(_EVENT_IDS, f"{self.tenant}\0{self.event_id}"))

    @classmethod
    def from_dict(cls, data: Any, offset: int | None = None) -> EventEnvelope:
        """Return the envelope that `to_dict` wrote.

        Args:
            data: What `to_dict` returned.
            offset: The position in the topic, or None.

        Raises:
            InvalidTurn: Names the field that is invalid.
        """
        known = [each.name for each in dataclasses.fields(cls) if each.name != "offset"]
        _check_names("envelope", "an EventEnvelope", data, known)
        if data.get("version", VERSION) != VERSION:
            raise invalid("version", f"be {VERSION}", data["version"], "Upgrade agent-runtime-core")
        _check_choice("topic", data.get("topic"), TOPICS)
        _check_choice("type", data.get("type"), tuple(PAYLOADS))
        ids: dict[str, Any] = {name: data.get(name) for name in ("trace_id", "turn_id", "step_id")}
        for name, value in {**ids, "event_id": data.get("event_id") or ""}.items():
            _check_id(name, value)
        _check_tenant(tenant := data.get("tenant"))
        return cls(
            topic=data["topic"], event_id=data["event_id"], type=data["type"], offset=offset,
            timestamp=_timestamp(data.get("timestamp")),
            payload=PAYLOADS[data["type"]].from_dict(data.get("payload")), tenant=tenant, **ids,
        )  # fmt: skip


def _check_choice(field_: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise invalid(field_, f"be one of {', '.join(known)}", value)


def _timestamp(value: Any) -> _dt.datetime:
    try:
        found = _dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise invalid("timestamp", "be a time in ISO 8601", value, "Use datetime.isoformat()") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=_dt.UTC)
