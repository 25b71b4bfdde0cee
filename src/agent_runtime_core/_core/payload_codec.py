"""Payload codecs: their interface, and how encrypted texts are recognized without a codec."""

from __future__ import annotations

import re
from typing import Final, Protocol, runtime_checkable

from ..errors import UnknownEncryptionKey


@runtime_checkable
class PayloadCodec(Protocol):
    """Changes texts on their way to a store and back. It must be safe to call from several threads.

    A codec may have three more attributes. `digest(text)` returns a text that is the same for the same text, and
    reveals nothing about it: stores keep it in place of the digests of inputs and arguments. `digests(text)` returns
    the digests under all keys that the codec knows, always in the same order, and first what `digest` returns: an
    effect that was stored under one of the other keys is found too. `searchable` says whether stores may keep the words
    of documents unencrypted, for the full-text search.
    """

    def encode(self, text: str, *, context: str) -> str:
        """Return what the store gets for a text. `context` names the kind of text and its owner.

        Args:
            text: The text.
            context: Names the kind of text and its owner.
        """

    def decode(self, text: str, *, context: str) -> str:
        """Return the text again, or raise StorageCorrupt if it was not encoded with the same context.

        Args:
            text: The stored text.
            context: The context that it was encoded with.

        Raises:
            StorageCorrupt: The text was not encoded with that context.
        """


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
