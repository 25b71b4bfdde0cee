"""Who in this process wants to hear of commits to a Redis server, and the thread that hears of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from .._clock import Clock
from .redis_line import connection, driver, pause
from .redis_url import Place

QUIET = 5.0  # seconds without a word, after which the server is asked for one
_TURN = 1.0  # seconds between looks whether it is over


class Bell:
    """Listeners by topic. Its thread starts with the first of them; after a time without a connection all are woken."""

    def __init__(self, place: Place, channel: str, clock: Clock) -> None:
        self._place = place
        self._channel = channel
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._conn: Any = None  # where what is rung can be heard
        self._thread: threading.Thread | None = None
        self._closed = False

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            known = topic in self._listeners
            listeners = self._listeners.setdefault(topic, [])
            listeners.append(wake)
            if not known and self._conn is not None:
                with contextlib.suppress(*driver().broken):  # the thread notices
                    self._conn.send_command("SUBSCRIBE", self._of(topic))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agent-runtime-bell", daemon=True)
                self._thread.start()

        def stop() -> None:
            with contextlib.suppress(ValueError):
                listeners.remove(wake)

        return stop

    def wake(self, topics: list[str] | None = None) -> None:
        """Wake those who listen to these topics, or all."""
        for topic in tuple(self._listeners) if topics is None else topics:
            for wake in tuple(self._listeners.get(topic, ())):
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    wake()

    def _of(self, topic: str) -> str:
        """The channel of a topic: those that nobody here listens to wake no thread here."""
        return f"{self._channel}:{topic}"

    def _subscribe(self, conn: Any) -> None:
        with self._lock:
            channels = [self._channel, *map(self._of, self._listeners)]
            conn.send_command("SUBSCRIBE", *channels)
            self._conn = conn
        for _ in channels:
            conn.read_response()

    def _run(self) -> None:
        while not self._closed:
            conn = connection(self._place)
            try:
                conn.connect()
                self._subscribe(conn)
                self.wake()  # what was rung meanwhile was not heard
                self._hear(conn)
            except driver().broken:
                pause(0.2)
            finally:
                with self._lock:
                    self._conn = None
                with contextlib.suppress(Exception):
                    conn.disconnect()

    def _hear(self, conn: Any) -> None:
        quiet, asked = 0.0, False
        while not self._closed:
            if conn.can_read(timeout=_TURN):
                said = conn.read_response()
                quiet, asked = 0.0, False
                if isinstance(said, list) and said[0] in (b"message", b"subscribe"):
                    # A channel that is new was not heard until now.
                    self.wake([said[1].decode()[len(self._channel) + 1 :]])
                continue
            quiet += _TURN
            if quiet >= QUIET and not asked:
                conn.send_command("PING")
                asked = True
            elif quiet >= 2 * QUIET:
                raise OSError("no word from the server")

    def close(self, ring: Callable[[], None], patience: float) -> None:
        self._closed = True
        if self._thread is not None:
            ring()
            self._thread.join(patience)
