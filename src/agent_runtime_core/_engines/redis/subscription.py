"""Follow one channel of a Redis server for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from ..._core.threads import in_thread, started
from ...errors import StorageError
from .connection import connection
from .url import RedisAddress


class Subscription:
    """A connection that follows one channel, read by a thread of its own.

    On the loop that called `follow`, `take` is called with each message, and `lost` when no more can come.
    """

    def __init__(
        self, place: Callable[[], RedisAddress], channel: str, take: Callable[[bytes], None], lost: Callable[[], None]
    ) -> None:
        self.channel: str = channel
        self._place = place
        self._take = take
        self._lost = lost
        self._conn: Any = None
        self._closed = False

    async def follow(self) -> None:
        """Return when the server has the subscription. Raises any error of the driver."""
        await in_thread(self._connect)
        loop = asyncio.get_running_loop()
        try:
            started(lambda: self._read(loop), "agent-runtime-subscription")
        except BaseException:
            self._conn.disconnect()
            raise

    def _connect(self) -> None:
        conn = connection(self._place())
        try:
            conn.connect()
            conn.send_command("SUBSCRIBE", self.channel)
            conn.read_response()
            conn._sock.settimeout(None)  # the next message may take any time
        except BaseException:
            conn.disconnect()
            raise
        self._conn = conn
        if self._closed:
            self.close()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            try:
                while not self._closed:
                    reply = self._conn.read_response()
                    if reply[0] == b"message":
                        loop.call_soon_threadsafe(self._deliver, reply[2])
            except Exception:  # noqa: BLE001 - after any error nothing can be read any more
                if not self._closed:
                    loop.call_soon_threadsafe(self._ended)
            finally:
                self._conn.disconnect()

    def _deliver(self, message: bytes) -> None:
        if not self._closed:
            try:
                self._take(message)
            except (StorageError, ValueError):  # unreadable, and later messages may be too
                self._ended()

    def _ended(self) -> None:
        if not self._closed:
            self.close()
            self._lost()

    def close(self) -> None:
        """Stop following, also while a thread connects."""
        self._closed = True
        with contextlib.suppress(AttributeError, OSError):  # not connected yet, or not any more
            self._conn._sock.shutdown(socket.SHUT_RDWR)  # which wakes the thread that reads it
