"""The six stores on a document store that the caller has opened."""

from __future__ import annotations

from typing import Unpack

from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import StoredKnowledge
from ..document_stores.memory import StoredMemory
from ..document_stores.preferences import StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.base import DocumentStore


class DocumentPlace:
    """Keeps the documents of a store in a document store, which `close` leaves open.

    Args:
        documents: The document store.
        **options: See `HomeOptions`.
    """

    home: DocumentHome

    def __init__(self, documents: DocumentStore, **options: Unpack[HomeOptions]) -> None:
        self.home = DocumentHome(sessions_expire=True, closes_documents=False, **options).keep_in(documents)
        super().__init__()


class DocumentMemoryStore(DocumentPlace, StoredMemory):
    """Stores the memory of agents, by key, in a document store."""


class DocumentConversationStore(DocumentPlace, StoredConversations):
    """Stores conversations and their messages in a document store."""


class DocumentTaskStore(DocumentPlace, StoredTasks):
    """Stores lists of tasks in a document store."""


class DocumentPreferencesStore(DocumentPlace, StoredPreferences):
    """Stores preferences, by key, in a document store."""


class DocumentKnowledgeStore(DocumentPlace, StoredKnowledge):
    """Stores facts, summaries and embeddings in a document store."""


class DocumentAuditStore(DocumentPlace, StoredAudit):
    """Stores audit entries, errors and metrics in a document store."""
