"""Wait for runs to finish, and stream their events."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial

from .._core.context_vars import start_helper, start_soon
from .._core.per_loop import PerLoop, call_in_loop
from ..errors import StorageBusy, StorageClosed
from ..events.base import EventBus
from ..events.event import Event
from ..queue.base import RunQueue
from ..queue.records import LIVE, RunRow

CHECK_INTERVAL = 1.0  # seconds between two reads of the awaited runs if no notification arrives
MIN_CHECK_PAUSE = 0.005  # shortest pause in seconds between two reads of several runs, after notifications
PAUSE_FACTOR = 4  # the pause is so many times the duration of the last read
#: Longest pause in seconds for each run that is read, so that one slow read does not delay the results of a few runs.
PAUSE_PER_RUN = 0.0002
MAX_RUNS_PER_READ = 500

_End = asyncio.Future[RunRow]


class RunWatcher:
    """Waits for the ends of runs, in any event loop, until it is closed."""

    def __init__(self, queue: RunQueue) -> None:
        self._queue = queue
        self._by_loop: PerLoop[_LoopWatcher] = PerLoop(partial(_LoopWatcher, queue), _LoopWatcher.stop_listening)
        self._lock = threading.Lock()
        self._closed = False

    async def until_ended(self, run_id: str, at_most: float | None = None) -> RunRow | None:
        """Return the run's row once it is finished, or None after `at_most` seconds.

        Raises:
            StorageClosed: The watcher was closed.
            UnknownRun: No such run is stored.
        """
        waits = self._here()
        end = waits.add(run_id)
        try:
            await asyncio.wait({end}, timeout=at_most)
            if end.done():
                return end.result()
        finally:
            waits.drop(run_id, end)
        row = await self._queue.require(run_id)
        return None if row.status in LIVE else row

    def _here(self) -> _LoopWatcher:
        with self._lock:
            if self._closed:
                raise closed()
            return self._by_loop.here()

    def close(self) -> None:
        """Have every call of `until_ended` raise StorageClosed."""
        with self._lock:
            self._closed = True
        for loop, waits in self._by_loop.items():
            call_in_loop(loop, waits.cancel_all)


def closed() -> StorageClosed:
    """Return the error of calls on a closed runner."""
    return StorageClosed("this runner was closed. Create another runner")


class _LoopWatcher:
    """The runs that are awaited in one event loop, with one listener and one task that reads for all of them."""

    def __init__(self, queue: RunQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue, self._loop = queue, loop
        self._waiting: dict[str, set[_End]] = {}
        self._new: set[str] = set()  # awaited runs that were not read yet
        self._notified = False  # a run ended since all awaited runs were read
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] | None = None

    def add(self, run_id: str) -> _End:
        """Return a future for the end of a run. The run is read now, and each time a run ends."""
        if not self._waiting:
            self._stop_listening = self._queue.listen("done", self._notify)
        end: _End = self._loop.create_future()
        self._waiting.setdefault(run_id, set()).add(end)
        self._new.add(run_id)
        self._wake()
        return end

    def drop(self, run_id: str, end: _End) -> None:
        """Stop waiting for a run."""
        ends = self._waiting.get(run_id, set())
        ends.discard(end)
        if not ends and self._waiting.pop(run_id, None) is not None:
            self._stop_if_idle()

    def cancel_all(self) -> None:
        """Have every waiting call raise StorageClosed."""
        for run_id in tuple(self._waiting):
            self._resolve(run_id, closed())

    def stop_listening(self) -> None:
        """Receive no more notifications."""
        if self._stop_listening is not None:
            self._stop_listening()
        self._stop_listening = None

    def _stop_if_idle(self) -> None:
        if not self._waiting:
            self.stop_listening()
            if not self._loop.is_closed():  # as when a wait is garbage-collected after its loop was closed
                self._changed.set()

    def _notify(self) -> None:
        """Have the awaited runs read, because a run ended. Thread-safe."""
        if not self._notified:
            self._notified = True
            call_in_loop(self._loop, self._wake)

    def _wake(self) -> None:
        self._changed.set()
        if self._waiting and (self._task is None or self._task.done()):
            self._task = start_helper(self._follow(), "agent-runtime-ends")
            self._task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # by code that cancels all tasks of the loop, and continues
            self._loop.call_later(CHECK_INTERVAL, self._wake)

    async def _follow(self) -> None:
        """Read new runs immediately, and all runs when a run ends or after `CHECK_INTERVAL`, while any is awaited."""
        time = self._loop.time
        earliest, latest = 0.0, time() + CHECK_INTERVAL  # times of the next read of all runs
        while self._waiting:
            self._changed.clear()
            new, self._new = self._new, set()
            began = time()
            if began >= (earliest if self._notified else latest):
                self._notified = False  # a run that ends from now on may be missing in this read
                count = len(self._waiting)
                await self._read_all(tuple(self._waiting))
                pause = (
                    max(MIN_CHECK_PAUSE, min(PAUSE_FACTOR * (time() - began), PAUSE_PER_RUN * count))
                    if count > 1
                    else 0.0
                )
                earliest, latest = time() + min(pause, CHECK_INTERVAL), time() + CHECK_INTERVAL
            elif new:
                await self._read_all([run_id for run_id in new if run_id in self._waiting])
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(earliest if self._notified else latest):
                        await self._changed.wait()

    async def _read_all(self, run_ids: Sequence[str]) -> None:
        for start in range(0, len(run_ids), MAX_RUNS_PER_READ):
            await self._read(run_ids[start : start + MAX_RUNS_PER_READ])

    async def _read(self, run_ids: Sequence[str]) -> None:
        if len(run_ids) == 1:
            await self._read_one(run_ids[0])
            return
        try:
            snapshots = await self._queue.snapshots(run_ids)
        except Exception as error:  # noqa: BLE001 - the waiting calls raise it
            for run_id in run_ids:
                self._resolve(run_id, error)
            return
        ended = [run_id for run_id in run_ids if run_id not in snapshots or snapshots[run_id].status not in LIVE]
        await asyncio.gather(*map(self._read_one, ended))

    async def _read_one(self, run_id: str) -> None:
        try:
            row = await self._queue.require(run_id)
        except Exception as error:  # noqa: BLE001 - the waiting calls raise it
            self._resolve(run_id, error)
            return
        if row.status not in LIVE:
            self._resolve(run_id, row)

    def _resolve(self, run_id: str, what: RunRow | Exception) -> None:
        ends = self._waiting.pop(run_id, None)
        if ends is None:
            return
        for end in ends:
            if end.done():
                continue
            if isinstance(what, Exception):
                end.set_exception(what)
                end.exception()  # else asyncio logs it if the waiting task ended
            else:
                end.set_result(what)
        self._stop_if_idle()


@contextlib.asynccontextmanager
async def pages_until_ended(
    watch: RunWatcher, bus: EventBus, run_id: str, since: int
) -> AsyncIterator[AsyncGenerator[Sequence[Event], None]]:
    """Open the pages of the run's events from `since` on, stored events and then live events, until the run ends."""
    ended = start_soon(_confirm_ended(watch, run_id))
    try:
        async with contextlib.aclosing(bus.pages(run_id, since, until=ended)) as pages:
            yield pages
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def _confirm_ended(watch: RunWatcher, run_id: str) -> None:
    """Return once the run is finished. While the queue is not available, it waits."""
    while True:
        try:
            await watch.until_ended(run_id)
        except StorageBusy:
            await asyncio.sleep(CHECK_INTERVAL)
        else:
            return
