"""The steps of a run, read from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.ids import step_id
from .._journal.record import DONE, Record
from ..queue.records import RunRow
from .attempts import TracedStep, enclosing, scopes_of, traced_steps
from .plain import iso_time


def steps_of(row: RunRow, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the steps, waits and calls of a run in order of their start, as `agent-runtime show` prints them."""
    return [
        {
            "state": each.state, "name": each.name, "step_key": each.key.partition(":")[2],
            "step_id": step_id(row.run_id, each.name, each.key), "attempts": each.number,
            "duration_ms": each.last.ms if each.last is not None and each.last.kind == DONE else None,
            "timestamp": iso_time(each.records[-1].t, "seconds") if each.records else None, "error": each.error,
        }
        for each in traced_steps(row, records).values()
    ]  # fmt: skip


def step_views(row: RunRow, records: Sequence[Record], after: int = -1, limit: int | None = None) -> dict[str, Any]:
    """Return a page of the steps of a run in the order of their start: {"items", "next"}.

    Args:
        row: The run.
        records: Its whole journal.
        after: The `sequence` of the last step of the page before, -1 for the first page.
        limit: How many steps at most; None for all.

    Returns:
        `next` is the `after` of the next page, None for the last one. Each item is {"sequence", "step_id", "name",
        "key", "state", "started_at", "ended_at", "duration_ms", "attempts", "error", "cost_usd", "usage", "parent"};
        `parent` is the step id of the enclosing step.
    """
    steps = [*traced_steps(row, records).values()]
    scopes = scopes_of(steps)
    first = max(after + 1, 0)
    end = len(steps) if limit is None else min(first + limit, len(steps))
    items = [_step_view(row, number, steps[number], scopes) for number in range(first, end)]
    return {"items": items, "next": end - 1 if items and end < len(steps) else None}


def _step_view(row: RunRow, number: int, step: TracedStep, scopes: dict[str, TracedStep]) -> dict[str, Any]:
    last, usage, outer = step.last, step.usage, enclosing(step, scopes)
    return {
        "sequence": number, "step_id": step_id(row.run_id, step.name, step.key), "name": step.name,
        "key": step.key.partition(":")[2], "state": step.state, "started_at": iso_time(step.began),
        "ended_at": iso_time(step.ended),
        "duration_ms": last.ms if last is not None and last.kind == DONE else None,
        "attempts": step.number, "error": step.error, "cost_usd": usage.get("cost_usd"), "usage": usage or None,
        "parent": None if outer is None else step_id(row.run_id, outer.name, outer.key),
    }  # fmt: skip
