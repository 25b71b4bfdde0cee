"""What a run tells about itself, as a log that can be read, replayed and followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_import import lazily, pick
from ..config import get_config

if TYPE_CHECKING:
    from .._engines.base import Guard, Op
    from .base import EventBus
    from .event import Event, StoredEvent
    from .memory import InMemoryEventBus
    from .redis import RedisEventBus
    from .sqlite import SQLiteEventBus

__all__ = [
    "BACKENDS",
    "Event",
    "EventBus",
    "Guard",
    "InMemoryEventBus",
    "Op",
    "RedisEventBus",
    "SQLiteEventBus",
    "StoredEvent",
    "get_event_bus",
]

BACKENDS = {"memory": ".memory:InMemoryEventBus", "sqlite": ".sqlite:SQLiteEventBus", "redis": ".redis:RedisEventBus"}

_LAZY = {
    "Event": ".event:Event",
    "EventBus": ".base:EventBus",
    "Guard": ".._engines.base:Guard",
    "Op": ".._engines.base:Op",
    "StoredEvent": ".event:StoredEvent",
} | {dotted.partition(":")[2]: dotted for dotted in BACKENDS.values()}


def get_event_bus(backend: str | None = None, **options: Any) -> EventBus:
    """A bus by the name of its backend, or by `"their_package.module:Class"`; None is the configured one:
    where `backend_url` says, or else of the backend's own setting.

    `options` go to its constructor. SQLite's `path` is by default the configured one,
    or agent_runtime.db, and Redis' `url` the configured `redis_url`.
    InvalidArgument (a ValueError): there is no such backend.
    """
    name, options = get_config().chosen("event_bus_backend", backend, options)
    bus: EventBus = pick(BACKENDS, name, package=__name__, what="event bus")(**options)
    return bus


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
