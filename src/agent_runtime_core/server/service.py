"""Whether the server is ready, what Prometheus reads of it, and the page of the inspector, which reads the API."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._views.overview import health_view, store_problem
from .._views.page import page_file
from .._views.visibility import refuse_limited
from ..tracing.prometheus import Sample
from .access import admitted
from .documents import OPEN, Health
from .errors import Problem
from .state import ServerState, state_of

router: APIRouter = APIRouter(tags=["health"])
others: APIRouter = APIRouter(include_in_schema=False)

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": Health},
    503: {"model": Health, "description": "The server is not ready."},
}
CHECK_SECONDS: Final = 1.0  # for which an answer counts


@router.get("/health/live", responses={200: {"model": Health}}, openapi_extra=OPEN)
async def read_liveness() -> Response:
    """Return 200 while the process serves requests."""
    return _response("ok", {})


@router.get("/health/ready", responses=_ANSWERS, openapi_extra=OPEN)
async def read_readiness(request: Request) -> Response:
    """Return 200 if the server accepts requests and its store answers, else 503."""
    return _response("ok" if not await _problems(state_of(request)) else "unavailable", {})


@router.get("/health", responses=_ANSWERS, openapi_extra={"security": [{}, {"token": []}]})
async def read_health(request: Request) -> Response:
    """Return whether the server is ready. A caller with the scope read also gets versions and reasons."""
    state = state_of(request)
    caller = await state.access.optional(request)
    problems = await _problems(state)
    details: dict[str, Any] = {}
    if caller is not None and "read" in caller.scopes:
        details = health_view(state.runner, problems, state.limits.open_streams)
    return _response("unavailable" if problems else "ok", details)


def _response(status: str, details: dict[str, Any]) -> Response:
    failed = status != "ok"
    headers = {"Retry-After": "5"} if failed else None
    return JSONResponse({"status": status, **details}, 503 if failed else 200, headers=headers)


async def _problems(state: ServerState) -> list[str]:
    found = ["the server is shutting down"] if state.draining.is_set() else []
    if store := await _store_problem(state):
        found.append(store)
    return found


async def _store_problem(state: ServerState) -> str:
    """Return why the store does not answer, or "". Read at most once per second, because everybody may ask."""
    now, (until, known) = state.runner.queue.clock.boot(), state.store_check
    if now < until:
        return known
    known = await store_problem(state.runner)
    state.store_check = (now + CHECK_SECONDS, known)
    return known


@others.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of this process."""
    state = state_of(request)
    if not state.settings.metrics_open:
        refuse_limited(await admitted(request, "metrics"))
    if state.metrics is None:
        raise Problem.of(404, "This server has no metrics. Start it with --metrics, or pass create_app(metrics=...).")
    body, content_type = await state.metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


def prepare(state: ServerState) -> None:
    """Let the metrics include the runner, the topics and the streams of a server."""
    metrics, runner = state.metrics, state.runner
    if metrics is None:
        return
    if runner.tracer is None or metrics not in runner.tracer.sinks:
        runner.add_trace_sink(metrics)
    topics = None if state.turns is None else state.turns.topics
    metrics.watch(runner, topics=topics)
    metrics.add_source("server", lambda: _of_server(state))


def _of_server(state: ServerState) -> list[Sample]:
    limits = state.limits
    return [
        Sample("streams", ("sse",), limits.open_streams - limits.open_sockets),
        Sample("streams", ("socket",), limits.open_sockets),
        Sample("streams_cut", (), limits.streams_cut),
    ]


@others.get("/")
async def page(request: Request) -> Response:
    """Return the page."""
    return _file(request, "index.html")


@others.get("/static/{path:path}")
async def static_file(request: Request, path: str) -> Response:
    """Return a script, a style sheet or the icon."""
    return _file(request, path)


def _file(request: Request, name: str) -> Response:
    status, content, headers = page_file(name, request.headers.get("if-none-match"))
    return Response(content, status, headers=headers)
