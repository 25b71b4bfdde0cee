"""The six stores in the memory of this process."""

from __future__ import annotations

from typing import Any, Unpack, cast

from ..._engines.memory import MemoryEngine
from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import MAX_VECTORS, StoredKnowledge, StoredMemory, StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.memory import MemoryDocuments


class InMemoryPlace:
    """Keeps the documents of a store in memory. They are lost when the process ends.

    Args:
        engine: Stores with the same engine share their documents. None is a new engine.
        **options: See `HomeOptions`.
    """

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Unpack[HomeOptions]) -> None:
        home = DocumentHome(**options)
        cast(Any, super()).__init__(home.keep_in(MemoryDocuments(engine=engine, clock=home.clock)))


class InMemoryMemoryStore(InMemoryPlace, StoredMemory):
    """Stores the memory of agents, by key, in the memory of this process."""


class InMemoryConversationStore(InMemoryPlace, StoredConversations):
    """Stores conversations and their messages in the memory of this process."""


class InMemoryTaskStore(InMemoryPlace, StoredTasks):
    """Stores lists of tasks in the memory of this process."""


class InMemoryPreferencesStore(InMemoryPlace, StoredPreferences):
    """Stores preferences, by key, in the memory of this process."""


class InMemoryKnowledgeStore(InMemoryPlace, StoredKnowledge):
    """Stores facts, summaries and embeddings in the memory of this process.

    Args:
        engine: The engine to share with other stores; a new id by default.
        max_vectors: The most embeddings of a scope.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, *, engine: MemoryEngine | None = None, max_vectors: int = MAX_VECTORS, **options: Unpack[HomeOptions]
    ) -> None:
        super().__init__(engine=engine, **options)
        self.max_vectors = max_vectors


class InMemoryAuditStore(InMemoryPlace, StoredAudit):
    """Stores audit entries, errors and metrics in the memory of this process.

    Args:
        engine: The engine to share with other stores; a new id by default.
        max_age: Seconds after which entries are deleted; None keeps them.
        max_entries: How many entries of each kind and scope are kept; None keeps all.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, *, engine: MemoryEngine | None = None, max_age: float | None = None, max_entries: int | None = None,
        **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        self.keep_at_most(max_age, max_entries)
        super().__init__(engine=engine, **options)
