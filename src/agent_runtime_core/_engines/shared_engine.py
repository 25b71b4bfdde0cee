"""An engine that all users of one place in this process have in common: the last of them to let go shuts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from abc import abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Self

from .._core.clock import Clock
from .._core.threads import in_thread
from ..errors import StorageClosed
from .base import Engine


class Process:
    """This one, known without asking the system, which each commit would do."""

    forks: ClassVar[int] = 0  # that lie between the first process and this one


class SharedEngine(Engine):
    """Open ones stand in the table of their class, by `key`; `name` is the place as errors call it."""

    _open: ClassVar[dict[Any, Any]]
    _open_lock: ClassVar[threading.Lock]
    #: What a child can do that was forked while it was open.
    after_fork: ClassVar[str] = "open it again in this process"

    def __init__(self, key: Hashable, name: str, clock: Clock) -> None:
        self.clock: Clock = clock
        self._key = key
        self._name = name
        self._forks = Process.forks
        self._users = 0
        self._closed = False

    def share(self) -> Self:
        """This engine, for one more user, who closes it too."""
        self._users += 1
        return self

    @property
    def is_of_parent(self) -> bool:
        """Whether it was opened before this process was forked off."""
        return self._forks != Process.forks

    def _ensure_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"{self._name} was closed")
        if self._forks != Process.forks:
            raise StorageClosed(f"{self._name} was opened before a fork: {self.after_fork}")
        if sys.is_finalizing():  # the threads of the engine have stopped and would never answer
            raise StorageClosed(f"{self._name} cannot be used while the interpreter shuts down. Close it before")

    async def close(self) -> None:
        if self._release():
            await in_thread(self._close_now)  # not the loop's executor, which ends with the main thread

    def close_now(self) -> None:
        """`close` for those who have no loop, or must not wait for one."""
        if self._release():
            self._close_now()

    def _release(self) -> bool:
        """One user less; True for the last one, who has to shut."""
        with self._open_lock:
            self._users -= 1
            if self._users > 0 or self._closed:
                return False
            self._closed = True
            if self._open.get(self._key) is self:
                del self._open[self._key]
        if self.is_of_parent or sys.is_finalizing():
            return False
        with contextlib.suppress(RuntimeError):
            self._flush(asyncio.get_running_loop())
        return True

    @abstractmethod
    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send off what callers on this loop asked for in its present turn."""

    @abstractmethod
    def _close_now(self) -> None:
        """End the threads and close what is open; only ever called once."""


def _forked() -> None:
    """Another thread may have been opening or closing something: it is not in this process, and never lets go."""
    Process.forks += 1
    for kind in SharedEngine.__subclasses__():
        kind._open_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
