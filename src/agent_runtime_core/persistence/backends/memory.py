"""The six stores in this process, gone when it ends."""

from __future__ import annotations

from typing import Any

from ..._engines.memory import MemoryEngine
from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import StoredKnowledge
from ..document_stores.memory import StoredMemory
from ..document_stores.preferences import StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.memory import MemoryDocuments


class InMemoryHome(DocumentHome):
    """In this process, gone when it ends. Stores with the same `engine` share their documents."""

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.keep_in(MemoryDocuments(engine=engine, clock=self.clock))


class InMemoryMemoryStore(StoredMemory, home=InMemoryHome):
    """What an agent remembers by key, in this process, gone when it ends."""


class InMemoryConversationStore(StoredConversations, home=InMemoryHome):
    """Conversations and their messages, in this process, gone when it ends."""


class InMemoryTaskStore(StoredTasks, home=InMemoryHome):
    """Tasks, in lists, in this process, gone when it ends."""


class InMemoryPreferencesStore(StoredPreferences, home=InMemoryHome):
    """What a user prefers, in this process, gone when it ends."""


class InMemoryKnowledgeStore(StoredKnowledge, home=InMemoryHome):
    """Facts, summaries and embeddings, in this process, gone when it ends."""


class InMemoryAuditStore(StoredAudit, home=InMemoryHome):
    """What happened, what went wrong and how long it took, in this process, gone when it ends."""
