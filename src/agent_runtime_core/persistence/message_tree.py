"""Which message follows which: pure functions over the messages of a conversation, in the order they came.

1. A message without a parent follows the one before it on its branch; `branch_id` None is the main line.
2. The first message of a branch stands in the place of its parent where both have one role (an edit, another
   answer): it follows what the parent follows. Where the roles differ it follows the parent.
3. A later message of a branch follows the parent it names.

No message is ever changed or left out by an edit: the old path stays whole beside the new one.
"""

from __future__ import annotations

import datetime as _dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeAlias
from uuid import UUID

from ..errors import InvalidArgument, brief
from .models import ConversationMessage, new_id

#: Set by the place of a new message in the tree, and so not by who edits it.
PLACED = frozenset({"role", "content", "parent_message_id", "branch_id"})
FREE = frozenset(ConversationMessage.__dataclass_fields__) - PLACED

#: A branch, None for the main line, or `...` for the one that is active.
BranchChoice: TypeAlias = UUID | EllipsisType | None


class BrokenHistory(InvalidArgument):
    """Messages whose parents lead nowhere: to one that is not there, or in a circle."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """The messages that share a branch id, None for the main line.

    `follows` is the message its first one follows, None where it begins the conversation; `replaces` the one in
    whose place the first one stands; `leaf` its last; `messages` how many it has of its own.
    """

    id: UUID | None
    leaf: UUID
    messages: int
    follows: UUID | None
    replaces: UUID | None
    updated_at: _dt.datetime


class Tree:
    """The messages of one conversation by what they follow; every look is a walk, never a recursion."""

    def __init__(self, messages: Iterable[ConversationMessage]) -> None:
        self.by_id: dict[UUID, ConversationMessage] = {}
        self.on_branch: dict[UUID | None, list[ConversationMessage]] = {}
        self._before: dict[UUID, UUID] = {}
        self._follows: dict[UUID, UUID | None] = {}
        for message in messages:
            if message.id in self.by_id:
                raise BrokenHistory(f"two messages have the id {message.id}")
            self.by_id[message.id] = message
            line = self.on_branch.setdefault(message.branch_id, [])
            if line:
                self._before[message.id] = line[-1].id
            line.append(message)

    def message(self, message_id: UUID) -> ConversationMessage:
        if not isinstance(message_id, UUID | str) or message_id not in self.by_id:
            raise InvalidArgument(f"there is no message {_named(message_id)} in this conversation")
        return self.by_id[message_id]

    def replaces(self, message: ConversationMessage) -> ConversationMessage | None:
        """The message in whose place this one stands."""
        if message.parent_message_id is None or message.id in self._before:
            return None
        parent = self._parent(message)
        return parent if parent.role == message.role else None

    def follows(self, message: ConversationMessage) -> UUID | None:
        """The id of the message before this one on its path; None where it is the first."""
        chain: list[UUID] = []
        while message.id not in self._follows and (parent := self.replaces(message)) is not None:
            chain.append(message.id)
            if len(chain) > len(self.by_id):
                raise _circle(message.id)
            message = parent
        if message.id not in self._follows:
            named = message.parent_message_id
            self._follows[message.id] = self._before.get(message.id) if named is None else self._parent(message).id
        found = self._follows[message.id]
        self._follows.update(dict.fromkeys(chain, found))
        return found

    def path(self, leaf: UUID) -> list[ConversationMessage]:
        """The messages from the first one to that leaf."""
        walked: dict[UUID, ConversationMessage] = {}
        at: UUID | None = self.message(leaf).id
        while at is not None:
            if at in walked:
                raise _circle(at)
            walked[at] = self.by_id[at]
            at = self.follows(self.by_id[at])
        return list(walked.values())[::-1]

    def _parent(self, message: ConversationMessage) -> ConversationMessage:
        parent = None if message.parent_message_id is None else self.by_id.get(message.parent_message_id)
        if parent is None:
            raise BrokenHistory(f"the parent {_named(message.parent_message_id)} of message {message.id} is not there")
        return parent


def _named(id_: object) -> str:
    return str(id_) if isinstance(id_, UUID) else brief(id_)


def _circle(at: UUID) -> BrokenHistory:
    return BrokenHistory(f"the parents of message {at} go round in a circle")


def path(messages: Iterable[ConversationMessage], leaf: UUID) -> list[ConversationMessage]:
    """The messages from the first one to that leaf. InvalidArgument: no such message; BrokenHistory."""
    return Tree(messages).path(leaf)


def leaves(messages: Iterable[ConversationMessage]) -> list[UUID]:
    """The messages that none follows: each message is on the path to one of them. BrokenHistory."""
    tree = Tree(messages)
    followed = {tree.follows(message) for message in tree.by_id.values()}
    return [each for each in tree.by_id if each not in followed]


def branches(messages: Iterable[ConversationMessage]) -> list[Branch]:
    """The branches in the order of their first messages. BrokenHistory."""
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
    """The path to `leaf`, else to the last message of `branch_id`, else of the active branch.

    An active branch that has no message yet leaves it at the main line; where that has none either, it is the path
    to the last message. InvalidArgument: no such message, no such branch; BrokenHistory.
    """
    tree = Tree(messages)
    if leaf is not None:
        return tree.path(leaf)
    if isinstance(branch_id, EllipsisType):
        last = tree.on_branch.get(active) or tree.on_branch.get(None) or messages[-1:]
    else:
        known = isinstance(branch_id, UUID | str | None)
        last = (known and tree.on_branch.get(branch_id)) or []
        if not last and branch_id is not None:
            raise no_branch(branch_id)
    return tree.path(last[-1].id) if last else []


def no_branch(branch_id: UUID) -> InvalidArgument:
    return InvalidArgument(f"there is no branch {_named(branch_id)} in this conversation: None is the main line")


def replacement(
    messages: Iterable[ConversationMessage], message_id: UUID, content: Any, fields: dict[str, Any],
) -> ConversationMessage:  # fmt: skip
    """A message to stand in the place of another one, on a branch of its own.

    InvalidArgument: no such message; a field of `fields` that its place decides, or that is none.
    """
    for name in fields:
        if name not in FREE:
            raise InvalidArgument(
                f"{brief(name)} cannot be given to another message in its place: {', '.join(sorted(FREE))}"
            )
    old = Tree(messages).message(message_id)
    return ConversationMessage(**fields, role=old.role, content=content, parent_message_id=old.id, branch_id=new_id())


def copies(messages: Iterable[ConversationMessage]) -> list[ConversationMessage]:
    """A path once more, as the main line of a conversation of its own: new ids, `metadata["forked_from"]` the old."""
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
