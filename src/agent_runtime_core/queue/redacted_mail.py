"""Redact the messages of a mailbox before they are stored."""

from __future__ import annotations

from typing import Any, Final, cast

from .._core.codec.json import decode, encode
from .._core.redaction import Redaction
from ..errors import RedactionFailed
from .records import MESSAGE

_PAYLOADS: Final = ("signal", MESSAGE)  # the others have no contents, or contents that were redacted before


def redacted_mail(redaction: Redaction, run_id: str, kind: str, payload: str) -> str:
    """Return the payload of a message that may be stored.

    Raises:
        RedactionFailed: The hook failed, or returned no chat message for one.
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
