"""What a Redis server has for one event loop, read by that loop: to be woken by a thread takes as long as the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

from ..errors import StorageError
from ..portal import in_thread
from .redis_answers import Answers
from .redis_line import PIECE, connection
from .redis_url import Place


class Letters:
    """A connection that follows one channel; `take` is called with each message, `lost` when no more can come."""

    def __init__(
        self, place: Callable[[], Place], channel: str, take: Callable[[bytes], None], lost: Callable[[], None]
    ) -> None:
        self.channel: str = channel
        self._place = place
        self._take = take
        self._lost = lost
        self._arrived: Answers = Answers(numbers=True)
        self._conn: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd: int | None = None
        self._closed = False

    async def follow(self) -> None:
        """Follow the channel. Any error of the driver; NotImplementedError where loops of this kind read nothing."""
        await in_thread(self._connect)
        self._read_on(asyncio.get_running_loop())

    def _connect(self) -> None:
        conn = connection(self._place())
        try:
            conn.connect()
            conn.send_command("SUBSCRIBE", self.channel)
            conn.read_response()
        except BaseException:
            conn.disconnect()
            raise
        self._conn = conn
        if self._closed:
            self.close()

    def _read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        fd = os.dup(self._conn._sock.fileno())  # the loop's own, which nobody else closes
        try:
            loop.add_reader(fd, self._hear)
        except BaseException:
            os.close(fd)
            self.close()
            raise
        self._loop, self._fd = loop, fd

    def _hear(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, PIECE)
            if not data:
                raise OSError("the server has closed the connection")
            self._arrived.add(data)
            while (said := self._arrived.take()) is not None:
                if isinstance(said, list) and said[0] == b"message":
                    self._take(said[2])
        except BlockingIOError:
            return
        except (OSError, StorageError, ValueError):  # of what makes no sense, too
            self.close()
            self._lost()

    def close(self) -> None:
        """Also while a thread connects it."""
        self._closed = True
        if self._loop is not None and self._fd is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
        self._fd = self._loop = None
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                conn.disconnect()
