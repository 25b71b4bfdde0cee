"""Document store in plain files of a directory, which people can read and search.

All processes of a machine can use the same directory.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from ..._core.clock import SYSTEM, Clock
from ..._core.ids import path_text
from ..._core.per_loop import PerLoop
from ..._core.validation import must
from ..._engines.base import Guard, Op
from ..._engines.commit_request import CommitRequest, PendingCommits, resolve_all
from ...errors import StorageBusy, StorageClosed
from .base import DocumentStore
from .file_database import FileDatabase, ReadRequest

PATIENCE: Final = 6.0  # seconds that a read or commit waits for other readers and writers
_BATCH: Final = 64  # reads and commits that the thread of a store executes together, at most

Inbox = SimpleQueue[CommitRequest | ReadRequest | None]


def _no_check() -> None:
    return None


class FileDocuments(DocumentStore):
    """Document store in files below a directory.

    Args:
        root: The directory. The first write creates it.
        ready: Called before the first read or write. Its errors are raised to the caller.
        clock: The clock of the store.

    Raises:
        InvalidArgument: `root` is not a path.
    """

    rewrites = True
    patience: float = PATIENCE
    """Seconds that a read or commit waits for other readers and writers. Then it raises StorageBusy."""

    def __init__(
        self, root: str | os.PathLike[str], *, ready: Callable[[], None] = _no_check, clock: Clock = SYSTEM
    ) -> None:
        super().__init__(clock=clock)
        path = path_text(root)
        if path is None:
            raise must("root", "be the path of a directory", root)
        self.root: str = os.path.abspath(path)
        self._ready = ready
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._database = FileDatabase(self.root, self.clock, self._ready)
        self._inbox: Inbox = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: PerLoop[PendingCommits] = PerLoop(
            lambda loop: PendingCommits(loop, self.root, lambda: self.patience, lambda: self._waiting.pop(loop, None))
        )

    def _require_open(self) -> FileDatabase:
        if self._closed:
            raise StorageClosed(f"{self.root} was closed")
        if self._pid != os.getpid():
            self._start()  # after a fork: the threads of the parent do not exist in the child process
        return self._database

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Apply operations, all or nothing.

        Raises:
            StorageBusy: The lock was not free within `patience` seconds.
            StorageClosed: The store was closed.
        """
        return await CommitRequest(guard, ops, self)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        """Return the pending commits of an event loop."""
        self._require_open()
        return self._waiting[loop]

    def submit(self, request: CommitRequest | ReadRequest) -> None:
        """Queue a request for the thread of this store, and start the thread if there is none."""
        with self._starting:  # two threads must not use the index of a kind at the same time
            if self._thread is None:
                arguments = (self._database, self._inbox)
                self._thread = threading.Thread(target=_serve, args=arguments, name="agent-runtime-files", daemon=True)
                self._thread.start()
                weakref.finalize(
                    self, self._inbox.put, None
                ).atexit = False  # ends the thread of a store that was not closed
        self._inbox.put(request)

    async def read(self, what: str, *args: Any) -> Any:
        """Execute a read, and return its result.

        Raises:
            StorageBusy: The lock was not free within `patience` seconds.
            StorageClosed: The store was closed.
        """
        database = self._require_open()
        reads: dict[str, Callable[..., list[Any]]] = {
            "get": database.get, "find": database.find, "words": database.words, "kinds": database.kinds
        }  # fmt: skip
        answer: Future[list[Any]] = Future()
        self.submit(ReadRequest(partial(reads[what], *args), answer))
        waiting = asyncio.wrap_future(answer)
        try:
            await asyncio.wait([waiting], timeout=self.patience)
            if answer.cancel():  # it was not started
                raise StorageBusy(f"{self.root} did not answer within {self.patience:g} s. Try again.")
            return await waiting
        finally:
            waiting.cancel()

    async def close(self) -> None:
        """Execute the requests that were submitted, and end the thread."""
        self._closed = True
        if self._thread is not None and self._pid == os.getpid():
            self._inbox.put(None)
            self._thread = None


def _serve(database: FileDatabase, inbox: Inbox) -> None:
    """Execute requests in batches. It runs in the thread of a store."""
    while (request := inbox.get()) is not None:
        batch = [request]
        closing = False
        while len(batch) < _BATCH and not inbox.empty():
            if (next_request := inbox.get()) is None:
                closing = True
                break
            batch.append(next_request)
        if reads := [each for each in batch if isinstance(each, ReadRequest)]:
            database.read(reads)
        if commits := [each for each in batch if isinstance(each, CommitRequest) and not each.timed_out]:
            database.commit(commits)
            resolve_all(commits)
        if closing:
            return
