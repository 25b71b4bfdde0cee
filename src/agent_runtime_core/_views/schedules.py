"""Schedules as the command line, the HTTP API and the pages show them."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from ..queue.records import RunFilter, RunRow
from ..runner.run_client import RunClient
from ..runner.schedules import Schedule
from .plain import plain_of
from .problems import safe_text

_TICKS: Final = 5  # next ticks of a schedule
_MOST_RUNS: Final = 20  # of its last runs
_FIELDS: Final = tuple(each.name for each in fields(Schedule) if each.name != "error")


def schedule_view(schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a schedule. Times show the offset of its time zone."""
    found = {name: getattr(schedule, name) for name in _FIELDS}
    return {name: value.isoformat() if isinstance(value, _dt.datetime) else value for name, value in found.items()} | {
        "metadata": plain_of(schedule.metadata),
        "input": plain_of(schedule.input),
        "tags": [*schedule.tags],
        "last_run_id": schedule.last_run_id and str(schedule.last_run_id),
    }


async def schedule_items(runner: RunClient, rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Return the items of a list of schedules, with the state of the last run of each, with one read.

    A schedule that this process cannot read shows its `id`, and the reason as its `error`.
    """
    items = [_item(Schedule.listed(row)) for row in rows]
    states = await runner.queue.snapshots([each["last_run_id"] for each in items if each["last_run_id"]])
    for each in items:
        found = states.get(each["last_run_id"])
        each["last_state"] = None if found is None else found.status
    return items


def _item(schedule: Schedule) -> dict[str, Any]:
    if schedule.error is None:
        return {**schedule_view(schedule), "error": None}
    nothing = dict.fromkeys(_FIELDS)
    return {**nothing, "id": schedule.id, "tenant": schedule.tenant, "error": safe_text(schedule.error)}


async def schedule_detail(runner: RunClient, row: RunRow) -> dict[str, Any]:
    """Return a schedule with its next ticks, as if it were not paused."""
    schedule = Schedule.of(row)
    ticks = await runner.schedules.next_ticks(schedule.id, _TICKS, tenant=schedule.tenant)
    return {**schedule_view(schedule), "next_ticks": [each.isoformat() for each in ticks]}


async def last_runs(runner: RunClient, row: RunRow) -> list[RunRow]:
    """Return the rows of the last runs of a schedule without their inputs, the newest first."""
    wanted = RunFilter(prefix=f"{row.run_key}:", tenant=row.tenant, newest_first=True, limit=_MOST_RUNS)
    return await runner.queue.find(wanted._replace(without_input=True))
