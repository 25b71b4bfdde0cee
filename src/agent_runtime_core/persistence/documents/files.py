"""Documents in plain files of a directory, for people to read and search; all processes on a machine share them."""

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
from ..._engines.base import Guard, Op
from ..._engines.commit_request import CommitRequest, PendingCommits, resolve_all
from ...errors import InvalidArgument, StorageBusy, StorageClosed, brief
from .base import DocumentStore
from .file_database import FileDatabase, ReadRequest

PATIENCE: Final = 6.0  # seconds a caller waits for others who read or write there
_GROUP: Final = 64  # reads and commits that the thread of a store takes at once, at most

Inbox = SimpleQueue[CommitRequest | ReadRequest | None]


def _nothing() -> None:
    return None


class FileDocuments(DocumentStore):
    """Documents in files below `root`, which is made with the first write.

    `ready()` is called before anything is read or written there, and raises what speaks against it.
    """

    patience: float = PATIENCE

    def __init__(
        self, root: str | os.PathLike[str], *, ready: Callable[[], None] = _nothing, clock: Clock = SYSTEM
    ) -> None:
        super().__init__(clock=clock)
        text = path_text(root)
        if text is None:
            raise InvalidArgument(f"{brief(root, 500)} is no path of a directory: name one")
        self.root: str = os.path.abspath(text)
        self._ready = ready
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._database = FileDatabase(self.root, self.clock, self._ready)
        self._inbox: Inbox = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: PerLoop[PendingCommits] = PerLoop(
            lambda loop: PendingCommits(loop, self.root, lambda: self.patience, lambda: self._waiting.pop(loop, None))
        )

    def _open(self) -> FileDatabase:
        if self._closed:
            raise StorageClosed(f"{self.root} was closed")
        if self._pid != os.getpid():
            self._begin()  # the threads stayed with the parent
        return self._database

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await CommitRequest(guard, ops, self)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        self._open()
        return self._waiting[loop]

    def submit(self, request: CommitRequest | ReadRequest) -> None:
        with self._starting:  # two threads must not use the index of a kind at once
            if self._thread is None:
                arguments = (self._database, self._inbox)
                self._thread = threading.Thread(target=_serve, args=arguments, name="agent-runtime-files", daemon=True)
                self._thread.start()
                weakref.finalize(self, self._inbox.put, None).atexit = False  # a store may be dropped without close()
        self._inbox.put(request)

    async def read(self, what: str, *args: Any) -> Any:
        database = self._open()
        reads: dict[str, Callable[..., list[Any]]] = {
            "get": database.get, "find": database.find, "words": database.words
        }  # fmt: skip
        answer: Future[list[Any]] = Future()
        self.submit(ReadRequest(partial(reads[what], *args), answer))
        waiting = asyncio.wrap_future(answer)
        try:
            await asyncio.wait([waiting], timeout=self.patience)
            if answer.cancel():  # it has not begun
                raise StorageBusy(f"{self.root} did not answer within {self.patience:g} s; try again")
            return await waiting
        finally:
            waiting.cancel()

    async def close(self) -> None:
        """Execute what was handed over, and end the thread."""
        self._closed = True
        if self._thread is not None and self._pid == os.getpid():
            self._inbox.put(None)
            self._thread = None


def _serve(database: FileDatabase, inbox: Inbox) -> None:
    """The thread of one store: take what waits, execute it, answer the callers."""
    while (request := inbox.get()) is not None:
        batch = [request]
        ended = False
        while len(batch) < _GROUP and not inbox.empty():
            if (more := inbox.get()) is None:
                ended = True
                break
            batch.append(more)
        if reads := [each for each in batch if isinstance(each, ReadRequest)]:
            database.read(reads)
        if commits := [each for each in batch if isinstance(each, CommitRequest) and not each.timed_out]:
            database.commit(commits)
            resolve_all(commits)
        if ended:
            return
