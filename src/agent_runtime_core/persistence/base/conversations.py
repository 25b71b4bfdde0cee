"""Conversations and their messages."""

from __future__ import annotations

import datetime as _dt
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

from ...errors import InvalidArgument
from ..documents.full_text import best, folded, text_in, words_of
from ..message_tree import Branch, BranchChoice, Tree, copies, no_branch, replacement
from ..message_tree import branches as branches_of
from ..message_tree import history as history_of
from ..models import Conversation, ConversationMessage, Scope, moment

_PAGE = 100


class ConversationStore(ABC):
    """Conversations with the messages of all their branches, in the order they came.

    Six methods are yours to write; those below them are made of these six, and are then reads and writes that others
    may come between: where `switch_branch` saves, a message appended meanwhile is lost if your `save` writes the whole
    conversation. In ours each is one commit, and none is lost.
    """

    @abstractmethod
    async def save(self, conversation: Conversation, scope: Scope = Scope.PROJECT) -> None:
        """Store a conversation, and set its `updated_at`."""

    @abstractmethod
    async def get(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> Conversation | None: ...

    @abstractmethod
    async def delete(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Whether there was one."""

    @abstractmethod
    async def list_conversations(
        self, scope: Scope = Scope.PROJECT, limit: int = 100, offset: int = 0, agent_key: str | None = None
    ) -> list[Conversation]:
        """Those of that agent, or of all, the last changed first."""

    @abstractmethod
    async def add_message(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope = Scope.PROJECT
    ) -> None:
        """Append a message. InvalidArgument: there is no such conversation."""

    @abstractmethod
    async def get_messages(
        self,
        conversation_id: UUID,
        scope: Scope = Scope.PROJECT,
        limit: int | None = None,
        before: _dt.datetime | None = None,
    ) -> list[ConversationMessage]:
        """Messages of all branches in the order they came: the last `limit` of those before that time."""

    async def append(
        self, conversation_id: UUID, messages: Sequence[ConversationMessage], scope: Scope = Scope.PROJECT
    ) -> int:
        """Append those messages whose ids are not there yet; how many were. InvalidArgument: no such conversation."""
        there = {message.id for message in (await self._known(conversation_id, scope)).messages}
        added = 0
        for message in messages:
            if message.id not in there:
                await self.add_message(conversation_id, message, scope)
                there.add(message.id)
                added += 1
        return added

    # -- branches

    async def branches(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> list[Branch]:
        """Its branches in the order of their first messages. InvalidArgument: no such conversation; BrokenHistory."""
        return branches_of((await self._known(conversation_id, scope)).messages)

    async def history(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT, *, leaf: UUID | None = None,
        branch_id: BranchChoice = ...,
    ) -> list[ConversationMessage]:  # fmt: skip
        """The messages from the first one to `leaf`, else to the last one of `branch_id` (None: the main line), else of
        the active branch.

        InvalidArgument: no such conversation, message or branch; BrokenHistory: the parents lead nowhere.
        """
        known = await self._known(conversation_id, scope)
        return history_of(known.messages, known.active_branch_id, leaf=leaf, branch_id=branch_id)

    async def edit_message(
        self, conversation_id: UUID, message_id: UUID, content: str | dict[str, Any] | list[Any],
        scope: Scope = Scope.PROJECT, *, switch: bool = True, **fields: Any,
    ) -> ConversationMessage:  # fmt: skip
        """A message in the place of another one, with its role, on a branch of its own, which becomes the active one.

        `fields` are further ones of the new message; with an `id` that is there already, that message is the answer.
        InvalidArgument: no such conversation or message, or a field that is not for the caller to set.
        """
        known = await self._known(conversation_id, scope)
        return await self._replace(known, message_id, content, scope, switch, fields)

    async def regenerate(
        self, conversation_id: UUID, message_id: UUID, content: str | dict[str, Any] | list[Any],
        scope: Scope = Scope.PROJECT, *, switch: bool = True, **fields: Any,
    ) -> ConversationMessage:  # fmt: skip
        """Another answer in the place of one of the assistant's, as `edit_message` puts it there."""
        known = await self._known(conversation_id, scope)
        role = Tree(known.messages).message(message_id).role
        if role != "assistant":
            raise InvalidArgument(
                f"message {message_id} is of the {role}, no answer: edit_message puts one in its place"
            )
        return await self._replace(known, message_id, content, scope, switch, fields)

    async def switch_branch(
        self, conversation_id: UUID, branch_id: UUID | None, scope: Scope = Scope.PROJECT
    ) -> None:  # fmt: skip
        """Make a branch the active one; None: the main line. InvalidArgument: no such conversation or branch."""
        known = await self._known(conversation_id, scope)
        if branch_id is not None and all(message.branch_id != branch_id for message in known.messages):
            raise no_branch(branch_id)
        await self._activate(known, branch_id, scope)

    async def fork(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT, *, at: UUID | None = None, title: str | None = None
    ) -> Conversation:
        """A new conversation with copies of the messages up to `at`, else of the active branch.

        It keeps agent, metadata and, where no other one is given, the title; not the summary, which may tell of more.
        `metadata["forked_from"]` of each message is the id of the one it was copied from.
        """
        known = await self._known(conversation_id, scope)
        made = Conversation(
            title=known.title if title is None else title,
            messages=copies(history_of(known.messages, known.active_branch_id, leaf=at)),
            metadata=known.metadata,
            agent_key=known.agent_key,
            parent_conversation_id=known.id,
        )
        await self.save(made, scope)
        return made

    # -- search

    async def search(
        self, query: str, scope: Scope = Scope.PROJECT, limit: int = 20
    ) -> list[tuple[UUID, ConversationMessage]]:
        """Messages whose content holds every word of `query`, with the ids of their conversations, best first.

        Words are compared without case and accents; the last one may be the start of another. Ours ask the full-text
        index of their store where it has one; here every conversation is read.
        """
        found = [each async for each in self._all_messages(scope)]
        texts = ((str(n), moment(each.timestamp), folded(text_in(each.content))) for n, (_, each) in enumerate(found))
        return [found[int(n)] for n in best(words_of(query), texts, limit)]

    async def _all_messages(self, scope: Scope) -> AsyncIterator[tuple[UUID, ConversationMessage]]:
        for number in itertools.count():
            page = await self.list_conversations(scope, _PAGE, number * _PAGE)
            for conversation in page:
                for message in await self.get_messages(conversation.id, scope):
                    yield conversation.id, message
            if len(page) < _PAGE:
                return

    # -- what the methods above are made of

    async def _known(self, conversation_id: UUID, scope: Scope) -> Conversation:
        found = await self.get(conversation_id, scope)
        if found is None:
            raise no_conversation(conversation_id)
        return found

    async def _replace(
        self, known: Conversation, message_id: UUID, content: Any, scope: Scope, switch: bool, fields: dict[str, Any]
    ) -> ConversationMessage:
        made = next((each for each in known.messages if each.id == fields.get("id")), None)
        if made is None:
            made = replacement(known.messages, message_id, content, fields)
            await self._branch_off(known.id, made, scope, switch)
        elif switch:
            await self._activate(known, made.branch_id, scope)
        return made

    async def _branch_off(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope, switch: bool
    ) -> None:  # fmt: skip
        await self.add_message(conversation_id, message, scope)
        if switch:
            await self._activate(await self._known(conversation_id, scope), message.branch_id, scope)

    async def _activate(self, conversation: Conversation, branch_id: UUID | None, scope: Scope) -> None:
        conversation.active_branch_id = branch_id
        await self.save(conversation, scope)

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""


def no_conversation(conversation_id: object) -> InvalidArgument:
    return InvalidArgument(f"there is no conversation {conversation_id} in this scope: save it first")
