"""Save a conversation: write only what is new, or changed since the conversation object was read."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._core.clock import aware
from ..._core.codec.json import MAX_BYTES, digest
from ..._core.redaction import Redaction
from ..._core.validation import Shown, must
from ..._engines.base import Op
from ...errors import RedactionFailed
from ..documents.base import Collection, Document, Entry, text_in
from ..model_codec import model_of, text_of
from ..models import Conversation, ConversationMessage, ToolCall, moment
from .base import changed_fields, check_link, escaped, id_text, ranks_for

_WITHOUT_MESSAGES = frozenset({"messages"})
_FIELDS = tuple(
    field.name for field in dataclasses.fields(Conversation) if field.name not in {"messages", "updated_at"}
)


@dataclass(kw_only=True)
class Header(Conversation):
    """A conversation as it is stored, without its messages.

    `born` is a creation id. It distinguishes the conversation from a deleted one with the same id, and from one in
    another scope or store.
    """

    born: str = ""


# -- documents


def now_in_microseconds(table: Collection) -> float:
    """Return the current time in seconds, rounded to microseconds like a datetime."""
    return moment(aware(table.documents.clock.wall()))


def header_entry(key: str, header: Header, now: float) -> Entry:
    """Return the document of a header, and set its `updated_at`."""
    header.updated_at = _in_zone_of(header.updated_at, now)
    return Entry(key, text_of(header, leave_out=_WITHOUT_MESSAGES), group_of(header.agent_key), rank=now)


def group_of(agent_key: str | None) -> str:
    """Return the document group of the conversations of an agent."""
    if not isinstance(agent_key, str | None):
        raise must("agent_key", "be a string or None", agent_key)
    return "" if agent_key is None else f"agent:{escaped(agent_key)}"


def message_entry(
    conversation: str, message: ConversationMessage, redaction: Redaction | None = None, *, max_bytes: int = MAX_BYTES
) -> Entry:
    """Check a message, redact it, and return its document."""
    if not isinstance(message, ConversationMessage):
        raise must("a message", "be a ConversationMessage", message)
    key = f"{conversation}/{id_text(message.id, 'message')}"
    # Other types could be stored, but not read again or compared.
    if not isinstance(message.timestamp, _dt.datetime):
        raise must(f"the timestamp of message {message.id}", "be a datetime", message.timestamp)
    if not isinstance(message.tool_calls, list) or any(type(each) is not ToolCall for each in message.tool_calls):
        raise must(
            f"the tool_calls of message {message.id}",
            "be a list of ToolCall(id=, name=, arguments=)",
            message.tool_calls,
        )
    check_link(message.parent_message_id, "the parent_message_id of a message")
    check_link(message.branch_id, "the branch_id of a message")
    if redaction is not None:
        message = _redacted(redaction, message, f"conversation {conversation}")
    # A message of an earlier release has no such fields. Its text stays the same, so that it is not written again.
    absent = frozenset(name for name in ("run_id", "position") if getattr(message, name) is None)
    text = text_of(message, leave_out=absent, max_bytes=max_bytes)
    return Entry(key, text, conversation, words=text_in(message.content))


def _redacted(redaction: Redaction, message: ConversationMessage, owner: str) -> ConversationMessage:
    """Return the message that may be stored. The hook gets it as a dict, and returns one of the same form."""
    shown = {
        "role": message.role,
        "content": message.content,
        "metadata": message.metadata,
        "tool_calls": [dataclasses.asdict(each) for each in message.tool_calls],
    }
    found = redaction.stored_value("message", shown, owner)
    try:
        calls = [ToolCall(**each) for each in found["tool_calls"]]
        return dataclasses.replace(message, content=found["content"], metadata=found["metadata"], tool_calls=calls)
    except (LookupError, TypeError):
        raise RedactionFailed("message", owner, "returned no message for one") from None


def read_back(header: Document, messages: list[ConversationMessage]) -> Conversation:
    """Return the conversation of a header with these messages."""
    stored = model_of(Header, header.text)
    found = Conversation(**{name: getattr(stored, name) for name in _FIELDS})
    # An append changes only the rank of the header, so the rank may be later than `updated_at`.
    moved = header.rank > moment(stored.updated_at)
    found.updated_at = _in_zone_of(stored.updated_at, header.rank) if moved else stored.updated_at
    found.messages = messages
    return found


def _in_zone_of(when: Any, seconds: float) -> _dt.datetime:
    """Return a time in the time zone of `when`, or naive if `when` is naive."""
    now = aware(seconds)
    if not isinstance(when, _dt.datetime):
        return now
    return now.replace(tzinfo=None) if when.tzinfo is None else now.astimezone(when.tzinfo)


# -- the state of an object when it was read


class StoredMessage(NamedTuple):
    """A message as it was read or saved: the digest of its text, and its rank."""

    digest: str
    rank: float


def stored_message(document: Document) -> tuple[str, StoredMessage]:
    """Return the key of a message, and the message as it was read."""
    return document.key, StoredMessage(digest(document.text), document.rank)


class LoadedState(NamedTuple):
    """The state of a conversation object when it was last read or saved.

    `header` is None if the application created the object. Then all its fields are saved, and no message is deleted.
    """

    creation_id: str
    header: str | None
    messages: dict[str, StoredMessage]

    @classmethod
    def of(cls, header: Document, messages: dict[str, StoredMessage], *, by_hand: bool = False) -> LoadedState:
        return cls(model_of(Header, header.text).born, None if by_hand else header.text, messages)

    def is_of(self, header: Document) -> bool:
        """Return whether this is a state of the stored conversation."""
        return self.creation_id == model_of(Header, header.text).born


def entries_of(key: str, conversation: Conversation, redaction: Redaction | None) -> dict[str, Entry]:
    """Check the messages of a conversation, and return their documents by key, in order."""
    entries: dict[str, Entry] = {}
    if not isinstance(conversation.messages, list | tuple):
        raise must(f"the messages of conversation {key}", "be a list", conversation.messages)
    for message in conversation.messages:
        entry = message_entry(key, message, redaction)
        if entry.key in entries:
            raise must(f"the message ids of conversation {key}", "be unique", Shown(f"{message.id} twice"))
        entries[entry.key] = entry
    return entries


class ConversationSave:
    """One attempt to save a conversation.

    Args:
        key: The key of the conversation.
        conversation: The object to save.
        entries: The documents of its messages, from `entries_of`.
        header: The stored header, or None if there is none.
        loaded: The state of the object when it was read.
        now: The current time in seconds.
        creation_id: The creation id of a new conversation.
    """

    def __init__(
        self, key: str, conversation: Conversation, entries: dict[str, Entry], header: Document | None,
        loaded: LoadedState | None, now: float, creation_id: str,
    ) -> None:  # fmt: skip
        self._key, self._stored_header, self._entries = key, header, entries
        self._loaded = loaded if header is not None else None
        self._text = text_of(conversation, leave_out=_WITHOUT_MESSAGES)
        self.header: Header = _merged(conversation, self._text, header, self._loaded, creation_id)
        self._header_entry = header_entry(key, self.header, now)
        loaded_messages = self._loaded.messages if self._loaded is not None else {}
        self._digests = {key: digest(entry.text) for key, entry in entries.items()}
        self._ranks = ranks_for(list(entries), {key: stored.rank for key, stored in loaded_messages.items()})
        self._written = [key for key in entries if loaded_messages.get(key) != (self._digests[key], self._ranks[key])]
        #: Messages that the caller moved to another position, but did not change.
        self.moved: list[str] = [
            key for key in self._written if key in loaded_messages and loaded_messages[key].digest == self._digests[key]
        ]
        self._deleted = (
            []
            if self._loaded is None or self._loaded.header is None
            else [key for key in loaded_messages if key not in entries]
        )

    def ops(self, headers: Collection, messages: Collection, moved: Sequence[Document]) -> list[Op]:
        """Return the operations: put the header, put messages in their order, delete messages.

        Args:
            headers: The documents of headers.
            messages: The documents of messages.
            moved: The stored documents of `self.moved`. They keep the changes of other writers, and one that another
                writer deleted stays deleted.
        """
        stored = {each.key: each for each in moved}
        deleted = set(self.moved) - stored.keys()
        self._written = [key for key in self._written if key not in deleted]
        expect = 0 if self._stored_header is None else self._stored_header.version
        # The header may have expired before its messages.
        before = [messages.clear(self._key)] if self._stored_header is None else []
        return [
            *before,
            headers.put(self._header_entry, expect),
            *(self._put(messages, key, stored.get(key)) for key in self._written),
            *(messages.delete(key) for key in self._deleted),
        ]

    def _put(self, messages: Collection, key: str, moved: Document | None) -> Op:
        entry = self._entries[key]._replace(rank=self._ranks[key])
        if moved is None:
            return messages.put(entry)
        if moved.text != entry.text:
            words = text_in(model_of(ConversationMessage, moved.text).content)
            entry = entry._replace(text=moved.text, words=words)
        return messages.put(entry, moved.version)

    def saved_state(self, results: Sequence[Any]) -> LoadedState:
        """Return the state of the object after the commit. `results` are those of `ops`."""
        first = 2 if self._stored_header is None else 1
        ranks = dict(self._ranks)
        for key, (_, rank) in zip(self._written, results[first:], strict=False):
            ranks[key] = rank
        stored = {key: StoredMessage(self._digests[key], ranks[key] or 0.0) for key in self._entries}
        return LoadedState(self.header.born, self._text, stored)


def _merged(
    conversation: Conversation, text: str, header: Document | None, loaded: LoadedState | None, creation_id: str
) -> Header:
    """Return the fields that the caller changed, and the stored ones of the others."""
    fields = {name: getattr(conversation, name) for name in _FIELDS}
    if header is not None and loaded is not None:
        creation_id = loaded.creation_id
        if loaded.header is not None:
            theirs, changed = model_of(Header, header.text), changed_fields(text, loaded.header)
            fields = {name: value if name in changed else getattr(theirs, name) for name, value in fields.items()}
    return Header(**fields, updated_at=conversation.updated_at, born=creation_id)
