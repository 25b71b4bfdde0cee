"""Conversations and their messages."""

from __future__ import annotations

import datetime as _dt
from abc import ABC, abstractmethod
from uuid import UUID

from ..models import Conversation, ConversationMessage, Scope


class ConversationStore(ABC):
    """Conversations with the messages of all their branches, in the order they came."""

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

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""
