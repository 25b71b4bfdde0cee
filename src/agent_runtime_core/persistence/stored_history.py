"""Stored messages as chat messages of agents and models, one at a time and as the history of a conversation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, cast
from uuid import UUID

from .._core.arguments import SYSTEM_ROLES
from .._core.codec.json import decode, encode
from .._core.per_loop import sliced
from ..errors import BadArguments, UnserialisableResult
from ..interfaces import ToolCallDict
from ..tools.arguments import read_arguments
from .message_tree import Tree
from .models import ConversationMessage, ToolCall

#: Key in the metadata of a message: the chat message, if the fields of the model do not hold all of it.
RAW = "chat"

_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
#: Replaces the content in that chat message, because the message itself has it. A content of 10 MiB fits only once.
_SAME_CONTENT = {"in": "content"}


def chat_of(message: ConversationMessage) -> dict[str, Any]:
    """Return a message in OpenAI's chat format."""
    chat = _chat_of(message)
    raw = (message.metadata or {}).get(RAW)  # a custom store may return None as metadata
    if not isinstance(raw, dict) or str(raw.get("role", "")) != message.role:  # metadata of the application
        return chat
    original = cast("dict[str, Any]", decode(encode(raw)))
    if original.get("content") == _SAME_CONTENT:
        original["content"] = copy.deepcopy(message.content)
    before = _chat_of(_message_of(original, message.id))
    for name in _FIELDS:
        if chat.get(name) != before.get(name):  # a field of the message was changed after it was stored
            original.pop(name, None)
            original |= {name: chat[name]} if name in chat else {}
    return original


def _chat_of(message: ConversationMessage) -> dict[str, Any]:
    """Return the chat message that the fields of the model describe."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [_call_of(each) for each in message.tool_calls]
    if message.tool_call_id is not None:
        chat["tool_call_id"] = message.tool_call_id
    return chat


def _call_of(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, separators=(",", ":"))
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def message_of(chat: Mapping[str, Any], message_id: UUID, **fields: Any) -> ConversationMessage:
    """Return a chat message as a stored message. `chat_of` restores it, including data the model has no field for."""
    message = _message_of(chat, message_id, **fields)
    if _chat_of(message) != dict(chat):
        content = {"content": dict(_SAME_CONTENT)} if message.content else {}
        message.metadata = {**message.metadata, RAW: {**chat, **content}}
    return message


def _message_of(chat: Mapping[str, Any], message_id: UUID, **fields: Any) -> ConversationMessage:
    content = chat.get("content")
    return ConversationMessage(
        id=message_id,
        role=str(chat.get("role", "")),
        content=content if isinstance(content, (str, dict, list)) else "",
        tool_calls=[ToolCall(**call) for each in chat.get("tool_calls") or () if (call := _tool_call_fields(each))],
        tool_call_id=chat.get("tool_call_id"),
        **fields,
    )


def _tool_call_fields(call: Any) -> dict[str, Any] | None:
    if not isinstance(call, Mapping):
        return None
    tool_call = ToolCallDict(call)
    try:
        arguments = read_arguments(tool_call.arguments)
        encode([[[arguments]]])  # nested as deeply as in a stored message, which has a limit
    except (BadArguments, UnserialisableResult):
        arguments = {}
    return {"id": tool_call.id, "name": tool_call.name, "arguments": arguments}


class Pairing:
    """Chat messages in which each tool call has a result, and each result a tool call.

    Providers reject other messages, and a stored conversation with them would be rejected forever. A missing result
    is replaced by an error text. A result without a call is dropped.
    """

    def __init__(self) -> None:
        self.pairs: list[Mapping[str, Any]] = []
        self.unanswered: list[Any] = []  # ids of the calls of the last message that have no result yet

    def add(self, chat: Mapping[str, Any]) -> None:
        """Add the next message."""
        if chat.get("role") != "tool":
            self.pairs += map(_missing_result, self.unanswered)
            self.pairs.append(chat)
            self.unanswered = [each.get("id") for each in chat.get("tool_calls") or () if isinstance(each, Mapping)]
        elif chat.get("tool_call_id") in self.unanswered:
            self.pairs.append(chat)
            self.unanswered.remove(chat.get("tool_call_id"))

    def before(self, following: Iterable[Any] = ()) -> list[Mapping[str, Any]]:
        """Return all messages. For calls at the end, a result may be at the beginning of `following`."""
        answered = [each.get("tool_call_id") for each in takewhile(_is_result, following)]
        return [*self.pairs, *(_missing_result(each) for each in self.unanswered if each not in answered)]

    def copy(self) -> Pairing:
        """Return another pairing of the same messages, to which other messages can be added."""
        other = Pairing()
        other.pairs, other.unanswered = self.pairs.copy(), self.unanswered.copy()
        return other


def paired(chats: Iterable[Mapping[str, Any]], following: Iterable[Any] = ()) -> list[Mapping[str, Any]]:
    """Return chat messages as `Pairing` pairs them."""
    pairing = Pairing()
    for chat in chats:
        pairing.add(chat)
    return pairing.before(following)


def _missing_result(call_id: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Error: no result of this call is known"}


def _is_result(chat: Any) -> bool:
    return isinstance(chat, Mapping) and chat.get("role") == "tool"


def same_chat(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two chat messages are the same. Fields that some clients add are not compared."""
    return all(_comparable(one, name) == _comparable(other, name) for name in _FIELDS)


def _comparable(chat: Mapping[str, Any], name: str) -> Any:
    value = chat.get(name)
    if name == "tool_calls":
        return [each.get("id") for each in value or () if isinstance(each, Mapping)]
    return value or None


#: Keys in the metadata of a message whose run failed. A rejected message is not sent to a model again: the provider
#: would reject every later request of the conversation.
UNANSWERED, REJECTED = "unanswered", "rejected"
#: Key in the metadata of a message that stands for a later one: a tool call had no result when its run ended.
OPEN = "open"
_PER_MESSAGE: Final = 500  # characters that stand for the other fields of a message
_ATOMS: Final = frozenset({str, int, float, bool, type(None)})

Chat = Mapping[str, Any]


class ChatPath:
    """One path of a conversation as chat messages, without those that a provider rejected."""

    def __init__(self) -> None:
        self.leaf: ConversationMessage | None = None  # the last message of the path
        self.prompts: list[Chat] = []  # the leading prompts, which belong to the agent
        self.chats: list[Chat] = []  # the messages after them
        self._pairing = Pairing()
        self._is_flat = True  # no message contains a list or a dict

    async def followed_by(self, messages: Sequence[ConversationMessage]) -> ChatPath:
        """Return the path that continues with these messages."""
        path = ChatPath()
        path.leaf = messages[-1]
        path.prompts, path.chats = self.prompts.copy(), self.chats.copy()
        path._pairing, path._is_flat = self._pairing.copy(), self._is_flat
        await sliced(map(path._add, messages))
        return path

    def _add(self, message: ConversationMessage) -> None:
        if is_marked(message, REJECTED):
            return
        chat = chat_of(message)
        if not self.chats and chat.get("role") in SYSTEM_ROLES:
            self.prompts.append(chat)
        else:
            self.chats.append(chat)
            self._pairing.add(chat)
            self._is_flat = self._is_flat and is_flat(chat)

    async def copies(self, following: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return copies of the messages after the prompts, with a result for each tool call.

        Args:
            following: The next messages. They may begin with the results of the last calls.
        """
        copy_of: Callable[[Any], dict[str, Any]] = dict.copy if self._is_flat else copied
        return await sliced(map(copy_of, self._pairing.before(following)))


class StoredHistory:
    """The messages of a conversation at one time. Several readers share it, so nothing of it is modified."""

    def __init__(self, tree: Tree, active_branch_id: UUID | None) -> None:
        self._tree = tree
        self.active_branch_id: UUID | None = active_branch_id
        self._path = ChatPath()  # that of the last call of `path_to`
        self._characters: int | None = None

    @classmethod
    async def of(cls, messages: Sequence[ConversationMessage], active_branch_id: UUID | None) -> StoredHistory:
        """Return the history of these messages, in order of arrival."""
        return await cls(Tree(), active_branch_id).followed_by(messages)

    async def followed_by(self, messages: Sequence[ConversationMessage]) -> StoredHistory:
        """Return the history after these messages were appended."""
        other = StoredHistory(self._tree.copy(), self.active_branch_id)
        other._path = self._path
        await sliced(map(other._tree.add, messages))
        return other

    @property
    def characters(self) -> int:
        """About how many characters its messages have."""
        if self._characters is None:
            self._characters = sum(_characters_of(each) for each in self._tree.by_id.values())
        return self._characters

    def __contains__(self, message_id: UUID) -> bool:
        return message_id in self._tree.by_id

    def leaf(self) -> ConversationMessage | None:
        """Return the last message of the active branch, as `message_tree.history` selects it."""
        branches = self._tree.on_branch
        if branch := branches.get(self.active_branch_id) or branches.get(None):
            return branch[-1]
        return next(reversed(self._tree.by_id.values()), None)

    async def path_to(self, leaf: UUID) -> ChatPath:
        """Return the path to a message.

        Raises:
            InvalidArgument: The message does not exist.
            BrokenHistory: A parent is missing, or parents form a cycle.
        """
        known = self._path
        new = (await sliced(self._back_from(leaf, known.leaf)))[::-1]
        if not new:
            return known
        begins = self._tree.follows(new[0]) is None
        self._path = found = await (ChatPath() if begins else known).followed_by(new)
        return found

    def _back_from(self, leaf: UUID, end: ConversationMessage | None) -> Iterator[ConversationMessage]:
        for message in self._tree.back_from(leaf):
            if message is end:
                return
            yield message


def is_marked(message: ConversationMessage, mark: str = UNANSWERED) -> bool:
    """Return whether the metadata of a message have a mark."""
    return (message.metadata or {}).get(mark) is True  # a custom store may return None as metadata


def _characters_of(message: ConversationMessage) -> int:
    content = message.content if isinstance(message.content, str) else repr(message.content)
    return len(content) + (len(repr(message.tool_calls)) if message.tool_calls else 0) + _PER_MESSAGE


def is_flat(chat: Chat) -> bool:
    """Return whether a chat message contains nothing that can be modified."""
    return _ATOMS.issuperset(map(type, chat.values()))


def copied(value: Any) -> Any:
    """Return a copy of a chat message, or of a part of it, which shares nothing with it that can be modified."""
    kind = type(value)
    if kind is dict:
        if is_flat(value):  # most messages
            return value.copy()
        return {name: copied(each) for name, each in value.items()}
    if kind is list:
        return [copied(each) for each in value]
    return value if kind in _ATOMS else copy.deepcopy(value)
