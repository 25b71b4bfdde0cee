"""Event logs of runs, which can be read, replayed and subscribed to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_import import lazily, pick
from ..config import get_config

if TYPE_CHECKING:
    from .._engines.base import Guard as Guard
    from .._engines.base import Op as Op
    from .base import EventBus as EventBus
    from .event import Event as Event
    from .event import StoredEvent as StoredEvent
    from .memory import InMemoryEventBus as InMemoryEventBus
    from .redis import RedisEventBus as RedisEventBus
    from .sqlite import SQLiteEventBus as SQLiteEventBus

BACKENDS = {"memory": ".memory:InMemoryEventBus", "sqlite": ".sqlite:SQLiteEventBus", "redis": ".redis:RedisEventBus"}

_LAZY = {
    "Event": ".event:Event",
    "EventBus": ".base:EventBus",
    "Guard": ".._engines.base:Guard",
    "Op": ".._engines.base:Op",
    "StoredEvent": ".event:StoredEvent",
} | {dotted.partition(":")[2]: dotted for dotted in BACKENDS.values()}
_PUBLIC = sorted([*_LAZY, "BACKENDS", "get_event_bus"])

if not TYPE_CHECKING:  # type checkers see the imports above
    __all__ = _PUBLIC


def get_event_bus(backend: str | None = None, **options: Any) -> EventBus:
    """Return a new event bus.

    Args:
        backend: Name of a built-in backend ("memory", "sqlite" or "redis"), or "package.module:Class" of a custom one.
            None for the configured one: of `backend_url` if that is set, else of `event_bus_backend`.
        **options: Arguments of its constructor. By default the `path` of SQLite is the configured one, else
            agent_runtime.db, and the `url` of Redis is the configured `redis_url`.

    Raises:
        InvalidArgument: if there is no such backend.
    """
    config = get_config()
    name, options = config.chosen("event_bus_backend", backend, options)
    bus: EventBus = pick(BACKENDS, name, package=__name__, what="event bus")(**options)
    config.encode_contents(bus)
    return bus


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _PUBLIC
