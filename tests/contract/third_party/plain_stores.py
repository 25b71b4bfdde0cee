"""Stores as somebody writes them: the abstract methods on plain dicts, with constructors of their own."""

from __future__ import annotations

import copy
import datetime as dt
from typing import Any
from uuid import UUID

from agent_runtime_core.persistence.base.conversations import ConversationStore
from agent_runtime_core.persistence.base.knowledge import MemoryStore, PreferencesStore
from agent_runtime_core.persistence.models import Conversation, ConversationMessage, Scope, moment, now


class _ByScope:
    def __init__(self, user: str = "alice") -> None:
        self.user = user
        self.kept: dict[Scope, dict[Any, Any]] = {scope: {} for scope in Scope}


class PlainMemory(_ByScope, MemoryStore):
    async def get(self, key: str, scope: Scope = Scope.PROJECT) -> Any | None:
        return copy.deepcopy(self.kept[scope].get(key))

    async def set(self, key: str, value: Any, scope: Scope = Scope.PROJECT) -> None:
        self.kept[scope][key] = copy.deepcopy(value)

    async def delete(self, key: str, scope: Scope = Scope.PROJECT) -> bool:
        return self.kept[scope].pop(key, self) is not self

    async def list_keys(self, scope: Scope = Scope.PROJECT, prefix: str | None = None) -> list[str]:
        return sorted(key for key in self.kept[scope] if key.startswith(prefix or ""))

    async def clear(self, scope: Scope = Scope.PROJECT) -> None:
        self.kept[scope].clear()


class PlainPreferences(_ByScope, PreferencesStore):
    async def get(self, key: str, scope: Scope = Scope.GLOBAL) -> Any | None:
        return copy.deepcopy(self.kept[scope].get(key))

    async def set(self, key: str, value: Any, scope: Scope = Scope.GLOBAL) -> None:
        self.kept[scope][key] = copy.deepcopy(value)

    async def delete(self, key: str, scope: Scope = Scope.GLOBAL) -> bool:
        return self.kept[scope].pop(key, self) is not self

    async def get_all(self, scope: Scope = Scope.GLOBAL) -> dict[str, Any]:
        return copy.deepcopy(self.kept[scope])


class PlainConversations(_ByScope, ConversationStore):
    async def save(self, conversation: Conversation, scope: Scope = Scope.PROJECT) -> None:
        conversation.updated_at = now()
        self.kept[scope][conversation.id] = copy.deepcopy(conversation)

    async def get(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> Conversation | None:
        return copy.deepcopy(self.kept[scope].get(conversation_id))

    async def delete(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.kept[scope].pop(conversation_id, None) is not None

    async def list_conversations(
        self, scope: Scope = Scope.PROJECT, limit: int = 100, offset: int = 0, agent_key: str | None = None
    ) -> list[Conversation]:
        found = [each for each in self.kept[scope].values() if agent_key in (None, each.agent_key)]
        found.sort(key=lambda each: moment(each.updated_at), reverse=True)
        return copy.deepcopy(found[offset : offset + limit])

    async def add_message(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope = Scope.PROJECT
    ) -> None:
        if conversation_id not in self.kept[scope]:
            raise ValueError(f"Conversation {conversation_id} not found")
        conversation = self.kept[scope][conversation_id]
        conversation.messages.append(copy.deepcopy(message))
        conversation.updated_at = now()

    async def get_messages(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT, limit: int | None = None,
        before: dt.datetime | None = None,
    ) -> list[ConversationMessage]:  # fmt: skip
        found = await self.get(conversation_id, scope)
        messages = [] if found is None else found.messages
        if before is not None:
            messages = [each for each in messages if moment(each.timestamp) < moment(before)]
        return messages if limit is None else messages[-limit:]


# -- what each of them may get wrong


class _PatternPrefix(PlainMemory):
    async def list_keys(self, scope: Scope = Scope.PROJECT, prefix: str | None = None) -> list[str]:
        return sorted(key for key in self.kept[scope] if key.lower().startswith((prefix or "").lower()))


class _OneScope(PlainMemory):
    async def get(self, key: str, scope: Scope = Scope.PROJECT) -> Any | None:
        return await super().get(key)

    async def set(self, key: str, value: Any, scope: Scope = Scope.PROJECT) -> None:
        await super().set(key, value)


class _ClearsAll(PlainMemory):
    async def clear(self, scope: Scope = Scope.PROJECT) -> None:
        for kept in self.kept.values():
            kept.clear()


class _OfTheProject(PlainPreferences):
    async def set(self, key: str, value: Any, scope: Scope = Scope.PROJECT) -> None:
        await super().set(key, value, scope)


class _ForgetsBranches(PlainConversations):
    async def save(self, conversation: Conversation, scope: Scope = Scope.PROJECT) -> None:
        await super().save(conversation, scope)
        self.kept[scope][conversation.id].active_branch_id = None


class _FirstMessages(PlainConversations):
    async def get_messages(self, *args: Any, limit: int | None = None, **options: Any) -> list[ConversationMessage]:
        return (await super().get_messages(*args, **options))[:limit]


class _MakesWhatIsUnknown(PlainConversations):
    async def add_message(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope = Scope.PROJECT
    ) -> None:
        self.kept[scope].setdefault(conversation_id, Conversation(id=conversation_id))
        await super().add_message(conversation_id, message, scope)


class _OldestFirst(PlainConversations):
    async def list_conversations(self, *args: Any, **options: Any) -> list[Conversation]:
        return (await super().list_conversations(*args, **options))[::-1]


class _AddsInFront(PlainConversations):
    async def add_message(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope = Scope.PROJECT
    ) -> None:
        if conversation_id not in self.kept[scope]:
            raise ValueError(f"Conversation {conversation_id} not found")
        self.kept[scope][conversation_id].messages.insert(0, copy.deepcopy(message))


DEFECTS: dict[type[Any], list[type[Any]]] = {
    PlainMemory: [_PatternPrefix, _OneScope, _ClearsAll],
    PlainPreferences: [_OfTheProject],
    PlainConversations: [_ForgetsBranches, _FirstMessages, _MakesWhatIsUnknown, _OldestFirst, _AddsInFront],
}
