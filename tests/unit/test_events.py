"""Event buses beyond the contract: derived events, sharing between followers, loops, threads and processes."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime as dt
import pickle
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import events
from agent_runtime_core._core.clock import Clock
from agent_runtime_core._core.event_types import EventType
from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._journal.record import ATTEMPT, DONE, ENDED, STARTED, Record
from agent_runtime_core.config import configure
from agent_runtime_core.errors import (
    InvalidArgument,
    LeaseLost,
    MissingDependency,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    UnserialisableResult,
)
from agent_runtime_core.events import Event, EventBus, InMemoryEventBus, SQLiteEventBus, get_event_bus
from agent_runtime_core.events.event import StoredEvent, payload_of
from agent_runtime_core.events.subscriptions import PAGE, WINDOW, WINDOW_BYTES, SubscriptionHub
from tests.support.runs import soon

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a01")
OTHER = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a02")


@pytest.fixture(params=["memory", "sqlite"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> EventBus:
    return InMemoryEventBus() if request.param == "memory" else SQLiteEventBus(tmp_path / "events.db")


async def fill(bus: EventBus, count: int, first: int = 0, run_id: UUID = RUN) -> None:
    rows = [(f"e{n}", "tick", {"n": n}) for n in range(first, first + count)]
    await bus.commit(None, [bus.publishing(run_id, rows)])


async def take(bus: EventBus, count: int, since: int | None = None, run_id: UUID = RUN) -> list[Event]:
    found = []
    async for event in bus.subscribe(run_id, since):
        found.append(event)
        if len(found) == count:
            break
    return found


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def sequences(found: Sequence[Event]) -> list[int]:
    return [event.sequence for event in found]


# -- events


def test_an_event_has_an_aware_timestamp_and_plain_defaults() -> None:
    event = Event(RUN, "tick")
    assert event.timestamp.utcoffset() == dt.timedelta(0)
    assert (event.payload, event.sequence) == ({}, 0)


async def test_a_stored_event_decodes_when_read_and_behaves_like_any_other(bus: EventBus) -> None:
    await bus.publish(RUN, EventType.TOOL_CALL, {"n": 1})
    for treat in (
        lambda event: event,
        copy.deepcopy,
        copy.copy,
        lambda event: pickle.loads(pickle.dumps(event)),
        dataclasses.replace,
        lambda event: Event(**dataclasses.asdict(event)),
    ):
        [event] = await bus.get_events(RUN)
        assert treat(event) == Event(RUN, "tool.call", {"n": 1}, event.timestamp, 0)
    assert type(event.event_type) is str
    with pytest.raises(AttributeError, match="nothing"):
        event.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="_row"):
        Event(RUN, "tick")._row  # noqa: B018
    await bus.close()


async def test_followers_share_one_event_object(bus: EventBus) -> None:
    followers = [asyncio.create_task(take(bus, 3, 0)) for _ in range(2)]
    await turns()
    await fill(bus, 3)
    one, two = [await follower for follower in followers]
    assert [first is second for first, second in zip(one, two, strict=True)] == [True] * 3
    await bus.close()


# -- events that follow from the journal


def records() -> list[Record]:
    return [
        Record(0, ATTEMPT, "agent", attempt=1, claim_id="01A", t=10.0, nev=1),
        Record(1, STARTED, "a", "0", attempt=1, claim_id="01A", t=20.0, total=2, tries=1, nev=2),
        Record(2, DONE, "a", "0", attempt=1, claim_id="01A", t=30.0, total=2, tries=1, ms=5, nev=1, result="1"),
        Record(3, "checkpoint", claim_id="01A", t=35.0),
        Record(4, ENDED, "succeeded", claim_id="01A", t=40.0, result='{"final_output": {"n": 1}, "usage": {}}', nev=1),
    ]


async def append(bus: EventBus, *some: Record) -> None:
    await bus.commit(None, [Op("journal.append", (str(RUN), record)) for record in some])


async def test_who_follows_past_a_type_that_is_not_known_here_gets_each_event(bus: EventBus) -> None:
    started, *_, ended = records()
    ended = ended._replace(result='{"final_output": {"n": {"$": "theirs.Odd", "v": {"x": 1}}}, "usage": {}}')
    info = '{"tool": {"name": "t", "id": "c", "args": {}}}'
    called = Record(1, DONE, "tool", "0", claim_id="01A", t=20.0, info=info, nev=1)
    await append(bus, started, called._replace(result='{"ok": true, "result": {"$": "theirs.Odd", "v": {"x": 2}}}'))
    await append(bus, ended._replace(seq=2))
    found = await take(bus, 3, 0)
    assert [event.event_type for event in found] == ["run.started", "tool.result", "run.succeeded"]
    assert [event.timestamp.timestamp() for event in found] == [10, 20, 40]
    for event in found[1:]:
        with pytest.raises(UnserialisableResult, match=r"the type 'theirs\.Odd' is not registered in this process"):
            event.payload  # noqa: B018
    assert payload_of(found[0]) == found[0].payload
    assert payload_of(found[1])["result"] == {"$": "theirs.Odd", "v": {"x": 2}}
    assert payload_of(found[2]) == {"final_output": {"n": {"$": "theirs.Odd", "v": {"x": 1}}}, "usage": {}}
    await bus.close()


async def test_a_record_of_a_type_that_is_not_known_here_is_read_from_its_middle(bus: EventBus) -> None:
    info, result = '{"began": ["attempt", "agent", 1, {}]}', '{"final_output": {"n": {"$": "theirs.Odd", "v": 1}}}'
    await append(bus, records()[-1]._replace(seq=0, info=info, result=result, nev=2))
    for since, kinds in enumerate((["run.started", "run.succeeded"], ["run.succeeded"], [])):
        found = await bus.get_events(RUN, since)
        assert [event.event_type for event in found] == kinds
        assert sequences(found) == list(range(since, 2))
    await bus.close()


async def test_boundary_records_appear_among_the_events(bus: EventBus) -> None:
    started, begun, done, quiet, ended = records()
    await append(bus, started, begun)
    await bus.publish(RUN, "tool.call", {"mine": 1}, event_id="t")
    await append(bus, done, quiet, ended)
    expected = ["run.started", "step.started", "progress.update", "tool.call", "step.completed", "run.succeeded"]
    found = await bus.get_events(RUN)
    assert bus.derives
    assert [event.event_type for event in found] == expected
    assert sequences(found) == list(range(6))
    assert [event.timestamp.timestamp() for event in found if event.event_type != "tool.call"] == [10, 20, 20, 30, 40]
    assert found[5].payload == {"final_output": {"n": 1}, "usage": {}}
    assert await bus.published(RUN) == {"t"}
    assert len(await bus._rows(str(RUN), 0, 2)) == 2
    for since in range(7):
        for limit in range(7):
            assert await bus.get_events(RUN, since, limit) == found[since : since + limit], (since, limit)
    await bus.close()


async def test_a_follower_hears_of_derived_events(bus: EventBus) -> None:
    follower = asyncio.create_task(take(bus, 6, 0))
    await turns()
    for record in records():
        await append(bus, record)
        await turns(3)
    await bus.publish(RUN, "tick", {})
    assert sequences(await follower) == list(range(6))
    await bus.close()


async def test_long_stretches_of_records_and_events_are_read_in_order(bus: EventBus) -> None:
    for n in range(0, 1200, 300):
        some = [Record(-1, "failed", f"s{i}", claim_id="01A", info='{"error": "x"}', nev=1) for i in range(n, n + 300)]
        await append(bus, *some)
        await fill(bus, 300, first=n)
    found = await bus.get_events(RUN)
    assert sequences(found) == list(range(2400))
    assert [event.event_type for event in found[250:350]] == ["step.failed"] * 50 + ["tick"] * 50
    assert sequences(await take(bus, 2400, 0)) == list(range(2400))
    assert len(await bus.published(RUN)) == 1200
    await bus.close()


# -- following


class Watched(InMemoryEventBus):
    """Counts reads, and holds or fails them."""

    def __init__(self) -> None:
        super().__init__()
        self.page_reads = self.looks = 0
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[Any]:
        self.page_reads += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super()._rows(run_id, since, limit)

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return await super()._heads(run_ids)


async def test_what_is_kept_for_followers_is_bounded() -> None:
    bus = InMemoryEventBus()
    slow = bus.subscribe(RUN, 0)
    fast = asyncio.create_task(take(bus, 10_000, 0))
    await fill(bus, 1)
    await anext(slow)
    for first in range(1, 10_000, 303):
        await fill(bus, 303, first=first)
        await turns(5)
        feed = bus._hubs.here().feeds[str(RUN)]
        assert sum(map(len, feed.window)) <= WINDOW
    assert sequences(await fast) == list(range(10_000))
    assert feed.floor > 1
    for expected in range(1, 10_000):
        event = await anext(slow)
        assert (event.sequence, event.payload) == (expected, {"n": expected})
    await slow.aclose()


async def test_what_is_kept_for_followers_is_bounded_in_bytes_too() -> None:
    bus, text, at_once = InMemoryEventBus(), "x" * 10_000, 5
    slow = bus.subscribe(RUN, 0)
    fast = asyncio.create_task(take(bus, 200, 0))
    for first in range(0, 200, at_once):
        rows = [(f"e{n}", "tick", {"text": text}) for n in range(first, first + at_once)]
        await bus.commit(None, [bus.publishing(RUN, rows)])
        await turns(5)
        if not first:
            await anext(slow)
    assert sequences(await fast) == list(range(200))
    kept = bus._hubs.here().feeds[str(RUN)].window
    assert sum(len(event._row[2]) for page in kept for event in page) <= WINDOW_BYTES + at_once * len(text)
    assert sequences([await anext(slow) for _ in range(199)]) == list(range(1, 200))
    await slow.aclose()


async def test_who_comes_at_an_edge_of_what_is_kept_begins_where_it_asked(bus: EventBus) -> None:
    ahead = asyncio.create_task(take(bus, 4 * PAGE + 1, 0))
    await turns()
    for first in range(0, 4 * PAGE, PAGE):
        await fill(bus, PAGE, first=first)
        await soon(lambda: bus._hubs.here().feeds[str(RUN)].tail == first + PAGE)  # noqa: B023
    feed = bus._hubs.here().feeds[str(RUN)]
    assert (feed.floor, feed.tail) == (2 * PAGE, 4 * PAGE)
    for edge in (feed.floor, feed.floor + PAGE, feed.tail):
        for since in range(edge - 2, min(edge + 3, feed.tail)):
            [event] = await take(bus, 1, since)
            assert (event.sequence, event.payload) == (since, {"n": since})
    await bus.publish(RUN, "tick", {})
    assert sequences(await ahead) == list(range(4 * PAGE + 1))
    await bus.close()


async def test_a_publisher_neither_waits_nor_reads_for_a_follower_that_is_behind() -> None:
    bus = Watched()
    slow = bus.subscribe(RUN, 0)
    await fill(bus, 1)
    await anext(slow)
    fast = asyncio.create_task(take(bus, 2 * WINDOW + 1, 0))
    for n in range(2 * WINDOW):
        with pytest.raises(StopIteration):  # done at its first step: there is nothing in between to wait at
            bus.publish(RUN, "tick", {"n": n}).send(None)
        if n % PAGE == 0:
            await turns(5)
    await fast
    assert bus._hubs.here().feeds[str(RUN)].floor > 1, "the slow one has fallen out of the window"
    pages = bus.page_reads
    for n in range(2 * WINDOW):
        with pytest.raises(StopIteration):
            bus.publish(RUN, "tick", {"n": n}).send(None)
        if n % 100 == 0:
            await turns(5)
    assert bus.page_reads == pages
    assert sequences([await anext(slow) for _ in range(4 * WINDOW)]) == list(range(1, 4 * WINDOW + 1))
    await slow.aclose()


@pytest.mark.parametrize("change", ["t = 1e300", "t = 1e18", "payload = '{'"])
async def test_an_event_that_was_damaged_is_told(tmp_path: Path, change: str) -> None:
    bus = SQLiteEventBus(tmp_path / "events.db")
    await fill(bus, 2)
    conn = sqlite3.connect(tmp_path / "events.db")
    conn.execute(f"UPDATE arc_events SET {change} WHERE seq = 1")
    conn.commit()
    conn.close()
    _, event = await bus.get_events(RUN)
    with pytest.raises(StorageCorrupt, match=f"run {RUN}: (timestamp|payload) of event 1 .*[Rr]estore a backup"):
        _ = event.payload, event.timestamp
    await bus.close()


async def test_many_followers_cost_one_read_a_page() -> None:
    bus = Watched()
    await fill(bus, PAGE * 6)
    found = await asyncio.gather(*(take(bus, PAGE * 6, 0) for _ in range(50)))
    assert all(sequences(each) == list(range(PAGE * 6)) for each in found)
    assert bus.page_reads <= 8


async def test_many_commits_in_a_tick_are_one_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[SubscriptionHub] = []
    wake = SubscriptionHub._notified

    def counted(hub: SubscriptionHub) -> None:
        rung.append(hub)
        wake(hub)

    monkeypatch.setattr(SubscriptionHub, "_notified", counted)
    bus = Watched()
    follower = asyncio.create_task(take(bus, 300, 0))
    await turns()
    for n in range(300):
        await bus.publish(RUN, "tick", {"n": n})
    assert sequences(await follower) == list(range(300))
    assert len(rung) == 1


async def test_commits_of_other_threads_wake_a_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = InMemoryEventBus()
    follower = asyncio.create_task(take(bus, 100, 0))
    await turns()
    loop, calls = asyncio.get_running_loop(), []
    from_thread = loop.call_soon_threadsafe

    def counted(callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Handle:
        calls.append(callback)
        return from_thread(callback, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

    def publish() -> None:
        for n in range(100):
            bus.engine.commit_from_thread(None, [bus.publishing(RUN, [(f"e{n}", "tick", {})])])

    thread = threading.Thread(target=publish)
    thread.start()
    thread.join(20)
    assert len(calls) == 1
    assert sequences(await follower) == list(range(100))


async def test_runs_where_nothing_happened_are_not_read() -> None:
    bus = Watched()
    runs = [UUID(int=n) for n in range(1, 41)]
    followers = [asyncio.create_task(take(bus, 1, run_id=run_id)) for run_id in runs]
    await turns()
    pages = bus.page_reads
    await bus.publish(runs[7], "tick", {})
    await followers.pop(7)
    assert (bus.looks, bus.page_reads - pages) == (1, 1)
    bus.error = StorageBusy("no answer")
    await bus.publish(runs[0], "tick", {})
    for result in await asyncio.gather(*followers, return_exceptions=True):
        assert isinstance(result, StorageBusy)


async def test_when_the_reading_follower_is_cancelled_another_one_reads() -> None:
    bus = Watched()
    first = asyncio.create_task(take(bus, 2, 0))
    second = asyncio.create_task(take(bus, 2, 0))
    await turns()
    bus.gate = asyncio.Event()
    await fill(bus, 2)
    await turns()
    assert bus.page_reads == 1
    first.cancel()
    await turns()
    bus.gate.set()
    assert sequences(await second) == [0, 1]
    assert first.cancelled()


async def test_a_follower_that_waits_is_woken_once_for_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = InMemoryEventBus()
    followers = [asyncio.create_task(take(bus, 2, 0)) for _ in range(50)]
    await bus.publish(RUN, "tick", {})
    await turns()
    loop, waits = asyncio.get_running_loop(), 0
    create = loop.create_future

    def counted() -> asyncio.Future[Any]:
        nonlocal waits
        waits += 1
        return create()

    monkeypatch.setattr(loop, "create_future", counted)
    await bus.publish(RUN, "tick", {})
    await turns()
    assert waits == 0
    assert [sequences(follower.result()) for follower in followers] == [[0, 1]] * 50


async def test_when_the_follower_called_to_read_is_cancelled_another_one_reads() -> None:
    bus = InMemoryEventBus()
    followers = [asyncio.create_task(take(bus, 1, 0)) for _ in range(3)]
    await turns()
    feed = bus._hubs.here().feeds[str(RUN)]
    await fill(bus, 1)
    await turns(1)
    assert len(feed._waiting) == 2  # the first one has been called, and did not run yet
    followers[0].cancel()
    async with asyncio.timeout(20):
        found = await asyncio.gather(*followers, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert [sequences(each) for each in found[1:] if not isinstance(each, BaseException)] == [[0], [0]]


async def test_who_comes_after_a_run_was_begun_anew_is_told_nothing_of_the_deleted_one(bus: EventBus) -> None:
    await fill(bus, 5)
    followed = bus.subscribe(RUN, 0)
    for _ in range(5):
        await anext(followed)
    upcoming = asyncio.ensure_future(anext(followed))
    await turns()
    await bus.commit(None, [Op("events.delete", (str(RUN),))])
    await fill(bus, 3, first=100)
    assert [event.payload["n"] for event in await take(bus, 3, 0)] == [100, 101, 102]
    await fill(bus, 5, first=103)
    assert [event.payload["n"] for event in await take(bus, 8, 0)] == [*range(100, 108)]
    assert (await upcoming).payload == {"n": 105}  # the first one behind its cursor
    await followed.aclose()
    await bus.close()


async def test_a_run_that_was_begun_anew_and_got_further_is_read_from_its_beginning(bus: EventBus) -> None:
    await fill(bus, 3)
    followed = bus.subscribe(RUN, 0)
    for _ in range(3):
        await anext(followed)
    await bus.commit(None, [Op("events.delete", (str(RUN),))])
    await fill(bus, 8, first=100)
    assert (await anext(followed)).sequence == 3
    assert [event.payload["n"] for event in await take(bus, 8, 0)] == [*range(100, 108)]
    assert [event.payload["n"] for event in await take(bus, 6, 2)] == [*range(102, 108)]
    await followed.aclose()
    await bus.close()


async def test_a_storage_error_ends_each_subscription_and_leaves_no_trace() -> None:
    bus = Watched()
    followers = [asyncio.create_task(take(bus, 2, 0)) for _ in range(3)]
    await turns()
    bus.error = StorageBusy("no answer")
    await fill(bus, 2)
    assert [type(each) for each in await asyncio.gather(*followers, return_exceptions=True)] == [StorageBusy] * 3
    assert bus._hubs == {}
    assert bus.engine._listeners["events"] == []
    bus.error = None
    assert sequences(await take(bus, 2, 0)) == [0, 1]


async def test_a_bulk_replay_lets_others_run() -> None:
    bus = InMemoryEventBus()
    await fill(bus, PAGE * 20)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(tick())
    await take(bus, PAGE * 20, 0)
    assert ticks >= 20
    at_the_end = bus.subscribe(RUN, PAGE * 20 - 1)
    await anext(at_the_end)
    ticks = 0
    await take(bus, PAGE * 20 - 1, 0)
    other.cancel()
    assert ticks >= 18
    await at_the_end.aclose()


async def test_several_event_loops_follow_one_bus(bus: EventBus) -> None:
    ready = threading.Semaphore(0)
    found: list[list[int]] = []

    async def follow() -> None:
        stream = bus.subscribe(RUN, 0)
        seen = [(await anext(stream)).sequence]
        ready.release()
        seen += [(await anext(stream)).sequence for _ in range(99)]
        await stream.aclose()
        found.append(seen)

    threads = [threading.Thread(target=lambda: asyncio.run(follow())) for _ in range(3)]
    await bus.publish(RUN, "tick", {})
    for thread in threads:
        thread.start()
        assert await asyncio.to_thread(ready.acquire, timeout=20)
    for n in range(99):
        await bus.publish(RUN, "tick", {"n": n})
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
    assert found == [list(range(100))] * 3
    assert bus._hubs == {}
    await bus.close()


async def test_a_loop_closed_with_followers_in_it_disturbs_no_publisher() -> None:
    bus = InMemoryEventBus()
    streams: list[Any] = []

    async def start() -> None:
        stream = bus.subscribe(RUN, 0)
        await anext(stream)
        streams.append(stream)

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(start())
        task.add_done_callback(lambda _: loop.stop())
        loop.run_forever()
        loop.close()

    await bus.publish(RUN, "tick", {})
    await asyncio.to_thread(abandon)
    assert len(bus._hubs) == 1
    await bus.publish(RUN, "tick", {})
    assert bus._hubs == {}
    assert bus.engine._listeners["events"] == []


async def test_closing_tells_followers_in_another_loop(bus: EventBus) -> None:
    ready = threading.Event()
    ended: list[type[BaseException]] = []

    async def follow() -> None:
        stream = bus.subscribe(RUN, 0)
        await anext(stream)
        ready.set()
        try:
            await anext(stream)
        except StorageClosed as error:
            ended.append(type(error))

    thread = threading.Thread(target=lambda: asyncio.run(follow()))
    await bus.publish(RUN, "tick", {})
    thread.start()
    assert await asyncio.to_thread(ready.wait, 20)
    await bus.close()
    await asyncio.to_thread(thread.join, 20)
    assert ended == [StorageClosed]


class PolledClock(Clock):
    """Time passes when the test says so."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.slept: list[float] = []
        self.tick = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.tick.wait()
        self.tick.clear()


class Polled(EventBus):
    """Tells nobody of its commits."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock, poll_interval=0.25)
        self.inner = InMemoryEventBus()

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await self.inner.commit(guard, ops)

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[Any]:
        return await self.inner._rows(run_id, since, limit)

    async def _head(self, run_id: str) -> int:
        return await self.inner._head(run_id)


async def test_without_a_bell_followers_look_at_each_interval_of_the_clock() -> None:
    clock = PolledClock()
    bus = Polled(clock)
    assert bus.commits is bus
    follower = asyncio.create_task(take(bus, 1))
    await turns()
    await bus.publish(RUN, "tick", {})
    await turns()
    assert (follower.done(), clock.slept) == (False, [0.25])
    clock.tick.set()
    assert sequences(await follower) == [0]
    for wrong in (0, -1.0):
        with pytest.raises(InvalidArgument, match="poll_interval"):
            InMemoryEventBus(poll_interval=wrong)


# -- memory


async def test_clear_is_sync_and_numbers_start_again() -> None:
    bus = InMemoryEventBus()
    await fill(bus, 3)
    bus.clear()
    assert await bus.get_events(RUN) == []
    assert (await bus.publish(RUN, "tick", {}, event_id="e0")).sequence == 0


async def test_clear_leaves_the_numbers_a_journal_refers_to() -> None:
    bus = InMemoryEventBus()
    await append(bus, records()[0])
    await fill(bus, 2)
    bus.clear()
    await bus.publish(RUN, "tick", {})
    assert sequences(await bus.get_events(RUN)) == [0, 3]


async def test_buses_on_one_engine_share_the_log() -> None:
    engine = MemoryEngine()
    one, two = InMemoryEventBus(engine=engine), InMemoryEventBus(engine=engine)
    assert one.commits is two.commits is engine
    follower = asyncio.create_task(take(two, 1, 0))
    await one.publish(RUN, "tick", {})
    assert sequences(await follower) == [0]
    await one.close()
    assert sequences(await two.get_events(RUN)) == [0]


# -- SQLite


async def test_a_file_keeps_its_events(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    bus = SQLiteEventBus(db_path=str(path))
    written = await bus.publish(RUN, "tick", {"n": 1}, event_id="a")
    await bus.close()
    again = SQLiteEventBus(path)
    assert await again.get_events(RUN) == [written]
    assert (await again.publish(RUN, "tick", {}, event_id="a")).sequence == 0
    assert (await again.publish(RUN, "tick", {})).sequence == 1
    await again.close()


async def test_closing_twice_lets_go_of_the_file_once(tmp_path: Path) -> None:
    one, two = SQLiteEventBus(tmp_path / "events.db"), SQLiteEventBus(tmp_path / "events.db")
    assert one.engine is two.engine
    await one.close()
    await one.close()
    await two.publish(RUN, "tick", {})
    await two.close()
    assert one.engine.path not in SQLiteEngine._open


async def test_a_commit_rings_instead_of_being_polled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime_core._engines.sqlite.liveness._POLL", 300.0)
    bus = SQLiteEventBus(tmp_path / "events.db")
    await bus.publish(RUN, "tick", {})
    stream = bus.subscribe(RUN, 0)
    await anext(stream)
    async with asyncio.timeout(20):
        _, event = await asyncio.gather(bus.publish(RUN, "tick", {}), anext(stream))
    assert event.sequence == 1
    await stream.aclose()
    await bus.close()


PUBLISHER = """
import asyncio, sys
from agent_runtime_core.events import SQLiteEventBus

async def main(path, run_id):
    bus = SQLiteEventBus(path)
    for n in range(50):
        await bus.publish(run_id, "tick", {"n": n})
    await bus.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_events_of_another_process_are_followed(tmp_path: Path) -> None:
    bus = SQLiteEventBus(tmp_path / "events.db")
    await bus.publish(RUN, "tick", {"n": -1})
    followers = [asyncio.create_task(take(bus, 51, 0)), asyncio.create_task(take(bus, 50, 1))]
    await turns()
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path / "events.db"), str(RUN)])
    try:
        found = [await follower for follower in followers]
    finally:
        assert await asyncio.to_thread(publisher.wait, 30) == 0
    assert [event.payload["n"] for event in found[0]] == list(range(-1, 50))
    assert sequences(found[1]) == list(range(1, 51))
    await bus.close()


# -- claims


async def test_a_publish_answers_for_a_lost_reply_only_if_all_of_it_landed(bus: EventBus) -> None:
    key = str(RUN)
    await bus.commit(None, [Op("fence.install", (key, "01A"))])
    landed = bus.publishing(RUN, [("a", "tick", {}), ("b", "tick", {})])
    assert await bus.commit(Guard(key, "01A"), [landed]) == [[0, 1]]
    await bus.commit(None, [Op("fence.install", (key, "01B"))])
    assert await bus.commit(Guard(key, "01A"), [landed]) == [[0, 1]]
    half = bus.publishing(RUN, [("b", "tick", {}), ("c", "tick", {})])
    with pytest.raises(LeaseLost):
        await bus.commit(Guard(key, "01A"), [half])
    with pytest.raises(LeaseLost):
        await bus.commit(Guard(key, "01A"), [Op("events.delete", (key,))])
    assert sequences(await bus.get_events(RUN)) == [0, 1]
    await bus.close()


# -- the factory


def test_the_configured_backend_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(get_event_bus(), InMemoryEventBus)
    configure(event_bus_backend="sqlite", sqlite_path=str(tmp_path / "configured.db"), durability="normal")
    bus = get_event_bus()
    assert isinstance(bus, SQLiteEventBus)
    assert (Path(bus.engine.path).name, bus.engine.durability) == ("configured.db", "normal")
    asyncio.run(bus.close())
    monkeypatch.chdir(tmp_path)
    configure()
    default = get_event_bus("sqlite")
    asyncio.run(default.close())
    assert (tmp_path / "agent_runtime.db").exists()
    shared = SQLiteEngine.open(tmp_path / "shared.db")
    on_shared = get_event_bus("sqlite", engine=shared)
    assert isinstance(on_shared, SQLiteEventBus)
    assert on_shared.engine is shared
    asyncio.run(on_shared.close())


def test_a_backend_of_somebody_else_is_named_by_its_class() -> None:
    bus = get_event_bus("agent_runtime_core.events.memory:InMemoryEventBus", poll_interval=1.0)
    assert isinstance(bus, InMemoryEventBus)
    with pytest.raises(
        ValueError, match=r"unknown event bus 'memry'\. Did you mean 'memory'\? Write 'package\.module:"
    ):
        get_event_bus("memry")
    with pytest.raises(MissingDependency):
        get_event_bus("not_installed_anywhere.bus:Bus")


def test_every_name_is_there_and_loaded_on_first_use() -> None:
    assert dir(events) == sorted(vars(events)["__all__"])
    for name in dir(events):
        assert getattr(events, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'RedisBus'"):
        _ = events.RedisBus  # type: ignore[attr-defined]
    code = "import sys, agent_runtime_core.events as e; assert 'asyncio' not in sys.modules; e.Event"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_stored_event_is_what_a_backend_moves() -> None:
    assert StoredEvent._fields == ("sequence", "event_type", "payload", "t", "event_id")


@pytest.mark.parametrize("wrong", [None, 7, "", "a\0"])
async def test_a_run_id_is_a_uuid_or_a_text(wrong: Any) -> None:
    bus = InMemoryEventBus()
    calls: list[Callable[[], Any]] = [lambda: bus.subscribe(wrong), lambda: bus.publishing(wrong, [])]
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
    with pytest.raises(InvalidArgument):
        await bus.get_events(wrong)


async def test_a_text_that_is_no_uuid_names_a_run_of_its_own() -> None:
    bus = InMemoryEventBus()
    event = await bus.publish("run-123", "tick", {})
    assert (await bus.get_events("run-123"))[0].run_id == event.run_id
    assert await bus.get_events(event.run_id) == [event]
