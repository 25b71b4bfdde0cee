"""The six stores in this process, gone when it ends."""

from __future__ import annotations

from ..homes.memory import InMemoryHome
from ..stored.audit import StoredAudit
from ..stored.conversations import StoredConversations
from ..stored.knowledge import StoredKnowledge
from ..stored.memory import StoredMemory
from ..stored.preferences import StoredPreferences
from ..stored.tasks import StoredTasks


class InMemoryMemoryStore(InMemoryHome, StoredMemory):
    """What an agent remembers by key, in this process, gone when it ends."""


class InMemoryConversationStore(InMemoryHome, StoredConversations):
    """Conversations and their messages, in this process, gone when it ends."""


class InMemoryTaskStore(InMemoryHome, StoredTasks):
    """Tasks, in lists, in this process, gone when it ends."""


class InMemoryPreferencesStore(InMemoryHome, StoredPreferences):
    """What a user prefers, in this process, gone when it ends."""


class InMemoryKnowledgeStore(InMemoryHome, StoredKnowledge):
    """Facts, summaries and embeddings, in this process, gone when it ends."""


class InMemoryAuditStore(InMemoryHome, StoredAudit):
    """What happened, what went wrong and how long it took, in this process, gone when it ends."""
