"""The six stores in the memory of this process."""

from __future__ import annotations

from typing import Unpack

from ..._engines.memory import MemoryEngine
from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.embeddings import MAX_VECTORS
from ..document_stores.knowledge import StoredKnowledge
from ..document_stores.memory import StoredMemory
from ..document_stores.preferences import StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.memory import MemoryDocuments


class InMemoryHome(DocumentHome):
    """Keeps documents in memory. They are lost when the process ends.

    Args:
        engine: Stores with the same engine share their documents. None is a new engine.
        **options: See `HomeOptions`.
    """

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Unpack[HomeOptions]) -> None:
        super().__init__(**options)
        self.keep_in(MemoryDocuments(engine=engine, clock=self.clock))


class InMemoryMemoryStore(StoredMemory, home=InMemoryHome):
    """Stores the memory of agents, by key, in the memory of this process."""

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Unpack[HomeOptions]) -> None:
        super().__init__(engine=engine, **options)


class InMemoryConversationStore(StoredConversations, home=InMemoryHome):
    """Stores conversations and their messages in the memory of this process."""

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Unpack[HomeOptions]) -> None:
        super().__init__(engine=engine, **options)


class InMemoryTaskStore(StoredTasks, home=InMemoryHome):
    """Stores lists of tasks in the memory of this process."""

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Unpack[HomeOptions]) -> None:
        super().__init__(engine=engine, **options)


class InMemoryPreferencesStore(StoredPreferences, home=InMemoryHome):
    """Stores preferences, by key, in the memory of this process."""

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Unpack[HomeOptions]) -> None:
        super().__init__(engine=engine, **options)


class InMemoryKnowledgeStore(StoredKnowledge, home=InMemoryHome):
    """Stores facts, summaries and embeddings in the memory of this process."""

    def __init__(
        self, *, engine: MemoryEngine | None = None, max_vectors: int = MAX_VECTORS, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        super().__init__(engine=engine, max_vectors=max_vectors, **options)


class InMemoryAuditStore(StoredAudit, home=InMemoryHome):
    """Stores audit entries, errors and metrics in the memory of this process."""

    def __init__(
        self, *, engine: MemoryEngine | None = None, max_age: float | None = None, max_entries: int | None = None,
        **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        super().__init__(engine=engine, max_age=max_age, max_entries=max_entries, **options)
