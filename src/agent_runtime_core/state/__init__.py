"""State stores: journals, checkpoints and statuses of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_exports import lazy_exports
from .._core.lazy_import import pick
from ..config import get_config

if TYPE_CHECKING:
    from .._engines.base import Guard as Guard
    from .._engines.base import Op as Op
    from .._journal.record import JournalOperations as JournalOperations
    from .._journal.record import Record as Record
    from .base import EffectExists as EffectExists
    from .base import EffectRow as EffectRow
    from .base import StateOperations as StateOperations
    from .base import StateRow as StateRow
    from .base import StateStore as StateStore
    from .base import same_digest as same_digest
    from .memory import InMemoryStateStore as InMemoryStateStore
    from .postgres import PostgresStateStore as PostgresStateStore
    from .redis import RedisStateStore as RedisStateStore
    from .sqlite import SQLiteStateStore as SQLiteStateStore
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".._engines.base": "Guard Op",
            ".._journal.record": "JournalOperations Record",
            ".base": "EffectExists EffectRow StateOperations StateRow StateStore same_digest",
            ".memory": "InMemoryStateStore",
            ".postgres": "PostgresStateStore",
            ".redis": "RedisStateStore",
            ".sqlite": "SQLiteStateStore",
        },
        "BACKENDS get_state_store",
    )

BACKENDS = {
    "memory": ".memory:InMemoryStateStore",
    "sqlite": ".sqlite:SQLiteStateStore",
    "redis": ".redis:RedisStateStore",
    "postgres": ".postgres:PostgresStateStore",
}
"""The classes of the built-in state stores by the name of their backend."""


def get_state_store(backend: str | None = None, **options: Any) -> StateStore:
    """Return a new state store.

    Args:
        backend: Name of a built-in backend ("memory", "sqlite" or "redis"), or "package.module:Class" of a custom
            backend. If None, the configured backend: from `backend_url` if that is set, else from
            `state_store_backend`.
        **options: Arguments of its constructor. By default the `path` of SQLite is the configured path, else
            agent_runtime.db, and the `url` of Redis is the configured `redis_url`.

    Raises:
        InvalidArgument: if there is no such backend.
    """
    config = get_config()
    name, options = config.chosen("state_store_backend", backend, options)
    store: StateStore = pick(BACKENDS, name, package=__name__, what="state store")(**options)
    config.encode_contents(store)
    return store
