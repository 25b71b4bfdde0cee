"""Who may execute which run: the queue, on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_import import lazily, pick
from ..config import get_config

if TYPE_CHECKING:
    from .._engines.base import Guard, NotApplied, Op
    from .base import RunQueue
    from .memory import InMemoryQueue
    from .queued_run import QueuedRun
    from .records import ClaimRequest, MailboxMessage, RowChanged, RunFilter, RunRow, RunSnapshot, RunUpdate
    from .redis import RedisQueue
    from .sqlite import SQLiteQueue
    from .transitions import RunTransitions, operations, replays

__all__ = [
    "BACKENDS",
    "ClaimRequest",
    "Guard",
    "InMemoryQueue",
    "MailboxMessage",
    "NotApplied",
    "Op",
    "QueuedRun",
    "RedisQueue",
    "RowChanged",
    "RunFilter",
    "RunQueue",
    "RunRow",
    "RunSnapshot",
    "RunTransitions",
    "RunUpdate",
    "SQLiteQueue",
    "get_queue",
    "operations",
    "replays",
]

BACKENDS = {"memory": ".memory:InMemoryQueue", "sqlite": ".sqlite:SQLiteQueue", "redis": ".redis:RedisQueue"}

_LAZY = (
    {name: f".._engines.base:{name}" for name in ("Guard", "NotApplied", "Op")}
    | {"QueuedRun": ".queued_run:QueuedRun", "RunQueue": ".base:RunQueue"}
    | {
        name: f".records:{name}"
        for name in ("ClaimRequest", "MailboxMessage", "RowChanged", "RunFilter", "RunRow", "RunSnapshot", "RunUpdate")
    }
    | {name: f".transitions:{name}" for name in ("RunTransitions", "operations", "replays")}
    | {dotted.partition(":")[2]: dotted for dotted in BACKENDS.values()}
)

#: Names of 0.6.0.
_RENAMED = {
    "Mail": "MailboxMessage",
    "Moved": "RowChanged",
    "News": "RunSnapshot",
    "Rows": "RunTransitions",
    "Settle": "RunUpdate",
}


def get_queue(backend: str | None = None, **options: Any) -> RunQueue:
    """A queue by the name of its backend, or by `"their_package.module:Class"`; None is the configured one:
    where `backend_url` says, or else of the backend's own setting.

    `options` go to its constructor. SQLite's `path` is by default the configured one,
    or agent_runtime.db, and Redis' `url` the configured `redis_url`.
    InvalidArgument (a ValueError): there is no such backend.
    """
    name, options = get_config().chosen("queue_backend", backend, options)
    queue: RunQueue = pick(BACKENDS, name, package=__name__, what="queue")(**options)
    return queue


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name, _RENAMED)


def __dir__() -> list[str]:
    return sorted(__all__)
