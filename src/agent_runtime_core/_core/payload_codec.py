"""The interface of payload codecs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


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
        """Return what the store gets for a text. `context` names the kind of text and its owner."""

    def decode(self, text: str, *, context: str) -> str:
        """Return the text again, or raise StorageCorrupt if it was not encoded with the same context."""
