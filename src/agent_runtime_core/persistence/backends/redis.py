"""The six stores on a Redis or Valkey server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import StoredKnowledge
from ..document_stores.memory import StoredMemory
from ..document_stores.preferences import StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.redis import RedisDocuments

if TYPE_CHECKING:
    from ..._engines.redis.engine import RedisEngine


class RedisHome(DocumentHome):
    """All scopes on one server. `url` or `redis_url` names it, or it is that of `engine`."""

    sessions_expire = True

    def __init__(
        self, url: str | None = None, *, redis_url: str | None = None, engine: RedisEngine | None = None, **options: Any
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self.keep_in(RedisDocuments(url, redis_url=redis_url, engine=engine, clock=self.clock))


class RedisMemoryStore(StoredMemory, home=RedisHome):
    """What an agent remembers by key, on a Redis or Valkey server."""


class RedisConversationStore(StoredConversations, home=RedisHome):
    """Conversations and their messages, on a Redis or Valkey server."""


class RedisTaskStore(StoredTasks, home=RedisHome):
    """Tasks, in lists, on a Redis or Valkey server."""


class RedisPreferencesStore(StoredPreferences, home=RedisHome):
    """What a user prefers, on a Redis or Valkey server."""


class RedisKnowledgeStore(StoredKnowledge, home=RedisHome):
    """Facts, summaries and embeddings, on a Redis or Valkey server."""


class RedisAuditStore(StoredAudit, home=RedisHome):
    """What happened, what went wrong and how long it took, on a Redis or Valkey server."""
