"""Slow a run down to the speed of the readers of its answer, in this process and in others.

A reader in another process reports its position through the event bus. The run looks for such reports now and then
while it publishes text.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from .._core.clock import Clock
from .._core.context_vars import start_helper
from .._core.ids import new_ulid
from .._core.log import log
from .._core.per_loop import call_in_loop
from ..errors import StorageError
from ..events.base import EventBus

REPORT_SECONDS: Final = 0.25  # between two reports of a reader that takes little
LOOK_SECONDS: Final = 0.25  # between two looks of a run for readers in other processes
POLL_SECONDS: Final = 0.1  # the same while there are some
WAITING_POLL_SECONDS: Final = 0.02  # the same while the run waits for a reader
BYTES_PER_CHARACTER: Final = 6  # at most, as JSON


class Reader:
    """A reader that a run waits for. `cursor` is the first sequence number that it did not read."""

    def __init__(self, buffer: _RunBuffer, cursor: int) -> None:
        self.cursor: int = cursor
        self.taken: int = 0  # bytes since its last report
        self.is_due: asyncio.Event = asyncio.Event()  # it took enough for a report
        self.buffer: _RunBuffer = buffer
        self.look_again: Callable[[], object] | None = None  # called once this process does not execute the run

    def read_up_to(self, sequence: int, size: int = 0) -> None:
        """Note that the events up to this sequence number were read, and how many bytes they have."""
        self.cursor = max(self.cursor, sequence + 1)
        self.taken += size
        if self.taken >= self.buffer.most / 2:
            self.is_due.set()
        self.buffer.release_waiters()


class _RunBuffer:
    """The events of one run that its readers have not read, and the calls that wait to publish more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.readers: list[Reader] = []
        self.lock: threading.Lock = threading.Lock()
        self._unread: deque[tuple[int, int]] = deque()  # (sequence, bytes)
        self._unsent = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_waiters(self) -> bool:
        """Whether the run waits for a reader."""
        return bool(self._waiters)

    def full(self) -> bool:
        """Return whether the slowest reader lags by more than `most` bytes; drop events that all have read."""
        first = min((each.cursor for each in self.readers), default=None)
        while self._unread and (first is None or self._unread[0][0] < first):
            self._unsent -= self._unread.popleft()[1]
        return self._unsent > self.most

    def published(self, sequence: int, size: int) -> asyncio.Future[None] | None:
        """Count an event, and return what to await before the next, if anything."""
        with self.lock:
            self._unread.append((sequence, size))
            self._unsent += size
            if not self.full():
                return None
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            return waiter

    def release_waiters(self) -> None:
        """Resume the waiting calls if the readers have read enough."""
        with self.lock:
            if not self._waiters or self.full():
                return
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            call_in_loop(waiter.get_loop(), _resume, waiter)


def _resume(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Backpressure:
    """The runs of this process that have readers, and the readers of this process.

    Args:
        most: How many bytes a reader may lag by default.
        bus: Returns the event bus, through which readers of other processes report.
    """

    def __init__(self, most: int, bus: Callable[[], EventBus]) -> None:
        self.most: int = most
        self._bus = bus
        #: How long runs have waited for readers.
        self.waited_seconds: float = 0.0
        self._buffers: dict[str, _RunBuffer] = {}
        self._outlets: WeakValueDictionary[str, Outlet] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._own = ""  # how the ids of readers of this process begin
        self._numbers = 0

    # -- readers

    @contextlib.contextmanager
    def attached(self, run_id: str, cursor: int, most: int | None = None) -> Iterator[Reader]:
        """Attach a reader to a run. The run waits for it until the block is left.

        Args:
            run_id: The run.
            cursor: The sequence number of the first event that the reader reads.
            most: How many bytes the readers of this run may lag. Only the value of its first reader counts.
        """
        reader = self.attach(run_id, cursor, most)
        try:
            yield reader
        finally:
            self.detach(run_id, reader)

    def attach(self, run_id: str, cursor: int, most: int | None = None) -> Reader:
        """Attach a reader to a run, until `detach`."""
        with self._lock:
            buffer = self._buffers.setdefault(run_id, _RunBuffer(self.most if most is None else most))
            reader = Reader(buffer, cursor)
            buffer.readers.append(reader)
        return reader

    def detach(self, run_id: str, reader: Reader) -> None:
        """Let the run wait for this reader no more."""
        with self._lock:
            buffer = reader.buffer
            buffer.readers.remove(reader)
            if not buffer.readers and self._buffers.get(run_id) is buffer:
                del self._buffers[run_id]
        buffer.release_waiters()

    @contextlib.asynccontextmanager
    async def reporting(self, run_id: str, reader: Reader) -> AsyncIterator[None]:
        """Report the position of a reader to the process that executes the run, until the block is left."""
        bus = self._bus()
        if not bus.stores_readers:
            yield
            return
        task = start_helper(self._report(bus, run_id, reader), "agent-runtime-reader")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _report(self, bus: EventBus, run_id: str, reader: Reader) -> None:
        """Report whenever the reader took half of what it may lag, else every 250 ms.

        While this process executes the run, it needs no reports. Another process may take the run over.
        """
        reader.look_again = partial(call_in_loop, asyncio.get_running_loop(), reader.is_due.set)
        self._numbers += 1
        self._own = self._own or new_ulid(bus.clock)
        name, reported = f"{self._own}.{self._numbers}", False
        try:
            while True:
                reader.taken = 0
                reader.is_due.clear()
                if run_id in self._outlets:
                    await reader.is_due.wait()
                    continue
                reported = True
                await bus.report_reader(run_id, name, reader.cursor - 1)
                await _first(reader.is_due.wait(), bus.clock.sleep(REPORT_SECONDS))
        except StorageError as error:
            log.warning("run %s is not slowed down for a reader, which cannot report: %s", run_id, type(error).__name__)
        finally:
            if reported:
                with contextlib.suppress(StorageError):
                    await bus.report_reader(run_id, name, None)

    # -- runs

    def outlet(self, run_id: str) -> Outlet:
        """Return where a run that this process executes publishes its text."""
        outlet = self._outlets[run_id] = Outlet(self, run_id, self._bus())
        return outlet

    def no_longer_executed(self, run_id: str) -> None:
        """Have the readers of a run report to another process, if one takes the run over."""
        buffer = self._buffers.get(run_id)
        for reader in () if buffer is None else tuple(buffer.readers):
            if reader.look_again is not None:
                reader.look_again()

    def published(self, run_id: str, sequence: int, size: int) -> asyncio.Future[None] | None:
        """Count an event of a run, in bytes, and return what to await before the next, if anything."""
        buffer = self._buffers.get(run_id)
        waiter = None if buffer is None else buffer.published(sequence, size)
        if waiter is not None:
            waiter.add_done_callback(partial(self._waited, waiter.get_loop().time()))
        return waiter

    def _waited(self, since: float, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            self.waited_seconds += waiter.get_loop().time() - since

    def foreign(self, reports: dict[str, int]) -> dict[str, int]:
        """Return the reports of readers in other processes."""
        return {name: at for name, at in reports.items() if not self._own or not name.startswith(self._own)}


class Outlet:
    """Where one run publishes the pieces of its answer."""

    __slots__ = ("__weakref__", "_bus", "_clock", "_flow", "_look_at", "_looking", "_run_id", "longest")

    def __init__(self, flow: Backpressure, run_id: str, bus: EventBus) -> None:
        self._flow, self._run_id, self._bus = flow, run_id, bus
        self._clock: Clock = bus.clock
        #: Characters of a text that may be published together.
        self.longest: int = max(flow.most // BYTES_PER_CHARACTER, 1)
        self._look_at = float("-inf") if bus.stores_readers else float("inf")
        self._looking: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        self._flow.no_longer_executed(self._run_id)

    def pieces(self, text: str) -> list[str]:
        """Return a text in pieces that are not larger than a reader may lag."""
        size = self._flow.most if text.isascii() else self.longest
        return [text[at : at + size] for at in range(0, len(text), size)]

    def published(self, sequence: int, size: int) -> asyncio.Future[None] | None:
        """Count a published piece, and return what to await before the next, if anything."""
        if self._looking is None and (now := self._clock.boot()) >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._looking = start_helper(self._look(), "agent-runtime-readers")
        return self._flow.published(self._run_id, sequence, size)

    async def _look(self) -> None:
        """Let the run wait for its readers in other processes, as long as they report."""
        known: dict[str, Reader] = {}
        try:
            while True:
                found = self._flow.foreign(await self._bus.readers(self._run_id))
                for name in known.keys() - found.keys():
                    self._flow.detach(self._run_id, known.pop(name))
                for name, at in found.items():
                    if name in known:
                        known[name].read_up_to(at)
                    else:
                        known[name] = self._flow.attach(self._run_id, at + 1)
                if not known:
                    return
                waits = any(reader.buffer.has_waiters for reader in known.values())
                await self._clock.sleep(WAITING_POLL_SECONDS if waits else POLL_SECONDS)
        except StorageError:
            return  # the run must not wait for readers that it cannot see
        finally:
            for reader in known.values():
                self._flow.detach(self._run_id, reader)
            self._looking = None


async def _first(*ways: Coroutine[Any, Any, Any]) -> None:
    """Return when a coroutine of these ends, and cancel the others."""
    tasks: list[asyncio.Task[Any]] = [start_helper(each) for each in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
