"""Submit, list and read runs."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from .._views.compare import compare_view
from .._views.cursors import cursor_of
from .._views.journal import journal_view
from .._views.list_query import filters_of, page_start
from .._views.messages import messages_view
from .._views.plan import plan_view
from .._views.runs import result_view, run_view
from .._views.steps import step_views
from .._views.timeline import step_detail, timeline_view
from ..errors import InvalidArgument
from ..queue.records import LIVE, RunRow
from .access import OF_RESULTS, Caller, in_tenant, require
from .documents import AnyObject, Comparison, Outcome, Page, Plan, Run, Timeline, answers
from .listing import visible_page
from .models import AgentRun, ListQuery, NewRun, PageQuery, PromptRun, TimelineQuery, WaitQuery
from .reply import Reply
from .state import ServerState, children_without_input, is_visible, row_without_input, state_of, visible_row
from .submission import insert, invalid_in, row_of, span_of
from .waiting import after_wait, preferred_wait

router: APIRouter = APIRouter(tags=["runs"], default_response_class=Reply)

Reader = Annotated[Caller, require("read")]
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
RETRY_SECONDS: Final = 1
#: The fields of a run that need the scope read, as other callers get them.
_UNREAD: Final[dict[str, Any]] = {
    **dict.fromkeys(("steps", "children", "questions", "actions"), ()),
    **dict.fromkeys(("next_step", "parent", "worker", "error_info", "input", "metadata"), None),
}


def location_of(request: Request, run_id: str, what: str = "runs") -> str:
    """Return the path of a run or turn."""
    return f"{request.scope.get('root_path', '')}/api/v1/{what}/{quote(run_id, safe='')}"


async def view_for(state: ServerState, caller: Caller, row: RunRow, *, new: bool = False) -> dict[str, Any]:
    """Return a run as the caller may see it: without the ids of hidden runs, and without what the scope read shows.

    A `new` run has nothing yet that the caller has not sent.
    """
    found = await run_view(state.runner, row, new=new)
    if "read" not in caller.scopes and not new:
        return found | _UNREAD
    if caller.limited:
        related = await children_without_input(state.runner.queue, row.run_id)
        if row.parent_id is not None:
            parent = await row_without_input(state.runner.queue, row.parent_id)
            related += [] if parent is None else [parent]
        visible = await _visible(state, caller, related)
        found["children"] = [each for each in found["children"] if each["run_id"] in visible]
        found["parent"] = row.parent_id if row.parent_id in visible else None
    return found


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
    return Reply(await view_for(state, caller, row, new=fresh), 201 if new else 200, headers)


@router.get("/runs", summary="List runs", responses=answers(ok_200=Page))
async def list_runs(request: Request, caller: Reader, query: Annotated[ListQuery, Query()]) -> Response:
    """List runs, newest first, without their inputs and results. Several states select the runs with one of them."""
    state = state_of(request)
    bound = query.model_dump(exclude={"cursor", "limit"}) | {"tenant": caller.tenant}
    before = page_start(query.cursor, bound)
    page = await visible_page(state, caller, filters_of(bound), before, query.limit)
    return Reply({"items": page.items, "next": None if page.next is None else cursor_of(page.next, bound)})


@router.get("/runs/{id}", summary="Read a run", responses=answers(404, ok_200=Run))
async def read_run(request: Request, id: str, caller: ResultReader) -> Response:
    """Return a run with its steps."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    return Reply(await view_for(state, caller, row))


@router.get(
    "/runs/{id}/result", summary="Read the result of a run", responses=answers(404, ok_200=Outcome, ok_202=Outcome)
)
async def read_result(
    request: Request, id: str, caller: ResultReader, query: Annotated[WaitQuery, Query()]
) -> Response:
    """Return the result: 200 once the run has finished, 202 until then."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    row = await after_wait(request, state, row, query.wait, required=True)
    outcome = await result_view(state.runner, row)
    if row.status in LIVE:
        return Reply(outcome, 202, {"Retry-After": str(RETRY_SECONDS)})
    return Reply(outcome)


@router.get("/runs/{id}/steps", summary="List the steps of a run", responses=answers(404, ok_200=Page))
async def read_steps(request: Request, id: str, caller: Reader, query: Annotated[PageQuery, Query()]) -> Response:
    """List the steps, waits and calls of a run in the order of their start."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    return Reply(step_views(row, await state.runner.state_store.records(row.run_id), query.after, query.limit))


@router.get("/runs/{id}/steps/{step_id}", summary="Read a step of a run", responses=answers(404, ok_200=AnyObject))
async def read_step(request: Request, id: str, step_id: str, caller: Reader) -> Response:
    """Return one row of the timeline with its input, output, error and records."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    found = step_detail(row, await state.runner.state_store.records(row.run_id), step_id)
    await _hide_children(state, caller, row, [found])
    return Reply(found)


@router.get("/runs/{id}/timeline", summary="Read the timeline of a run", responses=answers(404, ok_200=Timeline))
async def read_timeline(
    request: Request, id: str, caller: Reader, query: Annotated[TimelineQuery, Query()]
) -> Response:  # fmt: skip
    """List the steps, model calls, tool calls, waits, approvals, sleeps and child runs with their attempts."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    records = await state.runner.state_store.records(row.run_id)
    found = timeline_view(row, records, query.after, query.limit, query.newest_first)
    await _hide_children(state, caller, row, found["items"])
    return Reply(found)


async def _hide_children(state: ServerState, caller: Caller, row: RunRow, items: list[dict[str, Any]]) -> None:
    """Remove the ids of child runs that the caller may not see."""
    if not caller.limited or not any(each["child_run_id"] for each in items):
        return
    visible = await _visible(state, caller, await children_without_input(state.runner.queue, row.run_id))
    for each in items:
        each["child_run_id"] = each["child_run_id"] if each["child_run_id"] in visible else None


async def _visible(state: ServerState, caller: Caller, rows: list[RunRow]) -> set[str]:
    """Return the ids of the runs that the caller may read."""
    return {each.run_id for each in rows if await is_visible(state, caller, each, "read")}


@router.get("/runs/{id}/journal", summary="List the records of a run", responses=answers(404, ok_200=Page))
async def read_journal(request: Request, id: str, caller: Reader, query: Annotated[PageQuery, Query()]) -> Response:
    """List the records of the run's journal as they are stored."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    later = await state.runner.state_store.records(row.run_id, query.after)
    return Reply(journal_view(later, query.after, query.limit))


@router.get("/runs/{id}/messages", summary="Read the conversation of a run", responses=answers(404, ok_200=Page))
async def read_messages(
    request: Request, id: str, caller: ResultReader, query: Annotated[PageQuery, Query()]
) -> Response:
    """List the messages of the run in chat format."""
    state = state_of(request)
    row = await visible_row(state, caller, id, "read")
    return Reply(await messages_view(state.runner, row, query.after, query.limit))


@router.get("/runs/{id}/plan", summary="Read the plan of a run", responses=answers(404, ok_200=Plan))
async def read_plan(request: Request, id: str, caller: Reader) -> Response:
    """Return the steps of the run's plan with their dependencies."""
    state = state_of(request)
    return Reply(await plan_view(state.runner, await visible_row(state, caller, id, "read")))


@router.get("/runs/{id}/compare/{other}", summary="Compare two runs", responses=answers(404, ok_200=Comparison))
async def compare_runs(request: Request, id: str, other: str, caller: Reader) -> Response:
    """Return per step whether two runs have the same result, another one, or only one of them has the step."""
    state = state_of(request)
    first = await visible_row(state, caller, id, "read")
    return Reply(await compare_view(state.runner, first, await visible_row(state, caller, other, "read")))
