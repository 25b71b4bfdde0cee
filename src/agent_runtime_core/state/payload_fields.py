"""The contents of what a state store commits: records, checkpoints and effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._engines.payloads import UNREADABLE, PayloadFields, Payloads, Undecoded, why_unreadable
from .._journal.payload_fields import encode_record
from ..errors import StorageError
from .rows import CHILD, MEMBER, EffectRow, StateRow


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
