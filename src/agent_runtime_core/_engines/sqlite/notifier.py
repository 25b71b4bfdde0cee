"""Notifications of commits to a SQLite file: the FIFO of this process, or polling of the file."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable

from ..._core.clock import Clock
from ..notifier import Notifier
from .liveness import RESCAN, ProcessLiveness

_POLL = 0.5  # seconds between polls of data_version while there is a FIFO
_POLL_WITHOUT_FIFO = 0.005
_RETRY = 5.0  # seconds between tries to create a FIFO, after no descriptor or no inode was left


_POLL_READ_ONLY = 0.05  # seconds between two looks of a process that only reads


class FifoNotifier(Notifier):
    """Wakes listeners when other processes write to the FIFO. Its thread also polls the file, often without a FIFO."""

    def __init__(
        self, liveness: ProcessLiveness, clock: Clock, connect: Callable[[], sqlite3.Connection],
        disconnect: Callable[[sqlite3.Connection], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._liveness = liveness
        self._clock = clock
        self._connect = connect
        self._disconnect = disconnect

    def _setup(self) -> None:
        self._liveness.open_fifo()

    def notify(self, topics: set[str]) -> None:
        """Wake the listeners of this process and notify the other processes."""
        if self._listeners:
            self.wake(topics)
        self._liveness.notify(topics)

    def _run(self) -> None:
        # Opened by the first poll, which wakes all listeners: many processes end before that.
        conn: sqlite3.Connection | None = None
        version: int | None = None
        # A process that scanned for FIFOs just before this one was created does not write to it yet.
        unseen_until = self._clock.boot() + 2 * RESCAN
        retry_at = self._clock.boot() + _RETRY
        while not self._closed:
            if unseen_until and self._clock.boot() >= unseen_until:
                unseen_until = 0.0
                self.wake()
            if self._liveness.fifo is None and self._clock.boot() >= retry_at:
                retry_at = self._clock.boot() + _RETRY
                if self._liveness.open_fifo():
                    unseen_until = self._clock.boot() + 2 * RESCAN
            if self._liveness.fifo is not None:
                letters = self._liveness.wait(2 * RESCAN if unseen_until else _POLL)
            else:
                threading.Event().wait(_POLL_WITHOUT_FIFO)
                letters = ""
            if letters:
                self.wake({t for t in tuple(self._listeners) if t[0] in letters})
                continue
            with contextlib.suppress(sqlite3.Error):
                conn = conn or self._connect()
                seen = conn.execute("PRAGMA data_version").fetchone()[0]
                if seen != version:
                    version = seen
                    self.wake()
        if conn is not None:
            self._disconnect(conn)


class PollingNotifier(Notifier):
    """Wakes all listeners when `signature()` has changed, for a process that may not create a FIFO."""

    def __init__(self, signature: Callable[[], object]) -> None:
        super().__init__()
        self._signature = signature
        self._stopping = threading.Event()

    def stop(self, timeout: float) -> None:
        """End the thread."""
        self.close(self._stopping.set, timeout)

    def _run(self) -> None:
        seen: object = None
        changed = False
        while not self._stopping.wait(_POLL_READ_ONLY):
            with contextlib.suppress(OSError):
                now = self._signature()
                # Once more after a change: a later commit may have the same modification time.
                wakes, changed = changed or now != seen, now != seen
                seen = now
                if wakes:
                    self.wake()
