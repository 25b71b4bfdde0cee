"""The contents of a journal: results, errors, states and other JSON of its records, checkpoints and effects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .._engines.payloads import UNREADABLE, PayloadFields, Payloads, Undecoded, why_unreadable
from .._engines.reading_codec import mark_in_text, words_of
from .._journal.record import ENDED, FAILED, RETRYING, Record
from ..errors import StorageError
from .rows import CHILD, MEMBER, EffectRow, StateRow

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


def decode_state(payloads: Payloads | None, run_id: str, row: StateRow) -> StateRow:
    """Return the state of a run as its readers get it."""
    if payloads is None:
        return row
    return row._replace(checkpoint=payloads.decode_optional("checkpoint of run", run_id, row.checkpoint))


def _encode_effect(payloads: Payloads, args: Any) -> tuple[EffectRow, tuple[str, ...]]:
    """Return the row as its store gets it, and the digests that its store compares. Ids of runs stay readable."""
    [row] = args
    if row.status in (MEMBER, CHILD):
        return row, ()
    digest, *others = payloads.digests(row.digest)
    result = payloads.encode_optional("effect of run", row.run_id, row.result)
    return row._replace(digest=digest, result=result), tuple(others)


def decode_effect(payloads: Payloads | None, row: EffectRow, digest: str, digests: Sequence[str]) -> EffectRow:
    """Return the row of an effect as its readers get it.

    Args:
        payloads: The codec of the process, if it has one.
        row: The row as its store has it.
        digest: The digest of the effect that was looked up. The row gets it, unless its own cannot be compared.
        digests: The forms of that digest.
    """
    if row.digest in digests:
        row = row._replace(digest=digest)
    if row.status in (MEMBER, CHILD) or row.result is None:
        return row
    error: StorageError | None = None
    if payloads is None:
        error = why_unreadable(f"effect of run {row.run_id}", row.result)
    else:
        try:
            return row._replace(result=payloads.decode("effect of run", row.run_id, row.result))
        except UNREADABLE as reason:
            error = reason
    # The effect must be found nevertheless. Only who uses its result needs its key.
    return row if error is None else row._replace(result=Undecoded(row.result, error))


def _encode_transaction(payloads: Payloads, args: Any) -> tuple[Any, ...]:
    run_id, fn, arguments, draft, make_record = args
    return run_id, fn, arguments, draft, lambda result: encode_record(payloads, run_id, make_record(result))


FIELDS = PayloadFields(
    {
        "journal.append": lambda payloads, args: (args[0], encode_record(payloads, *args)),
        "journal.transact": _encode_transaction,
        "state.checkpoint": lambda payloads, args: (
            args[0], payloads.encode("checkpoint of run", args[0], args[1]), *args[2:],
        ),
        "effect.begin": _encode_effect,
        "effect.put": _encode_effect,
        "effect.drop": _encode_effect,
    },
    {
        "journal.transact": lambda payloads, args, result: payloads.decode_optional("result of run", args[0], result),
    },
)  # fmt: skip
