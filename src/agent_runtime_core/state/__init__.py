"""What runs have done and where they stand, on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_import import lazily, pick
from ..config import get_config

if TYPE_CHECKING:
    from .._engines.base import Guard, Op
    from .._journal.record import Record
    from .base import EffectExists, EffectRow, StateRow, StateStore
    from .memory import InMemoryStateStore
    from .redis import RedisStateStore
    from .sqlite import SQLiteStateStore

__all__ = [
    "BACKENDS",
    "EffectExists",
    "EffectRow",
    "Guard",
    "InMemoryStateStore",
    "Op",
    "Record",
    "RedisStateStore",
    "SQLiteStateStore",
    "StateRow",
    "StateStore",
    "get_state_store",
]

BACKENDS = {
    "memory": ".memory:InMemoryStateStore",
    "sqlite": ".sqlite:SQLiteStateStore",
    "redis": ".redis:RedisStateStore",
}

_LAZY = {
    "EffectExists": ".base:EffectExists",
    "EffectRow": ".base:EffectRow",
    "Guard": ".._engines.base:Guard",
    "Op": ".._engines.base:Op",
    "Record": ".._journal.record:Record",
    "StateRow": ".base:StateRow",
    "StateStore": ".base:StateStore",
} | {dotted.partition(":")[2]: dotted for dotted in BACKENDS.values()}


def get_state_store(backend: str | None = None, **options: Any) -> StateStore:
    """A state store by the name of its backend, or by `"their_package.module:Class"`; None is the configured one:
    where `backend_url` says, or else of the backend's own setting.

    `options` go to its constructor. SQLite's `path` is by default the configured one,
    or agent_runtime.db, and Redis' `url` the configured `redis_url`.
    InvalidArgument (a ValueError): there is no such backend.
    """
    name, options = get_config().chosen("state_store_backend", backend, options)
    store: StateStore = pick(BACKENDS, name, package=__name__, what="state store")(**options)
    return store


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
