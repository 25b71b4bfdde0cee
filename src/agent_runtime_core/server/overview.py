"""Open questions, the queue, agents, usage and turns."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from .._views.about import about_view
from .._views.agents import agents_view
from .._views.cursors import cursor_of
from .._views.list_query import MAX_LIMIT, check_order, position_in
from .._views.plain import plain_of
from .._views.queue import queue_view, workers_view
from .._views.usage import usage_view
from .._views.waits import question_view
from ..errors import UnknownRun
from ..runner.approvals import open_requests
from ..turns.manager import TurnManager
from .access import OF_QUESTIONS, OF_RESULTS, Caller, has_session, refuse_limited, require
from .documents import AnyObject, Page, Queue, Usage, answers
from .models import ApprovalQuery, NewTurn, UsageQuery
from .reply import Reply
from .runs import location_of
from .state import is_visible, state_of, visible_row
from .submission import insert_turn, span_of

router: APIRouter = APIRouter(tags=["overview"], default_response_class=Reply)

#: Questions that one request reads to fill a page.
_MAX_READ: Final = 2_000

Reader = Annotated[Caller, require("read")]
ResultReader = Annotated[Caller, require(*OF_RESULTS)]
Submitter = Annotated[Caller, require("run")]


@router.get("/approvals", summary="List open questions", responses=answers(ok_200=Page))
async def list_approvals(
    request: Request, caller: Annotated[Caller, require(*OF_QUESTIONS)], query: Annotated[ApprovalQuery, Query()]
) -> Response:
    """List the open questions of all runs, oldest first, with the schema and details of each.

    Without the scope read, a caller gets the questions that it may answer.
    """
    state = state_of(request)
    verb = "read" if "read" in caller.scopes else "act"
    bound = {"agent": query.agent, "tenant": caller.tenant, "list": "approvals"}
    after = None if query.cursor is None else position_in(query.cursor, bound, str)[0]
    batch = query.limit if caller.may is None else MAX_LIMIT
    left = _MAX_READ
    items: list[dict[str, Any]] = []
    while True:
        page = await open_requests(
            state.runner.queue, batch + 1, after, query.agent, caller.tenant or "", metadata=caller.may is not None
        )  # fmt: skip
        more = len(page) > batch
        for number, (row, each) in enumerate(page[:batch], 1):
            after = each.cursor
            if await is_visible(state, caller, row, verb):
                items.append(question_view(each))
            if len(items) == query.limit:
                more = number < len(page)
                break
        left -= len(page)
        if not more or len(items) == query.limit or left <= 0:
            return Reply({"items": items, "next": cursor_of([after], bound) if more and after else None})


@router.get("/about", summary="Read about the server", responses=answers(ok_200=AnyObject))
async def read_about(request: Request, caller: Reader) -> Response:
    """Return the store, the versions, and what the caller may do."""
    runner = state_of(request).runner
    view = about_view(runner, caller.scopes, "stream", hide_store=caller.limited)
    return Reply({**view, "signed_in": has_session(request, state_of(request).access)})


@router.get("/queue", summary="Read the state of the queue", responses=answers(ok_200=Queue))
async def read_queue(request: Request, caller: Reader) -> Response:
    """Return how many runs wait, since when, the concurrency keys in use, and the workers."""
    refuse_limited(caller, by_tenant=True)
    return Reply(await queue_view(state_of(request).runner, caller.tenant))


@router.get("/workers", summary="List the processes that claim runs", responses=answers(ok_200=Page))
async def list_workers(request: Request, caller: Reader) -> Response:
    """List the processes that claim runs, with host, agents, slots, and when each was last seen."""
    refuse_limited(caller)
    return Reply({"items": await workers_view(state_of(request).runner), "next": None})


@router.get("/agents", summary="List the agents of this server", responses=answers(ok_200=Page))
async def list_agents(request: Request, caller: Reader) -> Response:
    """List the agents with their descriptions, tools and input schemas."""
    state = state_of(request)
    items = await agents_view(state.runner, state.registry, caller.tenant)
    if caller.may is not None:  # the numbers are those of all runs, and other agents those of hidden ones
        items = [{**each, "runs": {}} for each in items if each["registered"]]
    return Reply({"items": items, "next": None})


@router.get("/usage", summary="Add up usage", responses=answers(ok_200=Usage))
async def read_usage(request: Request, caller: Reader, query: Annotated[UsageQuery, Query()]) -> Response:
    """Add up tokens and cost by agent, model or day."""
    refuse_limited(caller, by_tenant=True)
    check_order(query.since, query.until)
    return Reply(await usage_view(state_of(request).runner, query.by, query.since, query.until, caller.tenant))


@router.post(
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


@router.get("/turns/{id}", summary="Read a turn", responses=answers(404, ok_200=AnyObject))
async def read_turn(request: Request, id: str, caller: ResultReader) -> Response:
    """Return a turn with its answer, and with its plan and steps for the scope read."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    if state.turns is None:
        raise UnknownRun("no turn has this id")
    return Reply(await _turn_for(caller, state.turns, row.run_id))


async def _turn_for(caller: Caller, turns: TurnManager, turn_id: str) -> Any:
    """Return a turn as the caller may see it."""
    found = plain_of((await turns.get_turn(turn_id)).to_dict())
    return found if "read" in caller.scopes else found | {"plan": None, "steps": []}
