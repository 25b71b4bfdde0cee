"""The contract of stores for conversations."""

from __future__ import annotations

import copy
import datetime as _dt
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

from ..._core.validation import must
from ...errors import InvalidArgument
from ..documents.base import best, folded, text_in, words_of
from ..message_tree import Branch, BranchChoice, Tree, copies, no_branch, replacement
from ..message_tree import branches as branches_of
from ..message_tree import history as history_of
from ..models import Conversation, ConversationMessage, Scope, moment

_PAGE = 100


class ConversationStore(ABC):
    """Stores conversations with the messages of all their branches, in order of arrival.

    A store must implement the six abstract methods. The other methods are built on them, so they are separate reads
    and writes. A message that another writer appends between `switch_branch`'s read and its `save` is lost if your
    `save` writes the whole conversation. In the built-in stores each method is one commit, and no message is lost.
    """

    @abstractmethod
    async def save(self, conversation: Conversation, scope: Scope = Scope.PROJECT) -> None:
        """Store a conversation, and set its `updated_at`.

        Args:
            conversation: The conversation.
            scope: The scope.
        """

    @abstractmethod
    async def get(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> Conversation | None:
        """Return a conversation with its messages, or None if there is none.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.
        """

    @abstractmethod
    async def delete(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Delete a conversation with its messages, and return whether it existed.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.

        Returns:
            Whether the conversation existed.
        """

    @abstractmethod
    async def list_conversations(
        self, scope: Scope = Scope.PROJECT, limit: int = 100, offset: int = 0, agent_key: str | None = None
    ) -> list[Conversation]:
        """Return conversations, the most recently changed first. The built-in stores leave `messages` empty.

        Args:
            scope: The scope to read.
            limit: At most this many conversations.
            offset: Skip this many conversations.
            agent_key: Only the conversations of this agent. If None, of all agents.
        """

    @abstractmethod
    async def add_message(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope = Scope.PROJECT
    ) -> None:
        """Append a message.

        Args:
            conversation_id: The id of the conversation.
            message: The message.
            scope: The scope.

        Raises:
            InvalidArgument: The conversation does not exist.
        """

    @abstractmethod
    async def get_messages(
        self,
        conversation_id: UUID,
        scope: Scope = Scope.PROJECT,
        limit: int | None = None,
        before: _dt.datetime | None = None,
    ) -> list[ConversationMessage]:
        """Return the messages of all branches, in order of arrival.

        Args:
            conversation_id: The conversation.
            scope: The scope of the conversation.
            limit: Only the last `limit` messages. If None, all.
            before: Only messages with an earlier timestamp.
        """

    async def append(
        self, conversation_id: UUID, messages: Sequence[ConversationMessage], scope: Scope = Scope.PROJECT
    ) -> int:
        """Append the messages whose ids the conversation does not contain yet.

        Args:
            conversation_id: The id of the conversation.
            messages: The messages, in order.
            scope: The scope.

        Returns:
            How many messages were appended.

        Raises:
            InvalidArgument: The conversation does not exist.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import Conversation, ConversationMessage
            >>> from agent_runtime_core.persistence import InMemoryConversationStore
            >>> async def main():
            ...     store, chat = InMemoryConversationStore(), Conversation(title="Hello")
            ...     await store.save(chat)
            ...     await store.append(chat.id, [ConversationMessage(role="user", content="Hi")])
            ...     return [message.content for message in await store.get_messages(chat.id)]
            >>> asyncio.run(main())
            ['Hi']
        """
        ids = {message.id for message in (await self._require(conversation_id, scope)).messages}
        added = 0
        for message in messages:
            if message.id not in ids:
                await self.add_message(conversation_id, message, scope)
                ids.add(message.id)
                added += 1
        return added

    # -- branches

    async def branches(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> list[Branch]:
        """Return the branches of a conversation, in the order of their first messages.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.

        Raises:
            InvalidArgument: The conversation does not exist.
            BrokenHistory: A parent of a message is missing, or parents form a cycle.
        """
        return branches_of((await self._require(conversation_id, scope)).messages)

    async def history(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT, *, leaf: UUID | None = None,
        branch_id: BranchChoice = ...,
    ) -> list[ConversationMessage]:  # fmt: skip
        """Return one path of messages, from the first message to a leaf.

        Args:
            conversation_id: The conversation.
            scope: The scope of the conversation.
            leaf: The last message of the path. If None, the last message of the branch.
            branch_id: The branch if there is no `leaf`. None is the main line, `...` the active branch.

        Raises:
            InvalidArgument: The conversation, the message or the branch does not exist.
            BrokenHistory: A parent of a message is missing, or parents form a cycle.
        """
        conversation = await self._require(conversation_id, scope)
        return history_of(conversation.messages, conversation.active_branch_id, leaf=leaf, branch_id=branch_id)

    async def edit_message(
        self, conversation_id: UUID, message_id: UUID, content: str | dict[str, Any] | list[Any],
        scope: Scope = Scope.PROJECT, *, switch: bool = True, **fields: Any,
    ) -> ConversationMessage:  # fmt: skip
        """Replace a message by an edited message, on a new branch.

        The role does not change. The old message and its branch are not modified.

        Args:
            conversation_id: The conversation.
            message_id: The message to replace.
            content: The content of the new message.
            scope: The scope of the conversation.
            switch: Make the new branch active.
            **fields: Further fields of the new message. If a message with the passed `id` exists, it is returned
                instead, so that the call can be repeated.

        Returns:
            The new message.

        Raises:
            InvalidArgument: The conversation or the message does not exist, or the caller may not set a field.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import Conversation, ConversationMessage
            >>> from agent_runtime_core.persistence import InMemoryConversationStore
            >>> async def main():
            ...     store, first = InMemoryConversationStore(), ConversationMessage(role="user", content="Hi")
            ...     chat = Conversation(messages=[first])
            ...     await store.save(chat)
            ...     await store.edit_message(chat.id, first.id, "Good morning")
            ...     return [message.content for message in await store.history(chat.id)]
            >>> asyncio.run(main())
            ['Good morning']
        """
        conversation = await self._require(conversation_id, scope)
        return await self._replace(conversation, message_id, content, scope, switch, fields)

    async def regenerate(
        self, conversation_id: UUID, message_id: UUID, content: str | dict[str, Any] | list[Any],
        scope: Scope = Scope.PROJECT, *, switch: bool = True, **fields: Any,
    ) -> ConversationMessage:  # fmt: skip
        """Replace an answer of the assistant by another answer, on a new branch.

        The arguments are the same as for `edit_message`.

        Args:
            conversation_id: The id of the conversation.
            message_id: The answer to replace.
            content: The content of the new answer.
            scope: The scope.
            switch: Make the new branch active.
            **fields: Further fields of the new answer, as in `edit_message`.

        Returns:
            The new message.

        Raises:
            InvalidArgument: As in `edit_message`, or the message is not from the assistant.
        """
        conversation = await self._require(conversation_id, scope)
        role = Tree(conversation.messages).message(message_id).role
        if role != "assistant":
            raise must(f"message {message_id}", "have the role 'assistant'", role, "Use edit_message to replace it")
        return await self._replace(conversation, message_id, content, scope, switch, fields)

    async def switch_branch(self, conversation_id: UUID, branch_id: UUID | None, scope: Scope = Scope.PROJECT) -> None:
        """Make a branch active. None is the main line.

        Args:
            conversation_id: The id of the conversation.
            branch_id: The branch. None is the main line.
            scope: The scope.

        Raises:
            InvalidArgument: The conversation or the branch does not exist.
        """
        conversation = await self._require(conversation_id, scope)
        if branch_id is not None and all(message.branch_id != branch_id for message in conversation.messages):
            raise no_branch(branch_id)
        await self._activate(conversation, branch_id, scope)

    async def fork(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT, *, at: UUID | None = None, title: str | None = None
    ) -> Conversation:
        """Copy one path of messages into a new conversation.

        The fork keeps the agent and the metadata. It does not keep the summary, which may cover more messages. The id
        of the original message is in `metadata["forked_from"]` of each copy.

        Args:
            conversation_id: The conversation to copy from.
            scope: The scope of both conversations.
            at: The last message to copy. None copies the active branch.
            title: The title of the fork. None keeps the title.

        Returns:
            The new conversation.

        Raises:
            InvalidArgument: The conversation or the message does not exist.
            BrokenHistory: A parent of a message is missing, or parents form a cycle.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import Conversation, ConversationMessage
            >>> from agent_runtime_core.persistence import InMemoryConversationStore
            >>> async def main():
            ...     store = InMemoryConversationStore()
            ...     chat = Conversation(title="Trip", messages=[ConversationMessage(role="user", content="Hi")])
            ...     await store.save(chat)
            ...     return (await store.fork(chat.id)).parent_conversation_id == chat.id
            >>> asyncio.run(main())
            True
        """
        conversation = await self._require(conversation_id, scope)
        fork = Conversation(
            title=conversation.title if title is None else title,
            messages=copies(history_of(conversation.messages, conversation.active_branch_id, leaf=at)),
            metadata=conversation.metadata,
            agent_key=conversation.agent_key,
            parent_conversation_id=conversation.id,
        )
        await self.save(fork, scope)
        return fork

    async def move_to(self, other: ConversationStore, conversation_id: UUID) -> bool:
        """Move a conversation to another store, with all its messages.

        `PersistenceManager.assign_conversation` uses it. Here the conversation is saved in the other store, and then
        deleted. After a crash between the two, a second call deletes it. A message that another writer appends in
        between is lost.

        Args:
            other: The other store, such as `for_tenant(tenant)` of this store.
            conversation_id: The conversation.

        Returns:
            Whether it was moved. False if it does not exist, or if the other store contains another conversation with
            this id.
        """
        found, there = await self.get(conversation_id), await other.get(conversation_id)
        if found is None:
            return False
        if there is None:
            await other.save(copy.deepcopy(found))
        elif [each.id for each in there.messages] != [each.id for each in found.messages]:
            return False
        return await self.delete(conversation_id)

    # -- search

    async def search(
        self, query: str, scope: Scope = Scope.PROJECT, limit: int = 20
    ) -> list[tuple[UUID, ConversationMessage]]:
        """Return at most `limit` messages that contain all words of `query`, the best match first.

        Case and accents are ignored. The last word of `query` also matches words that begin with it. The built-in
        stores use the full-text index of their backend, if any. Here every conversation is read.

        Args:
            query: The words.
            scope: The scope to search.
            limit: At most this many messages.

        Returns:
            Pairs of a conversation id and a message.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import Conversation, ConversationMessage
            >>> from agent_runtime_core.persistence import InMemoryConversationStore
            >>> async def main():
            ...     store = InMemoryConversationStore()
            ...     await store.save(Conversation(messages=[ConversationMessage(role="user", content="Trains to Ulm")]))
            ...     return [message.content for _, message in await store.search("ulm")]
            >>> asyncio.run(main())
            ['Trains to Ulm']
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

    # -- helpers

    async def _require(self, conversation_id: UUID, scope: Scope) -> Conversation:
        found = await self.get(conversation_id, scope)
        if found is None:
            raise no_conversation(conversation_id)
        return found

    async def _replace(
        self,
        conversation: Conversation,
        message_id: UUID,
        content: Any,
        scope: Scope,
        switch: bool,
        fields: dict[str, Any],
    ) -> ConversationMessage:
        new = next((each for each in conversation.messages if each.id == fields.get("id")), None)
        if new is None:
            new = replacement(conversation.messages, message_id, content, fields)
            await self._branch_off(conversation.id, new, scope, switch)
        elif switch:
            await self._activate(conversation, new.branch_id, scope)
        return new

    async def _branch_off(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope, switch: bool
    ) -> None:
        await self.add_message(conversation_id, message, scope)
        if switch:
            await self._activate(await self._require(conversation_id, scope), message.branch_id, scope)

    async def _activate(self, conversation: Conversation, branch_id: UUID | None, scope: Scope) -> None:
        conversation.active_branch_id = branch_id
        await self.save(conversation, scope)

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""


def no_conversation(conversation_id: object) -> InvalidArgument:
    """Return the error for an unknown conversation."""
    return InvalidArgument(f"conversation {conversation_id} not found in this scope. Save it first.")
