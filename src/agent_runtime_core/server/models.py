"""Bodies of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import Header
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator

from .._views.queries import PRINTABLE, TENANT_TEXT, TIME_FORMS, seconds_of
from ..planning.plan import MOST_STEPS

#: A text of more than spaces, as a schema. The library checks it itself.
_NOT_BLANK: Final = {"type": "string", "pattern": r"\S"}
Key = Annotated[str, Field(min_length=1, max_length=512, json_schema_extra={**PRINTABLE})]
#: The header that makes a repeated request safe.
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", min_length=1, max_length=512, json_schema_extra={**PRINTABLE})
]


def _one_of(value: Any, *kinds: type) -> Any:
    # A union of pydantic would report one error for each of its types.
    if not isinstance(value, kinds):
        raise ValueError(f"must be {' or '.join(_TYPES[each] for each in kinds)}")
    return value


def _chat_message(value: Any) -> Any:
    return _one_of(value, str, dict)


def _step(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        return value[0], _one_of(value[1], str, int)
    if value is not None and not isinstance(value, str):
        raise ValueError("must be a step's name or id, or a pair of its name and its key or occurrence")
    return value


_TYPES: Final = {str: "a string", dict: "an object", int: "an integer"}
_STRING: Final[dict[str, Any]] = {"type": "string"}
_NULL: Final[dict[str, Any]] = {"type": "null"}

#: A time, as wall seconds.
Time = Annotated[float, BeforeValidator(seconds_of), WithJsonSchema({"anyOf": TIME_FORMS})]
_CONTENT: Final = {"anyOf": [_NOT_BLANK, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}
_USER_MESSAGE: Final = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"const": "user"}, "content": _CONTENT},
}
#: A text of the user or a chat message.
ChatMessage = Annotated[Any, BeforeValidator(_chat_message), WithJsonSchema({"anyOf": [_NOT_BLANK, _USER_MESSAGE]})]
_TURN_ID: Final = {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 200, **PRINTABLE}, _NULL]}
_OBJECT: Final = {"type": "object"}


def _turn(title: str, name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return a form of a turn with all of its fields: generated clients ignore what is beside `oneOf`."""
    return {
        "title": title,
        "type": "object",
        "additionalProperties": False,
        "required": [name],
        "properties": {
            name: content,
            **dict.fromkeys(("turn_id", "conversation_id", "user_id", "personality", "trace_id"), _TURN_ID),
            "params": _OBJECT,
            "metadata": _OBJECT,
        },
    }


_FORMS: Final = [
    _turn("TextTurn", "text", _CONTENT),
    _turn("MessagesTurn", "messages", {"type": "array", "minItems": 1, "items": _USER_MESSAGE}),
]
#: A `TurnEvent`, which checks itself.
NewTurn = Annotated[dict[str, Any], WithJsonSchema({"oneOf": _FORMS})]
_PAIR: Final = {
    "type": "array", "prefixItems": [_STRING, {"type": ["string", "integer"]}], "minItems": 2, "maxItems": 2
}  # fmt: skip
#: A step of a run, as `runner.fork` takes it.
StepName = Annotated[Any, BeforeValidator(_step), WithJsonSchema({"anyOf": [_STRING, _PAIR, _NULL]})]


def form(required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a form of a body."""
    return {"required": [*required], "properties": properties}


def one_of(*forms: dict[str, Any]) -> ConfigDict:
    """Return the configuration of a body that has one of these forms."""
    return ConfigDict(json_schema_extra={"oneOf": [*forms]})


class Body(BaseModel):
    """A JSON object. Values have the type of their field, without conversion, and there are no other fields."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


class _TenantRun(Body):
    tenant: str | None = Field(
        default=None,
        description="Whose run it is. A caller with a tenant may send no other one.",
        json_schema_extra={**TENANT_TEXT},
    )


class PromptRun(_TenantRun):
    """A run of the Orchestrator: it plans the prompt and executes the plan."""

    prompt: str
    max_steps: int = Field(default=10, ge=1, le=MOST_STEPS)


class AgentRun(_TenantRun):
    """A run of an agent."""

    agent: Key
    input: dict[str, Any] = Field(default_factory=dict)
    run_id: Key | None = Field(default=None, description="Names the run: a UUID, or a run key of 1 to 512 characters.")
    priority: int = Field(default=0, ge=-(2**31) + 1, le=2**31 - 1, description="At most the server's `max_priority`.")
    delay: float = Field(default=0, ge=0, description="Seconds until the run may start.")
    deadline: Time | None = Field(default=None, description="When the run is stopped.")
    expires_in: float | None = Field(
        default=None, ge=0, description="Seconds after which the run is not started any more."
    )
    concurrency_key: str | None = Field(default=None, max_length=512)
    conversation_id: Key | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


def _form(body: Any) -> str | None:
    """Return which form of a new run this is; None for neither or both."""
    fields = body if isinstance(body, dict) else ()
    forms = [form for name, form in (("prompt", "PromptRun"), ("agent", "AgentRun")) if name in fields]
    return forms[0] if len(forms) == 1 else None


NewRun = Annotated[
    Annotated[PromptRun, Tag("PromptRun")] | Annotated[AgentRun, Tag("AgentRun")],
    Discriminator(
        _form,
        custom_error_type="run_form",
        custom_error_message="body must be an object with either prompt or agent. Send one of the two",
    ),
]


class Cancel(Body):
    """How long to wait for the run to stop."""

    wait: float = Field(default=0, ge=0, le=60, description="Seconds.")


class Fork(Body):
    """Which saved results the new run starts with."""

    after_step: StepName = Field(
        default=None,
        description="A step's name or id, or a pair of its name and its key or occurrence. Null: all steps.",
    )
    new_run_id: Key | None = None
    input: dict[str, Any] | None = None


class Answer(Body):
    """The answer to an open question."""

    answer: Any
    request_id: Key | None = Field(default=None, description="Null: the latest open question of that name.")


class SentMessage(Body):
    """A message for the agent of a run."""

    message: ChatMessage
    when: Literal["next_turn", "interrupt"] = "next_turn"
    message_id: Key | None = None


class DeadLetters(Body):
    """Which finished runs: those with these ids, or all with a state."""

    model_config: ClassVar[ConfigDict] = one_of(
        form(("ids",), ids={"type": "array", "items": _STRING}, all=_NULL, expect=_NULL, state=_STRING),
        form(("all", "expect"), all={"const": True}, expect={"type": "integer"}, ids=_NULL, state=_STRING),
    )

    ids: list[Key] | None = Field(default=None, min_length=1)
    all: Literal[True] | None = None
    state: Literal["dead", "failed", "timed_out", "cancelled"] = "dead"
    expect: int | None = Field(default=None, ge=0, description="With all: how many runs the caller expects.")

    @model_validator(mode="after")
    def _one_form(self) -> DeadLetters:
        if (self.ids is None) == (self.all is None) or (self.all is None) != (self.expect is None):
            raise ValueError("must have either ids, or all and expect")
        return self
