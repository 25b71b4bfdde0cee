"""Export a run as an HTML file: everything that its page asks for, as an object from path to answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final
from uuid import UUID

from .._views.export import events_of
from .._views.journal import journal_view
from .._views.messages import messages_view
from .._views.overview import about_view
from .._views.plain import iso_time, without_secrets
from .._views.plan import plan_view
from .._views.runs import run_view
from .._views.timeline import step_details, timeline_view
from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .html_file import html_page
from .redaction import redacted_answers

#: Most runs in a file: the run, its child runs, theirs, and so on.
MAX_RUNS: Final = 100
#: Most events of a run in a file: a browser reads them all when it opens the file.
MAX_EVENTS: Final = 50_000
#: Most characters of the inputs of model calls of a run. Each input repeats the conversation before it.
MAX_REQUESTS: Final = 8 << 20


async def run_html(runner: RunClient, run_id: UUID | str, *, redact: bool = False) -> str:
    """Return an HTML file that shows a run and its child runs, as the command `export RUN --html` writes it.

    The file opens from disk and needs no network. It has all that is stored of the run. Secrets in URLs are replaced
    by ***.

    Args:
        runner: The runner on the store, which may be read-only.
        run_id: The run, or the id you passed as `run_id`.
        redact: Leave out contents: inputs, outputs, payloads of events, messages, error messages and metadata. Names,
            states, times, tokens, costs and types of errors stay. Keys are replaced by a hash.

    Raises:
        UnknownRun: No such run is stored.

    Example:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRunner
        >>> from agent_runtime_core.inspector import run_html
        >>> async def main():
        ...     async with AgentRunner.open("agents.db", read_only=True) as runner:
        ...         return await run_html(runner, "order-7", redact=True)
        >>> text = asyncio.run(main())  # doctest: +SKIP
    """
    return html_page(await exported_data(runner, await runner.queue.require(run_id), redact=redact))


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


async def _add_run(runner: RunClient, row: RunRow, answers: dict[str, Any], leave_out: Callable[[str], None]) -> None:
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
