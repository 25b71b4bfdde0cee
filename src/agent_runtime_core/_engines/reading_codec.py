"""A payload codec for commands that only show runs: it marks the contents that it cannot decrypt."""

from __future__ import annotations

import json
from typing import Any, Final

from .._core.encrypted_text import key_id_of
from .._core.payload_codec import PayloadCodec
from ..errors import NotSupported, UnknownEncryptionKey

_FIELD: Final = "encrypted"
_BEGIN: Final = f'{{"{_FIELD}": {{"key": '


class ReadingCodec:
    """Decodes with another codec, and marks what that cannot decrypt.

    No run can be executed with it, because it refuses every write.

    Args:
        codec: The other codec; None if the process has none.
    """

    #: `Payloads` refuses every operation that would write.
    reads_only: Final = True

    def __init__(self, codec: PayloadCodec | None) -> None:
        self._codec = codec
        self.searchable: bool = bool(getattr(codec, "searchable", codec is None))

    def encode(self, text: str, *, context: str) -> str:
        """Raise NotSupported."""
        raise NotSupported("contents that are only shown cannot be written. Use a process with the payload codec")

    def decode(self, text: str, *, context: str) -> str:
        """Return the text, or the JSON object `{"encrypted": {"key": ID}}`."""
        key_id = key_id_of(text)
        try:
            if self._codec is not None:
                return self._codec.decode(text, context=context)
        except UnknownEncryptionKey as error:
            key_id = error.key_id
        except Exception:  # noqa: BLE001 - another key of the same id, or a damaged text: a reader shows the rest
            key_id = key_id or "unknown"
        return text if key_id is None else _marked(key_id, context)


def _marked(key_id: str, context: str) -> str:
    mark: dict[str, Any] = {_FIELD: {"key": key_id}}
    words = words_of(mark)
    if context.startswith("error "):
        mark |= {"type": "Encrypted", "message": words}
    elif context.startswith("document "):  # a message of a conversation
        mark |= {"role": "user", "content": words}
    return json.dumps(mark)


def mark_in(value: Any) -> dict[str, Any] | None:
    """Return the mark `{"encrypted": {"key": ID}}` of contents that could not be decrypted; None for other values."""
    found = value.get(_FIELD) if isinstance(value, dict) else None
    return {_FIELD: found} if isinstance(found, dict) and found.keys() == {"key"} else None


def mark_in_text(text: str | None) -> dict[str, Any] | None:
    """Return the mark in a text that `ReadingCodec` decoded; None for other texts."""
    return mark_in(json.loads(text)) if text is not None and text.startswith(_BEGIN) else None


def words_of(mark: Any) -> str:
    """Return a mark in words."""
    return f"(encrypted with key {mark[_FIELD]['key']!r})"


def in_words(value: Any) -> Any:
    """Return a JSON tree with words in place of the marks."""
    if isinstance(value, dict):
        return words_of(value) if mark_in(value) == value else {name: in_words(each) for name, each in value.items()}
    return [in_words(each) for each in value] if isinstance(value, list) else value
