"""Branches of a conversation: pure functions over its messages, in order of arrival.

1. A message without a parent follows the previous message of its branch. `branch_id` None is the main line.
2. The first message of a branch replaces its parent if both have the same role: it is an edit, or another answer.
   It then follows the predecessor of the parent. If the roles differ, it follows the parent.
3. A later message of a branch follows its parent, if it names a parent.

An edit adds a branch. It never changes or removes a message, so the old path remains complete.
"""

from __future__ import annotations

import datetime as _dt
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeAlias
from uuid import UUID

from .._core.validation import unknown
from ..errors import InvalidArgument, brief
from .models import ConversationMessage, new_id

#: Fields that the position of a new message in the tree determines. A caller cannot set them.
PLACED = frozenset({"role", "content", "parent_message_id", "branch_id", "run_id", "position"})
FREE = frozenset(ConversationMessage.__dataclass_fields__) - PLACED

#: A branch, None for the main line, or `...` for the active branch.
BranchChoice: TypeAlias = UUID | EllipsisType | None


class BrokenHistory(InvalidArgument):
    """The parents of messages are inconsistent: a parent is missing, or they form a cycle."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch: the messages that share a branch id.

    Attributes:
        id: The branch id. None for the main line.
        leaf: The last message of the branch.
        messages: How many messages the branch contains. Messages before the branch are not counted.
        follows: The message that its first message follows. None if the branch begins the conversation.
        replaces: The message that its first message replaces, if any.
        updated_at: The timestamp of the last message.
    """

    id: UUID | None
    leaf: UUID
    messages: int
    follows: UUID | None
    replaces: UUID | None
    updated_at: _dt.datetime


class Tree:
    """The messages of one conversation, and which message each of them follows.

    All methods are iterative, because a long conversation would exceed the recursion limit.
    """

    def __init__(self, messages: Iterable[ConversationMessage] = ()) -> None:
        self.by_id: dict[UUID, ConversationMessage] = {}
        self.on_branch: dict[UUID | None, list[ConversationMessage]] = {}
        self._previous: dict[UUID, UUID] = {}
        self._follows: dict[UUID, UUID | None] = {}
        for message in messages:
            self.add(message)

    def add(self, message: ConversationMessage) -> None:
        """Add the next message in order of arrival."""
        if message.id in self.by_id:
            raise BrokenHistory(f"message ids must be unique, got {message.id} twice.")
        self.by_id[message.id] = message
        branch = self.on_branch.setdefault(message.branch_id, [])
        if branch:
            self._previous[message.id] = branch[-1].id
        branch.append(message)

    def copy(self) -> Tree:
        """Return a tree to which other messages can be added. Both contain the same message objects."""
        other = Tree()
        other.by_id, other._previous, other._follows = self.by_id.copy(), self._previous.copy(), self._follows.copy()
        other.on_branch = {branch: messages.copy() for branch, messages in self.on_branch.items()}
        return other

    def message(self, message_id: UUID) -> ConversationMessage:
        """Return a message by its id, or raise InvalidArgument."""
        if not isinstance(message_id, UUID | str) or message_id not in self.by_id:
            raise InvalidArgument(
                f"message {_named(message_id)} not found in this conversation. Use the id of one of its messages."
            )
        return self.by_id[message_id]

    def replaces(self, message: ConversationMessage) -> ConversationMessage | None:
        """Return the message that this message replaces, or None."""
        if message.parent_message_id is None or message.id in self._previous:
            return None
        parent = self._parent(message)
        return parent if parent.role == message.role else None

    def follows(self, message: ConversationMessage) -> UUID | None:
        """Return the id of the message before this message on its path, or None for the first message."""
        chain: list[UUID] = []
        while message.id not in self._follows and (parent := self.replaces(message)) is not None:
            chain.append(message.id)
            if len(chain) > len(self.by_id):
                raise _cycle(message.id)
            message = parent
        if message.id not in self._follows:
            has_parent = message.parent_message_id is not None
            self._follows[message.id] = self._parent(message).id if has_parent else self._previous.get(message.id)
        predecessor = self._follows[message.id]
        self._follows.update(dict.fromkeys(chain, predecessor))
        return predecessor

    def path(self, leaf: UUID) -> list[ConversationMessage]:
        """Return the messages from the first message to the leaf."""
        return [*self.back_from(leaf)][::-1]

    def back_from(self, leaf: UUID) -> Iterator[ConversationMessage]:
        """Yield the messages from the leaf back to the first message."""
        seen: set[UUID] = set()
        current: UUID | None = self.message(leaf).id
        while current is not None:
            if current in seen:
                raise _cycle(current)
            seen.add(current)
            message = self.by_id[current]
            yield message
            current = self.follows(message)

    def _parent(self, message: ConversationMessage) -> ConversationMessage:
        parent = None if message.parent_message_id is None else self.by_id.get(message.parent_message_id)
        if parent is None:
            raise BrokenHistory(
                f"the parent {_named(message.parent_message_id)} of message {message.id} not found. Save the parent "
                "message, or set parent_message_id to None."
            )
        return parent


def _named(id_: object) -> str:
    return str(id_) if isinstance(id_, UUID) else brief(id_)


def _cycle(message_id: UUID) -> BrokenHistory:
    return BrokenHistory(
        f"the parents of message {message_id} must not form a cycle, got {message_id} twice. "
        "Change one parent_message_id."
    )


def path(messages: Iterable[ConversationMessage], leaf: UUID) -> list[ConversationMessage]:
    """Return the messages from the first message to a leaf.

    Raises:
        InvalidArgument: The message does not exist.
        BrokenHistory: A parent is missing, or parents form a cycle.
    """
    return Tree(messages).path(leaf)


def leaves(messages: Iterable[ConversationMessage]) -> list[UUID]:
    """Return the ids of the messages that no other message follows.

    Each message is on the path to at least one leaf.

    Raises:
        BrokenHistory: A parent is missing, or parents form a cycle.
    """
    tree = Tree(messages)
    followed = {tree.follows(message) for message in tree.by_id.values()}
    return [each for each in tree.by_id if each not in followed]


def branches(messages: Iterable[ConversationMessage]) -> list[Branch]:
    """Return the branches, in the order of their first messages.

    Raises:
        BrokenHistory: A parent is missing, or parents form a cycle.
    """
    tree = Tree(messages)
    return [_branch(tree, branch_id, own) for branch_id, own in tree.on_branch.items()]


def _branch(tree: Tree, branch_id: UUID | None, own: Sequence[ConversationMessage]) -> Branch:
    first, last = own[0], own[-1]
    replaced = tree.replaces(first)
    return Branch(
        id=branch_id,
        leaf=last.id,
        messages=len(own),
        follows=tree.follows(first),
        replaces=None if replaced is None else replaced.id,
        updated_at=last.timestamp,
    )


def history(
    messages: Sequence[ConversationMessage], active: UUID | None = None, *,
    leaf: UUID | None = None, branch_id: BranchChoice = ...,
) -> list[ConversationMessage]:  # fmt: skip
    """Return one path of messages, from the first message to a leaf.

    If the active branch has no message yet, the path of the main line is used. If the main line has no message either,
    it is the path to the last message.

    Args:
        messages: All messages of the conversation.
        active: The active branch.
        leaf: The last message of the path. If None, the last message of the branch.
        branch_id: The branch if there is no `leaf`. None is the main line, `...` the active branch.

    Raises:
        InvalidArgument: The message or the branch does not exist.
        BrokenHistory: A parent is missing, or parents form a cycle.
    """
    tree = Tree(messages)
    if leaf is not None:
        return tree.path(leaf)
    if isinstance(branch_id, EllipsisType):
        last = tree.on_branch.get(active) or tree.on_branch.get(None) or messages[-1:]
    else:
        hashable = isinstance(branch_id, UUID | str | None)
        last = (hashable and tree.on_branch.get(branch_id)) or []
        if not last and branch_id is not None:
            raise no_branch(branch_id)
    return tree.path(last[-1].id) if last else []


def no_branch(branch_id: UUID) -> InvalidArgument:
    """Return the error for an unknown branch."""
    return InvalidArgument(f"branch {_named(branch_id)} not found in this conversation. Use None for the main line.")


def replacement(
    messages: Iterable[ConversationMessage], message_id: UUID, content: Any, fields: dict[str, Any]
) -> ConversationMessage:
    """Return a message that replaces another message, on a new branch.

    Raises:
        InvalidArgument: The message does not exist, or the caller may not set one of `fields`.
    """
    for name in fields:
        if name not in FREE:
            raise InvalidArgument(unknown("message field", name, FREE))
    old = Tree(messages).message(message_id)
    return ConversationMessage(**fields, role=old.role, content=content, parent_message_id=old.id, branch_id=new_id())


def copies(messages: Iterable[ConversationMessage]) -> list[ConversationMessage]:
    """Return copies of the messages of a path, as the main line of another conversation.

    Each copy gets a new id, and keeps the old id in `metadata["forked_from"]`.
    """
    return [
        replace(
            message,
            id=new_id(),
            parent_message_id=None,
            branch_id=None,
            metadata={**(message.metadata or {}), "forked_from": str(message.id)},
        )
        for message in messages
    ]
