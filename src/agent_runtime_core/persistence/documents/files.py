"""Documents in plain files of a directory, for people to read and search; all processes on a machine share them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final

from ..._clock import SYSTEM, Clock
from ..._engines.base import Guard, Op
from ..._engines.requests import Request, Waiting, deliver
from ..._ids import path_text
from ...errors import InvalidArgument, StorageClosed, brief
from ...portal import in_thread
from .base import DocumentStore
from .file_room import Room

PATIENCE: Final = 6.0  # seconds a caller waits for whoever else writes there
_GROUP: Final = 64  # commits in one turn with the lock, at most


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
        self._room = Room(self.root, self.clock, self._ready, self.patience)
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting: dict[asyncio.AbstractEventLoop, Waiting] = {}

    def _open(self) -> Room:
        if self._closed:
            raise StorageClosed(f"{self.root} was closed")
        if self._pid != os.getpid():
            self._begin()  # the threads stayed with the parent
        return self._room

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await Request(guard, ops, self)

    def callers(self, loop: asyncio.AbstractEventLoop) -> Waiting:
        def all_told() -> None:
            self._waiting.pop(loop, None)

        self._open()
        if loop not in self._waiting:
            self._waiting[loop] = Waiting(loop, self.root, lambda: self.patience, all_told)
        return self._waiting[loop]

    def submit(self, request: Request) -> None:
        if self._thread is None:
            arguments = (self._room, self._inbox)
            self._thread = threading.Thread(target=_write, args=arguments, name="agent-runtime-files", daemon=True)
            self._thread.start()
        self._inbox.put(request)

    async def read(self, what: str, *args: Any) -> Any:
        room = self._open()
        reads: dict[str, Callable[..., Any]] = {
            "get": room.get, "find": room.find, "stamp": room.stamp, "words": room.words
        }  # fmt: skip
        return await in_thread(reads[what], *args)

    async def close(self) -> None:
        """What was handed over is carried out."""
        self._closed = True
        if self._thread is not None and self._pid == os.getpid():
            self._inbox.put(None)
            self._thread = None


def _write(room: Room, inbox: SimpleQueue[Request | None]) -> None:
    """The thread of one store: take what is there, carry it out, tell the callers."""
    while (request := inbox.get()) is not None:
        batch = [request]
        ended = False
        while len(batch) < _GROUP and not inbox.empty():
            if (more := inbox.get()) is None:
                ended = True
                break
            batch.append(more)
        going = [each for each in batch if not each.withdrawn]
        if going:
            room.write(going)
        deliver(going)
        if ended:
            return
