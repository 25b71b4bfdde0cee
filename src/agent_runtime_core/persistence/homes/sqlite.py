"""Stores in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

import os
from typing import Any

from ..._engines.sqlite import SQLiteEngine
from ..documents.sqlite import SQLiteDocuments
from ..models import Scope
from ..stored.base import Home


class SQLiteHome(Home):
    """All scopes in one file; `path` and `db_path` name it, or it is that of `engine`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        db_path: str | os.PathLike[str] | None = None,
        durability: str = "full",
        engine: SQLiteEngine | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._documents = SQLiteDocuments(path, db_path=db_path, durability=durability, engine=engine, clock=self.clock)
        self.follow(self._documents)

    def documents(self, scope: Scope) -> SQLiteDocuments:
        return self._documents

    def expires(self, scope: Scope) -> float | None:
        return self.session_ttl if scope is Scope.SESSION else None
