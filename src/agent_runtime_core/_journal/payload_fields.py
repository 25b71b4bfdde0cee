"""The contents of records: results, errors, states and other JSON."""

from __future__ import annotations

import json
from typing import Any

from .._engines.payloads import Payloads, why_unreadable
from .._engines.reading_codec import mark_in_text, words_of
from .record import ENDED, FAILED, RETRYING, Record

TOGETHER = ("error", "state", "info", "next", "digest")
_MARK = "="  # begins what was encoded together; no JSON object begins so


def encode_record(payloads: Payloads, run_id: str, record: Record) -> Record:
    """Return a record as its store gets it. What most records do not have is encoded together, in `info`."""
    values = {name: value for name in TOGETHER if (value := getattr(record, name)) is not None}
    info = payloads.encode("record of run", run_id, _MARK + json.dumps(values)) if values else None
    result = payloads.encode_optional("result of run", run_id, record.result)
    return record._replace(result=result, error=None, state=None, info=info, next=None, digest=None)


def decode_record(payloads: Payloads | None, run_id: str, record: Record) -> Record:
    """Return a record that a store has as its readers get it."""
    if payloads is None:
        return record
    record = record._replace(result=payloads.decode_optional("result of run", run_id, record.result))
    if payloads.reads_only and record.kind == ENDED and (mark := mark_in_text(record.result)) is not None:
        said = [{"role": "assistant", "content": words_of(mark)}]
        record = record._replace(result=json.dumps({"final_output": mark, "final_messages": said}))
    if record.info is None:
        return record
    text = payloads.decode("record of run", run_id, record.info)
    if payloads.reads_only and (mark := mark_in_text(text)) is not None:
        return record._replace(info=_marked_info(record, mark))
    # Without the mark, the record was stored before there was a codec.
    return record._replace(**{"info": None, **json.loads(text[1:])}) if text.startswith(_MARK) else record


def _marked_info(record: Record, mark: dict[str, Any]) -> str:
    """Return the fields that readers of a record need, with marks as contents."""
    error = {"type": "Encrypted", "message": words_of(mark)}
    if record.kind in (RETRYING, FAILED):
        return json.dumps({"error": words_of(mark), "type": "Encrypted", "retry_delay": 0.0})
    if record.kind == ENDED and record.name not in ("succeeded", "cancelled"):
        return json.dumps({**mark, "end": {"error": error}})
    return json.dumps(mark)


def decode_records(payloads: Payloads | None, run_id: str, records: list[Record]) -> list[Record]:
    """Return records that a store has as their readers get them."""
    if payloads is None:
        # A process without a codec continues no encrypted journal, so the last contents are encrypted if any are.
        texts = (each.info or each.result for each in reversed(records))
        error = why_unreadable(f"record of run {run_id}", next((text for text in texts if text is not None), None))
        if error is not None:
            raise error
        return records
    return [decode_record(payloads, run_id, each) for each in records]
