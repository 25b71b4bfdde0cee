"""Who in this process wants to hear of commits to a SQLite file, and the thread that hears of other processes'."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable

from .._clock import Clock
from .presence import RESCAN, Presence

_POLL = 0.5  # seconds between looks at data_version behind the bell
_POLL_WITHOUT_BELL = 0.005


class Bell:
    """Listeners by topic. Its thread starts with the first of them."""

    def __init__(
        self, presence: Presence, clock: Clock, connect: Callable[[], sqlite3.Connection],
        disconnect: Callable[[sqlite3.Connection], None],
    ) -> None:  # fmt: skip
        self._presence = presence
        self._clock = clock
        self._connect = connect
        self._disconnect = disconnect
        self._lock = threading.Lock()
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            if self._thread is None:
                self._presence.hang_bell()
                self._thread = threading.Thread(target=self._run, name="agent-runtime-bell", daemon=True)
                self._thread.start()
            listeners = self._listeners.setdefault(topic, [])
            listeners.append(wake)

        def stop() -> None:
            if wake in listeners:
                listeners.remove(wake)

        return stop

    def ring(self, topics: set[str]) -> None:
        """Something was committed here."""
        if self._listeners:
            self._wake(topics)
        self._presence.ring(topics)

    def _wake(self, topics: set[str]) -> None:
        for topic in topics:
            for wake in tuple(self._listeners.get(topic, ())):
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    wake()

    def _run(self) -> None:
        conn = self._connect()
        version = conn.execute("PRAGMA data_version").fetchone()[0]
        # Who listed the bells just before this one hung does not ring it yet.
        unheard = self._clock.boot() + 2 * RESCAN
        while not self._closed:
            if unheard and self._clock.boot() >= unheard:
                unheard = 0.0
                self._wake(set(self._listeners))
            if self._presence.bell is not None:
                letters = self._presence.wait(2 * RESCAN if unheard else _POLL)
            else:
                threading.Event().wait(_POLL_WITHOUT_BELL)
                letters = ""
            if letters:
                self._wake({t for t in tuple(self._listeners) if t[0] in letters})
                continue
            with contextlib.suppress(sqlite3.Error):
                seen = conn.execute("PRAGMA data_version").fetchone()[0]
                if seen != version:
                    version = seen
                    self._wake(set(self._listeners))
        self._disconnect(conn)

    def close(self, patience: float) -> None:
        self._closed = True
        self._presence.ring_self()
        if self._thread is not None:
            self._thread.join(patience)
