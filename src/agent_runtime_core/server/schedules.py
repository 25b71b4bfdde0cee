"""Store, pause, resume, run and delete schedules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .._core.validation import must
from .._views.problems import invalid
from .._views.schedules import schedule_detail
from .._views.visibility import is_visible, visible_schedule, visible_view
from ..errors import InvalidArgument, MissingDependency
from ..runner.schedules import Schedule, Schedules
from . import documents
from .access import Caller, require
from .documents import Reply, answers
from .errors import Problem
from .runs import location_of
from .state import ServerState, state_of
from .submission import check_agent, check_new, check_pools, invalid_in

router: APIRouter = APIRouter(tags=["schedules"], default_response_class=Reply)

Actor = Annotated[Caller, require("act")]
Submitter = Annotated[Caller, require("run")]
_NAMED = {each: each for each in documents.CronSchedule.model_fields}
_FIELDS = {"schedule": "id", "every": "every", "tag": "tags", **_NAMED}
_ANSWERS = answers(404, writes=True, ok_200=documents.Schedule)
_OF_PUT = answers(404, 409, writes=True, ok_200=documents.Schedule)


@router.put("/schedules/{id}", summary="Store a schedule", responses=_OF_PUT)
async def put_schedule(request: Request, id: str, body: documents.NewSchedule, caller: Submitter) -> Response:
    """Store a schedule of the tenant of the request, or replace it. After a change, the first tick is the next tick."""
    state, options = state_of(request), body.model_dump()
    runner, tenant = state.runner, caller.tenant
    try:
        check_agent(state, body.agent)
        check_pools(body.input)
        if body.priority > state.settings.max_priority:
            raise must("priority", f"be at most {state.settings.max_priority}", body.priority)
        run = runner.new_run(
            body.agent, body.input, metadata=body.metadata, priority=body.priority, tenant=tenant,
            concurrency_key=body.concurrency_key, concurrency_limit=body.concurrency_limit, tags=body.tags,
        )  # fmt: skip
        await check_new(state, caller, run)
        stored = await runner.schedules.row(id, tenant=tenant)
        if stored is not None and not await is_visible(runner.queue, caller, stored, "act"):
            raise Problem.of(409, "The id belongs to another schedule.")
        await runner.schedules.put(id, tenant=tenant, **options)
    except InvalidArgument as error:
        raise invalid_in(error, _FIELDS) from None
    except MissingDependency as error:
        raise invalid("cron", InvalidArgument(str(error))) from None
    return await _reply(state, caller, id)


@router.post("/schedules/{id}/pause", summary="Pause a schedule", responses=_ANSWERS)
async def pause_schedule(request: Request, id: str, caller: Actor) -> Response:
    """Fire no tick until the schedule is resumed."""
    return await _changed(request, caller, id, Schedules.pause)


@router.post("/schedules/{id}/resume", summary="Resume a schedule", responses=_ANSWERS)
async def resume_schedule(request: Request, id: str, caller: Actor) -> Response:
    """Fire ticks again, from the first tick after now."""
    return await _changed(request, caller, id, Schedules.resume)


@router.post("/schedules/{id}/run", status_code=201, summary="Run a schedule now",
             responses=answers(404, writes=True, ok_201=documents.Run))  # fmt: skip
async def run_schedule(request: Request, id: str, caller: Submitter) -> Response:
    """Start a run of the schedule now, besides its ticks."""
    state = state_of(request)
    await visible_schedule(state.runner, caller, id, "act")
    await state.pending.check(state.runner.queue, state.settings.max_pending)
    try:
        run_id = await state.runner.schedules.run_now(id, tenant=caller.tenant)
    except BaseException:
        state.pending.release()
        raise
    row = await state.runner.queue.require(run_id)
    headers = {"Location": location_of(request, row.run_id)}
    return Reply(await visible_view(state.runner, caller, row), 201, headers)


@router.delete("/schedules/{id}", status_code=204, summary="Delete a schedule", responses=answers(404, writes=True))
async def delete_schedule(request: Request, id: str, caller: Actor) -> Response:
    """Delete a schedule. Its runs stay."""
    state = state_of(request)
    await visible_schedule(state.runner, caller, id, "delete")
    await state.runner.schedules.delete(id, tenant=caller.tenant)
    return Response(status_code=204)


async def _changed(request: Request, caller: Caller, id: str, change: Callable[..., Awaitable[Schedule]]) -> Response:
    state = state_of(request)
    await visible_schedule(state.runner, caller, id, "act")
    await change(state.runner.schedules, id, tenant=caller.tenant)
    return await _reply(state, caller, id)


async def _reply(state: ServerState, caller: Caller, id: str) -> Response:
    return Reply(await schedule_detail(state.runner, await visible_schedule(state.runner, caller, id, "act")))
