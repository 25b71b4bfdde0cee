"""Conformance tests for audit stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make()` returns a new and empty store.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from ....persistence.models import (
    AuditEntry,
    AuditEventType,
    ErrorRecord,
    ErrorSeverity,
    PerformanceMetric,
    Scope,
    new_id,
)
from ..checks import Cases, opened, same
from .fixtures import TREE, stores_of_tenants

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check

NOON = dt.datetime(2026, 11, 21, 12, 0, tzinfo=dt.UTC)
NAIVE = NOON.replace(tzinfo=None)
HOUR = dt.timedelta(hours=1)
EAST = dt.timezone(dt.timedelta(hours=5, minutes=30))
UNKNOWN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2bff")
CALL, RESULT = AuditEventType.TOOL_CALL, AuditEventType.TOOL_RESULT


def at(hours: float) -> dt.datetime:
    """A time `hours` after noon; UTC, naive and another time zone in rotation."""
    when = NOON + hours * HOUR
    zones = (when, when.replace(tzinfo=None), when.astimezone(EAST))
    return zones[int(hours) % 3]


# -- entries


@CASES
async def every_field_of_an_entry_comes_back(make: Make) -> None:
    async with opened(make) as store:
        full = AuditEntry(
            event_type=CALL, timestamp=NAIVE, conversation_id=new_id(), run_id=new_id(), agent_key="a", action="é",
            details=copy.deepcopy(TREE), actor_type="user", actor_id="u", request_id="r", parent_event_id=new_id(),
            metadata=copy.deepcopy(TREE),
        )  # fmt: skip
        bare = AuditEntry(event_type=AuditEventType.CUSTOM, action=None, timestamp=NOON - HOUR)
        for entry in (bare, full):
            await store.log_event(entry)
        same(await store.get_events(), [full, bare], "the entries")


@CASES
async def entries_are_found_by_what_they_are_of(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get_events(), [], "the entries of an empty store")
        run, conversation = new_id(), new_id()
        for n in range(12):
            await store.log_event(
                AuditEntry(
                    event_type=CALL if n % 2 else RESULT,
                    timestamp=at(n),
                    run_id=run if n % 3 == 0 else None,
                    conversation_id=conversation if n < 8 else None,
                    action=str(n),
                )
            )

        async def found(**options: Any) -> list[int]:
            return [int(each.action) for each in await store.get_events(**options)]

        same(await found(), list(range(11, -1, -1)), "all entries, newest first")
        same(await found(limit=3), [11, 10, 9], "the entries with limit 3")
        same(await found(run_id=run), [9, 6, 3, 0], "the entries of a run")
        same(await found(conversation_id=conversation, limit=2), [7, 6], "two entries of a conversation")
        same(await found(event_types=[CALL]), [11, 9, 7, 5, 3, 1], "the entries of a type")
        same(await found(event_types=[CALL, RESULT], run_id=run, limit=1), [9], "an entry of two types and a run")
        same(await found(event_types=[AuditEventType.CUSTOM]), [], "the entries of another type")
        for zone in (dt.UTC, EAST, None):
            start, end = ((NOON + n * HOUR).astimezone(zone or dt.UTC).replace(tzinfo=zone) for n in (3, 6))
            same(await found(start_time=start, end_time=end), [6, 5, 4, 3], f"the entries of a range in zone {zone}")
            same(await found(start_time=start, run_id=run), [9, 6, 3], f"the entries of a run since a time in {zone}")
        same(await found(end_time=NOON + HOUR, event_types=[CALL], run_id=run), [], "entries for all filters")
        same(await found(run_id=UNKNOWN), [], "the entries of an unknown run")


# -- errors


@CASES
async def every_field_of_an_error_comes_back(make: Make) -> None:
    async with opened(make) as store:
        full = ErrorRecord(
            timestamp=NAIVE, severity=ErrorSeverity.CRITICAL, error_type="E", message="é", stack_trace="a\nb",
            conversation_id=new_id(), run_id=new_id(), agent_key="a", context=copy.deepcopy(TREE), resolved=True,
            resolved_at=NOON, resolution_notes="n", metadata=copy.deepcopy(TREE),
        )  # fmt: skip
        bare = ErrorRecord(error_type=None, message=None, timestamp=NOON - HOUR)
        for error in (bare, full):
            await store.log_error(error)
        same(await store.get_errors(), [full, bare], "the errors")


@CASES
async def errors_are_found_and_resolved(make: Make) -> None:
    async with opened(make) as store:
        errors = [
            ErrorRecord(
                message=str(n), timestamp=at(n), severity=ErrorSeverity.WARNING if n % 2 else ErrorSeverity.ERROR
            )
            for n in range(6)
        ]
        for error in errors:
            await store.log_error(error)

        async def found(**options: Any) -> list[int]:
            return [int(each.message) for each in await store.get_errors(**options)]

        same(await found(), [5, 4, 3, 2, 1, 0], "all entries, newest first")
        same(await found(severity=ErrorSeverity.WARNING, limit=2), [5, 3], "two errors of a severity")
        same(
            await found(start_time=NOON + 2 * HOUR, end_time=NAIVE + 4 * HOUR), [4, 3, 2], "the records of a time range"
        )
        same(await store.resolve_error(errors[3].id, "fixed"), True, "the result of resolving an error")
        same(await store.resolve_error(errors[0].id), True, "the result of resolving an error without notes")
        same(await store.resolve_error(UNKNOWN, "fixed"), False, "the result of resolving an unknown error")
        same(
            (await found(resolved=True), await found(resolved=False)),
            ([3, 0], [5, 4, 2, 1]),
            "the resolved and the unresolved errors",
        )
        resolved = next(each for each in await store.get_errors() if each.id == errors[3].id)
        same((resolved.resolved, resolved.resolution_notes), (True, "fixed"), "the resolved error")
        assert resolved.resolved_at is not None, "a resolved error must have resolved_at"
        same(resolved.timestamp, errors[3].timestamp, "its timestamp")


# -- metrics


@CASES
async def every_field_of_a_metric_comes_back(make: Make) -> None:
    async with opened(make) as store:
        full = PerformanceMetric(
            name="llm_latency", value=1250.5, unit="ms", timestamp=NAIVE, conversation_id=new_id(), run_id=new_id(),
            agent_key="a", tags={"model": "gpt-4", "n": 1}, metadata=copy.deepcopy(TREE),
        )  # fmt: skip
        bare = PerformanceMetric(name="llm_latency", value=0.0, unit=None, timestamp=NOON - HOUR)
        for metric in (bare, full):
            await store.record_metric(metric)
        same(await store.get_metrics("llm_latency"), [full, bare], "the metrics")


@CASES
async def metrics_are_found_and_summed_up(make: Make) -> None:
    async with opened(make) as store:
        for n in range(6):
            tags = {"model": "m" if n % 2 else "k", "n": n}
            await store.record_metric(PerformanceMetric(name="a", value=float(n), timestamp=at(n), tags=tags))
        await store.record_metric(PerformanceMetric(name="ab", value=99.0))

        async def found(**options: Any) -> list[float]:
            return [each.value for each in await store.get_metrics("a", **options)]

        same(await found(), [5.0, 4.0, 3.0, 2.0, 1.0, 0.0], "all entries, newest first")
        same(await found(limit=2), [5.0, 4.0], "the metrics with limit 2")
        same(await found(tags={"model": "m"}), [5.0, 3.0, 1.0], "the metrics with a tag")
        same(await found(tags={"model": "m", "n": 3}), [3.0], "the metrics with two tags")
        same(await found(tags={"other": "m"}), [], "the metrics with another tag")
        same(await found(start_time=NOON + HOUR, end_time=NAIVE + 2 * HOUR), [2.0, 1.0], "the records of a time range")
        same(await store.get_metrics("c"), [], "the metrics of an unknown name")
        summary = await store.get_metric_summary("a", start_time=NOON + HOUR)
        same(
            {name: round(summary[name], 9) for name in ("count", "min", "max", "avg", "sum", "p50")},
            {"count": 5, "min": 1.0, "max": 5.0, "avg": 3.0, "sum": 15.0, "p50": 3.0},
            "the summary of five values",
        )
        assert 3.0 <= summary["p95"] <= summary["p99"] <= 5.0, f"percentiles of five values: {summary}"
        same((await store.get_metric_summary("c"))["count"], 0, "the count for an unknown name")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        entry, error = AuditEntry(event_type=CALL), ErrorRecord(message="m")
        await store.log_event(entry)
        await store.log_error(error)
        await store.record_metric(PerformanceMetric(name="a", value=1.0))
        there = Scope.GLOBAL
        same((await store.get_events(there), await store.get_errors(there)), ([], []), "entries and errors, globally")
        same(await store.get_metrics("a", there), [], "metrics in the global scope")
        same((await store.get_metric_summary("a", there))["count"], 0, "the count in the global scope")
        same(
            await store.resolve_error(error.id, scope=there), False, "the result of resolving an error in another scope"
        )
        same(await store.get_events(Scope.PROJECT), [entry], "the entries in their scope")


@CASES
async def tenants_use_the_same_ids_apart(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.get_events(scope, run_id=UNKNOWN), [], f"the entries of tenant {tenant!r} at first")
                entry = AuditEntry(id=UNKNOWN, event_type=CALL, run_id=UNKNOWN, action=f"{tenant}", timestamp=NOON)
                await store.log_event(entry, scope)
                await store.log_error(ErrorRecord(id=UNKNOWN, message=f"{tenant}", timestamp=NOON), scope)
                await store.record_metric(PerformanceMetric(id=UNKNOWN, name="n", value=1.0, timestamp=NOON), scope)
        for scope in Scope:
            for tenant, store in stores.items():
                actions = [each.action for each in await store.get_events(scope, run_id=UNKNOWN)]
                same(actions, [str(tenant)], f"the entries of tenant {tenant!r}")
                errors = [each.message for each in await store.get_errors(scope)]
                same(errors, [str(tenant)], f"the errors of tenant {tenant!r}")
                same((await store.get_metric_summary("n", scope))["count"], 1, f"the metrics of tenant {tenant!r}")
                same(await store.resolve_error(UNKNOWN, f"{tenant}", scope), True, "the result of resolve_error")
        notes = [[each.resolution_notes for each in await store.get_errors()] for store in stores.values()]
        same(notes, [[str(tenant)] for tenant in stores], "the notes of all tenants")
