"""Responses in the OpenAPI document: the shapes of JSON, and the problems of each route."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict

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
