"""Cases for what the audit stores of this package do in addition to the contract."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime as dt
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime_core.errors import InvalidArgument, UnserialisableResult
from agent_runtime_core.persistence.models import AuditEntry, ErrorRecord, PerformanceMetric, Scope, moment, new_id
from agent_runtime_core.testing.clock import START, VirtualClock
from agent_runtime_core.testing.contracts.checks import Cases, opened, refused, same
from agent_runtime_core.testing.contracts.persistence.audit import CALL, HOUR, NOON, RESULT, Case, Make, at
from tests.contract.persistence.fixtures import HOSTILE, TYPED, fenced

BUILT_IN: Cases[Case] = Cases()


@BUILT_IN
async def what_could_not_be_read_again_is_refused(make: Make) -> None:
    async with opened(make) as store:
        metric = PerformanceMetric(name="a", value=1.0)
        await store.record_metric(metric)
        texts: list[Any] = ["no.such", None, 7]
        writes: list[tuple[Any, Any]] = [
            *((store.log_event, AuditEntry(event_type=bad)) for bad in texts),
            *((store.log_error, ErrorRecord(severity=bad)) for bad in texts),
            *((store.record_metric, dataclasses.replace(metric, id=new_id(), tags=bad)) for bad in texts),
            *((write, bad) for write in (store.log_event, store.log_error, store.record_metric) for bad in ("a", None)),
        ]
        for write, bad in writes:
            with refused(InvalidArgument, f"{write.__name__}({bad!r:.80})"):
                await write(bad)
        same((await store.get_events(), await store.get_errors()), ([], []), "entries and errors after that")
        same(await store.get_metrics("a", tags={}), [metric], "the metrics after that")
        await store.log_event(AuditEntry(event_type="tool_call"))  # type: ignore[arg-type]
        same([each.event_type for each in await store.get_events()], [CALL], "the type of an entry given by its value")


@BUILT_IN
async def percentiles_lie_between_the_closest_ranks(make: Make) -> None:
    async with opened(make) as store:
        for n, value in enumerate([15, 20.0, 35.0, 40.0, 50.0]):
            await store.record_metric(PerformanceMetric(name="a", value=value, timestamp=at(n)))
        same(
            await store.get_metric_summary("a"),
            {"count": 5, "min": 15.0, "max": 50.0, "avg": 32.0, "sum": 160.0, "p50": 35.0, "p95": 48.0, "p99": 49.6},
            "the summary of five values",
        )
        zeros = {"count": 0, "min": 0, "max": 0, "avg": 0, "sum": 0, "p50": 0, "p95": 0, "p99": 0}
        same(await store.get_metric_summary("b"), zeros, "the summary of none")
        await store.record_metric(PerformanceMetric(name="one", value=7.0))
        same(set((await store.get_metric_summary("one")).values()), {1, 7.0}, "the summary of one value")
        for _ in range(10):
            await store.record_metric(PerformanceMetric(name="tenths", value=0.1))
        same((await store.get_metric_summary("tenths"))["sum"], 1.0, "a sum without an error of its own")


@BUILT_IN
async def a_metric_is_a_finite_number(make: Make) -> None:
    async with opened(make) as store:
        bad: Any
        for bad in (math.nan, math.inf, -math.inf, "5", None, True, 10**400):
            with refused(InvalidArgument, f"a metric of {bad!r:.20}"):
                await store.record_metric(PerformanceMetric(name="a", value=bad))
        with refused(InvalidArgument, "a metric without a name"):
            await store.record_metric(PerformanceMetric(name="", value=1.0))
        for limit in (-1, 1.5, True):
            with refused(InvalidArgument, f"a limit of {limit}"):
                await store.get_metrics("a", limit=limit)
        with refused(InvalidArgument, "a time that is none"):
            await store.get_events(start_time="yesterday")
        with refused(InvalidArgument, "an entry at a time that is none"):
            await store.log_event(AuditEntry(event_type=CALL, timestamp="now"))  # type: ignore[arg-type]
        with refused(InvalidArgument, "an event type that there is not"):
            await store.get_events(event_types=["tool"])
        with refused(UnserialisableResult, "details without a JSON form"):
            await store.log_event(AuditEntry(event_type=CALL, details={"x": object()}))
        same((await store.get_metrics("a"), await store.get_events()), ([], []), "what is stored after that")
        for name in HOSTILE:
            await store.record_metric(PerformanceMetric(name=name, value=1.0))
        same([len(await store.get_metrics(name)) for name in HOSTILE], [1] * len(HOSTILE), "metrics of any name")


@BUILT_IN
async def what_was_written_stays_as_it_is(make: Make) -> None:
    async with opened(make) as store:
        entry = AuditEntry(event_type=CALL, action="first", details=copy.deepcopy(TYPED))
        error, metric = ErrorRecord(message="first"), PerformanceMetric(name="a", value=1.0)
        await store.log_event(entry)
        await store.log_error(error)
        await store.record_metric(metric)
        entry.details["pair"] = "changed by its writer"
        await store.log_event(dataclasses.replace(entry, action="second"))
        await store.log_error(dataclasses.replace(error, message="second"))
        await store.record_metric(dataclasses.replace(metric, value=2.0))
        [found] = await store.get_events()
        same((found.action, found.details), ("first", TYPED), "the entry")
        same([each.message for each in await store.get_errors()], ["first"], "the error")
        same([each.value for each in await store.get_metrics("a")], [1.0], "the metric")


@BUILT_IN
async def an_error_is_resolved_once(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        error = ErrorRecord(message="m")
        await store.log_error(error)
        notes = [str(n) for n in range(6)]
        answers = await asyncio.gather(*(to.resolve_error(error.id, note) for note in notes for to in (store, beside)))
        same(answers, [True] * 12, "the answers")
        [first] = await store.get_errors()
        same(first.resolution_notes in notes, True, "whether the note is one of them")
        await beside.resolve_error(error.id)
        same(await store.get_errors(), [first], "the error resolved again, without a word")
        await beside.resolve_error(error.id, "better known")
        [second] = await store.get_errors()
        same((second.resolution_notes, second.resolved_at), ("better known", first.resolved_at), "with another note")


@BUILT_IN
async def many_of_one_moment_are_all_found(make: Make) -> None:
    async with opened(make) as store:
        ids = set()
        for n in range(60):
            entry = AuditEntry(event_type=CALL if n % 2 else RESULT, timestamp=NOON, action=str(n))
            await store.log_event(entry)
            ids.add(entry.id)
        same({each.id for each in await store.get_events()}, ids, "the entries")
        same(len(await store.get_events(event_types=[CALL], limit=7)), 7, "seven of a type")
        same(len(await store.get_events(event_types=[CALL], limit=40)), 30, "all of a type")
        lines = [json.loads(line) async for line in store.export()]
        same(sorted(each["id"] for each in lines), sorted(map(str, ids)), "the lines of the export")


@BUILT_IN
async def it_is_pruned_by_age_and_number(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, clock=clock) as store:

        async def fill() -> None:
            for n in range(10):
                when = dt.datetime.fromtimestamp(START - n, dt.UTC)
                await store.log_event(AuditEntry(event_type=CALL, timestamp=when, action=str(n)))
                await store.log_error(ErrorRecord(message=str(n), timestamp=when.replace(tzinfo=None)))
                await store.record_metric(PerformanceMetric(name=f"m{n % 2}", value=float(n), timestamp=when))

        await fill()
        same(await store.prune(older_than=7), 6, "how many were older than seven seconds")
        same([each.action for each in await store.get_events()], list("01234567"), "the entries that are left")
        same(await store.prune(keep=5), 9, "how many there were beyond five of each kind")
        same([each.message for each in await store.get_errors()], list("01234"), "the errors that are left")
        same(await store.prune(Scope.GLOBAL, keep=0), 0, "how many there were in another scope")
        clock.advance(2)
        same(await store.prune(older_than=4.5, keep=4), 6, "both at once")
        same(await store.prune(keep=0), 9, "how many were left")
        same([line async for line in store.export()], [], "what is left")
        for bad in ({}, {"older_than": -1}, {"keep": -1}, {"keep": 1.5}, {"older_than": "a day"}):
            with refused(InvalidArgument, f"prune({bad})"):
                await store.prune(**bad)


@BUILT_IN
async def it_prunes_by_itself(make: Make) -> None:
    clock = VirtualClock()
    with refused(InvalidArgument, "a store with an age below 0"):
        make(max_age=-1.0)
    async with opened(make, place="one", max_entries=20, max_age=1000.0, clock=clock) as store:
        for n in range(201):
            clock.advance(1)
            await store.log_event(AuditEntry(event_type=CALL, action=str(n), timestamp=_now(clock)))
            if n % 50 == 0:
                await store.record_metric(PerformanceMetric(name="a", value=float(n), timestamp=_now(clock)))
        left = [int(each.action) for each in await store.get_events(limit=1000)]
        same(left, list(range(200, 180, -1)), "the newest 20")
        same(len(await store.get_metrics("a")), 5, "the metrics, of which there are few")
        same(await store.prune(), 0, "what is left to prune by hand")
        clock.advance(2000)
        same(await store.prune(), 25, "what was too old")
    async with opened(make, place="one", max_entries=3, clock=clock) as store:
        for _ in range(2):
            await store.log_event(AuditEntry(event_type=CALL, timestamp=_now(clock)))
    for _ in range(6):
        async with opened(make, place="one", max_entries=3, clock=clock) as store:
            await store.log_event(AuditEntry(event_type=CALL, timestamp=_now(clock)))
            same(len(await store.get_events()) <= 3, True, "whether short lives prune too")


def _now(clock: VirtualClock) -> dt.datetime:
    return dt.datetime.fromtimestamp(clock.wall(), dt.UTC)


@BUILT_IN
async def it_is_exported_in_order_of_time(make: Make) -> None:
    async with opened(make) as store:
        run = new_id()
        await store.record_metric(PerformanceMetric(name="a", value=1.5, timestamp=at(2), tags={"t": (1, 2)}))
        await store.log_event(AuditEntry(event_type=CALL, timestamp=at(3), run_id=run, details=copy.deepcopy(TYPED)))
        await store.log_error(ErrorRecord(message="ü\n", timestamp=at(1)))
        await store.log_event(AuditEntry(event_type=RESULT, timestamp=at(4)))
        lines = [line async for line in store.export()]
        same(["\n" in line for line in lines], [False] * 4, "whether a line is more than one")
        made = [json.loads(line) for line in lines]
        same([each["type"] for each in made], ["error", "metric", "event", "event"], "their types")
        times = [dt.datetime.fromisoformat(each["timestamp"]) for each in made]
        same([(moment(each), each.tzinfo is None) for each in times],
             [(moment(NOON + n * HOUR), False) for n in (1, 2, 3, 4)], "their times")  # fmt: skip
        same((made[0]["message"], made[1]["tags"]), ("ü\n", {"t": [1, 2]}), "a message and tags")
        same((made[2]["run_id"], made[2]["event_type"], made[2]["details"]["price"]), (str(run), "tool_call", "1.10"),
             "an entry")  # fmt: skip
        some = [json.loads(line) async for line in store.export(start_time=NOON + 2 * HOUR, end_time=at(3))]
        same([each["type"] for each in some], ["metric", "event"], "those of a time")


@BUILT_IN
async def a_line_of_the_export_can_be_written_to_a_file(make: Make) -> None:
    async with opened(make) as store:
        for text in ("ü", "half \ud83d"):
            await store.log_event(AuditEntry(event_type=CALL, timestamp=NOON, details={"text": text}))
        lines = [line.encode() async for line in store.export()]
        same({json.loads(line)["details"]["text"] for line in lines}, {"ü", "half \ud83d"}, "the texts")


@BUILT_IN
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        entry = AuditEntry(event_type=CALL)
        await mine.log_event(entry, Scope.SESSION)
        same(await mine.get_events(Scope.SESSION), [entry], "the entries of the session")
        same((await another.get_events(Scope.SESSION), await mine.get_events()), ([], []), "those of others")


@BUILT_IN
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as store:
        error = ErrorRecord(message="m")
        await store.log_error(error)
        await store.log_event(AuditEntry(event_type=CALL))
        await store.record_metric(PerformanceMetric(name="a", value=1.0))

        async def state() -> Any:
            return [line async for line in store.export()]

        writes: dict[str, Callable[[], Awaitable[Any]]] = {
            "log_event": lambda: store.log_event(AuditEntry(event_type=CALL)),
            "log_error": lambda: store.log_error(ErrorRecord(message="late")),
            "record_metric": lambda: store.record_metric(PerformanceMetric(name="a", value=2.0)),
            "resolve_error": lambda: store.resolve_error(error.id, "late"),
            "prune": lambda: store.prune(keep=0),
        }
        await fenced(store.documents(Scope.PROJECT).commits, writes, state)
