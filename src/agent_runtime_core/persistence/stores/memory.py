"""Stores in this process, gone when it ends."""

from __future__ import annotations

from ..homes.memory import InMemoryHome
from ..stored.audit import StoredAudit
from ..stored.conversations import StoredConversations
from ..stored.knowledge import StoredKnowledge
from ..stored.memory import StoredMemory
from ..stored.preferences import StoredPreferences
from ..stored.tasks import StoredTasks


class InMemoryMemoryStore(InMemoryHome, StoredMemory):
    """What an agent remembers, in this process."""


class InMemoryConversationStore(InMemoryHome, StoredConversations):
    """Conversations in this process."""


class InMemoryTaskStore(InMemoryHome, StoredTasks):
    """Tasks in this process."""


class InMemoryPreferencesStore(InMemoryHome, StoredPreferences):
    """Preferences in this process."""


class InMemoryKnowledgeStore(InMemoryHome, StoredKnowledge):
    """What was learned, in this process."""


class InMemoryAuditStore(InMemoryHome, StoredAudit):
    """What happened, in this process."""
