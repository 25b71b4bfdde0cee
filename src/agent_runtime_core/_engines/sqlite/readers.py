"""Threads that read from a SQLite file, so that a slow read blocks no event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ..._core.per_loop import call_in_loop
from ..._core.threads import started
from ...errors import StorageError
from .transaction import DRIVER_ERRORS, translate

READERS = 2


class ReadSession(Protocol):
    """What one thread reads with."""

    def read(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return `fn(view, *args)`. The first read opens a connection."""

    def close(self) -> None:
        """Close the connection. The next read opens another connection."""


class Readers:
    """At most `READERS` threads. A second thread is started if the first is busy.

    Args:
        path: Names the file in errors.
        new_session: Creates the session of a thread.
        ensure_open: Raises StorageClosed if the engine was closed.
        idle: Seconds without a read after which a session is closed. None keeps it open.
    """

    def __init__(
        self, path: str, new_session: Callable[[], ReadSession], ensure_open: Callable[[], None],
        idle: float | None = None,
    ) -> None:  # fmt: skip
        self.threads: list[threading.Thread] = []
        self._path = path
        self._new_session = new_session
        self._ensure_open = ensure_open
        self._idle = idle
        self._requests: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._lock = threading.Lock()

    async def read(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return `fn(view, *args)`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.submit(fn, args, loop, future)
        return await future

    def submit(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        """Have a thread read, and set the outcome in `future`, which belongs to `loop`."""
        with self._lock:
            self._ensure_open()  # if another thread closed the engine, no reader would take the request
            if not self.threads:
                self.threads.append(started(self._run, "agent-runtime-reader"))
            self._requests.put((fn, args, loop, future))
            # Another reader is only started if the others are busy.
            if len(self.threads) < READERS and self._requests.qsize() > 1:
                with contextlib.suppress(StorageError):  # no thread can be started: the others serve this request later
                    self.threads.append(started(self._run, "agent-runtime-reader"))

    def stop(self) -> None:
        """End the threads after the reads that were requested."""
        with self._lock:
            for _ in self.threads:
                self._requests.put(None)

    def join(self, timeout: float) -> None:
        """Wait for each thread, at most `timeout` seconds."""
        for thread in self.threads:
            thread.join(timeout)

    def _run(self) -> None:
        session = self._new_session()
        while self._read_next(session):  # keeps no result alive while it waits
            pass
        session.close()

    def _next(self, session: ReadSession) -> tuple[Any, ...] | None:
        try:
            return self._requests.get(timeout=self._idle)
        except Empty:
            session.close()
            return self._requests.get()

    def _read_next(self, session: ReadSession) -> bool:
        """Execute the next read; False after the last read."""
        item = self._next(session)
        if item is None:
            return False
        fn, args, loop, future = item
        result: Any = None
        error: Exception | None = None
        try:
            result = session.read(fn, args)
        except DRIVER_ERRORS as failure:
            error = translate(failure, self._path)
        except Exception as failure:  # noqa: BLE001 - raised to the caller of this read
            error = failure
        call_in_loop(loop, answer, future, result, error)
        return True


def view(conn: sqlite3.Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return `fn(conn, *args)`, from one snapshot of the file."""
    conn.execute("BEGIN")
    try:
        return fn(conn, *args)
    except Exception as error:
        # A half-read cursor in one of its frames would keep this connection at an old snapshot.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        if conn.in_transaction:  # some errors end the transaction themselves
            conn.execute("ROLLBACK")


def answer(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the outcome of a request, unless its caller was cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
