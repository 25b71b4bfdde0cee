"""Submit and read runs and turns, and read a store."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .._views.plain import plain_of
from .._views.read_routes import OF_RESULTS, OF_RUNS, OF_STORES
from .._views.visibility import visible_row, visible_view
from ..errors import InvalidArgument, UnknownRun
from ..turns.manager import TurnManager
from .access import Caller, in_tenant, require
from .documents import AgentRun, AnyObject, NewRun, NewTurn, PromptRun, Reply, Run, answers
from .reads import after_wait, mount, preferred_wait
from .state import state_of
from .submission import insert, insert_turn, invalid_in, row_of, span_of

router: APIRouter = APIRouter(tags=["runs"], default_response_class=Reply)
overview: APIRouter = APIRouter(tags=["overview"], default_response_class=Reply)

ResultReader = Annotated[Caller, require(*OF_RESULTS)]
Submitter = Annotated[Caller, require("run")]
#: The headers of a new run, which the route reads itself: FastAPI takes a tenth of the request to resolve them.
_NEW_RUN_HEADERS: Final[dict[str, Any]] = {
    "parameters": [
        {"name": "Idempotency-Key", "in": "header", "required": False,
         "schema": {"type": "string", "minLength": 1, "maxLength": 512}},
        {"name": "Prefer", "in": "header", "required": False, "schema": {"type": "string"},
         "description": "wait=SECONDS, at most 60"},
    ]
}  # fmt: skip


def location_of(request: Request, run_id: str, what: str = "runs") -> str:
    """Return the path of a run or turn."""
    return f"{request.scope.get('root_path', '')}/api/v1/{what}/{quote(run_id, safe='')}"


@router.post(
    "/runs",
    status_code=201,
    summary="Submit a run",
    responses=answers(404, 409, writes=True, ok_200=Run, ok_201=Run),
    openapi_extra=_NEW_RUN_HEADERS,
)
async def submit_run(request: Request, body: NewRun, caller: Submitter) -> Response:
    """Store a run, for the Orchestrator with `prompt`, or else for an agent with `agent` and `input`.

    A repeated request with the same `Idempotency-Key` or `run_id` returns the stored run with 200.
    """
    state = state_of(request)
    caller = in_tenant(caller, body.tenant)
    try:
        row = row_of(state, caller, body, request.headers.get("idempotency-key"), span_of(request))
    except InvalidArgument as error:
        names = {"idempotency_key": "Idempotency-Key", **{each: each for each in AgentRun.model_fields}}
        raise invalid_in(error, names) from None
    row, new = await insert(state, caller, row, prompt=isinstance(body, PromptRun))
    seconds = preferred_wait(request.headers.get("prefer"))
    if state.limits.no_wait(caller.name) is not None:
        seconds = 0
    row = await after_wait(request, state, row, seconds)
    headers = {"Location": location_of(request, row.run_id)}
    if seconds:
        headers["Preference-Applied"] = f"wait={seconds}"
    fresh = new and not seconds
    return Reply(await visible_view(state.runner, caller, row, new=fresh), 201 if new else 200, headers)


mount(router, OF_RUNS)
mount(overview, OF_STORES)


@overview.post(
    "/turns",
    status_code=201,
    summary="Start a conversation turn",
    responses=answers(404, 409, writes=True, ok_201=AnyObject),
)
async def start_turn(request: Request, body: NewTurn, caller: Submitter) -> Response:
    """Start a turn: `messages` in chat format or `text`, and `turn_id`, which makes a repeated request safe."""
    state = state_of(request)
    stored = await insert_turn(state, caller, body, span_of(request))
    assert state.turns is not None
    turn = await _turn_for(caller, state.turns, stored.run_id)
    return Reply(turn, 201, {"Location": location_of(request, stored.run_id, "turns")})


@overview.get("/turns/{id}", summary="Read a turn", responses=answers(404, ok_200=AnyObject))
async def read_turn(request: Request, id: str, caller: ResultReader) -> Response:
    """Return a turn with its answer, and with its plan and steps for the scope read."""
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "read")
    if state.turns is None:
        raise UnknownRun("no turn has this id")
    return Reply(await _turn_for(caller, state.turns, row.run_id))


async def _turn_for(caller: Caller, turns: TurnManager, turn_id: str) -> Any:
    """Return a turn as the caller may see it."""
    found = plain_of((await turns.get_turn(turn_id)).to_dict())
    return found if "read" in caller.scopes else found | {"plan": None, "steps": []}
