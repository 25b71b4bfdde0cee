"""The contents of a queue: inputs, metadata, outputs and errors of runs, and the payloads of their messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

from .._core.codec.json import decode, encode
from .._core.redaction import Redaction
from .._engines.payloads import UNREADABLE, PayloadFields, Payloads, Undecoded, why_unreadable
from ..errors import RedactionFailed
from .records import MESSAGE, MailboxMessage, RunRow

_COLUMNS = ("input", "metadata", "output", "error")


def encode_row(payloads: Payloads, row: RunRow) -> RunRow:
    """Return a row as its store gets it."""
    contents = {name: payloads.encode_optional(f"{name} of run", row.run_id, getattr(row, name)) for name in _COLUMNS}
    return row.with_values(digest=payloads.keyed_digest(row.digest), **contents)


def decode_row(payloads: Payloads | None, row: RunRow) -> RunRow:
    """Return a stored row as its readers get it."""
    if payloads is None:
        return row
    contents = {name: payloads.decode_optional(f"{name} of run", row.run_id, getattr(row, name)) for name in _COLUMNS}
    return row.with_values(digest=payloads.stored_digest(row.digest), **contents)


def decode_committed(payloads: Payloads | None, row: RunRow) -> RunRow:
    """Return a row that a commit returned. If its contents cannot be decoded, its readers get the error.

    The commit must not seem to have failed: no worker would execute the runs that it claimed until their leases expire.
    """
    if payloads is None:
        return row
    try:
        return decode_row(payloads, row)
    except UNREADABLE as error:
        texts = {name: text for name in _COLUMNS if (text := getattr(row, name)) is not None}
        return row.with_values(**{name: Undecoded(text, error) for name, text in texts.items()})


def decode_rows(payloads: Payloads | None, rows: Iterable[RunRow]) -> list[RunRow]:
    """Return stored rows as their readers get them."""
    return [decode_row(payloads, row) for row in rows]


def _encode_mail(payloads: Payloads, run_id: str, mail: MailboxMessage) -> MailboxMessage:
    return mail._replace(payload=payloads.encode("message of run", run_id, mail.payload))


def decode_mail(payloads: Payloads | None, run_id: str, messages: list[MailboxMessage]) -> list[MailboxMessage]:
    """Return messages of a run's mailbox as their readers get them."""
    if payloads is None:
        for mail in messages:
            if (error := why_unreadable(f"message of run {run_id}", mail.payload)) is not None:
                raise error
        return messages
    return [mail._replace(payload=payloads.decode("message of run", run_id, mail.payload)) for mail in messages]


def _encode_update(payloads: Payloads, args: Any) -> tuple[Any, ...]:
    run_id, how = args
    output, error = (
        payloads.encode_optional(f"{name} of run", run_id, getattr(how, name)) for name in ("output", "error")
    )
    return run_id, how._replace(output=output, error=error)


def _row(payloads: Payloads, args: Any, row: RunRow) -> RunRow:
    return decode_committed(payloads, row)


def _taken(payloads: Payloads, args: Any, result: tuple[str, RunRow | None]) -> tuple[str, RunRow | None]:
    what, row = result
    return what, None if row is None else decode_committed(payloads, row)


FIELDS = PayloadFields(
    {
        "queue.insert": lambda payloads, args: (encode_row(payloads, args[0]),),
        "queue.take": lambda payloads, args: (encode_row(payloads, args[0]), *args[1:]),
        "queue.settle": _encode_update,
        "queue.post": lambda payloads, args: (args[0], _encode_mail(payloads, *args)),
    },
    {
        "queue.insert": _row,
        "queue.settle": _row,
        "queue.end": _row,
        "queue.reopen": _row,
        "queue.claim": lambda payloads, args, rows: [decode_committed(payloads, row) for row in rows],
        "queue.take": _taken,
    },
)


_PAYLOADS: Final = ("signal", MESSAGE)  # the others have no contents, or contents that were redacted before


def redacted_mail(redaction: Redaction, run_id: str, kind: str, payload: str) -> str:
    """Return the payload of a message that may be stored.

    Raises:
        RedactionFailed: The hook failed, or did not return a chat message for a message.
    """
    owner = f"run {run_id}"
    if kind not in _PAYLOADS:
        return payload
    if kind != MESSAGE:
        return redaction.stored("message", payload, owner)
    sent = cast("dict[str, Any]", decode(payload))
    message = redaction.stored_value("message", sent["message"], owner)
    if not isinstance(message, dict) or message.get("role") != sent["message"]["role"]:
        raise RedactionFailed("message", owner, "returned no chat message for one")
    return encode({**sent, "message": message})
