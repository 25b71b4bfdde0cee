"""The decoded messages of recent conversations, so that a turn of a conversation decodes only what is new.

Two short reads show whether they are still current. The header of a conversation gets a new version with every change
except an append, and the header of a conversation that was deleted and stored again has another creation id. Each
appended message has a greater rank than all messages before it. If a restored backup lacks the last message, all
messages are read again.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

from ..._core.per_loop import sliced
from ..documents.base import Collection, Document
from ..model_codec import model_of
from ..models import ConversationMessage
from ..stored_history import StoredHistory
from .conversation_save import Header

MOST: Final = 64  # conversations
MOST_BYTES: Final = 32 * 1024 * 1024  # about how many bytes all conversations take
_PER_MESSAGE: Final = 2_000  # bytes that a decoded message takes in addition to its text


class _Recent(NamedTuple):
    """A conversation as it was read last."""

    header: Document
    last: Document  # the last message
    history: StoredHistory
    size: int  # bytes

    def is_current(self, header: Document, tail: list[Document]) -> bool:
        """Return whether messages were only appended since then; `tail` are those from the last one on."""
        same_header = (header.version, header.text) == (self.header.version, self.header.text)
        return same_header and tail[:1] == [self.last]


class RecentHistories:
    """The histories of the conversations that were read last, up to a number and a size. Thread-safe."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], _Recent] = {}  # the one that was read last is at the end
        self._size = 0
        self._lock = threading.Lock()

    async def read(self, key: str, headers: Collection, messages: Collection) -> StoredHistory | None:
        """Return the history of a conversation, None if it does not exist."""
        known = (headers.space, key)  # another tenant may have a conversation with this key
        recent = self._recent.get(known)
        # Messages are read before the header. If its version is the same after that, no message was deleted or changed
        # before: a tail that is read later may belong to a changed conversation.
        tail = [] if recent is None else await messages.find(key, low=recent.last.rank)
        header = await headers.get(key)
        if header is None:
            self._keep(known, None)
            return None
        new = tail[1:]
        if recent is None or not recent.is_current(header, tail):
            recent, new = None, await messages.find(key)
        decoded = await sliced(model_of(ConversationMessage, each.text) for each in new)
        if recent is None:
            history = await StoredHistory.of(decoded, model_of(Header, header.text).active_branch_id)
            last, size = None, 0
        else:
            history = await recent.history.followed_by(decoded) if decoded else recent.history
            last, size = recent.last, recent.size
        last = new[-1] if new else last
        size += sum(len(each.text) + _PER_MESSAGE for each in new)
        self._keep(known, None if last is None else _Recent(header, last, history, size))
        return history

    def _keep(self, key: tuple[str, str], recent: _Recent | None) -> None:
        with self._lock:
            self._drop(key)
            if recent is None or recent.size > MOST_BYTES:
                return
            self._recent[key] = recent
            self._size += recent.size
            while len(self._recent) > MOST or self._size > MOST_BYTES:
                self._drop(next(iter(self._recent)))

    def _drop(self, key: tuple[str, str]) -> None:
        gone = self._recent.pop(key, None)
        self._size -= 0 if gone is None else gone.size
