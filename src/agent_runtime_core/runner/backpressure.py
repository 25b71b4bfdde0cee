"""Back-pressure: a run whose outputs are slow is made to wait before it tells more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator

from .._core.per_loop import call_in_loop


class Reader:
    """A reader that a run waits for; `cursor` is the first sequence that it has not taken."""

    def __init__(self, pipe: _RunBuffer, cursor: int) -> None:
        self.cursor: int = cursor
        self._pipe = pipe

    def read_up_to(self, sequence: int) -> None:
        """It is done with that event and all before it."""
        self.cursor = max(self.cursor, sequence + 1)
        self._pipe.release_waiters()


class _RunBuffer:
    """One run: what it told since somebody reads it so, and who waits to tell more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.readers: list[Reader] = []
        self.lock: threading.Lock = threading.Lock()
        self._unread: deque[tuple[int, int]] = deque()  # (sequence, bytes)
        self._unsent = 0
        self._waiters: list[asyncio.Future[None]] = []

    def full(self) -> bool:
        """Whether any reader is more than `most` bytes behind; what all have taken is forgotten."""
        first = min((each.cursor for each in self.readers), default=None)
        while self._unread and (first is None or self._unread[0][0] < first):
            self._unsent -= self._unread.popleft()[1]
        # The slowest reader is behind by all that is left.
        return self._unsent > self.most

    def published(self, sequence: int, size: int) -> asyncio.Future[None] | None:
        """Count an event; what to wait for before the next one, if anything."""
        with self.lock:
            self._unread.append((sequence, size))
            self._unsent += size
            if not self.full():
                return None
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            return waiter

    def release_waiters(self) -> None:
        """Let those go on who may."""
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
    """The runs of this process that have an output attached, and what it has not taken yet, in bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffers: dict[str, _RunBuffer] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def attached(self, run_id: str, cursor: int, most: int | None = None) -> Iterator[Reader]:
        """An Output for that run, from that sequence on; the run waits for it until it is left.

        `most` is how many bytes it may be behind, where the first output of the run says so.
        """
        with self._lock:
            pipe = self._buffers.setdefault(run_id, _RunBuffer(self._most if most is None else most))
            output = Reader(pipe, cursor)
            pipe.readers.append(output)
        try:
            yield output
        finally:
            with self._lock:
                pipe.readers.remove(output)
                if not pipe.readers:
                    self._buffers.pop(run_id, None)
            pipe.release_waiters()

    def published(self, run_id: str, sequence: int, size: int) -> asyncio.Future[None] | None:
        """A run told an event of so many bytes: what it has to wait for before the next, or None."""
        pipe = self._buffers.get(run_id)
        return None if pipe is None else pipe.published(sequence, size)
