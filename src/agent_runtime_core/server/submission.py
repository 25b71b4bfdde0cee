"""Store a new run for a request: which row it is, whether the caller may submit it, and whether the queue is full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from .._core.codec.json import decode_dict
from .._core.ids import known_uuid, parsed
from .._core.validation import Shown, must, unknown
from .._execution.context import conversation_id
from .._views.problems import invalid, invalid_field
from .._views.visibility import is_visible, no_such_run
from ..errors import IdempotencyConflict, InvalidArgument, UnknownAgent
from ..orchestrator import RunCreate
from ..queue.records import LIVE, RunFilter, RunRow
from .access import Caller
from .documents import AgentRun, PromptRun
from .errors import Problem
from .state import ServerState


def span_of(request: Request) -> str | None:
    """Return the `traceparent` header of a request; None without a valid header, which must not fail the request."""
    header = request.headers.get("traceparent")
    return None if parsed(header) is None else header


def row_of(
    state: ServerState, caller: Caller, body: PromptRun | AgentRun, key: str | None, traceparent: str | None
) -> RunRow:
    """Return the row of the run that a request asks for, in the span with that W3C `traceparent`.

    Raises:
        InvalidArgument: A value is invalid, or this server does not plan prompts.
        UnknownAgent: The server knows agents, and not this agent.
    """
    if isinstance(body, PromptRun):
        if state.orchestrator is None:
            raise no_part("prompt", "prompts", "Send agent and input")
        return state.orchestrator.new_run(RunCreate(body.prompt, body.max_steps), key, traceparent, caller.tenant)
    check_agent(state, body.agent)
    check_pools(body.input)
    if body.priority > state.settings.max_priority:
        raise must("priority", f"be at most {state.settings.max_priority}", body.priority)
    if body.deadline is not None and body.deadline <= state.runner.queue.clock.wall():
        raise must("deadline", "be in the future", body.deadline)
    return state.runner.new_run(
        body.agent, _input_of(body), run_id=body.run_id, idempotency_key=key, priority=body.priority,
        delay=body.delay, expires_in=body.expires_in, deadline=body.deadline, metadata=body.metadata,
        concurrency_key=body.concurrency_key, traceparent=traceparent, tenant=caller.tenant, params=body.params,
        tags=body.tags,
    )  # fmt: skip


def no_part(field: str, what: str, fix: str) -> Problem:
    """Return the problem for a request that needs a part which this server lacks."""
    return invalid_field(field, f"This server executes no {what}. {fix}.")


def check_pools(given: Mapping[str, Any] | None) -> None:
    """Reject pools in the limits of an input: a caller could use up the pool of another tenant.

    Raises:
        InvalidArgument: The input has pools.
    """
    limits = (given or {}).get("limits")
    if isinstance(limits, Mapping) and "pools" in limits:
        fix = "Set pools in the limits of the runner or the agent"
        raise must("input", "name no pools in its limits", Shown("some"), fix)


def _input_of(body: AgentRun) -> dict[str, Any]:
    given, conversation = body.input, body.conversation_id
    if conversation is None:
        return given
    if given.get("conversation_id", conversation) != conversation:
        raise must("conversation_id", "equal that of the input", conversation, "Send it once")
    return {**given, "conversation_id": conversation}


def check_agent(state: ServerState, agent: str) -> None:
    """Raise UnknownAgent if the server knows agents, and not this agent."""
    known = [*state.registry.keys()]
    if state.orchestrator is not None:
        known.append(state.orchestrator.agent.key)
    if known and agent not in known:  # a server that executes nothing may know no agents
        raise UnknownAgent(unknown("agent", agent, known))


async def insert(state: ServerState, caller: Caller, row: RunRow, *, prompt: bool) -> tuple[RunRow, bool]:
    """Store a row; return the stored row, and whether it is new.

    Raises:
        Problem: 403 if the caller may not submit such a run. 409 if another run uses the id or key. 422 for an id that
            a caller with a tenant may not choose.
        UnknownRun: The conversation belongs to a hidden run.
    """
    check_id(caller, row, "run_id")
    await check_new(state, caller, row)
    orchestrator = state.orchestrator if prompt else None
    await state.pending.check(state.runner.queue, state.settings.max_pending)
    new = False
    try:
        stored, new = await (orchestrator or state.runner).insert_run(row)
    except IdempotencyConflict as error:
        # Its message names fields of the other run, which may be hidden.
        other = await state.runner.queue.row(row.run_id)
        if caller.may is not None or (
            other is not None and not await is_visible(state.runner.queue, caller, other, "read")
        ):
            raise taken() from None
        raise error
    finally:
        if not new:
            state.pending.release()
    if not new and not await is_visible(state.runner.queue, caller, stored, "read"):
        raise taken()
    return stored, new


async def insert_turn(state: ServerState, caller: Caller, turn: Any, traceparent: str | None = None) -> RunRow:
    """Store the turn of a request, in the span with that W3C `traceparent`; return the row of its run.

    Raises:
        InvalidTurn: A field of the turn is invalid.
        Problem: The server executes no turns, the queue is full, or as for `insert`.
    """
    if state.turns is None:
        raise no_part("turn", "turns", "Use POST /runs")
    row = state.turns.new_run(turn, traceparent=traceparent, tenant=caller.tenant)
    stored, _ = await insert(state, caller, row, prompt=False)
    return stored


def check_id(caller: Caller, row: RunRow, field: str) -> None:
    """Raise Problem 422 if a caller with a tenant chose an id that a run of another tenant will get.

    The ids that are made of run keys, and the ids of child runs, are UUIDs of version 5, and anyone can compute them. A
    tenant whose id is taken could not use its key, or its run could not call its child.
    """
    if caller.tenant is not None and row.run_key is None and known_uuid(row.run_id).version == 5:
        raise invalid(field, must(field, "be text, or a UUID that is not of version 5", Shown("a UUID of version 5")))


async def check_new(state: ServerState, caller: Caller, row: RunRow) -> None:
    """Check that a caller may submit a new run: that the caller could act on it, and may name its conversation.

    A conversation belongs to its first run. A caller may name it if it is new, or if the caller may read that run. If
    messages of it are stored, and no run, nobody knows whose it is, and no caller with `may` may name it.

    Raises:
        Problem: 403 if the caller could not act on the run. 422 if the name of the conversation is not a string.
        UnknownRun: The caller may not name the conversation.
    """
    if not await is_visible(state.runner.queue, caller, row, "act"):
        raise Problem.of(403, "This caller may not have a run with this metadata.")
    if caller.may is None:
        return
    name = row.decoded("input", decode_dict).get("conversation_id")
    if (uuid := conversation_id(name)) is None:
        return
    if row.conversation is None:  # the queue does not list such a run in its conversation
        raise invalid("conversation_id", must("conversation_id", "be a string", name))
    runner, is_new = state.runner, True
    for each in {row.conversation, str(uuid)}:  # the UUID made of a text names the same conversation
        named = RunFilter(conversation=each, tenant=row.tenant, without_input=True, limit=1)
        for first in await runner.queue.find(named):
            is_new = False
            if not await is_visible(state.runner.queue, caller, first, "read"):
                raise no_such_run()
    if not is_new or not runner.keeps_conversations:
        return
    if await runner.persistence.for_tenant(row.tenant or None).conversations.get_messages(uuid, limit=1):
        raise no_such_run()


async def approve(state: ServerState, caller: Caller, row: RunRow, name: str, answer: Any, **ids: str | None) -> None:
    """Store the answer to a question of a run; `ids` are `request_id` and `message_id`.

    Raises:
        InvalidArgument: The answer does not fit the question.
        Problem: 409 if the question was answered before. 410 if the run has finished.
    """
    if row.status not in LIVE:
        raise finished()
    if not await state.runner.approve(row.run_id, name, answer, **ids, by=caller.name):
        if (await state.runner.queue.require(row.run_id)).status not in LIVE:
            raise finished()
        raise Problem.of(409, "The question was answered before.", type="urn:agent-runtime:already-answered")


def finished() -> Problem:
    """Return the problem for a request that needs a live run."""
    return Problem.of(410, "The run has finished.", type="urn:agent-runtime:run-finished")


def taken() -> Problem:
    """Return the problem for an id or key of a hidden run."""
    return Problem.of(
        409, "The run id or idempotency key is in use. Use another one.", type="urn:agent-runtime:idempotency-conflict"
    )


def invalid_in(error: InvalidArgument, names: Mapping[str, str]) -> Problem | InvalidArgument:
    """Return the problem for the field that the message begins with, by the name of the argument.

    Without such a field it is the error itself.
    """
    field = names.get(str(error).partition(" ")[0].partition("[")[0])
    return error if field is None else invalid(field, error)
