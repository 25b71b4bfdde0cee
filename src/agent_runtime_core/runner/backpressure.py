"""Slow a run down to the speed of the readers of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial

from .._core.per_loop import call_in_loop


class Reader:
    """A reader that a run waits for. `cursor` is the first sequence number that it has not read."""

    def __init__(self, buffer: _RunBuffer, cursor: int) -> None:
        self.cursor: int = cursor
        self._buffer = buffer

    def read_up_to(self, sequence: int) -> None:
        """Note that the events up to this sequence number were read."""
        self.cursor = max(self.cursor, sequence + 1)
        self._buffer.release_waiters()


class _RunBuffer:
    """The events of one run that its readers have not read, and the calls that wait to publish more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.readers: list[Reader] = []
        self.lock: threading.Lock = threading.Lock()
        self._unread: deque[tuple[int, int]] = deque()  # (sequence, bytes)
        self._unsent = 0
        self._waiters: list[asyncio.Future[None]] = []

    def full(self) -> bool:
        """Return whether the slowest reader lags by more than `most` bytes; drop events that all have read."""
        first = min((each.cursor for each in self.readers), default=None)
        while self._unread and (first is None or self._unread[0][0] < first):
            self._unsent -= self._unread.popleft()[1]
        return self._unsent > self.most

    def published(self, sequence: int, size: int) -> asyncio.Future[None] | None:
        """Count an event, and return what to await before the next one, if anything."""
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
    """The runs of this process that have attached readers.

    Args:
        most: How many bytes a reader may lag by default.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        #: How long runs have waited for readers.
        self.waited_seconds: float = 0.0
        self._buffers: dict[str, _RunBuffer] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def attached(self, run_id: str, cursor: int, most: int | None = None) -> Iterator[Reader]:
        """Attach a reader to a run. The run waits for it until the block is left.

        Args:
            run_id: The run.
            cursor: The sequence number of the first event that the reader reads.
            most: How many bytes the readers of this run may lag. Only the value of its first reader counts.
        """
        with self._lock:
            buffer = self._buffers.setdefault(run_id, _RunBuffer(self._most if most is None else most))
            reader = Reader(buffer, cursor)
            buffer.readers.append(reader)
        try:
            yield reader
        finally:
            with self._lock:
                buffer.readers.remove(reader)
                if not buffer.readers:
                    self._buffers.pop(run_id, None)
            buffer.release_waiters()

    def published(self, run_id: str, sequence: int, size: int) -> asyncio.Future[None] | None:
        """Count an event of a run, in bytes, and return what to await before the next one, if anything."""
        buffer = self._buffers.get(run_id)
        waiter = None if buffer is None else buffer.published(sequence, size)
        if waiter is not None:
            waiter.add_done_callback(partial(self._waited, waiter.get_loop().time()))
        return waiter

    def _waited(self, since: float, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            self.waited_seconds += waiter.get_loop().time() - since
