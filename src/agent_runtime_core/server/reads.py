"""Mount the routes that read, and wait for the end of a run within a request."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterable
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .._core.context_vars import start_helper
from .._views.queries import checked, titled
from .._views.read_routes import MAX_WAIT, Asked, Route, known_parameters
from ..queue.records import LIVE, RunRow
from . import documents
from .access import CALLER, Caller, admitted, has_session
from .documents import Reply, answers
from .state import ServerState, state_of

_PREFERRED: Final = re.compile(r'(?:^|[,;\s])wait\s*=\s*"?([0-9]{1,9})"?\s*(?=[,;]|$)', re.IGNORECASE)


class HttpRequest(Asked):
    """A request of the HTTP API."""

    caller: Caller

    def __init__(self, request: Request, caller: Caller, query: dict[str, Any]) -> None:
        self.request: Request = request
        self.state: ServerState = state_of(request)
        super().__init__(self.state.runner, caller, [*request.path_params.values()], query)

    def about(self) -> dict[str, Any]:
        """Return how the page follows a run, and whether a browser has signed in."""
        return {"live": "stream", "signed_in": has_session(self.request, self.state.access)}

    async def ended(self, row: RunRow, seconds: float) -> RunRow:
        """Return the run when it has finished, when the time is over, or when the client or the server leaves."""
        return await after_wait(self.request, self.state, row, seconds, required=True)


async def asked_of(request: Request, route: Route) -> HttpRequest:
    """Return a request for a route, or raise the problem of its caller or its parameters.

    A route without parameters in the table accepts every parameter. FastAPI would take a tenth of the request to read
    the path and the query of an endpoint with parameters.
    """
    caller = await admitted(request, *route.scopes)
    known = known_parameters(route) if route.parameters else None
    return HttpRequest(request, caller, checked(request.query_params.multi_items(), known) if known else {})


def mount(router: APIRouter, routes: Iterable[Route]) -> None:
    """Add routes to a router."""
    for each in routes:
        shape = getattr(documents, each.shape)
        found = answers(*([404] if "{" in each.path else []), **{f"ok_{status}": shape for status in each.statuses})
        router.add_api_route(f"/{each.path}", _endpoint(each), responses=found, **described(each))


def described(route: Route, *more: dict[str, Any]) -> dict[str, Any]:
    """Return what the OpenAPI document says about a route and its parameters; `more` are headers."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": titled(name)}}
        for name in (part.strip("{}") for part in route.path.split("/") if part[0] == "{")
    ]
    if route.parameters:
        parameters += [value.documented(name) for name, value in known_parameters(route).items()]
    return {
        "name": route.read.__name__,
        "summary": route.title,
        "description": inspect.getdoc(route.read),
        "openapi_extra": {"parameters": [*parameters, *more]} if parameters else None,
    }


def _endpoint(route: Route) -> Any:
    async def endpoint(request: Request) -> Response:
        answer = await route.read(await asked_of(request, route))
        return Reply(answer.value, answer.status, answer.headers)

    return endpoint


def preferred_wait(header: str | None) -> int:
    """Return the seconds of `Prefer: wait=SECONDS`, at most 60; 0 without it. Other preferences are ignored."""
    found = _PREFERRED.search(header or "")
    return min(int(found[1]), MAX_WAIT) if found else 0


async def after_wait(
    request: Request, state: ServerState, row: RunRow, seconds: float, *, required: bool = False, cancels: bool = False
) -> RunRow:
    """Return the run once it has finished, as it is after `seconds`, or when the client or the server leaves.

    Args:
        request: The request.
        state: The state of the server.
        row: The run.
        seconds: How long to wait.
        required: A caller that has used its share of waits gets Problem 429. Otherwise it gets the run immediately.
        cancels: The run is being cancelled, and is ended as `runner.cancel(wait=True)` does.
    """
    if row.status not in LIVE or seconds <= 0:
        return row
    caller = request.scope[CALLER].name
    if not required and state.limits.no_wait(caller) is not None:
        return row  # what the request asked for is stored, so it must not fail
    with state.limits.wait(caller):
        return await _waited(request, state, row.run_id, seconds, cancels)


async def _waited(request: Request, state: ServerState, run_id: str, seconds: float, cancels: bool) -> RunRow:
    runner = state.runner
    end = start_helper(runner.cancel(run_id, wait=True) if cancels else runner.watcher.until_ended(run_id, None))
    others = [start_helper(_disconnected(request)), start_helper(state.draining.wait())]
    try:
        await asyncio.wait([end, *others], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        found = end.result() if end.done() else None
        return found if isinstance(found, RunRow) else await runner.queue.require(run_id)
    finally:
        for task in (end, *others):
            task.cancel()
        await asyncio.gather(end, *others, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
