"""A turn between its run and its store: how it is found, kept, and said to be over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.clock import aware
from .._core.ids import trace_id
from .._execution.context import Context
from ..interfaces import RunResult
from ..runner.settings import RunInfo
from ..status import RunStatus, StepStatus
from .events import AuditEvent, EventEnvelope
from .logs import log
from .services import TurnServices
from .turn import Turn


async def load_turn(parts: TurnServices, ctx: Context) -> Turn:
    """The turn of a run: as it was saved, else as it was asked for."""
    return await parts.contexts.get_turn(str(ctx.run_id)) or new_turn(ctx)


def new_turn(ctx: Context) -> Turn:
    """A turn of which there is no more than what was asked."""
    return turn_of(str(ctx.run_id), ctx.trace_id, ctx.input, ctx.metadata)


def turn_of(run_id: str, trace_id: str, input: Mapping[str, Any], metadata: Mapping[str, Any]) -> Turn:
    """The turn that a run with this input is."""
    return Turn(
        run_id, trace_id, list(input.get("messages") or ()), conversation_id=input.get("conversation_id"),
        user_id=input.get("user_id"), personality=input.get("personality"), metadata=dict(metadata),
    )  # fmt: skip


async def save(parts: TurnServices, ctx: Context, turn: Turn) -> None:
    turn.updated_at = aware(ctx.clock.wall())
    turn.created_at = turn.created_at or turn.updated_at
    await parts.contexts.save_turn(turn)


def audited(parts: TurnServices, turn: Turn, action: str, details: dict[str, Any]) -> EventEnvelope:
    event = AuditEvent(action=action, details=details)
    return parts.topics.envelope(event, event_id=f"{action}:{turn.id}", trace_id=turn.trace_id, turn_id=turn.id)


async def as_ended(parts: TurnServices, info: RunInfo, result: RunResult) -> Turn:
    """The turn of a run that ends so: as it was asked for where its store has nothing of it, or is away."""
    try:
        turn = await parts.contexts.get_turn(str(info.run_id))
    except Exception as error:  # noqa: BLE001 - a store may fail in any way, and the end is told all the same
        log.warning("turn %s cannot be read, its end is told without its steps: %s", info.run_id, error)
        turn = None
    turn = turn or turn_of(str(info.run_id), trace_id(info.run_id), info.input, info.metadata)
    finish_turn(turn, result)
    return turn


def finish_turn(turn: Turn, result: RunResult) -> None:
    """Have a turn, as it was last saved, tell the end of its run: an earlier attempt may have failed otherwise."""
    turn.status, error = result.status or RunStatus.FAILED, result.error
    turn.error = None if error is None else {"type": error.type, "message": error.message, "details": error.details}
    stop_steps(turn)


def stop_steps(turn: Turn) -> None:
    """Of a turn that has ended, no step goes on."""
    for step in turn.steps:
        if turn.status is RunStatus.CANCELLED and not step.ended:
            step.status = StepStatus.CANCELLED
        elif step.status is StepStatus.RUNNING:
            late = turn.status is RunStatus.TIMED_OUT
            step.status = StepStatus.CANCELLED if late else StepStatus.PENDING


def end_of(parts: TurnServices, turn: Turn, generation: int) -> EventEnvelope:
    """The event that tells how a turn ended: one for each generation of its run."""
    about = {"status": turn.status.value, "metrics": turn.metrics.to_dict(), "error": turn.error}
    event = AuditEvent(action=f"turn.{turn.status.value}", details=about)
    mark = f"end:{turn.id}:{generation}"
    return parts.topics.envelope(event, event_id=mark, trace_id=turn.trace_id, turn_id=turn.id)
