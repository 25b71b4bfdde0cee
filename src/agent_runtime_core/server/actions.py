"""Act on runs: cancel, resume, fork, signal, answer, send, delete, and repair dead letters."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response
from pydantic import BeforeValidator

from .._core.arguments import run_input
from .._core.codec.json import decode_dict
from .._core.validation import Shown, must
from .._views.problems import invalid
from .._views.read_routes import OF_RESULTS
from .._views.visibility import is_visible, visible_row, visible_view
from ..errors import IllegalTransition, InvalidArgument, UnknownRun
from ..queue.records import LIVE, RunFilter, RunRow
from ..runner.approvals import AskedRequests
from . import documents
from .access import OF_SENDING, Caller, check_scope, require
from .documents import Reply, answers
from .errors import Problem, safe_text
from .reads import after_wait
from .runs import location_of
from .state import ServerState, state_of
from .submission import approve, check_id, check_new, check_pools, finished, invalid_in, taken

router: APIRouter = APIRouter(tags=["actions"], default_response_class=Reply)

Actor = Annotated[Caller, require("act")]
Sender = Annotated[Caller, require(*OF_SENDING)]
Approver = Annotated[Caller, require("approve")]
Admin = Annotated[Caller, require("admin")]
# Null is accepted, and not documented: a generated client cannot omit a body that may be null.
_NOT_NULL: Final = BeforeValidator(lambda body: {} if body is None else body)
_Cancel = Annotated[documents.Cancel, _NOT_NULL, Body(default_factory=documents.Cancel)]
_Fork = Annotated[documents.Fork, _NOT_NULL, Body(default_factory=documents.Fork)]
_PAGE: Final = 500  # dead letters that are read at once


# A parameter for the body would refuse null.
_ANY_BODY: Final = {"requestBody": {"required": True, "content": {"application/json": {"schema": {}}}}}


def _post(
    path: str, title: str, *codes: int, status: int | None = None, extra: dict[str, Any] | None = None, **found: Any
) -> Callable[[Any], Any]:
    """Return the decorator of a route that stores something, which `answers` describes."""
    responses = answers(*codes, writes=True, **found)
    return router.post(path, status_code=status, summary=title, responses=responses, openapi_extra=extra)


def _stored(row: RunRow) -> dict[str, Any]:
    return {"run_id": row.run_id, "state": row.status}


@_post("/runs/{id}/cancel", "Cancel a run", 404, status=202, ok_200=documents.Stored, ok_202=documents.Stored)
async def cancel_run(request: Request, id: str, caller: Actor, body: _Cancel) -> Response:
    """Cancel a run and its child runs: 202 if the request is stored, 200 if the run has finished."""
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "act")
    await state.runner.cancel(row.run_id, by=caller.name)
    row = await after_wait(request, state, await state.runner.queue.require(row.run_id), body.wait, cancels=True)
    return Reply(_stored(row), 202 if row.status in LIVE else 200)


@_post("/runs/{id}/resume", "Resume a run", 404, 409, status=202, ok_202=documents.Stored)
async def resume_run(request: Request, id: str, caller: Actor) -> Response:
    """Let a worker resume a failed, timed-out, cancelled or dead run. Completed steps keep their results."""
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "act")
    await state.runner.resume(row.run_id, by=caller.name)
    return Reply(_stored(await state.runner.queue.require(row.run_id)), 202)


@_post("/runs/{id}/fork", "Fork a run", 404, 409, status=201, ok_201=documents.Run)
async def fork_run(request: Request, id: str, caller: Actor, body: _Fork) -> Response:
    """Store a new run that resumes from a step of this run. It needs the scope result or read, too."""
    check_scope(caller, OF_RESULTS)  # the new run has the saved results of this one
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "act")
    if caller.limited:
        await _check_fork(state, caller, row, body)
    try:
        check_pools(body.input)
        new = await state.runner.fork(
            row.run_id, body.after_step, new_run_id=body.new_run_id, input=body.input, params=body.params,
            by=caller.name,
        )  # fmt: skip
    except InvalidArgument as error:
        problem = invalid_in(error, {"run_id": "new_run_id", "input": "input"})
        raise (invalid("after_step", error) if problem is error else problem) from None
    found = await state.runner.queue.require(new)
    headers = {"Location": location_of(request, found.run_id)}
    return Reply(await visible_view(state.runner, caller, found), 201, headers)


async def _check_fork(state: ServerState, caller: Caller, source: RunRow, body: documents.Fork) -> None:
    """Raise a problem for a fork that the caller may not make."""
    given = source.decoded("input", decode_dict) if body.input is None else body.input
    try:
        new = state.runner.queue.new_row(
            body.new_run_id or source.run_id, source.agent, run_input(given, body.params), {}, tenant=source.tenant
        )
    except InvalidArgument:
        return  # the runner says what is wrong with it
    fork = source.with_values(input=new.input, conversation=new.conversation, arrival=0)
    if body.new_run_id is not None:
        fork = fork.with_values(run_id=new.run_id, run_key=new.run_key)
        check_id(caller, fork, "new_run_id")
    await check_new(state, caller, fork)
    stored = None if body.new_run_id is None else await state.runner.queue.row(new.run_id)
    if stored is not None and not await is_visible(state.runner.queue, caller, stored, "act"):
        raise taken()


@_post(
    "/runs/{id}/signals/{name}", "Send a signal", 404, 409, 410, status=202, extra=_ANY_BODY, ok_202=documents.Stored
)
async def send_signal(
    request: Request, id: str, name: str, caller: Sender, idempotency_key: documents.IdempotencyKey = None
) -> Response:
    """Send a signal, whose payload is the body. It is kept until the run waits for a signal of that name.

    Without the scope approve it answers no question of that name.
    """
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "act")
    if not (body := await request.body()):
        raise invalid("body", must("the body", "be JSON", Shown("no body"), "Send null for a signal without a payload"))
    answers = "approve" in caller.scopes
    payload = json.loads(body)
    if not await state.runner.signal(row.run_id, name, payload, message_id=idempotency_key, answers=answers):
        raise finished()
    return Reply(_stored(row), 202)


@_post("/runs/{id}/messages", "Send a message to an agent", 404, 409, 410, status=202, ok_202=documents.StoredMessage)
async def send_message(request: Request, id: str, body: documents.SentMessage, caller: Sender) -> Response:
    """Send a message to the agent that works on a run."""
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "act")
    try:
        sent = await state.runner.send(row.run_id, body.message, when=body.when, message_id=body.message_id)
    except IllegalTransition:
        raise finished() from None
    except InvalidArgument as error:
        raise invalid("message", error) from None
    return Reply({"run_id": row.run_id, "message_id": sent}, 202)


@_post("/runs/{id}/approvals/{name}", "Answer a question of a run", 404, 409, 410, ok_200=documents.StoredAnswer)
async def answer_approval(request: Request, id: str, name: str, body: documents.Answer, caller: Approver) -> Response:
    """Answer an open question. A name that the run has not asked yet is kept for it."""
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "act")
    queue = state.runner.queue
    try:
        asked = bool((await AskedRequests.of(queue, state.runner.event_bus, row.run_id, name)).payloads)
        await approve(state, caller, row, name, body.answer, request_id=body.request_id)
    except InvalidArgument as error:
        raise invalid("request_id" if str(error).startswith("request_id ") else "answer", error) from None
    return Reply({**_stored(row), "asked": asked})


@router.delete("/runs/{id}", status_code=204, summary="Delete a run", responses=answers(404, 409, writes=True))
async def delete_run(request: Request, id: str, caller: Admin) -> Response:
    """Delete a finished run with its journal, events and messages."""
    state = state_of(request)
    row = await visible_row(state.runner.queue, caller, id, "delete")
    await state.runner.discard(row.run_id)
    return Response(status_code=204)


@_post("/dead/requeue", "Requeue dead letters", 409, ok_200=documents.Repaired)
async def requeue_dead_letters(request: Request, body: documents.DeadLetters, caller: Admin) -> Response:
    """Let workers resume dead letters."""
    state = state_of(request)
    return await _repair(state, caller, body, "act", partial(state.runner.requeue, by=caller.name))


@_post("/dead/discard", "Delete dead letters", 409, ok_200=documents.Repaired)
async def discard_dead_letters(request: Request, body: documents.DeadLetters, caller: Admin) -> Response:
    """Delete dead letters."""
    state = state_of(request)
    return await _repair(state, caller, body, "delete", state.runner.discard)


async def _repair(
    state: ServerState, caller: Caller, body: documents.DeadLetters, verb: str, act: Callable[[str], Awaitable[Any]]
) -> Response:
    """Apply `act` to each run; report those that do not exist, are hidden or are in another state."""
    ids = await _all_with(state, caller, body, verb) if body.ids is None else list(dict.fromkeys(body.ids))
    done: list[str] = []
    failed: list[dict[str, str]] = []
    for run_id in ids:
        if state.draining.is_set():  # the rest would delay the shutdown
            failed.append({"id": run_id, "why": "The server is shutting down."})
            continue
        try:
            row = await visible_row(state.runner.queue, caller, run_id, verb)
            if row.status != body.state:
                failed.append({"id": run_id, "why": f"The run must be {body.state}, and is {row.status}."})
                continue
            await act(row.run_id)
            done.append(run_id)
        except UnknownRun:
            failed.append({"id": run_id, "why": "No run has this id."})
        except IllegalTransition as error:
            failed.append({"id": run_id, "why": safe_text(str(error))})
        except Problem as problem:  # it is a key of several tenants
            failed.append({"id": run_id, "why": problem.detail})
    return Reply({"done": done, "failed": failed})


async def _all_with(state: ServerState, caller: Caller, body: documents.DeadLetters, verb: str) -> list[str]:
    """Return the ids of all runs with that state, or raise Problem 409 if they are not as many as expected."""
    wanted = RunFilter((body.state,), tenant=caller.tenant, limit=_PAGE, light=caller.may is None, without_input=True)
    found: list[str] = []
    while rows := await state.runner.queue.find_runs(wanted):
        found += [row.run_id for row in rows if await is_visible(state.runner.queue, caller, row, verb)]
        wanted = wanted._replace(after=rows[-1].arrival)
    if len(found) != body.expect:
        raise Problem.of(
            409,
            f"expect must be the number of {body.state} runs, which is {len(found)}. Nothing was changed.",
            type="urn:agent-runtime:unexpected-count",
        )
    return found
