"""Event logs of runs, which can be read, replayed and subscribed to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_exports import lazy_exports
from .._core.lazy_import import pick
from ..config import get_config

if TYPE_CHECKING:
    from .._engines.base import Guard as Guard
    from .._engines.base import Op as Op
    from .._journal.record import Record as Record
    from .base import EventBus as EventBus
    from .event import Event as Event
    from .event import StoredEvent as StoredEvent
    from .memory import InMemoryEventBus as InMemoryEventBus
    from .postgres import PostgresEventBus as PostgresEventBus
    from .redis import RedisEventBus as RedisEventBus
    from .sqlite import SQLiteEventBus as SQLiteEventBus
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".._engines.base": "Guard Op",
            ".._journal.record": "Record",
            ".base": "EventBus",
            ".event": "Event StoredEvent",
            ".memory": "InMemoryEventBus",
            ".postgres": "PostgresEventBus",
            ".redis": "RedisEventBus",
            ".sqlite": "SQLiteEventBus",
        },
        "BACKENDS get_event_bus",
    )

BACKENDS = {
    "memory": ".memory:InMemoryEventBus",
    "sqlite": ".sqlite:SQLiteEventBus",
    "redis": ".redis:RedisEventBus",
    "postgres": ".postgres:PostgresEventBus",
}
"""The classes of the built-in event buses by the name of their backend."""


def get_event_bus(backend: str | None = None, **options: Any) -> EventBus:
    """Return a new event bus.

    Args:
        backend: Name of a built-in backend ("memory", "sqlite" or "redis"), or "package.module:Class" of a custom
            backend. If None, the configured backend: from `backend_url` if that is set, else from `event_bus_backend`.
        **options: Arguments of its constructor. By default the `path` of SQLite is the configured path, else
            agent_runtime.db, and the `url` of Redis is the configured `redis_url`.

    Raises:
        InvalidArgument: if there is no such backend.
    """
    config = get_config()
    name, options = config.chosen("event_bus_backend", backend, options)
    bus: EventBus = pick(BACKENDS, name, package=__name__, what="event bus")(**options)
    config.encode_contents(bus)
    return bus
