"""The six stores in files."""

from __future__ import annotations

from ..homes.files import FileHome
from ..stored.audit import StoredAudit
from ..stored.conversations import StoredConversations
from ..stored.knowledge import StoredKnowledge
from ..stored.memory import StoredMemory
from ..stored.preferences import StoredPreferences
from ..stored.tasks import StoredTasks


class FileMemoryStore(FileHome, StoredMemory):
    """What an agent remembers by key, in files."""


class FileConversationStore(FileHome, StoredConversations):
    """Conversations and their messages, in files."""


class FileTaskStore(FileHome, StoredTasks):
    """Tasks, in lists, in files."""


class FilePreferencesStore(FileHome, StoredPreferences):
    """What a user prefers, in files."""


class FileKnowledgeStore(FileHome, StoredKnowledge):
    """Facts, summaries and embeddings, in files."""


class FileAuditStore(FileHome, StoredAudit):
    """What happened, what went wrong and how long it took, in files."""
