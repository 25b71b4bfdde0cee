"""The six stores on a Redis or Valkey server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, cast

from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import MAX_VECTORS, StoredKnowledge, StoredMemory, StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.redis import RedisDocuments

if TYPE_CHECKING:
    from ..._engines.redis.engine import RedisEngine


class RedisPlace:
    """Keeps the documents of all scopes of a store on one server.

    Args:
        url: The URL of the server. `redis_url` is another name of it.
        redis_url: The URL of the server.
        engine: Use the server of this engine instead.
        **options: See `HomeOptions`.
    """

    def __init__(
        self, url: str | None = None, *, redis_url: str | None = None, engine: RedisEngine | None = None,
        **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        home = DocumentHome(sessions_expire=True, **options)
        cast(Any, super()).__init__(
            home.keep_in(RedisDocuments(url, redis_url=redis_url, engine=engine, clock=home.clock))
        )


class RedisMemoryStore(RedisPlace, StoredMemory):
    """Stores the memory of agents, by key, on a Redis or Valkey server."""


class RedisConversationStore(RedisPlace, StoredConversations):
    """Stores conversations and their messages on a Redis or Valkey server."""


class RedisTaskStore(RedisPlace, StoredTasks):
    """Stores lists of tasks on a Redis or Valkey server."""


class RedisPreferencesStore(RedisPlace, StoredPreferences):
    """Stores preferences, by key, on a Redis or Valkey server."""


class RedisKnowledgeStore(RedisPlace, StoredKnowledge):
    """Stores facts, summaries and embeddings on a Redis or Valkey server.

    Args:
        url: The URL of the server.
        redis_url: The same as `url`.
        engine: The engine to share with other stores, instead of a URL.
        max_vectors: The most embeddings of a scope.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, url: str | None = None, *, redis_url: str | None = None, engine: RedisEngine | None = None,
        max_vectors: int = MAX_VECTORS, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        super().__init__(url, redis_url=redis_url, engine=engine, **options)
        self.max_vectors = max_vectors


class RedisAuditStore(RedisPlace, StoredAudit):
    """Stores audit entries, errors and metrics on a Redis or Valkey server.

    Args:
        url: The URL of the server.
        redis_url: The same as `url`.
        engine: The engine to share with other stores, instead of a URL.
        max_age: Seconds after which entries are deleted; None keeps them.
        max_entries: How many entries of each kind and scope are kept; None keeps all.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, url: str | None = None, *, redis_url: str | None = None, engine: RedisEngine | None = None,
        max_age: float | None = None, max_entries: int | None = None, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        self.keep_at_most(max_age, max_entries)
        super().__init__(url, redis_url=redis_url, engine=engine, **options)
