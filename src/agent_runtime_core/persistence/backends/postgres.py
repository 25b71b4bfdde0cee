"""The six stores in a PostgreSQL database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, cast

from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import MAX_VECTORS, StoredKnowledge, StoredMemory, StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.postgres import PostgresDocuments

if TYPE_CHECKING:
    from ..._engines.postgres.engine import PostgresEngine


class PostgresPlace:
    """Keeps the documents of all scopes of a store in one database.

    Args:
        url: The URL of the database.
        engine: Use the database of this engine instead.
        **options: See `HomeOptions`.
    """

    def __init__(
        self, url: str | None = None, *, engine: PostgresEngine | None = None, **options: Unpack[HomeOptions]
    ) -> None:
        home = DocumentHome(sessions_expire=True, **options)
        cast(Any, super()).__init__(home.keep_in(PostgresDocuments(url, engine=engine, clock=home.clock)))


class PostgresMemoryStore(PostgresPlace, StoredMemory):
    """Stores the memory of agents, by key, in a PostgreSQL database."""


class PostgresConversationStore(PostgresPlace, StoredConversations):
    """Stores conversations and their messages in a PostgreSQL database."""


class PostgresTaskStore(PostgresPlace, StoredTasks):
    """Stores lists of tasks in a PostgreSQL database."""


class PostgresPreferencesStore(PostgresPlace, StoredPreferences):
    """Stores preferences, by key, in a PostgreSQL database."""


class PostgresKnowledgeStore(PostgresPlace, StoredKnowledge):
    """Stores facts, summaries and embeddings in a PostgreSQL database.

    Args:
        url: The URL of the database.
        engine: The engine to share with other stores, instead of a URL.
        max_vectors: The most embeddings of a scope.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, url: str | None = None, *, engine: PostgresEngine | None = None,
        max_vectors: int = MAX_VECTORS, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        super().__init__(url, engine=engine, **options)
        self.max_vectors = max_vectors


class PostgresAuditStore(PostgresPlace, StoredAudit):
    """Stores audit entries, errors and metrics in a PostgreSQL database.

    Args:
        url: The URL of the database.
        engine: The engine to share with other stores, instead of a URL.
        max_age: Seconds after which entries are deleted; None keeps them.
        max_entries: How many entries of each kind and scope are kept; None keeps all.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, url: str | None = None, *, engine: PostgresEngine | None = None,
        max_age: float | None = None, max_entries: int | None = None, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        self.keep_at_most(max_age, max_entries)
        super().__init__(url, engine=engine, **options)
