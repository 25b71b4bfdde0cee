"""Bodies of requests, and the documents of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import Header
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator

from .._views.plain import json_bytes
from .._views.queries import PRINTABLE, TENANT_TEXT, TIME_FORMS, seconds_of
from ..planning.plan import MOST_STEPS
from .errors import MEDIA_TYPE

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
    """Return the configuration of a body that must fit one of these forms."""
    return ConfigDict(json_schema_extra={"oneOf": [*forms]})


class Body(BaseModel):
    """A JSON object. Values must be of the type of their field, without conversion, and there are no other fields."""

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
    params: dict[str, Any] | None = Field(default=None, description="Merged into the `params` of the input.")
    run_id: Key | None = Field(default=None, description="Names the run: a UUID, or a run key of 1 to 512 characters.")
    priority: int = Field(default=0, ge=-(2**31) + 1, le=2**31 - 1, description="At most the server's `max_priority`.")
    delay: float = Field(default=0, ge=0, description="Seconds until the run may start.")
    deadline: Time | None = Field(default=None, description="When the run is stopped.")
    expires_in: float | None = Field(
        default=None, ge=0, description="Seconds after which the run is not started any more."
    )
    concurrency_key: str | None = Field(default=None, max_length=512)
    concurrency_limit: int = Field(
        default=1, ge=1, le=10_000, description="How many runs of the concurrency key may be active."
    )
    conversation_id: Key | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    tags: list[str] = Field(default_factory=list, description="At most 32 tags of 1 to 128 characters.")


def _form_of(body: Any, **forms: str) -> str | None:
    fields = body if isinstance(body, dict) else ()
    found = [form for name, form in forms.items() if name in fields]
    return found[0] if len(found) == 1 else None


def _form(body: Any) -> str | None:
    """Return which form of a new run this is; None for neither or both."""
    return _form_of(body, prompt="PromptRun", agent="AgentRun")


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
    params: dict[str, Any] | None = Field(default=None, description="Merged into the `params` of the input.")


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


class _Schedule(Body):
    agent: Key
    input: dict[str, Any] = Field(default_factory=dict)
    catch_up: Literal["last", "all", "none"] = "last"
    overlap: Literal["skip", "queue", "cancel_previous"] = "skip"
    jitter: float = Field(default=0, ge=0, le=1e9, description="Delays each run by a part of so many seconds.")
    start: Time | None = Field(default=None, description="No run is for a time before this one.")
    end: Time | None = Field(default=None, description="No run is for a time after this one.")
    paused: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)
    priority: int = Field(default=0, ge=-(2**31) + 1, le=2**31 - 1, description="At most the server's `max_priority`.")
    concurrency_key: str | None = Field(default=None, max_length=512)
    concurrency_limit: int = Field(
        default=1, ge=1, le=10_000, description="How many runs of the concurrency key may be active."
    )
    tags: list[str] = Field(default_factory=list, description="At most 32 tags of 1 to 128 characters.")


class CronSchedule(_Schedule):
    """A schedule that starts runs at the times of a cron expression."""

    cron: str = Field(description="A cron expression of five fields.")
    timezone: str = Field(default="UTC", description="The time zone of `cron`, such as `Europe/Berlin`.")


class IntervalSchedule(_Schedule):
    """A schedule that starts runs at an interval."""

    every: float = Field(ge=1, lt=1e9, description="Seconds between two runs, counted from `start` or else from 1970.")


def _schedule_form(body: Any) -> str | None:
    """Return which form of a schedule this is; None for neither or both."""
    return _form_of(body, cron="CronSchedule", every="IntervalSchedule")


NewSchedule = Annotated[
    Annotated[CronSchedule, Tag("CronSchedule")] | Annotated[IntervalSchedule, Tag("IntervalSchedule")],
    Discriminator(
        _schedule_form,
        custom_error_type="schedule_form",
        custom_error_message="body must be an object with either cron or every. Send one of the two",
    ),
]


_PROBLEMS: Final = {
    400: "The body is not JSON, or a header is invalid.",
    401: "The token is missing or wrong.",
    403: "The token lacks the scope, or the request is from a foreign page.",
    404: "No such run is stored, or it is hidden from the caller.",
    409: "The request conflicts with the state of the run.",
    410: "The run has finished.",
    413: "The body is too large.",
    415: "The media type of the body is not application/json.",
    421: "The Host header names another server.",
    422: "A value is invalid.",
    429: "A limit is reached.",
    500: "An unexpected error.",
    503: "The store is busy, or the server is shutting down.",
    507: "The store is full.",
}
#: In the OpenAPI document, of a route that needs no token.
OPEN: Final[dict[str, Any]] = {"security": []}
_ALWAYS: Final = (400, 401, 403, 421, 422, 429, 500, 503)
_WITH_BODY: Final = (413, 415, 507)


class Reply(JSONResponse):
    """A JSON response."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json_bytes(content)


class Shape(BaseModel):
    """A response. Later versions may contain further fields."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")


class Run(Shape):
    """A run."""

    run_id: str
    status: str
    steps: list[dict[str, Any]]
    result: Any
    error: Any
    created_at: str
    updated_at: str
    state: str
    agent: str
    key: str | None
    tenant: str | None
    attempt: int
    generation: int
    reason: str | None
    worker: str | None
    parent: str | None
    children: list[dict[str, Any]]
    usage: dict[str, Any] | None
    limits: dict[str, Any] | None
    trace_id: str
    conversation_id: str | None


class Page(Shape):
    """A page of a list. `next` is the cursor of the next page, or null."""

    items: list[dict[str, Any]]
    next: str | int | None


class Runs(Page):
    """A page of runs. `note` says which runs were not read, if there are any."""

    note: str | None


class Timeline(Page):
    """A page of the timeline. `total` is the number of all rows."""

    total: int


class Outcome(Shape):
    """The state of a run, and its result if it has finished."""

    run_id: str
    key: str | None
    status: str
    state: str
    result: Any = None
    error: Any = None
    usage: Any = None


class Stored(Shape):
    """The request is stored for the run."""

    run_id: str
    state: str


class StoredAnswer(Stored):
    """The answer is stored for the run. `asked` is whether the run has asked for it; else it is kept for later."""

    asked: bool


class StoredMessage(Shape):
    """The message is stored for the agent."""

    run_id: str
    message_id: str


class Schedule(Shape):
    """A schedule. Times show the offset of its time zone."""

    id: str
    tenant: str | None
    agent: str
    input: dict[str, Any]
    cron: str | None
    every: float | None
    timezone: str
    catch_up: str
    overlap: str
    jitter: float
    start: str | None
    end: str | None
    paused: bool
    metadata: dict[str, Any]
    priority: int
    concurrency_key: str | None
    concurrency_limit: int
    tags: list[str]
    next_tick: str | None
    last_tick: str | None
    last_run_id: str | None
    skipped: int
    next_ticks: list[str]


class Failed(Shape):
    """A run that was not changed, and why."""

    id: str
    why: str


class Repaired(Shape):
    """The ids of changed runs, and the others."""

    done: list[str]
    failed: list[Failed]


class PlanNode(Shape):
    """A step of a plan or step list. `needs` of other steps are in the edges."""

    id: str
    name: str
    list: str
    state: str
    step_id: str
    started_at: str | None
    ended_at: str | None
    attempts: int
    error: Any
    kind: str
    tool: str | None
    input: Any
    description: str | None


class PlanEdge(Shape):
    """The second step needs the first step. Both are ids of nodes."""

    from_: str = Field(alias="from")
    to: str


class Plan(Shape):
    """The plan of a run. `not_started` counts steps whose names are not in the journal."""

    goal: str | None
    nodes: list[PlanNode]
    edges: list[PlanEdge]
    not_started: int
    complete: bool


class Used(Shape):
    """What runs have used."""

    runs: int
    tokens: float
    prompt_tokens: float
    completion_tokens: float
    cost_usd: float


class UsageItem(Used):
    """What the runs of one agent, tenant, model or day have used."""

    agent: str = ""
    tenant: str = ""
    model: str = ""
    day: str = ""


class Usage(Shape):
    """Tokens and cost. `complete` is whether all runs of that time are counted."""

    by: Literal["agent", "tenant", "model", "day"]
    since: str | None
    until: str | None
    complete: bool
    items: list[UsageItem]
    total: Used


class Dashboard(Shape):
    """What the runs of a window did. `complete` is whether all runs of the last week are counted."""

    window: Literal["hour", "day", "week"]
    since: str
    until: str
    counted_since: str | None
    complete: bool
    runs: int
    journals: int
    started: int
    ended: int
    failed: int
    series: list[dict[str, Any]]
    latency: dict[str, dict[str, Any]]
    cost: dict[str, list[dict[str, Any]]]
    errors: list[dict[str, Any]]


class QueueKey(Shape):
    """A concurrency key: the run that holds its slot, and how many runs are queued behind that run."""

    concurrency_key: str
    tenant: str | None
    run_id: str | None
    key: str | None
    state: str | None
    queued: int


class QueueWorker(Shape):
    """A worker that executes runs, and when the first and the last of their leases end."""

    worker: str
    runs: int
    agents: dict[str, int]
    lease_ends_at: str | None
    last_lease_ends_at: str | None
    expired: int


class Queue(Shape):
    """The state of the queue. `complete` is whether all live runs were read for the keys and workers."""

    total: int
    by_status: dict[str, int]
    by_agent: dict[str, dict[str, int]]
    oldest_pending_at: str | None
    oldest_pending_seconds: float | None
    due_later: int
    waiting: dict[str, int]
    concurrency_keys: list[QueueKey]
    workers: list[QueueWorker]
    complete: bool


class ForkOf(Shape):
    """Which run was forked from which, and the last step that was copied."""

    fork: str
    source: str
    step: str | None
    step_id: str | None
    index: int | None


class ComparedRun(Shape):
    """A run that is compared."""

    key: str | None
    state: str
    agent: str
    input: Any
    error: Any
    usage: Any


class ComparedRuns(Shape):
    """Both runs."""

    run: ComparedRun
    other: ComparedRun


class ComparedSide(Shape):
    """A step in one of the runs."""

    state: str
    digest: str | None
    result: Any
    duration_ms: float | None
    cost_usd: float | None
    attempts: int
    error: Any


class ComparedStep(Shape):
    """A step in both runs. `changed` names what differs."""

    name: str
    key: str
    outcome: Literal["same", "changed", "only_in_run", "only_in_other"]
    changed: list[str]
    run: ComparedSide | None
    other: ComparedSide | None


class Comparison(Shape):
    """Two runs, step by step."""

    run_id: str
    other_id: str
    fork_of: ForkOf | None
    first_difference: int | None
    input_changed: bool
    runs: ComparedRuns
    counts: dict[str, int]
    steps: list[ComparedStep]


class Health(Shape):
    """Whether the server is ready: `ok` or `unavailable`."""

    status: str


class SignedIn(Shape):
    """Whose cookie the browser sent, and what it may do."""

    name: str
    scopes: list[str]


class AnyObject(Shape):
    """An object."""


def answers(*codes: int, writes: bool = False, **found: Any) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route.

    Args:
        codes: Statuses of problems besides the statuses of every route.
        writes: Whether the route stores something, or takes a body.
        found: The shape of each success, by `ok_200`.
    """
    table: dict[int | str, dict[str, Any]] = {}
    for name, shape in found.items():
        code = int(name.removeprefix("ok_"))
        table[code] = {"model": shape, "description": (shape.__doc__ or "").strip()} if shape else {}
        if code == 201:
            table[code]["headers"] = {"Location": {"schema": {"type": "string"}, "description": "Where it is."}}
    for code in sorted({*_ALWAYS, *(_WITH_BODY if writes else ()), *codes}):
        schema = {"$ref": "#/components/schemas/Problem"}
        table[code] = {"description": _PROBLEMS[code], "content": {MEDIA_TYPE: {"schema": schema}}}
    return table
