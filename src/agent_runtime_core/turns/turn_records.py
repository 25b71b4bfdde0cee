"""Load, save and finish the turn of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.clock import aware
from .._core.ids import trace_id
from .._core.log import log
from .._execution.context import Context
from ..interfaces import RunResult
from ..runner.settings import RunInfo
from ..status import RunStatus, StepStatus
from .events import AuditEvent, EventEnvelope
from .services import TurnServices
from .turn import Turn


async def load_turn(services: TurnServices, ctx: Context) -> Turn:
    """Return the turn of a run as saved, else as requested."""
    return await services.contexts.for_tenant(ctx.tenant).get_turn(str(ctx.run_id)) or new_turn(ctx)


def new_turn(ctx: Context) -> Turn:
    """Return the turn of a run as requested, without progress."""
    return turn_of(str(ctx.run_id), ctx.trace_id, ctx.input, ctx.metadata, ctx.tenant)


def turn_of(
    run_id: str, trace_id: str, input: Mapping[str, Any], metadata: Mapping[str, Any], tenant: str | None
) -> Turn:
    """Return the turn of a run with this input, without progress."""
    return Turn(
        run_id, trace_id, list(input.get("messages") or ()), conversation_id=input.get("conversation_id"),
        user_id=input.get("user_id"), personality=input.get("personality"), metadata=dict(metadata),
        tenant=tenant,
    )  # fmt: skip


async def save(services: TurnServices, ctx: Context, turn: Turn) -> None:
    """Store the turn with the present time."""
    turn.updated_at = aware(ctx.clock.wall())
    turn.created_at = turn.created_at or turn.updated_at
    await services.contexts.for_tenant(turn.tenant).save_turn(turn)


def audit_event(services: TurnServices, turn: Turn, action: str, details: dict[str, Any]) -> EventEnvelope:
    """Return an audit event of the turn, in the envelope of its topic."""
    event = AuditEvent(action=action, details=details)
    return services.topics.envelope(event, event_id=f"{action}:{turn.id}", **turn.event_ids)


async def finished_turn(services: TurnServices, info: RunInfo, result: RunResult) -> Turn:
    """Return the turn of a finished run; as requested if it was not saved or its store is unavailable."""
    try:
        turn = await services.contexts.for_tenant(info.tenant).get_turn(str(info.run_id))
    except Exception as error:  # noqa: BLE001 - a store may fail in any way, the end is published all the same
        log.warning("reading turn %s failed; publishing its end without its steps: %s", info.run_id, error)
        turn = None
    turn = turn or turn_of(str(info.run_id), trace_id(info.run_id), info.input, info.metadata, info.tenant)
    finish_turn(turn, result)
    return turn


def finish_turn(turn: Turn, result: RunResult) -> None:
    """Set status and error of a turn from its run's result. The saved error may be that of an earlier attempt."""
    turn.status, error = result.status or RunStatus.FAILED, result.error
    turn.error = None if error is None else {"type": error.type, "message": error.message, "details": error.details}
    stop_steps(turn)


def stop_steps(turn: Turn) -> None:
    """Set the final status of the unfinished steps of a finished turn."""
    for step in turn.steps:
        if turn.status is RunStatus.CANCELLED and not step.ended:
            step.status = StepStatus.CANCELLED
        elif step.status is StepStatus.RUNNING:
            timed_out = turn.status is RunStatus.TIMED_OUT
            step.status = StepStatus.CANCELLED if timed_out else StepStatus.PENDING


def end_event(services: TurnServices, turn: Turn, generation: int) -> EventEnvelope:
    """Return the audit event for the end of a turn, with one event id for each generation of its run."""
    details = {"status": turn.status.value, "metrics": turn.metrics.to_dict(), "error": turn.error}
    event = AuditEvent(action=f"turn.{turn.status.value}", details=details)
    event_id = f"end:{turn.id}:{generation}"
    return services.topics.envelope(event, event_id=event_id, **turn.event_ids)
