"""Stores in this process, gone when it ends."""

from __future__ import annotations

from typing import Any

from ..._engines.memory import MemoryEngine
from ..documents.memory import MemoryDocuments
from ..models import Scope
from ..stored.base import Home


class InMemoryHome(Home):
    """In this process, gone when it ends; stores that are given the same `engine` share what they keep."""

    def __init__(self, *, engine: MemoryEngine | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._documents = MemoryDocuments(engine=engine, clock=self.clock)
        self.follow(self._documents)

    def documents(self, scope: Scope) -> MemoryDocuments:
        return self._documents
