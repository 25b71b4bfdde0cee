"""Stores on one Redis or Valkey server, shared by all processes that reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..documents.redis import RedisDocuments
from ..models import Scope
from ..stored.base import Home

if TYPE_CHECKING:
    from ..._engines.redis import RedisEngine


class RedisHome(Home):
    """All scopes on one server; `url` and `redis_url` name it, or it is that of `engine`."""

    def __init__(
        self, url: str | None = None, *, redis_url: str | None = None, engine: RedisEngine | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._documents = RedisDocuments(url, redis_url=redis_url, engine=engine, clock=self.clock)
        self.follow(self._documents)

    def documents(self, scope: Scope) -> RedisDocuments:
        return self._documents

    def expires(self, scope: Scope) -> float | None:
        return self.session_ttl if scope is Scope.SESSION else None
