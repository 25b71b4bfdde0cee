"""`/health`, for people, load balancers and supervisors."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._views.about import health_view, store_problem
from .documents import OPEN, Health
from .state import ServerState, state_of

router: APIRouter = APIRouter(tags=["health"])

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": Health}, 503: {"model": Health, "description": "The server is not ready."}
}  # fmt: skip
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
