"""The records of a run's journal as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from .._core.ids import step_id
from .._journal.record import Record
from ..errors import StorageCorrupt
from .plain import iso_time, plain_value

_JSON = ("result", "error", "state", "info", "next")


def journal_view(records: Sequence[Record], after: int = -1, limit: int | None = None) -> dict[str, Any]:
    """Return a page of records: {"items", "next"}.

    Args:
        records: The journal, or the part of it after the position `after`.
        after: The position of the last record of the page before, -1 for the first page.
        limit: How many records at most; None for all.

    Returns:
        `next` is the `after` of the next page, None for the last one.
    """
    later = (each for each in records if each.seq > after)
    page = [*islice(later, limit)]
    more = next(later, None) is not None
    return {"items": [record_view(each) for each in page], "next": page[-1].seq if page and more else None}


def record_view(record: Record, run_id: str | None = None) -> dict[str, Any]:
    """Return the fields of a record under their stored names, and the JSON in them as plain values.

    With the id of its run, it also has the id of its step.
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
