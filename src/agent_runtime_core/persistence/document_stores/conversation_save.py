"""How a conversation is written: what of it is new or changed since its object was read, and nothing else."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._core.clock import aware
from ..._core.codec.json import MAX_BYTES, digest
from ..._engines.base import Op
from ...errors import InvalidArgument, brief
from ..documents.base import Collection, Document, Entry
from ..documents.full_text import text_in
from ..model_codec import model_of, text_of
from ..models import Conversation, ConversationMessage, ToolCall, moment
from .arguments import check_link, escaped, id_text
from .ranks import ranks_for
from .three_way_merge import changed_fields

_WITHOUT_MESSAGES = frozenset({"messages"})
_FIELDS = tuple(
    field.name for field in dataclasses.fields(Conversation) if field.name not in {"messages", "updated_at"}
)


@dataclass(kw_only=True)
class Header(Conversation):
    """A conversation as it is stored, its messages apart.

    `born` tells it from one of the same id that was deleted, or is in another scope or store.
    """

    born: str = ""


# -- its documents


def instant(table: Collection) -> float:
    """Now, in whole microseconds, as datetimes count."""
    return moment(aware(table.documents.clock.wall()))


def header_entry(key: str, header: Header, now: float) -> Entry:
    header.updated_at = _like(header.updated_at, now)
    return Entry(key, text_of(header, leave_out=_WITHOUT_MESSAGES), group_of(header.agent_key), rank=now)


def group_of(agent_key: str | None) -> str:
    """What the conversations of one agent are found by."""
    if not isinstance(agent_key, str | None):
        raise InvalidArgument(f"an agent_key is a string, not {brief(agent_key)}")
    return "" if agent_key is None else f"agent:{escaped(agent_key)}"


def message_entry(conversation: str, message: ConversationMessage, *, max_bytes: int = MAX_BYTES) -> Entry:
    if not isinstance(message, ConversationMessage):
        raise InvalidArgument(f"a ConversationMessage is appended here, not {brief(message)}")
    key = f"{conversation}/{id_text(message.id, 'message')}"
    # These would be stored, and could not be read or compared.
    if not isinstance(message.timestamp, _dt.datetime):
        raise InvalidArgument(f"the timestamp of message {message.id} is a datetime, not {brief(message.timestamp)}")
    if not isinstance(message.tool_calls, list) or any(type(each) is not ToolCall for each in message.tool_calls):
        raise InvalidArgument(
            f"the tool_calls of message {message.id} are a list of ToolCall(id=, name=, arguments=), "
            f"not {brief(message.tool_calls)}"
        )
    check_link(message.parent_message_id, "the parent_message_id of a message")
    check_link(message.branch_id, "the branch_id of a message")
    return Entry(key, text_of(message, max_bytes=max_bytes), conversation, words=text_in(message.content))


def read_back(header: Document, messages: Sequence[Document]) -> Conversation:
    kept = model_of(Header, header.text)
    found = Conversation(**{name: getattr(kept, name) for name in _FIELDS})
    # An append moves the rank alone.
    moved = header.rank > moment(kept.updated_at)
    found.updated_at = _like(kept.updated_at, header.rank) if moved else kept.updated_at
    found.messages = [model_of(ConversationMessage, each.text) for each in messages]
    return found


def _like(when: Any, seconds: float) -> _dt.datetime:
    """That time, naive where `when` is, else in its zone."""
    now = aware(seconds)
    if not isinstance(when, _dt.datetime):
        return now
    return now.replace(tzinfo=None) if when.tzinfo is None else now.astimezone(when.tzinfo)


# -- what an object held


class StoredMessage(NamedTuple):
    """A message that is stored: the digest of its text, and where it stands."""

    digest: str
    rank: float


class LoadedState(NamedTuple):
    """What a conversation object held when it was read or saved.

    `header` is None where it was built by hand: then it decides every field, and deletes no message.
    """

    born: str
    header: str | None
    messages: dict[str, StoredMessage]

    @classmethod
    def of(cls, header: Document, messages: Sequence[Document], *, by_hand: bool = False) -> LoadedState:
        kept = {each.key: StoredMessage(digest(each.text), each.rank) for each in messages}
        return cls(model_of(Header, header.text).born, None if by_hand else header.text, kept)

    def is_of(self, header: Document) -> bool:
        return self.born == model_of(Header, header.text).born


def entries_of(key: str, conversation: Conversation) -> dict[str, Entry]:
    """The documents of its messages by their keys, in order."""
    entries: dict[str, Entry] = {}
    if not isinstance(conversation.messages, list | tuple):
        raise InvalidArgument(f"the messages of conversation {key} are a list, not {brief(conversation.messages)}")
    for message in conversation.messages:
        entry = message_entry(key, message)
        if entry.key in entries:
            raise InvalidArgument(f"two messages of conversation {key} have the id {message.id}")
        entries[entry.key] = entry
    return entries


class ConversationSave:
    """One try of saving a conversation over what is stored."""

    def __init__(
        self, key: str, conversation: Conversation, entries: dict[str, Entry], there: Document | None,
        held: LoadedState | None, now: float, born: str,
    ) -> None:  # fmt: skip
        self._key, self._there, self._entries = key, there, entries
        self._held = held if there is not None else None
        self._mine = text_of(conversation, leave_out=_WITHOUT_MESSAGES)
        self.header: Header = _merged(conversation, self._mine, there, self._held, born)
        self._header_entry = header_entry(key, self.header, now)
        known = self._held.messages if self._held is not None else {}
        self._digests = {key: digest(entry.text) for key, entry in entries.items()}
        self._ranks = ranks_for(list(entries), {key: kept.rank for key, kept in known.items()})
        self._written = [key for key in entries if known.get(key) != (self._digests[key], self._ranks[key])]
        #: Messages that the caller left as they were and put elsewhere among the others.
        self.moved: list[str] = [
            key for key in self._written if key in known and known[key].digest == self._digests[key]
        ]
        self._gone = [] if self._held is None or self._held.header is None else [
            key for key in known if key not in entries
        ]  # fmt: skip

    def ops(self, headers: Collection, messages: Collection, moved: Sequence[Document]) -> list[Op]:
        """The header first, then what is written in its order, then what is deleted.

        `moved` are those of `self.moved` that are there: they stay as others have changed or deleted them.
        """
        stored = {each.key: each for each in moved}
        deleted = set(self.moved) - stored.keys()
        self._written = [key for key in self._written if key not in deleted]
        expect = 0 if self._there is None else self._there.version
        # Messages may outlive a header that expired.
        before = [messages.clear(self._key)] if self._there is None else []
        return [
            *before,
            headers.put(self._header_entry, expect),
            *(self._put(messages, key, stored.get(key)) for key in self._written),
            *(messages.delete(key) for key in self._gone),
        ]

    def _put(self, messages: Collection, key: str, moved: Document | None) -> Op:
        entry = self._entries[key]._replace(rank=self._ranks[key])
        if moved is None:
            return messages.put(entry)
        if moved.text != entry.text:
            words = text_in(model_of(ConversationMessage, moved.text).content)
            entry = entry._replace(text=moved.text, words=words)
        return messages.put(entry, moved.version)

    def held(self, results: Sequence[Any]) -> LoadedState:
        """What the object holds once it is saved."""
        first = 2 if self._there is None else 1
        ranks = dict(self._ranks)
        for key, (_, rank) in zip(self._written, results[first:], strict=False):
            ranks[key] = rank
        kept = {key: StoredMessage(self._digests[key], ranks[key] or 0.0) for key in self._entries}
        return LoadedState(self.header.born, self._mine, kept)


def _merged(
    conversation: Conversation, mine: str, there: Document | None, held: LoadedState | None, born: str
) -> Header:  # fmt: skip
    """The caller's fields; of those it left as it had read them, the stored ones."""
    fields = {name: getattr(conversation, name) for name in _FIELDS}
    if there is not None and held is not None:
        born = held.born
        if held.header is not None:
            theirs, changed = model_of(Header, there.text), changed_fields(mine, held.header)
            fields = {name: value if name in changed else getattr(theirs, name) for name, value in fields.items()}
    return Header(**fields, updated_at=conversation.updated_at, born=born)
