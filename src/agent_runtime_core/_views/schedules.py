"""Schedules as the command line, the HTTP API and the pages show them."""

from __future__ import annotations

import datetime as _dt
from dataclasses import fields
from typing import Any, Final

from .._core.ids import SCHEDULED
from ..queue.records import RunFilter, RunRow
from ..runner.run_client import RunClient
from ..runner.schedules import Schedule
from .plain import plain_of

_TICKS: Final = 5  # next ticks of a schedule
MOST_RUNS: Final = 20  # of its last runs


def schedule_view(schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a schedule. Times have the offset of its time zone."""
    found = {each.name: getattr(schedule, each.name) for each in fields(schedule)}
    return {name: _shown(value) for name, value in found.items()} | {
        "metadata": plain_of(schedule.metadata), "input": plain_of(schedule.input),
        "last_run_id": schedule.last_run_id and str(schedule.last_run_id),
    }  # fmt: skip


def _shown(value: Any) -> Any:
    return value.isoformat() if isinstance(value, _dt.datetime) else value


async def schedule_detail(runner: RunClient, row: RunRow) -> dict[str, Any]:
    """Return a schedule with its next ticks, as if it were not paused."""
    schedule = Schedule.of(row)
    ticks = await runner.schedules.next_ticks(schedule.id, _TICKS, tenant=schedule.tenant)
    return {**schedule_view(schedule), "next_ticks": [each.isoformat() for each in ticks]}


async def last_runs(runner: RunClient, row: RunRow) -> list[RunRow]:
    """Return the rows of the last runs of a schedule without their inputs, the newest first."""
    name = (row.run_key or "").removeprefix(SCHEDULED)
    wanted = RunFilter(prefix=f"{SCHEDULED}{name}:", tenant=row.tenant, newest_first=True, limit=MOST_RUNS)
    return await runner.queue.find(wanted._replace(without_input=True))
