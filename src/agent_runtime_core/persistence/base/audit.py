"""The contract of stores for audit entries, errors and metrics."""

from __future__ import annotations

import datetime as _dt
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from ...errors import NotSupported
from ..models import AuditEntry, AuditEventType, ErrorRecord, ErrorSeverity, PerformanceMetric, Scope


class AuditStore(ABC):
    """Stores audit entries, errors and metrics.

    Times in different zones are compared as points in time. `start_time` and `end_time` are inclusive.
    """

    @abstractmethod
    async def log_event(self, entry: AuditEntry, scope: Scope = Scope.PROJECT) -> None:
        """Store an audit entry.

        Args:
            entry: The entry.
            scope: The scope.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import AuditEntry, AuditEventType, InMemoryAuditStore
            >>> async def main():
            ...     store = InMemoryAuditStore()
            ...     await store.log_event(AuditEntry(event_type=AuditEventType.CUSTOM, action="export"))
            ...     return [entry.action for entry in await store.get_events()]
            >>> asyncio.run(main())
            ['export']
        """

    @abstractmethod
    async def get_events(
        self,
        scope: Scope = Scope.PROJECT,
        conversation_id: UUID | None = None,
        run_id: UUID | None = None,
        event_types: Sequence[AuditEventType] | None = None,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Return audit entries, the newest first.

        Args:
            scope: The scope to read.
            conversation_id: Only the entries of this conversation. If None, of all conversations.
            run_id: Only the entries of this run. If None, of all runs.
            event_types: Only entries of these types. If None, of all types.
            start_time: The earliest time, inclusive.
            end_time: The latest time, inclusive.
            limit: At most this many entries.
        """

    @abstractmethod
    async def log_error(self, error: ErrorRecord, scope: Scope = Scope.PROJECT) -> None:
        """Store an error.

        Args:
            error: The error.
            scope: The scope.
        """

    @abstractmethod
    async def get_errors(
        self,
        scope: Scope = Scope.PROJECT,
        severity: ErrorSeverity | None = None,
        resolved: bool | None = None,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
        limit: int = 100,
    ) -> list[ErrorRecord]:
        """Return errors, the newest first.

        Args:
            scope: The scope to read.
            severity: Only errors of exactly this severity. If None, of all severities.
            resolved: Only resolved errors, or only open errors. If None, both.
            start_time: The earliest time, inclusive.
            end_time: The latest time, inclusive.
            limit: At most this many errors.
        """

    @abstractmethod
    async def resolve_error(
        self, error_id: UUID, resolution_notes: str | None = None, scope: Scope = Scope.PROJECT
    ) -> bool:
        """Mark an error as resolved, and return whether it exists.

        Args:
            error_id: The id of the error.
            resolution_notes: How it was resolved.
            scope: The scope.

        Returns:
            Whether the error exists.
        """

    @abstractmethod
    async def record_metric(self, metric: PerformanceMetric, scope: Scope = Scope.PROJECT) -> None:
        """Store a measured value.

        Args:
            metric: The measured value.
            scope: The scope.
        """

    @abstractmethod
    async def get_metrics(
        self,
        name: str,
        scope: Scope = Scope.PROJECT,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
        tags: Mapping[str, Any] | None = None,
        limit: int = 1000,
    ) -> list[PerformanceMetric]:
        """Return the values of a metric, the newest first.

        Args:
            name: The name of the metric.
            scope: The scope to read.
            start_time: The earliest time, inclusive.
            end_time: The latest time, inclusive.
            tags: Only values that have all these tags.
            limit: At most this many values.
        """

    @abstractmethod
    async def get_metric_summary(
        self,
        name: str,
        scope: Scope = Scope.PROJECT,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
    ) -> dict[str, float]:
        """Summarize the values of a metric.

        Args:
            name: The name of the metric.
            scope: The scope to read.
            start_time: The earliest time, inclusive.
            end_time: The latest time, inclusive.

        Returns:
            count, min, max, avg, sum, p50, p95 and p99. All are 0 if there are no values.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import InMemoryAuditStore, PerformanceMetric
            >>> async def main():
            ...     store = InMemoryAuditStore()
            ...     for value in (1.0, 3.0):
            ...         await store.record_metric(PerformanceMetric(name="latency", value=value, unit="s"))
            ...     return (await store.get_metric_summary("latency"))["avg"]
            >>> asyncio.run(main())
            2.0
        """

    async def prune(
        self, scope: Scope = Scope.PROJECT, *, older_than: float | None = None, keep: int | None = None
    ) -> int:
        """Delete old entries, errors and metrics.

        Args:
            scope: The scope to prune.
            older_than: Delete what is older than this many seconds.
            keep: Keep only the newest `keep` of each kind.

        Returns:
            How many were deleted.

        Raises:
            NotSupported: This store cannot be pruned.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import AuditEntry, AuditEventType, InMemoryAuditStore
            >>> async def main():
            ...     store = InMemoryAuditStore()
            ...     for action in ("read", "write", "export"):
            ...         await store.log_event(AuditEntry(event_type=AuditEventType.CUSTOM, action=action))
            ...     return await store.prune(keep=1)
            >>> asyncio.run(main())
            2
        """
        raise NotSupported(
            f"{type(self).__name__} does not support prune(). Use a store of agent_runtime_core.persistence."
        )

    def export(
        self,
        scope: Scope = Scope.PROJECT,
        *,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
    ) -> AsyncIterator[str]:
        """Yield lines of JSON, the oldest first.

        Each line is an object whose "type" is "event", "error" or "metric".

        Args:
            scope: The scope to export.
            start_time: The earliest time, inclusive.
            end_time: The latest time, inclusive.

        Raises:
            NotSupported: This store cannot export.
        """
        raise NotSupported(
            f"{type(self).__name__} does not support export(). Use a store of agent_runtime_core.persistence."
        )

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""
