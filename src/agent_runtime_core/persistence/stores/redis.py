"""The six stores on a Redis or Valkey server."""

from __future__ import annotations

from ..homes.redis import RedisHome
from ..stored.audit import StoredAudit
from ..stored.conversations import StoredConversations
from ..stored.knowledge import StoredKnowledge
from ..stored.memory import StoredMemory
from ..stored.preferences import StoredPreferences
from ..stored.tasks import StoredTasks


class RedisMemoryStore(RedisHome, StoredMemory):
    """What an agent remembers by key, on a Redis or Valkey server."""


class RedisConversationStore(RedisHome, StoredConversations):
    """Conversations and their messages, on a Redis or Valkey server."""


class RedisTaskStore(RedisHome, StoredTasks):
    """Tasks, in lists, on a Redis or Valkey server."""


class RedisPreferencesStore(RedisHome, StoredPreferences):
    """What a user prefers, on a Redis or Valkey server."""


class RedisKnowledgeStore(RedisHome, StoredKnowledge):
    """Facts, summaries and embeddings, on a Redis or Valkey server."""


class RedisAuditStore(RedisHome, StoredAudit):
    """What happened, what went wrong and how long it took, on a Redis or Valkey server."""
