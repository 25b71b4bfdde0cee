"""The contents of events: their payloads."""

from __future__ import annotations

from typing import Any

from .._engines.payloads import PayloadFields, Payloads
from .._journal.record import Record
from ..state.payload_fields import decode_record
from .event import EventRows, StoredEvent


def _encode_events(payloads: Payloads, args: Any) -> tuple[Any, ...]:
    run_id, rows = args
    return run_id, tuple(
        (event_id, kind, payloads.encode("event of run", run_id, payload), t) for event_id, kind, payload, t in rows
    )


def decode_rows(payloads: Payloads, run_id: str, rows: EventRows) -> EventRows:
    """Return the rows of a page as their readers get them."""

    def decoded(row: StoredEvent | Record) -> StoredEvent | Record:
        if isinstance(row, Record):
            return decode_record(payloads, run_id, row)
        return row._replace(payload=payloads.decode("event of run", run_id, row.payload))

    return EventRows(map(decoded, rows), rows.more, rows.size)


FIELDS = PayloadFields({"events.publish": _encode_events})
