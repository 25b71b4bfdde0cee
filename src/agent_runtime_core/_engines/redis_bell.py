"""Hearing of commits to a Redis server: a connection that follows one channel."""

from __future__ import annotations

import contextlib
from typing import Any

from .bell import Bell
from .redis_line import connection, driver, pause
from .redis_url import Place

QUIET = 5.0  # seconds without a word, after which the server is asked for one
_TURN = 1.0  # seconds between looks whether it is over


class ChannelBell(Bell):
    """After a time without a connection all are woken."""

    def __init__(self, place: Place, channel: str) -> None:
        super().__init__()
        self._place = place
        self._channel = channel

    def _run(self) -> None:
        while not self._closed:
            conn = connection(self._place)
            try:
                conn.connect()
                conn.send_command("SUBSCRIBE", self._channel)
                conn.read_response()
                self.wake()  # what was rung meanwhile was not heard
                self._hear(conn)
            except driver().broken:
                pause(0.2)
            finally:
                with contextlib.suppress(Exception):
                    conn.disconnect()

    def _hear(self, conn: Any) -> None:
        quiet, asked = 0.0, False
        while not self._closed:
            if conn.can_read(timeout=_TURN):
                said = conn.read_response()
                quiet, asked = 0.0, False
                if isinstance(said, list) and said[0] == b"message":
                    self.wake(said[2].decode().split(","))
                continue
            quiet += _TURN
            if quiet >= QUIET and not asked:
                conn.send_command("PING")
                asked = True
            elif quiet >= 2 * QUIET:
                raise OSError("no word from the server")
