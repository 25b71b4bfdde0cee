"""Errors of requests as `application/problem+json`, as FastAPI raises them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Match

from .._core.clock import SYSTEM
from .._core.ids import new_ulid
from .._core.validation import did_you_mean, must
from .._views import problems
from .._views.problems import MEDIA_TYPE, Problem, field_path, invalid_fields, log_text, safe_text
from ..errors import AgentRuntimeError

__all__ = [
    "MEDIA_TYPE", "PROBLEM_SCHEMA", "REQUEST_ID", "Problem", "add_handlers", "install_error_handlers", "log_text",
    "problem_of", "request_id_of", "response_of", "safe_text",
]  # fmt: skip

REQUEST_ID: Final = "agent_runtime.request_id"  # in the ASGI scope

#: What a value must do, by the type of pydantic's error; the names in braces are those of its context.
_MUST: Final = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "be an object"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "be a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "be an integer"),
    "greater_than_equal": "be at least {ge}", "less_than_equal": "be at most {le}", "list_type": "be a list",
    "literal_error": "be {expected}", "string_type": "be a string",
    "string_too_long": "have at most {max_length} characters",
    **dict.fromkeys(("string_too_short", "too_short"), "not be empty"),  # no other limit is used
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


def response_of(problem: Problem, request_id: str) -> Response:
    """Return a problem as a response."""
    body = json.dumps(problem.body(request_id))
    return Response(body, problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def problem_of(error: Exception, known_fields: Iterable[str] = ()) -> Problem:
    """Return the problem for any error. An unexpected error gives 500, without a detail."""
    if isinstance(error, RequestValidationError):
        return _invalid_request(error, known_fields)
    if isinstance(error, HTTPException):
        detail = "No endpoint has this path. GET /openapi.json lists them." if error.status_code == 404 else ""
        return Problem.of(error.status_code, detail, headers=error.headers)
    return problems.problem_of(error)


def _invalid_request(error: RequestValidationError, known: Iterable[str]) -> Problem:
    found, known = [], list(known)
    for each in error.errors():
        where = each.get("loc", ())
        if each["type"] == "json_invalid":
            return Problem.of(400, "The body must be JSON.", type="urn:agent-runtime:not-json")
        field = field_path(*where)
        item = {"field": field, "message": _message(each, field or "body", known)}
        if item not in found:
            found.append(item)
    return invalid_fields(found)


def _message(error: Mapping[str, Any], field: str, known: Sequence[str]) -> str:
    """Return what is wrong with a field. The message contains no value of the caller."""
    kind = error["type"]
    if kind == "missing":
        return f"{field} is missing."
    if kind == "extra_forbidden":
        hint = f" {did_you_mean(str(error['loc'][-1]), known)}" if known else ""
        return f"{field} is not a known field.{hint}"
    if kind in _MUST:
        limits = {
            name: f"{each:.15g}" if isinstance(each, float) else each for name, each in error.get("ctx", {}).items()
        }
        return f"{field} must {_MUST[kind].format_map(limits)}."
    message = safe_text(str(error.get("msg", "")).removeprefix("Value error, ")) or "must be valid."
    if message.startswith(("must ", "the time must ")):
        return f"{field} {message.removeprefix('the time ')}"
    return message if message.startswith(f"{field} ") else f"{field}: {message}"


def _known_fields(request: Request) -> Iterator[str]:
    """Yield the names of the fields that the route's body may contain."""
    field = getattr(request.scope.get("route"), "body_field", None)
    pending = [getattr(getattr(field, "field_info", None), "annotation", None)]
    while pending:
        each = pending.pop()
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield from (info.alias or name for name, info in each.model_fields.items())
        else:
            pending += getattr(each, "__args__", ())


def request_id_of(connection: HTTPConnection) -> str:
    """Return the id of this request, which the response contains in `X-Request-Id`."""
    return cast("str", connection.scope.get(REQUEST_ID, ""))


def _allowed(request: Request) -> Iterator[str]:
    """Yield the methods that the path of a request accepts."""
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            yield from ("GET", "HEAD") if method == "GET" else (method,)


async def _handle(request: Request, error: Exception) -> Response:
    known = _known_fields(request) if isinstance(error, RequestValidationError) else ()
    problem = problem_of(error, known)
    if problem.status == 405:  # the router names the methods of one route only
        problem.headers = {"Allow": ", ".join(_allowed(request))}
    if problem.status == 500:
        raise error  # the middleware reports it
    return response_of(problem, request_id_of(request))


def install_error_handlers(app: Starlette) -> None:
    """Answer the errors of this library in your own routes as the HTTP API does.

    A route that calls `runner.submit` then answers 503 with `Retry-After` while the store is not available, 409 for a
    used run id with another input, and 422 for an invalid value. An error that the API answers with 500 stays an error
    of your application.

    Args:
        app: Your application of FastAPI or Starlette.

    Raises:
        InvalidArgument: `app` is no such application.
    """
    if not isinstance(app, Starlette):
        raise must("app", "be an application of FastAPI or Starlette", app)

    async def handle(request: Request, error: Exception) -> Response:
        problem = problem_of(error)
        if problem.status == 500:
            raise error
        request_id = new_ulid(SYSTEM)
        response = response_of(problem, request_id)
        response.headers.update({"X-Request-Id": request_id, "Cache-Control": "no-store"})
        return response

    app.add_exception_handler(AgentRuntimeError, handle)


def add_handlers(app: FastAPI) -> None:
    """Answer the known errors of the application's routes with a problem; `Envelope` answers all others."""
    for kind in (Problem, AgentRuntimeError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)
