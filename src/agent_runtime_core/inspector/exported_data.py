"""Read everything that the page of a run asks for, as an object from path to answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

from .._views.about import about_view
from .._views.export import events_of
from .._views.journal import journal_view
from .._views.messages import messages_view
from .._views.plain import iso_time, without_secrets
from .._views.plan import plan_view
from .._views.runs import run_view
from .._views.timeline import step_details, timeline_view
from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .redaction import redacted_answers

#: Most runs in a file: the run, its child runs, theirs, and so on.
MAX_RUNS: Final = 100
#: Most events of a run in a file: a browser reads them all when it opens the file.
MAX_EVENTS: Final = 50_000
#: Most characters of the inputs of model calls of a run. Each input repeats the conversation before it.
MAX_REQUESTS: Final = 8 << 20


async def exported_data(runner: RunClient, row: RunRow, *, redact: bool) -> dict[str, Any]:
    """Return the answers of the API about a run and its child runs, by their paths below `api/v1/`.

    `about` also has "run_id", "redacted", "exported_at", and "left_out": sentences about what the file does not have.
    """
    rows, left_out = await _with_children(runner, row)
    answers: dict[str, Any] = {}
    for each in rows:
        await _add_run(runner, each, answers, left_out.append)
    about = {
        **about_view(runner, (), hide_store=True), "live": "none", "read_only": True, "run_id": row.run_id,
        "redacted": redact, "exported_at": iso_time(runner.queue.clock.wall(), "seconds"), "left_out": left_out,
    }  # fmt: skip
    found: dict[str, Any] = without_secrets({"about": about, **(redacted_answers(answers) if redact else answers)})
    return found


async def _with_children(runner: RunClient, row: RunRow) -> tuple[list[RunRow], list[str]]:
    """Return the row of a run and those of its child runs, level by level, and what is left out."""
    rows, next_ = [row], 0
    while next_ < len(rows):
        children = await runner.queue.children(rows[next_].run_id)
        if len(rows) + len(children) > MAX_RUNS:
            return [*rows, *children][:MAX_RUNS], [f"child runs after the first {MAX_RUNS - 1}"]
        rows += children
        next_ += 1
    return rows, []


async def _add_run(
    runner: RunClient, row: RunRow, answers: dict[str, Any], leave_out: Callable[[str], None]
) -> None:  # fmt: skip
    records = await runner.state_store.records(row.run_id)
    path = f"runs/{row.run_id}"
    answers[path] = await run_view(runner, row, records=records)
    events = await _events(runner, row)
    if len(events) > MAX_EVENTS:
        leave_out(f"events of run {row.run_id} after the first {MAX_EVENTS:,}")
    answers[f"{path}/events"] = {"items": events[:MAX_EVENTS], "next": None}
    answers[f"{path}/messages"] = await messages_view(runner, row, records=records)
    answers[f"{path}/plan"] = await plan_view(runner, row, records)
    answers[f"{path}/journal"] = journal_view(records)
    answers[f"{path}/timeline"] = timeline_view(row, records)
    room = MAX_REQUESTS
    for step in step_details(row, records):
        if step["kind"] == "model":
            room -= len(json.dumps(step["input"]))
            if room < 0:
                step["input"] = None
        answers[f"{path}/steps/{step['step_id']}"] = step
    if room < 0:
        leave_out(f"the inputs of later model calls of run {row.run_id}: its messages have them")


async def _events(runner: RunClient, row: RunRow) -> list[Any]:
    found: list[Any] = []
    async with aclosing(events_of(runner, row)) as events:
        async for each in events:
            found.append(each)
            if len(found) > MAX_EVENTS:
                break
    return found
