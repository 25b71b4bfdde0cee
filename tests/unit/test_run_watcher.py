"""Waiting for the ends of runs from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from agent_runtime_core.errors import StorageBusy, StorageClosed, StorageError, UnknownRun
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue.base import RunQueue
from agent_runtime_core.queue.records import RunRow, RunSnapshot
from agent_runtime_core.runner import run_watcher
from agent_runtime_core.runner.run_watcher import MAX_RUNS_PER_READ, PAUSE_FACTOR, RunWatcher, pages_until_ended


class _Rings:
    """A queue that rings once for nothing, and whose run has ended by the last of these looks at it."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def listen(self, topic: str, wake: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, wake)

    async def require(self, run_id: str) -> RunRow:
        self.left -= 1
        return RunRow(run_id, "a", status="running" if self.left else "succeeded")


def _watch(queue: Any) -> RunWatcher:
    return RunWatcher(cast(RunQueue, queue))


async def _waited(looks: int, at_most: float) -> Any:
    return await _watch(_Rings(looks)).until_ended("run", at_most)


async def test_the_last_look_is_when_the_time_is_over() -> None:
    ended = await _waited(3, 0.1)
    assert ended is not None
    assert ended.status == "succeeded"


async def test_after_that_nobody_looks() -> None:
    assert await _waited(4, 0.1) is None


class _Late(InMemoryEventBus):
    """A bus on which each event is read long after the run has ended."""

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[Any]:
        for _ in range(20):
            await asyncio.sleep(0)
        return await super()._rows(run_id, since, 1)


async def _streamed(queue: Any, since: int = 0) -> list[int]:
    bus, run_id = _Late(), str(UUID(int=1))
    for _ in range(3):
        await bus.publish(run_id, "tick", {})
    async with pages_until_ended(_watch(queue), bus, run_id, since) as pages:
        return [event.sequence async for page in pages for event in page]


async def test_a_stream_of_a_run_that_has_ended_waits_for_its_last_event() -> None:
    for since in range(4):
        assert await _streamed(_Rings(1), since) == list(range(since, 3))


class _Busy(_Rings):
    """One that does not answer at first."""

    async def require(self, run_id: str) -> RunRow:
        if self.left > 1:
            self.left -= 1
            raise StorageBusy("no answer")
        return await super().require(run_id)


async def test_a_queue_that_is_busy_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watcher, "CHECK_INTERVAL", 0)
    assert await _streamed(_Busy(4)) == [0, 1, 2]


async def test_a_wait_is_told_that_the_queue_is_busy() -> None:
    with pytest.raises(StorageBusy, match="no answer"):
        await _watch(_Busy(2)).until_ended("run")


class _Runs:
    """A queue of many runs, which tells what it was asked."""

    def __init__(self, count: int, news: Callable[[], Awaitable[object]] | None = None) -> None:
        self.status = {f"run-{n}": "running" for n in range(count)}
        self.reads: list[int] = []  # runs that were asked about in each read
        self.rows = 0
        self.listeners: list[Callable[[], None]] = []
        self._news = news
        self.under_way = 0

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(wake)
        return lambda: self.listeners.remove(wake)

    def end(self, run_id: str, status: str = "succeeded") -> None:
        self.status[run_id] = status
        for wake in tuple(self.listeners):
            wake()

    async def snapshots(self, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
        self.under_way += 1
        assert self.under_way == 1
        self.reads.append(len(run_ids))
        status = dict(self.status)
        await (asyncio.sleep(0) if self._news is None else self._news())
        self.under_way -= 1
        return {run_id: RunSnapshot(status[run_id], "", 0, False) for run_id in run_ids if run_id in status}

    async def require(self, run_id: str) -> RunRow:
        self.rows += 1
        if run_id not in self.status:
            raise UnknownRun(run_id)
        return RunRow(run_id, "a", status=self.status[run_id])


def _all(watch: RunWatcher, queue: _Runs) -> list[asyncio.Task[RunRow | None]]:
    return [asyncio.ensure_future(watch.until_ended(run_id)) for run_id in queue.status]


async def _turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_who_waits_for_many_runs_is_told_of_each_end_at_about_its_cost() -> None:
    count = 2 * MAX_RUNS_PER_READ
    queue = _Runs(count)
    waits = _all(_watch(queue), queue)
    await _turns()
    assert queue.reads == [MAX_RUNS_PER_READ, MAX_RUNS_PER_READ]
    assert len(queue.listeners) == 1
    for run_id in queue.status:
        queue.end(run_id)
        await asyncio.sleep(0)
    ended = await asyncio.gather(*waits)
    assert [row.status for row in ended if row is not None] == ["succeeded"] * count
    assert queue.rows == count  # each ended row once
    # Looks at all of them take at most this part of the time in which they end, and not one for each end.
    assert sum(queue.reads) < count * count / (10 * PAUSE_FACTOR)
    assert queue.listeners == []


async def test_what_ends_while_others_are_looked_at_is_looked_at_again() -> None:
    answer = asyncio.Event()
    queue = _Runs(3, answer.wait)
    waits = _all(_watch(queue), queue)
    await _turns()
    assert queue.reads == [3]
    for run_id in queue.status:  # behind the read that is under way
        queue.end(run_id)
    answer.set()
    await asyncio.gather(*waits)
    assert queue.reads == [3, 3]


async def test_a_look_that_took_long_does_not_make_the_next_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, slow = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + slow)

    async def stall() -> None:
        nonlocal slow
        slow += 20

    queue = _Runs(2)
    waits = _all(_watch(queue), queue)
    await _turns()
    queue._news = stall
    queue.end("run-0", "running")
    await _turns()
    assert queue.reads == [2, 2]
    queue._news = None
    for run_id in queue.status:
        queue.end(run_id)
    async with asyncio.timeout(10):
        await asyncio.gather(*waits)


async def test_a_run_whose_bell_nobody_hears_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watcher, "CHECK_INTERVAL", 0)
    queue = _Runs(2)
    waits = _all(_watch(queue), queue)
    await _turns()
    queue.status = dict.fromkeys(queue.status, "failed")
    assert [row.status for row in await asyncio.gather(*waits) if row is not None] == ["failed"] * 2


async def test_who_begins_to_wait_is_answered_whatever_the_others_wait_for() -> None:
    queue = _Runs(3)
    watch = _watch(queue)
    waits = _all(watch, queue)
    await _turns()
    queue.status["over"] = "failed"
    ended = await watch.until_ended("over")
    assert ended is not None
    assert queue.reads == [3]
    again = [asyncio.ensure_future(watch.until_ended("run-0")) for _ in range(2)]
    await _turns()
    queue.end("run-0")
    assert await asyncio.gather(*again, waits[0]) == [RunRow("run-0", "a", status="succeeded")] * 3
    for wait in waits[1:]:
        wait.cancel()
    await asyncio.wait(waits[1:])
    assert queue.listeners == []


async def test_a_run_that_is_deleted_meanwhile_is_told_to_those_who_wait_for_it() -> None:
    queue = _Runs(2)
    waits = _all(_watch(queue), queue)
    await _turns()
    del queue.status["run-0"]
    queue.end("run-1")
    gone, ended = await asyncio.gather(*waits, return_exceptions=True)
    assert isinstance(gone, UnknownRun)
    assert isinstance(ended, RunRow)


async def test_what_keeps_a_look_from_an_answer_is_told_to_all() -> None:
    async def refuse() -> None:
        raise StorageError("damaged")

    queue = _Runs(3, refuse)
    told = await asyncio.gather(*_all(_watch(queue), queue), return_exceptions=True)
    assert [str(each) for each in told] == ["damaged"] * 3
    assert queue.listeners == []


async def test_looks_go_on_after_somebody_cancelled_every_task() -> None:
    never = asyncio.Event()
    queue = _Runs(2, never.wait)
    waits = _all(_watch(queue), queue)
    await _turns()
    (looking,) = [task for task in asyncio.all_tasks() if task.get_name() == "agent-runtime-ends"]
    looking.cancel()
    await asyncio.wait({looking})
    queue._news, queue.under_way = None, 0
    for run_id in queue.status:
        queue.end(run_id)
    assert [row.status for row in await asyncio.gather(*waits) if row is not None] == ["succeeded"] * 2


async def test_closing_tells_those_who_wait_on_every_loop() -> None:
    queue, waiting = _Runs(2), threading.Event()
    watch = _watch(queue)

    async def elsewhere() -> None:
        wait = asyncio.ensure_future(watch.until_ended("run-0"))
        await _turns()
        waiting.set()
        with pytest.raises(StorageClosed, match="this runner was closed"):
            await wait

    other = asyncio.ensure_future(asyncio.to_thread(asyncio.run, elsewhere()))
    waits = _all(watch, queue)
    await asyncio.to_thread(waiting.wait, 10)
    watch.close()
    told = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(each) for each in told] == [StorageClosed] * 2
    await other
    with pytest.raises(StorageClosed):
        await watch.until_ended("run-0")
    assert queue.listeners == []


def test_a_loop_that_was_closed_with_waits_in_it_is_forgotten() -> None:
    queue = _Runs(2)
    watch = _watch(queue)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(watch.until_ended("run-0"))
    loop.run_until_complete(_turns())
    loop.close()
    queue.end("run-1")
    assert len(queue.listeners) == 1
    ended = asyncio.run(watch.until_ended("run-1"))
    assert ended is not None
    assert queue.listeners == []
    assert loop not in watch._by_loop
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
