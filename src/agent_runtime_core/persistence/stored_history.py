"""The messages of a stored conversation as chat messages, for readers that do not modify them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from .._core.arguments import SYSTEM_ROLES
from .._core.per_loop import sliced
from .chat_format import Pairing, chat_of
from .message_tree import Tree
from .models import ConversationMessage

#: Keys in the metadata of a message whose run failed. A rejected message is not sent to a model again: the provider
#: would reject every later request of the conversation.
UNANSWERED, REJECTED = "unanswered", "rejected"
#: Key in the metadata of a message that stands for a later message: a tool call had no result when its run ended.
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
        self._path = ChatPath()  # the path of the last call of `path_to`
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
