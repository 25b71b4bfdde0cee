"""Audit entries, errors and metrics as documents, sorted by time."""

from __future__ import annotations

import datetime as _dt
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from ..._core.ids import HALF
from ..._core.validation import Shown, is_number, must
from ...errors import brief
from ..base.audit import AuditStore
from ..documents.base import PAGE, Collection, Document, Entry
from ..model_codec import line, merge_by_rank, model_of, text_of
from ..models import AuditEntry, AuditEventType, ErrorRecord, ErrorSeverity, PerformanceMetric, Scope, now
from .base import DocumentBackedStore, check_count, check_link, check_model, choice, id_text, seconds_of, stored_key

M = TypeVar("M", AuditEntry, ErrorRecord, PerformanceMetric)

KINDS: dict[str, type[Any]] = {"event": AuditEntry, "error": ErrorRecord, "metric": PerformanceMetric}
PRUNE_EVERY = 100  # writes of one kind between two applications of `max_age` and `max_entries`


class StoredAudit(DocumentBackedStore, AuditStore):
    """Stores audit entries, errors and metrics until they are pruned. It never replaces an entry.

    With `max_age` or `max_entries`, the store prunes itself at its first write of a kind, and at every 100th write
    after that. So each writer may exceed the limit by up to 100 for a while.
    """

    max_age: float | None = None
    """Seconds after which entries are deleted; None keeps entries of any age."""
    max_entries: int | None = None
    """How many entries of each kind and scope are kept; None keeps all."""

    def __init__(self, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        self._written: dict[tuple[str, str], int] = {}

    def keep_at_most(self, max_age: float | None, max_entries: int | None) -> None:
        """Delete entries that are older than `max_age` seconds, and keep `max_entries` of each kind and scope.

        Args:
            max_age: Seconds; None keeps entries of any age.
            max_entries: How many entries; None keeps all.

        Raises:
            InvalidArgument: A limit is negative, or is not a number.
        """
        _check_bounds(max_age, max_entries, "max_age", "max_entries")
        self.max_age, self.max_entries = max_age, max_entries

    # -- writing

    async def log_event(self, entry: AuditEntry, scope: Scope | None = None) -> None:
        check_model(AuditEntry, entry)
        choice(AuditEventType, entry.event_type, "event_type")
        check_link(entry.run_id, "the run_id of an entry")
        check_link(entry.conversation_id, "the conversation_id of an entry")
        await self._add("event", entry, scope, group="" if entry.run_id is None else str(entry.run_id))

    async def log_error(self, error: ErrorRecord, scope: Scope | None = None) -> None:
        check_model(ErrorRecord, error)
        choice(ErrorSeverity, error.severity, "severity")
        await self._add("error", error, scope)

    async def record_metric(self, metric: PerformanceMetric, scope: Scope | None = None) -> None:
        check_model(PerformanceMetric, metric)
        _check_metric(metric)
        await self._add("metric", metric, scope, group=stored_key(metric.name, "name"))

    async def _add(self, kind: str, model: Any, scope: Scope | None, group: str = "") -> None:
        table = self.home.table(scope, kind)
        await table.write(
            table.add(Entry(id_text(model.id, kind), text_of(model), group, seconds_of(model.timestamp, "timestamp")))
        )
        await self._prune_if_due(table)

    async def resolve_error(
        self, error_id: UUID, resolution_notes: str | None = None, scope: Scope | None = None
    ) -> bool:
        def resolved(stored: Document | None) -> Entry | None:
            if stored is None:
                return None
            error = model_of(ErrorRecord, stored.text)
            if error.resolved and resolution_notes in (None, error.resolution_notes):
                return None
            error.resolved_at = error.resolved_at or now()
            error.resolved, error.resolution_notes = True, resolution_notes or error.resolution_notes
            return Entry(stored.key, text_of(error), stored.group, stored.rank, stored.expires)

        return await self.home.table(scope, "error").change(id_text(error_id, "error"), resolved) is not None

    # -- reading

    async def get_events(
        self,
        scope: Scope | None = None,
        conversation_id: UUID | None = None,
        run_id: UUID | None = None,
        event_types: Sequence[AuditEventType] | None = None,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        if event_types is not None and (isinstance(event_types, str) or not isinstance(event_types, Iterable)):
            raise must("event_types", "be a list of AuditEventType or None", event_types)
        types = None if event_types is None else {choice(AuditEventType, each, "event_type") for each in event_types}

        def wanted(entry: AuditEntry) -> bool:
            return (types is None or entry.event_type in types) and (
                conversation_id is None or str(entry.conversation_id) == str(conversation_id)
            )

        check_link(run_id, "run_id")
        check_link(conversation_id, "conversation_id")
        if isinstance(run_id, str) and HALF.search(run_id):
            return []  # an id with a lone surrogate cannot be stored, and some backends reject a query for it
        group = None if run_id is None else str(run_id)
        return await self._newest(AuditEntry, "event", scope, group, wanted, start_time, end_time, limit)

    async def get_errors(
        self,
        scope: Scope | None = None,
        severity: ErrorSeverity | None = None,
        resolved: bool | None = None,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
        limit: int = 100,
    ) -> list[ErrorRecord]:
        wanted_severity = None if severity is None else choice(ErrorSeverity, severity, "severity")

        def wanted(error: ErrorRecord) -> bool:
            return wanted_severity in (None, error.severity) and resolved in (None, error.resolved)

        return await self._newest(ErrorRecord, "error", scope, None, wanted, start_time, end_time, limit)

    async def get_metrics(
        self,
        name: str,
        scope: Scope | None = None,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
        tags: Mapping[str, Any] | None = None,
        limit: int = 1000,
    ) -> list[PerformanceMetric]:
        if tags is not None and not isinstance(tags, Mapping):
            raise must("tags", "be a dict", tags)
        required_tags = dict(tags or {}).items()

        def wanted(metric: PerformanceMetric) -> bool:
            return all(key in metric.tags and metric.tags[key] == value for key, value in required_tags)

        return await self._newest(
            PerformanceMetric, "metric", scope, stored_key(name, "name"), wanted, start_time, end_time, limit
        )

    async def get_metric_summary(
        self,
        name: str,
        scope: Scope | None = None,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
    ) -> dict[str, float]:
        low, high = _between(start_time, end_time)
        found = self.home.table(scope, "metric").pages(stored_key(name, "name"), low=low, high=high)
        return summary([model_of(PerformanceMetric, each.text).value async for page in found for each in page])

    async def _newest(
        self, model_class: type[M], kind: str, scope: Scope | None, group: str | None, wanted: Callable[[M], bool],
        start_time: _dt.datetime | None, end_time: _dt.datetime | None, limit: int | None,
    ) -> list[M]:  # fmt: skip
        check_count(limit, "limit")
        low, high = _between(start_time, end_time)
        found: list[M] = []
        size = PAGE if limit is None else max(1, min(limit, PAGE))
        async for page in self.home.table(scope, kind).pages(group, low=low, high=high, descending=True, size=size):
            found += filter(wanted, (model_of(model_class, each.text) for each in page))
            if limit is not None and len(found) >= limit:
                return found[:limit]
        return found

    # -- pruning and exporting

    async def prune(
        self, scope: Scope | None = None, *, older_than: float | None = None, keep: int | None = None
    ) -> int:
        """Delete old entries, errors and metrics.

        Args:
            scope: The scope to prune.
            older_than: Delete what is older than this many seconds.
            keep: Keep only the newest `keep` of each kind.

        Without `older_than` and `keep`, the store applies its `max_age` and `max_entries`.

        Returns:
            How many were deleted.

        Raises:
            InvalidArgument: Neither an argument nor the store sets a limit, or a limit is negative.
        """
        if older_than is None and keep is None:
            older_than, keep = self.max_age, self.max_entries
        if older_than is None and keep is None:
            raise must(
                "prune()",
                "have a limit",
                Shown("none, and this store has neither max_age nor max_entries"),
                "Pass older_than=seconds or keep=count",
            )
        _check_bounds(older_than, keep, "older_than", "keep")
        return sum([await self._prune(self.home.table(scope, kind), older_than, keep) for kind in KINDS])

    async def _prune_if_due(self, table: Collection) -> None:
        if self.max_age is None and self.max_entries is None:
            return
        position = (table.space, table.kind)
        written = self._written[position] = self._written.get(position, 0) + 1
        if written % PRUNE_EVERY == 1:
            await self._prune(table, self.max_age, self.max_entries)

    async def _prune(self, table: Collection, older_than: float | None, keep: int | None) -> int:
        deleted = 0
        if older_than is not None:
            deleted += await _delete(table, high=self.clock.wall() - older_than)
        if keep is not None:
            deleted += await _delete(table, descending=True, offset=keep)
        return deleted

    async def export(
        self,
        scope: Scope | None = None,
        *,
        start_time: _dt.datetime | None = None,
        end_time: _dt.datetime | None = None,
    ) -> AsyncIterator[str]:
        """Yield lines of JSON, the oldest first.

        Each line is an object whose "type" is "event", "error" or "metric". Times are in ISO 8601 with their time
        zone. Ids, and values that JSON lacks, are strings.

        Args:
            scope: The scope to export.
            start_time: The earliest time, inclusive.
            end_time: The latest time, inclusive.
        """
        low, high = _between(start_time, end_time)
        sources = {kind: self.home.table(scope, kind).pages(low=low, high=high) for kind in KINDS}
        async for kind, document in merge_by_rank(sources):
            yield line(kind, model_of(KINDS[kind], document.text))


async def _delete(table: Collection, **which: Any) -> int:
    """Delete the documents that `find` returns.

    A damaged index may list documents that cannot be deleted. Then it stops, instead of repeating forever.
    """
    deleted, last = 0, None
    while (found := await table.find(**which, limit=PAGE)) and found != last:
        deleted += sum(await table.write(*(table.delete(each.key) for each in found)))
        last = found
    return deleted


def _between(start: _dt.datetime | None, end: _dt.datetime | None) -> tuple[float | None, float | None]:
    """Return the range of ranks from `low` to below `high`. It includes `end`."""
    low = None if start is None else seconds_of(start, "start_time")
    return low, None if end is None else math.nextafter(seconds_of(end, "end_time"), math.inf)


def _check_metric(metric: PerformanceMetric) -> None:
    value, tags = metric.value, metric.tags
    if not isinstance(tags, dict):
        raise must(f"the tags of metric {brief(metric.name)}", "be a dict", tags)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise must(f"the value of metric {brief(metric.name)}", "be a finite number", value)


def _check_bounds(seconds: Any, count: Any, seconds_name: str, count_name: str) -> None:
    if seconds is not None and not (is_number(seconds) and seconds >= 0):
        raise must(seconds_name, "be a number of seconds of at least 0", seconds)
    check_count(count, count_name)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return count, min, max, avg, sum, p50, p95 and p99 of values. All are 0 if there are no values.

    A percentile is interpolated linearly between the two nearest values, as NumPy does by default.
    """
    ordered = sorted(map(float, values))
    if not ordered:
        return dict.fromkeys(("count", "min", "max", "avg", "sum", "p50", "p95", "p99"), 0)
    try:
        total = math.fsum(ordered)
    except OverflowError:  # fsum raises if the sum exceeds the largest float; sum returns infinity
        total = sum(ordered)
    return {
        "count": len(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "avg": min(max(math.fsum(each / len(ordered) for each in ordered), ordered[0]), ordered[-1]),
        "sum": total,
        "p50": percentile(ordered, 0.50),
        "p95": percentile(ordered, 0.95),
        "p99": percentile(ordered, 0.99),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share (0 to 1) of the sorted values lies."""
    position = (len(ordered) - 1) * share
    below = math.floor(position)
    fraction = position - below
    if not fraction:
        return ordered[below]
    return ordered[below] * (1 - fraction) + ordered[below + 1] * fraction
