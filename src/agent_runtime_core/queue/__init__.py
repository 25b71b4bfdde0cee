"""Queues of runs: which worker may execute which run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_exports import lazy_exports
from .._core.lazy_import import pick
from ..config import get_config

if TYPE_CHECKING:
    from .._engines.base import Guard as Guard
    from .._engines.base import NotApplied as NotApplied
    from .._engines.base import Op as Op
    from .base import RunQueue as RunQueue
    from .contents import ContentFilter as ContentFilter
    from .contents import RunContents as RunContents
    from .memory import InMemoryQueue as InMemoryQueue
    from .postgres import PostgresQueue as PostgresQueue
    from .records import ClaimRequest as ClaimRequest
    from .records import MailboxMessage as MailboxMessage
    from .records import ProcessRow as ProcessRow
    from .records import QueuedRun as QueuedRun
    from .records import RowChanged as RowChanged
    from .records import RunCounts as RunCounts
    from .records import RunFilter as RunFilter
    from .records import RunRow as RunRow
    from .records import RunSnapshot as RunSnapshot
    from .records import RunUpdate as RunUpdate
    from .redis import RedisQueue as RedisQueue
    from .sqlite import SQLiteQueue as SQLiteQueue
    from .transitions import RunTransitions as RunTransitions
    from .transitions import ServerLeases as ServerLeases
    from .transitions import operation_set as operation_set
    from .transitions import operations as operations
    from .transitions import replays as replays
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".._engines.base": "Guard NotApplied Op",
            ".base": "RunQueue",
            ".contents": "ContentFilter RunContents",
            ".memory": "InMemoryQueue",
            ".records": "ClaimRequest MailboxMessage ProcessRow QueuedRun RowChanged RunCounts RunFilter RunRow "
            "RunSnapshot RunUpdate",
            ".postgres": "PostgresQueue",
            ".redis": "RedisQueue",
            ".sqlite": "SQLiteQueue",
            ".transitions": "RunTransitions ServerLeases operation_set operations replays",
        },
        "BACKENDS get_queue",
        {  # names of 0.6.0
            "Mail": "MailboxMessage",
            "Moved": "RowChanged",
            "News": "RunSnapshot",
            "Rows": "RunTransitions",
            "Settle": "RunUpdate",
        },
    )

BACKENDS = {
    "memory": ".memory:InMemoryQueue",
    "sqlite": ".sqlite:SQLiteQueue",
    "redis": ".redis:RedisQueue",
    "postgres": ".postgres:PostgresQueue",
}
"""The classes of the built-in queues by the name of their backend."""


def get_queue(backend: str | None = None, **options: Any) -> RunQueue:
    """Return a new queue.

    Args:
        backend: Name of a built-in backend ("memory", "sqlite" or "redis"), or "package.module:Class" of a custom
            backend. If None, the configured backend: from `backend_url` if that is set, else from `queue_backend`.
        **options: Arguments of its constructor. By default the `path` of SQLite is the configured path, else
            agent_runtime.db, and the `url` of Redis is the configured `redis_url`.

    Raises:
        InvalidArgument: if there is no such backend.
    """
    config = get_config()
    name, options = config.chosen("queue_backend", backend, options)
    queue: RunQueue = pick(BACKENDS, name, package=__name__, what="queue")(**options)
    config.encode_contents(queue)
    return queue
