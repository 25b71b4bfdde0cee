"""Responses: JSON, its shapes in the OpenAPI document, and the problems of each route."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from .._views.plain import json_bytes
from .errors import MEDIA_TYPE

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
    """A response. Later versions may have further fields."""

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
    """The second step needs the first one. Both are ids of nodes."""

    from_: str = Field(alias="from")
    to: str


class Plan(Shape):
    """The plan of a run. `not_started` counts steps that the journal has no names of."""

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
    """What the runs of one agent, model or day have used."""

    agent: str = ""
    model: str = ""
    day: str = ""


class Usage(Shape):
    """Tokens and cost. `complete` is whether all runs of that time are counted."""

    by: Literal["agent", "model", "day"]
    since: str | None
    until: str | None
    complete: bool
    items: list[UsageItem]
    total: Used


class QueueKey(Shape):
    """A concurrency key: the run that has it, and how many are queued behind that run."""

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
    """Whose cookie the browser has, and what it may do."""

    name: str
    scopes: list[str]


class AnyObject(Shape):
    """An object."""


def answers(*codes: int, writes: bool = False, **found: Any) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route.

    Args:
        codes: Statuses of problems besides those of every route.
        writes: Whether the route stores something, or has a body.
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
