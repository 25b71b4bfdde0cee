"""The records of a run's journal as they are stored, and the result of a finished run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from .._core.ids import step_id
from .._journal.record import Record
from ..errors import StorageCorrupt, UnknownEncryptionKey
from ..queue.records import LIVE, RunRow
from ..runner.run_client import RunClient
from ..state.base import RunEnd
from .plain import iso_time, plain_value
from .problems import detail_of

_JSON = ("result", "error", "state", "info", "next")

_Outcome = tuple[dict[str, Any] | None, dict[str, Any]]  # error and usage


def journal_view(records: Sequence[Record], after: int = -1, limit: int | None = None) -> dict[str, Any]:
    """Return a page of records: {"items", "next"}.

    Args:
        records: The journal, or the part of it after the position `after`.
        after: The position of the last record of the page before, -1 for the first page.
        limit: How many records at most; None for all.

    Returns:
        `next` is the `after` of the next page, None for the last page.
    """
    later = (each for each in records if each.seq > after)
    page = [*islice(later, limit)]
    more = next(later, None) is not None
    return {"items": [record_view(each) for each in page], "next": page[-1].seq if page and more else None}


def record_view(record: Record, run_id: str | None = None) -> dict[str, Any]:
    """Return the fields of a record under their stored names, and the JSON in them as plain values.

    With the id of its run, the fields include the id of its step.
    """
    fields = record._asdict()
    for name in _JSON:
        try:
            fields[name] = plain_value(fields[name])
        except StorageCorrupt:  # older releases stored some errors as text
            continue
    fields["time"] = iso_time(fields.pop("t"))
    if run_id is not None and record.key:
        fields["step_id"] = step_id(run_id, record.name, record.key)
    return fields


async def ended_record(runner: RunClient, row: RunRow) -> Record | None:
    """Return the record with the result of a finished run; None for a live run or a run without a journal."""
    if row.status in LIVE:
        return None
    ended = await runner.state_store.ending(row.run_id)
    return None if ended is None or ended.attempt != row.generation or ended.result is None else ended


def result_in(row: RunRow, ended: Record | None) -> dict[str, Any]:
    """Return {"final_output", "final_messages", "usage", "artifacts", "error"} of a finished run."""
    if ended is not None:
        found: dict[str, Any] = plain_value(ended.result)
        return found
    output = row.decoded("output", plain_value)
    return {"final_output": output or {}, "error": last_error(row)}


def last_error(row: RunRow) -> dict[str, Any] | None:
    """Return the error of the last failed attempt: {"type", "message", ...}."""
    error = row.decoded("error", plain_value)
    return error if error is None or isinstance(error, dict) else {"type": "Error", "message": str(error)}


async def outcomes_of(runner: RunClient, rows: Sequence[RunRow]) -> list[_Outcome]:
    """Return error and usage of each run, with one read.

    Damaged data of a run becomes its error, so that one damaged run does not make the whole list fail.
    """
    finished = [row.run_id for row in rows if row.status not in LIVE]
    try:
        ends = await runner.state_store.endings(finished) if finished else {}
        return [outcome_in(row, ends.get(row.run_id)) for row in rows]
    except (StorageCorrupt, UnknownEncryptionKey) as error:
        if len(rows) == 1:
            return [({"type": type(error).__name__, "message": detail_of(error)}, {})]
    middle = len(rows) // 2
    return [*await outcomes_of(runner, rows[:middle]), *await outcomes_of(runner, rows[middle:])]


def outcome_in(row: RunRow, end: RunEnd | None) -> _Outcome:
    """Return error and usage of a run, without its result.

    Of a live run it is the error of its last failed attempt.
    """
    if end is None or row.status in LIVE or end.generation != row.generation:
        return last_error(row), {}
    return plain_value(end.error), json.loads(end.usage or "{}")
