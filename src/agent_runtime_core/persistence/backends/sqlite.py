"""The six stores in a SQLite file."""

from __future__ import annotations

import os
from typing import Any

from ..._engines.sqlite.engine import SQLiteEngine
from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import StoredKnowledge
from ..document_stores.memory import StoredMemory
from ..document_stores.preferences import StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.sqlite import SQLiteDocuments


class SQLiteHome(DocumentHome):
    """All scopes in one file. `path` or `db_path` names it, or it is that of `engine`."""

    sessions_expire = True

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, db_path: str | os.PathLike[str] | None = None,
        durability: str = "full", engine: SQLiteEngine | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self.keep_in(SQLiteDocuments(path, db_path=db_path, durability=durability, engine=engine, clock=self.clock))


class SQLiteMemoryStore(StoredMemory, home=SQLiteHome):
    """What an agent remembers by key, in a SQLite file."""


class SQLiteConversationStore(StoredConversations, home=SQLiteHome):
    """Conversations and their messages, in a SQLite file."""


class SQLiteTaskStore(StoredTasks, home=SQLiteHome):
    """Tasks, in lists, in a SQLite file."""


class SQLitePreferencesStore(StoredPreferences, home=SQLiteHome):
    """What a user prefers, in a SQLite file."""


class SQLiteKnowledgeStore(StoredKnowledge, home=SQLiteHome):
    """Facts, summaries and embeddings, in a SQLite file."""


class SQLiteAuditStore(StoredAudit, home=SQLiteHome):
    """What happened, what went wrong and how long it took, in a SQLite file."""
