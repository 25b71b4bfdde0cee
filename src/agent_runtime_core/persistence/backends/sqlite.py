"""The six stores in a SQLite file."""

from __future__ import annotations

import os
from typing import Any, Unpack, cast

from ..._engines.sqlite.engine import SQLiteEngine
from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import MAX_VECTORS, StoredKnowledge, StoredMemory, StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.sqlite import SQLiteDocuments


class SQLitePlace:
    """Keeps the documents of all scopes of a store in one file.

    Args:
        path: The path of the file. `db_path` is another name of it.
        db_path: The path of the file.
        durability: "full" or "normal": the `synchronous` setting of SQLite.
        engine: Use the file of this engine instead.
        **options: See `HomeOptions`.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, db_path: str | os.PathLike[str] | None = None,
        durability: str = "full", engine: SQLiteEngine | None = None, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        home = DocumentHome(sessions_expire=True, **options)
        documents = SQLiteDocuments(path, db_path=db_path, durability=durability, engine=engine, clock=home.clock)
        cast(Any, super()).__init__(home.keep_in(documents))


class SQLiteMemoryStore(SQLitePlace, StoredMemory):
    """Stores the memory of agents, by key, in a SQLite file."""


class SQLiteConversationStore(SQLitePlace, StoredConversations):
    """Stores conversations and their messages in a SQLite file."""


class SQLiteTaskStore(SQLitePlace, StoredTasks):
    """Stores lists of tasks in a SQLite file."""


class SQLitePreferencesStore(SQLitePlace, StoredPreferences):
    """Stores preferences, by key, in a SQLite file."""


class SQLiteKnowledgeStore(SQLitePlace, StoredKnowledge):
    """Stores facts, summaries and embeddings in a SQLite file.

    Args:
        path: The file.
        db_path: The same as `path`.
        durability: "full" survives a power loss, "normal" a crash of the process.
        engine: The engine to share with other stores, instead of a path.
        max_vectors: The most embeddings of a scope.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, db_path: str | os.PathLike[str] | None = None,
        durability: str = "full", engine: SQLiteEngine | None = None, max_vectors: int = MAX_VECTORS,
        **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        super().__init__(path, db_path=db_path, durability=durability, engine=engine, **options)
        self.max_vectors = max_vectors


class SQLiteAuditStore(SQLitePlace, StoredAudit):
    """Stores audit entries, errors and metrics in a SQLite file.

    Args:
        path: The file.
        db_path: The same as `path`.
        durability: "full" survives a power loss, "normal" a crash of the process.
        engine: The engine to share with other stores, instead of a path.
        max_age: Seconds after which entries are deleted; None keeps them.
        max_entries: How many entries of each kind and scope are kept; None keeps all.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, db_path: str | os.PathLike[str] | None = None,
        durability: str = "full", engine: SQLiteEngine | None = None, max_age: float | None = None,
        max_entries: int | None = None, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        self.keep_at_most(max_age, max_entries)
        super().__init__(path, db_path=db_path, durability=durability, engine=engine, **options)
