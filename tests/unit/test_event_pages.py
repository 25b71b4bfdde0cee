"""Pages of events: their size, how readers share them, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core._journal.record import DONE, FAILED, STARTED, Record
from agent_runtime_core.errors import StorageBusy, StorageClosed
from agent_runtime_core.events import Event, EventBus, InMemoryEventBus, get_event_bus
from agent_runtime_core.events.event import PAGE_BYTES, EventPage, row_size
from agent_runtime_core.events.subscriptions import PAGE, WINDOW
from tests.support.backends import POSTGRES, SERVERS
from tests.support.runs import soon

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a01")
KINDS = ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES]


@pytest.fixture(params=KINDS)
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> EventBus:
    where: dict[str, Any] = {}
    if request.param == "sqlite":
        where = {"path": tmp_path / "events.db"}
    elif request.param in SERVERS:
        where = {"url": request.getfixturevalue(f"{request.param}_url")}
    return get_event_bus(request.param, **where)


async def fill(bus: EventBus, lengths: Sequence[int], first: int = 0) -> None:
    rows = [(f"e{n}", "tick", {"x": "x" * length}) for n, length in enumerate(lengths, first)]
    await bus.commit(None, [bus.publishing(RUN, rows)])


def sequences(events: Sequence[Event]) -> list[int]:
    return [event.sequence for event in events]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def walked(bus: EventBus, since: int, limit: int) -> list[EventPage]:
    """All pages from a sequence on. Each is full, unless it is the last one."""
    pages: list[EventPage] = []
    while True:
        page = await bus._page(str(RUN), since, limit)
        pages.append(page)
        if not page.more:
            return pages
        assert page, "a page with events after it is empty"
        since = page[-1].sequence + 1


# -- what is read


async def _mixture(bus: EventBus, seed: int) -> int:
    """Append events and records, large and small, and records without events; return the number of events."""
    rng, count = random.Random(seed), 0
    for seq in range(150):
        text = "x" * rng.choice([5, 5, 5, 5000, 60_000, 270_000])
        kind = rng.randrange(5)
        if kind < 2:
            await fill(bus, [len(text) * (n == 0) for n in range(kind * 3 + 1)], count)
            count += kind * 3 + 1
            await bus.commit(None, [Op("journal.append", (str(RUN), Record(seq, "checkpoint", claim_id="01A")))])
            continue
        shown: dict[int, dict[str, Any]] = {
            2: {"kind": STARTED, "total": 2, "nev": 2},
            3: {"kind": DONE, "result": f'"{text}"', "nev": 1},
            4: {"kind": FAILED, "info": f'{{"error": "{text}"}}', "nev": 1},
        }
        record = Record(seq, name="s", key=str(seq), claim_id="01A", tries=1, **shown[kind])
        await bus.commit(None, [Op("journal.append", (str(RUN), record))])
        count += record.nev
    return count


@pytest.mark.parametrize("seed", range(3))
async def test_pages_of_any_rows_have_each_event_once(bus: EventBus, seed: int) -> None:
    count = await _mixture(bus, seed)
    everything = await bus.get_events(RUN)
    assert sequences(everything) == list(range(count))
    for since, limit in (
        (0, PAGE),
        (0, 7),
        (0, 1),
        (count // 2, PAGE),
        (count - 1, PAGE),
        (count, PAGE),
        (count + 9, 5),
    ):
        pages = await walked(bus, since, limit)
        assert [event for page in pages for event in page] == everything[since:], (since, limit)
        assert max(map(len, pages)) <= limit
    rows = await bus.stored_rows(str(RUN), 0, PAGE)
    assert sum(map(row_size, rows)) <= PAGE_BYTES or len(rows) == 1
    assert all(page.size <= PAGE_BYTES or len({event.timestamp for event in page}) == 1 for page in pages)
    await bus.close()


async def test_a_page_takes_the_memory_of_a_page(bus: EventBus) -> None:
    for n in range(0, 40, 2):
        await fill(bus, [PAGE_BYTES, PAGE_BYTES], 2 * n)
        await bus.commit(
            None,
            [Op("journal.append", (str(RUN), Record(-1, DONE, "s", str(n), result=f'"{"é" * PAGE_BYTES}"', nev=1)))],
        )
    await bus.head(RUN)
    gc.collect()
    for since in (0, 1, 2, 40):
        tracemalloc.start()
        page = await bus._page(str(RUN), since, PAGE)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (len(page), page.more) == (1, True)
        assert peak < 12 * PAGE_BYTES, f"{peak:,} bytes for one page"
    await bus.close()


# -- how readers share them


class Counted(InMemoryEventBus):
    """Counts reads, and fails them if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.page_reads = 0
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[Any]:
        self.page_reads += 1
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super()._rows(run_id, since, limit)


async def read(bus: EventBus, count: int, since: int | None = 0) -> list[Sequence[Event]]:
    """The pages with the first `count` events."""
    pages: list[Sequence[Event]] = []
    async with contextlib.aclosing(bus.pages(RUN, since)) as found:
        async for page in found:
            pages.append(page)
            count -= len(page)
            if count <= 0:
                break
    return pages


async def test_readers_at_the_same_sequence_get_the_same_pages(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(bus, [1000] * 2000)
    head, all_started = bus._head, asyncio.Barrier(20)

    async def head_known_to_all(run_id: str) -> int:
        found = await head(run_id)
        await all_started.wait()  # a reader that starts after the first page was read would be behind the window
        return found

    monkeypatch.setattr(bus, "_head", head_known_to_all)
    readers = [asyncio.create_task(read(bus, 2100)) for _ in range(20)]
    await fill(bus, [10] * 100, 2000)
    first, *others = [await reader for reader in readers]
    assert sequences([event for page in first for event in page]) == list(range(2100))
    for other in others:
        assert [id(page) for page in other] == [id(page) for page in first]
    await bus.close()


async def test_readers_behind_the_window_share_a_read() -> None:
    bus = Counted()
    await fill(bus, [10] * PAGE * 6)
    ahead = bus.pages(RUN, 0)
    for _ in range(6):
        await anext(ahead)
    assert bus._hubs.here().feeds[str(RUN)].floor == 6 * PAGE - WINDOW
    reads = bus.page_reads
    readers = [asyncio.create_task(read(bus, PAGE * 6)) for _ in range(50)]
    first, *others = [await reader for reader in readers]
    assert all([id(page) for page in other] == [id(page) for page in first] for other in others)
    assert bus.page_reads - reads == 50 + 4, "one for each start, and four for the pages"
    await ahead.aclose()


async def test_a_reader_behind_the_window_that_leaves_does_not_stop_the_others() -> None:
    bus = Counted()
    await fill(bus, [10] * PAGE * 4)
    ahead = bus.pages(RUN, 0)
    for _ in range(4):
        await anext(ahead)
    readers = [asyncio.create_task(read(bus, PAGE * 4)) for _ in range(3)]
    await turns(4)
    readers[0].cancel()
    for reader in readers[1:]:
        assert sequences([event for page in await reader for event in page]) == list(range(PAGE * 4))
    await ahead.aclose()


async def test_a_reader_that_lags_gets_small_pages_in_one() -> None:
    bus = InMemoryEventBus()
    slow, other, fast = bus.pages(RUN, 0), bus.pages(RUN, 0), bus.pages(RUN, 0)
    lengths = [10] * 30 + [200_000, 100_000, 10]
    for n, length in enumerate(lengths):
        await fill(bus, [length], n)
        assert sequences(await anext(fast)) == [n]
        if n == 0:
            assert await anext(slow) is await anext(other)
    found = [await anext(slow) for _ in range(2)]
    assert [sequences(page) for page in found] == [list(range(1, 31)), [31, 32]]
    assert [await anext(other) for _ in range(2)] == found
    assert list(await anext(bus.pages(RUN, 20))) == found[0][19:]
    for each in (slow, other, fast):
        await each.aclose()


async def test_pages_that_nobody_has_are_dropped() -> None:
    bus = InMemoryEventBus()
    slow = bus.pages(RUN, 0)
    await fill(bus, [10])
    await anext(slow)
    await fill(bus, [10] * PAGE * 4, 1)
    async with contextlib.aclosing(bus.pages(RUN, 0)) as fast:
        found = 0
        while found < PAGE * 4:
            found += len(await anext(fast))
        page = await anext(slow)
        feed = bus._hubs.here().feeds[str(RUN)]
        assert len(page) == PAGE
        assert len(feed._shared) == 1
        del page
        await slow.aclose()
        gc.collect()
        assert len(feed._shared) == 0


async def test_a_page_of_a_run_that_began_anew_is_not_shared() -> None:
    bus = InMemoryEventBus()
    await fill(bus, [10] * 5)
    old = bus.pages(RUN, 0)
    before = await anext(old)
    await bus.commit(None, [Op("events.delete", (str(RUN),))])
    await fill(bus, [20] * 5)
    async with contextlib.aclosing(bus.pages(RUN, 0)) as fresh:
        page = await anext(fresh)
        assert page is not before
        assert [len(event.payload["x"]) for event in page] == [20] * 5
    await old.aclose()


# -- until


async def test_pages_end_after_what_is_stored_when_the_future_is_done(bus: EventBus) -> None:
    await fill(bus, [10] * 3)
    for since in range(5):
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        pages = [page async for page in bus.pages(RUN, since, until=done)]
        assert sequences([event for page in pages for event in page]) == list(range(since, 3))
    done = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(_all(bus.pages(RUN, 0, until=done)))
    await soon(lambda: bool(bus._hubs.here().feeds) and bus._hubs.here().feeds[str(RUN)].tail == 3)
    await fill(bus, [10] * 3, 3)
    done.set_result(None)
    assert await waiting == list(range(6))
    assert len(bus._hubs) == 0
    await bus.close()


async def _all(pages: AsyncGenerator[Sequence[Event], None]) -> list[int]:
    return [event.sequence async for page in pages for event in page]


async def test_many_readers_end_with_one_read_and_at_different_times() -> None:
    bus = Counted()
    await fill(bus, [10] * 3)
    done = [asyncio.get_running_loop().create_future() for _ in range(60)]
    readers = [asyncio.create_task(_all(bus.pages(RUN, n % 4, until=each))) for n, each in enumerate(done)]
    await turns()
    reads = bus.page_reads
    for each in done[:50]:
        each.set_result(None)
    assert [await reader for reader in readers[:50]] == [list(range(n % 4, 3)) for n in range(50)]
    assert bus.page_reads == reads + 1
    for each in done[50:]:  # each in the middle of the read of another
        each.set_result(None)
        await asyncio.sleep(0)
    assert [await reader for reader in readers[50:]] == [list(range(n % 4, 3)) for n in range(50, 60)]


async def test_readers_that_end_during_a_read_end_with_the_next_one() -> None:
    bus = Counted()
    await fill(bus, [10])
    done = asyncio.get_running_loop().create_future()
    staying = asyncio.create_task(read(bus, 2))  # the first that waits is the one that reads
    await turns()
    readers = [asyncio.create_task(_all(bus.pages(RUN, 0, until=done))) for _ in range(3)]
    await turns()
    reads, bus.gate = bus.page_reads, asyncio.Event()
    await bus.publish(UUID(int=1), "tick", {})
    await soon(lambda: bus.page_reads > reads)
    done.set_result(None)
    await turns()
    bus.gate.set()
    async with asyncio.timeout(10):
        assert [await reader for reader in readers] == [[0]] * 3
    assert bus.page_reads == reads + 2, "one that began before the end, and one after it"
    staying.cancel()


async def test_other_runs_that_are_busy_do_not_delay_an_end() -> None:
    class Busy(Counted):
        async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[Any]:
            await self.publish(UUID(int=1), "tick", {})
            return await super()._rows(run_id, since, limit)

    bus = Busy()
    await fill(bus, [10])
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    assert await _all(bus.pages(RUN, 0, until=done)) == [0]
    assert bus.page_reads <= 4


async def test_a_reader_that_ends_lets_another_one_read() -> None:
    bus = Counted()
    await fill(bus, [10])
    done = asyncio.get_running_loop().create_future()
    ending = asyncio.create_task(_all(bus.pages(RUN, 0, until=done)))
    staying = asyncio.create_task(read(bus, 2))
    await turns()
    done.set_result(None)
    await fill(bus, [10], 1)
    assert await ending == [0, 1]
    assert [sequences(page) for page in await staying] == [[0], [1]]


async def test_a_future_that_fails_fails_the_pages() -> None:
    bus = InMemoryEventBus()
    await fill(bus, [10])
    failed = asyncio.get_running_loop().create_future()
    pages = bus.pages(RUN, 0, until=failed)
    assert sequences(await anext(pages)) == [0]
    waiting = asyncio.ensure_future(anext(pages))
    await turns()
    failed.set_exception(StorageBusy("no answer"))
    with pytest.raises(StorageBusy, match="no answer"):
        await waiting
    assert bus._hubs == {}


async def test_a_reader_that_fails_lets_another_one_read() -> None:
    bus = InMemoryEventBus()
    await fill(bus, [10])
    failed = asyncio.get_running_loop().create_future()
    failing = asyncio.create_task(_all(bus.pages(RUN, 0, until=failed)))
    await turns()
    staying = asyncio.create_task(read(bus, 2))
    await turns()
    await fill(bus, [10], 1)  # this calls the first one that waits to read
    failed.set_exception(StorageBusy("no answer"))
    async with asyncio.timeout(10):
        assert [sequences(page) for page in await staying] == [[0], [1]]
    with pytest.raises(StorageBusy):
        await failing


async def test_a_read_that_fails_at_the_end_fails_one_reader_only() -> None:
    bus = Counted()
    await fill(bus, [10])
    done = asyncio.get_running_loop().create_future()
    readers = [asyncio.create_task(_all(bus.pages(RUN, 0, until=done))) for _ in range(3)]
    await turns()
    bus.error = StorageBusy("no answer")
    done.set_result(None)
    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    bus.error = None
    found = await asyncio.gather(*readers, return_exceptions=True)
    assert found.count([0]) == 2
    assert sum(isinstance(each, StorageBusy) for each in found) == 1


async def test_a_bus_that_closes_ends_pages_that_wait_for_a_future() -> None:
    bus = InMemoryEventBus()
    done = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(_all(bus.pages(RUN, until=done)))
    await turns()
    await bus.close()
    with pytest.raises(StorageClosed):
        await waiting
    done.set_result(None)  # nobody is woken any more
    await turns()
