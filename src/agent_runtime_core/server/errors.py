"""Errors as `application/problem+json`. No body has a traceback, a path, a secret or a value of the caller."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from .._core.validation import did_you_mean, redacted
from ..errors import (
    AgentRuntimeError,
    IdempotencyConflict,
    IllegalTransition,
    InvalidArgument,
    InvalidTurn,
    JournalMismatch,
    LeaseLost,
    NotSupported,
    RunBusy,
    StorageBusy,
    StorageClosed,
    StorageFull,
    UnknownAgent,
    UnknownRun,
    UnknownTool,
    UnserialisableResult,
)

MEDIA_TYPE: Final = "application/problem+json"
RETRY_SECONDS: Final = 1  # after a busy store
REQUEST_ID: Final = "agent_runtime.request_id"  # in the ASGI scope

#: Code and title by error class. A class that is missing has those of its nearest base class.
_CODES: Final[Mapping[type[AgentRuntimeError], tuple[int, str]]] = {
    UnknownRun: (404, "Run not found"),
    UnknownAgent: (422, "Unknown agent"),
    UnknownTool: (422, "Unknown tool"),
    InvalidArgument: (422, "Invalid value"),
    UnserialisableResult: (422, "Invalid value"),
    IdempotencyConflict: (409, "Conflict with a stored run"),
    IllegalTransition: (409, "Not possible in the run's status"),
    RunBusy: (409, "The run is executing"),
    JournalMismatch: (409, "The code does not match the run"),
    LeaseLost: (409, "The run has changed"),
    NotSupported: (409, "Not supported by the store"),
    StorageBusy: (503, "The store is busy"),
    StorageClosed: (503, "The store is closed"),
    StorageFull: (507, "The store is full"),
}
#: Their messages name the place of the store.
_FIXED: Final[Mapping[type[AgentRuntimeError], str]] = {
    UnknownRun: "No run has this id.",
    StorageBusy: "The store did not reply in time. Repeat the request.",
    StorageClosed: "The store is not open. Repeat the request later.",
    StorageFull: "The store has no space left.",
}
_TITLES: Final = {
    400: "Bad request", 401: "Not authenticated", 403: "Not allowed", 404: "Not found", 405: "Method not allowed",
    408: "Request timeout", 409: "Conflict", 410: "Gone", 413: "Body too large", 414: "URL too long",
    415: "Unsupported media type", 421: "Wrong host", 422: "Invalid value", 429: "Too many requests",
    431: "Headers too large",
    500: "Internal error", 503: "Not available",
}  # fmt: skip

#: The JSON Schema of a body.
PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "title", "status", "request_id"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["field", "message"],
                "properties": {"field": {"type": "string"}, "message": {"type": "string"}},
            },
        },
        "request_id": {"type": "string"},
    },
}

_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_TO_HYPHEN: Final = re.compile(r"[^a-z0-9]+")
# What a caller sent is quoted, or follows "got". The names after "Did you mean" and "Known:" are the server's own.
_GOT: Final = re.compile(r",? got .*", re.DOTALL)
_HINT: Final = re.compile(r"(Did you mean '[^']{1,100}'\?|Known: [^.]{1,500}\.)$")
_QUOTED: Final = re.compile(r"(?<!\w)b?('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")(?!\w)|(?<!\w)['\"].*", re.DOTALL)
_PATH: Final = re.compile(r"(?<![\w/:.])(?:[A-Za-z]:\\|~?/)[^\s,;]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}(\[[0-9]{1,6}\])?")
MOST_ERRORS: Final = 20  # fields that a problem names


class Problem(Exception):
    """An error response.

    Args:
        status: The HTTP status.
        title: What kind of problem it is, in a few words.
        detail: What happened, and how to fix the request.
        type: The URN of the kind of problem. By default it is made of the title.
        errors: Each invalid field with a message: `{"field", "message"}`.
        headers: Headers of the response, such as `Retry-After`.
    """

    def __init__(
        self, status: int, title: str, detail: str = "", *, type: str = "", errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.status: int = status
        self.title: str = title
        self.detail: str = detail
        self.type: str = type or f"urn:agent-runtime:{kebab(title)}"
        self.errors: list[dict[str, str]] = [dict(each) for each in errors]
        self.headers: dict[str, str] = dict(headers or {})
        super().__init__(title)

    @classmethod
    def of(cls, status: int, detail: str = "", **more: Any) -> Problem:
        """Return a problem with the usual title of a status."""
        return cls(status, _TITLES.get(status, "Error"), detail, **more)

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the members of the response body."""
        found: dict[str, Any] = {"type": self.type, "title": self.title, "status": self.status}
        if self.detail:
            found["detail"] = self.detail
        if self.errors:
            found["errors"] = self.errors
        return {**found, "request_id": request_id}

    def response(self, request_id: str) -> Response:
        """Return the response."""
        return Response(json.dumps(self.body(request_id)), self.status, headers=self.headers, media_type=MEDIA_TYPE)


def kebab(words: str) -> str:
    """Return `unknown-run` for `UnknownRun` and for `Unknown run`."""
    return _TO_HYPHEN.sub("-", _WORDS.sub("-", words).lower()).strip("-")


def safe_text(message: str) -> str:
    """Return a message without the values and names in it, except the known names that it proposes."""
    hint = _HINT.search(message)
    text = message if hint is None else message[: hint.start()]
    text = _PATH.sub("…", _QUOTED.sub("…", _GOT.sub("", redacted(text)))).rstrip()
    if text and text[-1] not in ".?!…":
        text += "."
    return text if hint is None else f"{text} {hint[0]}"


def problem_of(error: Exception, known_fields: Iterable[str] = ()) -> Problem:
    """Return the problem for any error. An unexpected one gives 500, without a detail."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid_request(error, known_fields)
    if isinstance(error, HTTPException):
        detail = "No endpoint has this path. GET /openapi.json lists them." if error.status_code == 404 else ""
        return Problem.of(error.status_code, detail, headers=error.headers)
    known = next((each for each in type(error).__mro__ if each in _CODES), None)
    if known is None:
        return Problem(500, _TITLES[500], type="urn:agent-runtime:internal-error")
    status, title = _CODES[known]
    urn = f"urn:agent-runtime:{kebab(type(error).__name__)}"
    text, errors = str(error), []
    if isinstance(error, InvalidTurn):
        text = f"{_field(error.field)}{text.removeprefix(error.field)}"
    detail = _FIXED.get(known) or safe_text(text)
    if isinstance(error, InvalidTurn):
        errors = [{"field": _field(error.field), "message": detail}]
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else None
    return Problem(status, title, detail, type=urn, errors=errors, headers=headers)


def _invalid_request(error: RequestValidationError, known: Iterable[str]) -> Problem:
    found, known = [], list(known)
    for each in error.errors():
        where = each.get("loc", ())
        if each["type"] == "json_invalid":
            return Problem.of(400, "The body must be JSON.", type="urn:agent-runtime:not-json")
        field = _field(*where)
        if each["type"] == "extra_forbidden":
            message = f"Unknown field. {did_you_mean(str(where[-1]), known)}" if known else "Unknown field."
        elif each["type"] == "literal_error":  # the values that are possible, none of the caller
            message = f"Input should be {each['ctx']['expected']}."
        else:
            message = safe_text(str(each.get("msg", "")).removeprefix("Value error, ")) or "Invalid value."
        item = {"field": field, "message": message}
        if item not in found:
            found.append(item)
    detail = "; ".join(f"{each['field'] or 'body'}: {each['message']}" for each in found[:3])
    return Problem(422, _TITLES[422], detail, type="urn:agent-runtime:invalid-argument", errors=found[:MOST_ERRORS])


def _field(*where: object) -> str:
    """Return the path of a field. Model names are omitted, and names that cannot be those of fields are hidden."""
    source, *parts = where if len(where) > 1 else ("", *where)
    if source == "header":
        return str(parts[-1])
    shown = [
        str(each) if isinstance(each, int) or all(map(_NAME.fullmatch, str(each).split("."))) else "…"
        for position, each in enumerate(parts, 1)
        if not (isinstance(each, str) and each[:1].isupper() and position < len(parts))
    ]
    return ".".join(shown)


def _known_fields(request: Request) -> Iterator[str]:
    """Yield the names of the fields that the route's body or query may have."""
    route = request.scope.get("route")
    read = [getattr(route, "body_field", None), *getattr(getattr(route, "dependant", None), "query_params", ())]
    pending = [getattr(getattr(each, "field_info", None), "annotation", None) for each in read]
    while pending:
        each = pending.pop()
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield from (info.alias or name for name, info in each.model_fields.items())
        else:
            pending += getattr(each, "__args__", ())


def request_id_of(connection: HTTPConnection) -> str:
    """Return the id of this request, which the response has in `X-Request-Id`."""
    return cast("str", connection.scope.get(REQUEST_ID, ""))


async def _handle(request: Request, error: Exception) -> Response:
    known = _known_fields(request) if isinstance(error, RequestValidationError) else ()
    problem = problem_of(error, known)
    if problem.status == 500:
        raise error  # the middleware reports it
    return problem.response(request_id_of(request))


def add_handlers(app: FastAPI) -> None:
    """Answer the known errors of the application's routes with a problem; `Envelope` answers all others."""
    for kind in (Problem, AgentRuntimeError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)
