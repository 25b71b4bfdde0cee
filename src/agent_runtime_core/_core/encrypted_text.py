"""Texts that `AESGCMCodec` has encrypted: `arc1.<key id>.<base64>`. Processes without a codec recognize them too."""

from __future__ import annotations

import re
from typing import Final

from ..errors import UnknownEncryptionKey

MARK: Final = "arc1."  # begins encrypted text; no JSON text begins so
KEY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def key_id_of(text: str) -> str | None:
    """Return the id of the key that encrypted a text; None for a text that is not encrypted."""
    if not text.startswith(MARK):
        return None
    key_id, dot, _ = text[len(MARK) :].partition(".")
    return key_id if dot and KEY_ID.fullmatch(key_id) else None


def encrypted_without_codec(place: str, value: object) -> UnknownEncryptionKey | None:
    """Return the error for an encrypted text in a process without a codec; None for any other value."""
    key_id = key_id_of(value) if isinstance(value, str) else None
    return None if key_id is None else UnknownEncryptionKey(key_id, place, has_codec=False)
