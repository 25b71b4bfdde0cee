"""The six stores in a SQLite file."""

from __future__ import annotations

from ..homes.sqlite import SQLiteHome
from ..stored.audit import StoredAudit
from ..stored.conversations import StoredConversations
from ..stored.knowledge import StoredKnowledge
from ..stored.memory import StoredMemory
from ..stored.preferences import StoredPreferences
from ..stored.tasks import StoredTasks


class SQLiteMemoryStore(SQLiteHome, StoredMemory):
    """What an agent remembers by key, in a SQLite file."""


class SQLiteConversationStore(SQLiteHome, StoredConversations):
    """Conversations and their messages, in a SQLite file."""


class SQLiteTaskStore(SQLiteHome, StoredTasks):
    """Tasks, in lists, in a SQLite file."""


class SQLitePreferencesStore(SQLiteHome, StoredPreferences):
    """What a user prefers, in a SQLite file."""


class SQLiteKnowledgeStore(SQLiteHome, StoredKnowledge):
    """Facts, summaries and embeddings, in a SQLite file."""


class SQLiteAuditStore(SQLiteHome, StoredAudit):
    """What happened, what went wrong and how long it took, in a SQLite file."""
