"""How an event loop reads the script's answers by itself: to be woken by a thread takes longer than most of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from .redis_line import PIECE, Line
from .redis_pipe import Pipe

MOMENT = 0.1  # seconds after which an answer is left to the thread, which knows what to do where none comes


class Ear:
    """One loop's ear at the connection of a pipe; whatever is no plain answer it leaves to the pipe's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, line: Line, pipe: Pipe) -> None:
        self._loop = loop
        self._line = line
        self._pipe = pipe
        self._conn: Any = None  # the connection it is at
        # A descriptor of its own: the thread may close the connection's while the loop looks at it.
        self._fd: int | None = None
        self._looks = False

    def expect(self) -> None:
        """Something was sent; from the loop."""
        if self._line.conn is not self._conn:
            self._move()
        if self._fd is None:
            self._pipe.fetch()
        elif not self._looks:
            self._looks = True
            self._loop.call_later(MOMENT, self._look)

    def _move(self) -> None:
        self.close()
        self._conn, number = self._line.conn, self._line.fileno
        if number is None:
            return
        with contextlib.suppress(OSError):  # gone already
            self._fd = os.dup(number)
            try:
                self._loop.add_reader(self._fd, self._hear)
            except NotImplementedError:  # this kind of loop has none
                os.close(self._fd)
                self._fd = None

    def _hear(self) -> None:
        if not self._pipe.arrived(self._loop, self._conn, self._read):
            self._pipe.fetch()
        if self._line.conn is not self._conn:
            self.close()

    def _read(self) -> bytes:
        assert self._fd is not None
        return os.read(self._fd, PIECE)  # it never waits: a socket that has a time limit does not block

    def _look(self) -> None:
        """Whether an answer is overdue."""
        waits = self._pipe.waits()
        if waits is None or self._loop.is_closed():
            self._looks = False
            return
        if waits > MOMENT:
            self._pipe.fetch()
        self._loop.call_later(MOMENT, self._look)

    def close(self) -> None:
        """From the loop, or when it is closed."""
        self._conn = None
        if self._fd is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
