"""Conversations as documents: a header for each conversation, and a document for each message.

So an append is one small commit, regardless of the length of the conversation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as _dt
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple
from uuid import UUID

from ..._core.clock import aware
from ..._core.codec.json import MAX_BYTES, digest
from ..._core.ids import new_ulid
from ..._core.per_loop import sliced
from ..._core.redaction import Redaction
from ..._core.validation import Shown, must
from ..._engines.base import Op
from ...errors import RedactionFailed
from ..base.conversations import ConversationStore, no_conversation
from ..documents.base import Collection, Document, DocumentMissing, Entry, retry_conflicts, text_in
from ..model_codec import model_of, text_of
from ..models import Conversation, ConversationMessage, Scope, ToolCall, moment
from ..stored_history import StoredHistory
from .base import (
    CONVERSATION,
    MESSAGE,
    DocumentBackedStore,
    IdentityMap,
    changed_fields,
    check_count,
    check_link,
    escaped,
    id_text,
    ranks_for,
)

_PAGE = 200


class StoredConversations(DocumentBackedStore, ConversationStore):
    """Stores conversations. Each method is one commit, which is repeated after a conflict."""

    def __init__(self, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        self._loaded: IdentityMap[LoadedState] = IdentityMap()
        self._recent = RecentHistories()

    # -- whole conversations

    async def save(self, conversation: Conversation, scope: Scope | None = None) -> None:
        """Store a conversation, and set its `updated_at`.

        The store remembers the state of each object that it read or saved, and writes only what the caller changed
        since then. A message that was removed from the object is deleted. A message that another writer appended or
        changed is not modified. An object that the application created deletes nothing.

        Args:
            conversation: The conversation.
            scope: The scope.

        Raises:
            InvalidArgument: The conversation is not valid: an id is not a UUID, or two messages have the same id.
        """
        if not isinstance(conversation, Conversation):
            raise must("conversation", "be a Conversation", conversation)
        headers, messages = self._tables(scope)
        key = id_text(conversation.id, "conversation")
        check_link(conversation.active_branch_id, "the active_branch_id of a conversation")
        entries = entries_of(key, conversation, headers.documents.redaction)

        async def attempt() -> None:
            stored = await headers.get(key)
            loaded = self._loaded.of(conversation)
            if stored is not None and not (loaded and loaded.is_of(stored)):
                loaded = LoadedState.of(stored, dict(map(stored_message, await messages.find(key))), by_hand=True)
            save = ConversationSave(
                key,
                conversation,
                entries,
                stored,
                loaded,
                now_in_microseconds(headers),
                new_ulid(headers.documents.clock),
            )
            moved = await messages.many(save.moved)
            results = await headers.write(*save.ops(headers, messages, moved))
            self._loaded.remember(conversation, save.saved_state(results))
            conversation.updated_at = save.header.updated_at

        await retry_conflicts(f"conversation {key}", attempt)
        await self._renew(headers, messages, key)

    async def get(self, conversation_id: UUID, scope: Scope | None = None) -> Conversation | None:
        headers, messages = self._tables(scope)
        header = await headers.get(id_text(conversation_id, "conversation"))
        return None if header is None else await self._whole(header, messages)

    async def read_history(self, conversation_id: UUID) -> StoredHistory | None:
        """Return the messages of a conversation of the project for readers that do not modify them.

        Args:
            conversation_id: The id of the conversation.
        """
        headers, messages = self._tables(None)
        return await self._recent.read(id_text(conversation_id, "conversation"), headers, messages)

    async def delete(self, conversation_id: UUID, scope: Scope | None = None) -> bool:
        headers, messages = self._tables(scope)
        key = id_text(conversation_id, "conversation")
        existed, _ = await headers.write(headers.delete(key), messages.clear(key))
        return bool(existed)

    async def list_conversations(
        self, scope: Scope | None = None, limit: int | None = 100, offset: int = 0, agent_key: str | None = None
    ) -> list[Conversation]:
        """Return conversations without their messages, the most recently changed first.

        No message is read: `messages` is empty. If you change a listed conversation and save it, its messages stay.

        Args:
            scope: The scope to read.
            limit: At most this many conversations. If None, all.
            offset: Skip this many conversations.
            agent_key: Only the conversations of this agent. If None, of all agents.

        Raises:
            InvalidArgument: `limit` or `offset` is invalid.
        """
        if offset is None:
            raise must("offset", "be an integer of at least 0", None)
        check_count(limit, "limit")
        check_count(offset, "offset")
        group = None if agent_key is None else group_of(agent_key)
        headers = self._tables(scope)[0]
        return [
            await self._loaded_from(header, [])
            for header in await headers.find(group, descending=True, offset=offset, limit=limit)
        ]

    async def _whole(self, header: Document, messages: Collection) -> Conversation:
        return await self._loaded_from(header, await messages.find(header.key))

    async def _loaded_from(self, header: Document, found: list[Document]) -> Conversation:
        conversation = read_back(header, await sliced(map(_message, found)))
        self._loaded.remember(conversation, LoadedState.of(header, dict(await sliced(map(stored_message, found)))))
        return conversation

    async def move_to(self, other: ConversationStore, conversation_id: UUID) -> bool:
        """Move a conversation to another store, with all its messages, in one commit.

        A message that another writer appends during this commit is moved by a second commit. If the process is killed
        in between, a second call moves it. Between two document stores the move of the base class is used.

        Args:
            other: The other store.
            conversation_id: The id of the conversation.

        Returns:
            Whether it was moved, as in the base class.
        """
        old_headers, old_messages = self._tables(None)
        if not isinstance(other, StoredConversations):
            return await super().move_to(other, conversation_id)
        headers, messages = other._tables(None)
        if headers.documents is not old_headers.documents:
            return await super().move_to(other, conversation_id)
        key, is_tried = id_text(conversation_id, "conversation"), False

        async def attempt() -> bool:
            nonlocal is_tried
            header, there = await old_headers.get(key), await headers.get(key)
            if (header is None) == (there is None):
                return is_tried
            found = await old_messages.find(key)
            if header is None and not found:
                return is_tried
            ops = [op for each in found for op in (messages.add(_same_message(each)), old_messages.delete(each.key))]
            if header is not None:
                # The first put only checks that nobody changed the header since it was read.
                entry = _same(header)
                ops += [old_headers.put(entry, header.version), old_headers.delete(key), headers.put(entry, 0)]
            is_tried = True
            await headers.write(*ops)
            return await attempt()

        return await retry_conflicts(f"conversation {key}", attempt)

    # -- messages

    async def add_message(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope | None = None
    ) -> None:
        """Append a message, unless the conversation contains a message with its id.

        Args:
            conversation_id: The id of the conversation.
            message: The message.
            scope: The scope.

        Raises:
            InvalidArgument: The conversation does not exist.
        """
        await self.append(conversation_id, [message], scope)

    async def append(
        self, conversation_id: UUID, messages: Sequence[ConversationMessage], scope: Scope | None = None
    ) -> int:
        headers, table = self._tables(scope)
        key = id_text(conversation_id, "conversation")
        if not isinstance(messages, Iterable):
            raise must("messages", "be a list of ConversationMessage", messages)
        redaction = table.documents.redaction
        ops = [table.add(message_entry(key, message, redaction)) for message in messages]
        if not ops and await headers.get(key) is None:
            raise no_conversation(conversation_id)
        ranks = await self._commit_and_touch(headers, conversation_id, ops) if ops else []
        return sum(rank is not None for rank in ranks)

    async def get_messages(
        self,
        conversation_id: UUID,
        scope: Scope | None = None,
        limit: int | None = None,
        before: _dt.datetime | None = None,
    ) -> list[ConversationMessage]:
        table, key = self._tables(scope)[1], id_text(conversation_id, "conversation")
        check_count(limit, "limit")
        if limit == 0:
            return []
        if before is None:
            last = await table.find(key, descending=True, limit=limit)
            return [_message(each) for each in reversed(last)]
        if not isinstance(before, _dt.datetime):
            raise must("before", "be a datetime", before)
        found: list[ConversationMessage] = []
        async for page in table.pages(key, descending=True, size=_PAGE):
            found += [each for each in map(_message, page) if moment(each.timestamp) < moment(before)]
            if limit is not None and len(found) >= limit:
                break
        return found[:limit][::-1]

    async def search(
        self, query: str, scope: Scope | None = None, limit: int | None = 20
    ) -> list[tuple[UUID, ConversationMessage]]:
        table = self._tables(scope)[1]
        check_count(limit, "limit")
        if not isinstance(query, str):
            raise must("query", "be a string", query)
        return [(UUID(each.group), _message(each)) for each in await table.search(query, limit=limit)]

    # -- branches

    async def _branch_off(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope | None, switch: bool
    ) -> None:
        headers, messages = self._tables(scope)
        key = id_text(conversation_id, "conversation")
        add = messages.add(message_entry(key, message, messages.documents.redaction))
        if switch:
            await self._switch(headers, conversation_id, message.branch_id, add)
        else:
            await self._commit_and_touch(headers, conversation_id, [add])

    async def _activate(self, conversation: Conversation, branch_id: UUID | None, scope: Scope | None) -> None:
        await self._switch(self._tables(scope)[0], conversation.id, branch_id)

    async def _switch(self, headers: Collection, conversation_id: UUID, branch_id: UUID | None, *also: Op) -> None:
        key, now = id_text(conversation_id, "conversation"), now_in_microseconds(headers)

        def switched(stored: Document | None) -> Entry:
            if stored is None:
                raise no_conversation(conversation_id)
            header = model_of(Header, stored.text)
            header.active_branch_id = branch_id
            return header_entry(key, header, now)

        await headers.change(key, switched, *also)
        await self._renew(headers, replace(headers, kind=MESSAGE), key)

    # -- helpers

    async def _commit_and_touch(self, headers: Collection, conversation_id: UUID, ops: Sequence[Op]) -> list[Any]:
        """Commit `ops`, and set the time of the last change of the conversation. It must exist."""
        key = id_text(conversation_id, "conversation")
        touch = headers.touch(key, now_in_microseconds(headers))
        try:
            results = (await headers.write(*ops, touch))[:-1]
        except DocumentMissing:
            raise no_conversation(conversation_id) from None
        await self._renew(headers, replace(headers, kind=MESSAGE), key)
        return results

    async def _renew(self, headers: Collection, messages: Collection, key: str) -> None:
        """Extend the lifetime of messages in a session to the lifetime of their conversation.

        Otherwise messages that are not written again would expire before the conversation. This reads all messages at
        most once in half of the session's lifetime.
        """
        if headers.ttl is None:
            return
        renewal_time = headers.documents.clock.wall() + headers.ttl / 2
        first = await messages.find(key, limit=1)
        if all(each.expires is None or each.expires > renewal_time for each in first):
            return
        with contextlib.suppress(
            DocumentMissing
        ):  # a message was deleted at the same time: the next write renews the others
            async for page in messages.pages(key):
                await messages.write(*(messages.touch(each.key, each.rank) for each in page))

    def _tables(self, scope: Scope | None) -> tuple[Collection, Collection]:
        return self.home.table(scope, CONVERSATION), self.home.table(scope, MESSAGE)


def _same(document: Document, words: str = "") -> Entry:
    return Entry(document.key, document.text, document.group, document.rank, document.expires, words)


def _same_message(document: Document) -> Entry:
    return _same(document, text_in(_message(document).content))


def _message(document: Document) -> ConversationMessage:
    return model_of(ConversationMessage, document.text)


async def read_history(store: ConversationStore, conversation_id: UUID) -> StoredHistory | None:
    """Return the messages of a conversation for readers that do not modify them.

    A store of another package, or with another `get`, is read in full.
    """
    if isinstance(store, StoredConversations) and getattr(store.get, "__func__", None) is StoredConversations.get:
        return await store.read_history(conversation_id)
    found = await store.get(conversation_id)
    return None if found is None else await StoredHistory.of(found.messages, found.active_branch_id)


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
        """Return whether messages were only appended since then; `tail` begins at the last known message."""
        same_header = (header.version, header.text) == (self.header.version, self.header.text)
        return same_header and tail[:1] == [self.last]


class RecentHistories:
    """The histories of the conversations that were read last, up to a number and a size. Thread-safe."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], _Recent] = {}  # the conversation that was read last is at the end
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


_WITHOUT_MESSAGES = frozenset({"messages"})
_FIELDS = tuple(
    field.name for field in dataclasses.fields(Conversation) if field.name not in {"messages", "updated_at"}
)


@dataclass(kw_only=True)
class Header(Conversation):
    """A conversation as it is stored, without its messages.

    `born` is a creation id. It distinguishes the conversation from a deleted conversation with the same id, and from a
    conversation in another scope or store.
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
    # A message of an earlier release lacks these fields. Its text stays the same, so that it is not written again.
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
            moved: The stored documents of `self.moved`. They keep the changes of other writers, and a document that
                another writer deleted stays deleted.
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
        """Return the state of the object after the commit. `results` are the results of `ops`."""
        first = 2 if self._stored_header is None else 1
        ranks = dict(self._ranks)
        for key, (_, rank) in zip(self._written, results[first:], strict=False):
            ranks[key] = rank
        stored = {key: StoredMessage(self._digests[key], ranks[key] or 0.0) for key in self._entries}
        return LoadedState(self.header.born, self._text, stored)


def _merged(
    conversation: Conversation, text: str, header: Document | None, loaded: LoadedState | None, creation_id: str
) -> Header:
    """Return the fields that the caller changed, and the stored values of the other fields."""
    fields = {name: getattr(conversation, name) for name in _FIELDS}
    if header is not None and loaded is not None:
        creation_id = loaded.creation_id
        if loaded.header is not None:
            theirs, changed = model_of(Header, header.text), changed_fields(text, loaded.header)
            fields = {name: value if name in changed else getattr(theirs, name) for name, value in fields.items()}
    return Header(**fields, updated_at=conversation.updated_at, born=creation_id)
