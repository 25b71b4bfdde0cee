"""A turn between its run and its store: how it is found, kept, and said to be over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._clock import aware
from ..context import Context
from .events import AuditEvent, EventEnvelope
from .logs import TurnLog
from .parts import Parts
from .turn import Turn


async def saved(parts: Parts, ctx: Context) -> Turn:
    """The turn of a run: as it was saved, else as it was asked for."""
    return await parts.contexts.get_turn(str(ctx.run_id)) or asked(ctx)


def asked(ctx: Context) -> Turn:
    """A turn of which there is no more than what was asked."""
    return turn_of(str(ctx.run_id), ctx.trace_id, ctx.input, ctx.metadata)


def turn_of(run_id: str, trace_id: str, input: Mapping[str, Any], metadata: Mapping[str, Any]) -> Turn:
    """The turn that a run with this input is."""
    return Turn(
        run_id, trace_id, list(input.get("messages") or ()), conversation_id=input.get("conversation_id"),
        user_id=input.get("user_id"), personality=input.get("personality"), metadata=dict(metadata),
    )  # fmt: skip


async def save(parts: Parts, ctx: Context, turn: Turn) -> None:
    turn.updated_at = aware(ctx.clock.wall())
    turn.created_at = turn.created_at or turn.updated_at
    await parts.contexts.save_turn(turn)


def audited(parts: Parts, turn: Turn, action: str, details: dict[str, Any]) -> EventEnvelope:
    event = AuditEvent(action=action, details=details)
    return parts.topics.envelope(event, event_id=f"{action}:{turn.id}", trace_id=turn.trace_id, turn_id=turn.id)


async def ended(parts: Parts, ctx: Context, turn: Turn) -> None:
    about = {"status": turn.status.value, "metrics": turn.metrics.to_dict(), "error": turn.error}
    event = AuditEvent(action=f"turn.{turn.status.value}", details=about)
    mark = f"end:{turn.id}:{ctx.book.ledger.claim_id}"
    await parts.topics.tell(event, event_id=mark, trace_id=turn.trace_id, turn_id=turn.id)
    TurnLog(turn.trace_id, turn.id).info("turn ended: %s", turn.status.value)
    await parts.hooks.call("on_turn_end", turn)
