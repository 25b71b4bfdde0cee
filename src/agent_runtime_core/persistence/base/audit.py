"""What happened, what went wrong, and how long it took."""

from __future__ import annotations

import datetime as _dt
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from ...errors import NotSupported
from ..models import AuditEntry, AuditEventType, ErrorRecord, ErrorSeverity, PerformanceMetric, Scope


class AuditStore(ABC):
    """Entries, errors and metrics. Times are compared as moments: `start_time` is in, `end_time` too."""

    @abstractmethod
    async def log_event(self, entry: AuditEntry, scope: Scope = Scope.PROJECT) -> None: ...

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
        """The newest first."""

    @abstractmethod
    async def log_error(self, error: ErrorRecord, scope: Scope = Scope.PROJECT) -> None: ...

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
        """The newest first."""

    @abstractmethod
    async def resolve_error(
        self, error_id: UUID, resolution_notes: str | None = None, scope: Scope = Scope.PROJECT
    ) -> bool:
        """Whether there is such an error."""

    @abstractmethod
    async def record_metric(self, metric: PerformanceMetric, scope: Scope = Scope.PROJECT) -> None: ...

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
        """The newest first, of those that carry all of `tags`."""

    @abstractmethod
    async def get_metric_summary(
        self,
        name: str,
        scope: Scope = Scope.PROJECT,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
    ) -> dict[str, float]:
        """count, min, max, avg, sum, p50, p95 and p99 of the values."""

    async def prune(
        self, scope: Scope = Scope.PROJECT, *, older_than: float | None = None, keep: int | None = None
    ) -> int:
        """Delete what is older than so many seconds and all but the newest `keep` of each kind; how many."""
        raise NotSupported(f"{type(self).__name__} cannot be pruned; the stores of agent_runtime_core.persistence can")

    def export(
        self,
        scope: Scope = Scope.PROJECT,
        *,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
    ) -> AsyncIterator[str]:
        """Lines of JSON, the oldest first, each an object whose "type" is event, error or metric."""
        raise NotSupported(f"{type(self).__name__} cannot export; the stores of agent_runtime_core.persistence can")

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""
