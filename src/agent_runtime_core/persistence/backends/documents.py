"""The six stores on a document store that the caller has opened."""

from __future__ import annotations

from typing import ClassVar, Unpack

from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import StoredKnowledge
from ..document_stores.memory import StoredMemory
from ..document_stores.preferences import StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.base import DocumentStore


class OpenedHome(DocumentHome):
    """Keeps documents in a document store, which `close` leaves open.

    Args:
        documents: The document store.
        **options: See `HomeOptions`.
    """

    sessions_expire: ClassVar[bool] = True
    closes_documents: ClassVar[bool] = False

    def __init__(self, documents: DocumentStore, **options: Unpack[HomeOptions]) -> None:
        super().__init__(**options)
        self.keep_in(documents)


class DocumentMemoryStore(StoredMemory, home=OpenedHome):
    """Stores the memory of agents, by key, in a document store."""


class DocumentConversationStore(StoredConversations, home=OpenedHome):
    """Stores conversations and their messages in a document store."""


class DocumentTaskStore(StoredTasks, home=OpenedHome):
    """Stores lists of tasks in a document store."""


class DocumentPreferencesStore(StoredPreferences, home=OpenedHome):
    """Stores preferences, by key, in a document store."""


class DocumentKnowledgeStore(StoredKnowledge, home=OpenedHome):
    """Stores facts, summaries and embeddings in a document store."""


class DocumentAuditStore(StoredAudit, home=OpenedHome):
    """Stores audit entries, errors and metrics in a document store."""
