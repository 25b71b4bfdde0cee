"""Hearing of commits to a SQLite file: the FIFO of this process, and a look at the file now and then."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable

from ..._core.clock import Clock
from ..notifier import Notifier
from .liveness import RESCAN, ProcessLiveness

_POLL = 0.5  # seconds between looks at data_version behind the bell
_POLL_WITHOUT_BELL = 0.005
_TRY_AGAIN = 5.0  # seconds between tries to make a bell that could not be made: descriptors or inodes were short


class FifoNotifier(Notifier):
    """Rung by other processes; behind it, and where there are no FIFOs, its thread looks at the file."""

    def __init__(
        self, presence: ProcessLiveness, clock: Clock, connect: Callable[[], sqlite3.Connection],
        disconnect: Callable[[sqlite3.Connection], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._presence = presence
        self._clock = clock
        self._connect = connect
        self._disconnect = disconnect

    def _setup(self) -> None:
        self._presence.open_fifo()

    def notify(self, topics: set[str]) -> None:
        """Something was committed here."""
        if self._listeners:
            self.wake(topics)
        self._presence.notify(topics)

    def _run(self) -> None:
        # Opened at the first look, which wakes all: many a process is gone by then.
        conn: sqlite3.Connection | None = None
        version: int | None = None
        # A process that listed the bells just before this one was made does not write to it yet.
        unheard = self._clock.boot() + 2 * RESCAN
        again = self._clock.boot() + _TRY_AGAIN
        while not self._closed:
            if unheard and self._clock.boot() >= unheard:
                unheard = 0.0
                self.wake()
            if self._presence.fifo is None and self._clock.boot() >= again:
                again = self._clock.boot() + _TRY_AGAIN
                if self._presence.open_fifo():
                    unheard = self._clock.boot() + 2 * RESCAN
            if self._presence.fifo is not None:
                letters = self._presence.wait(2 * RESCAN if unheard else _POLL)
            else:
                threading.Event().wait(_POLL_WITHOUT_BELL)
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
