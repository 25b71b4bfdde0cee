"""An engine that all backends of this process on one location share; the last user closes it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self

from .._core.clock import Clock
from .._core.threads import in_thread
from .._core.validation import Shown, must
from ..errors import NotSupported, StorageClosed, brief
from .base import Engine, Guard, Op, OperationSet


class Process:
    """This process, without a system call in each commit."""

    forks: ClassVar[int] = 0  # between the first process and this process


class SafetyFinding(NamedTuple):
    """An unsafe setting of a server: its value, why it is unsafe, and how to fix it."""

    setting: str
    value: str
    severity: Literal["refuse", "warn"]
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting} is {self.value!r}, {self.why}: {self.remedy}"


class SharedEngine(Engine):
    """Open engines are in a table of their class.

    Args:
        key: Identifies the engine in that table.
        name: The location in error messages.
        clock: The clock of this engine and of the backends that get it as `engine`.
    """

    _open: ClassVar[dict[Any, Any]]
    _open_lock: ClassVar[threading.Lock]
    after_fork: ClassVar[str] = "Open it again in this process"
    """What a child process can do that was forked while the engine was open."""

    def __init__(self, key: Hashable, name: str, clock: Clock) -> None:
        self.clock: Clock = clock
        self._key = key
        self.location = name
        """The file or server in error messages, without a password."""
        self._forks = Process.forks
        self._users = 0
        self._closed = False

    def share(self) -> Self:
        """Count one more user, which must close the engine too, and return the engine."""
        self._users += 1
        return self

    @property
    def is_of_parent(self) -> bool:
        """Whether the parent process opened the engine, before the fork."""
        return self._forks != Process.forks

    def _ensure_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"{self.location} was closed. Open it again")
        if self._forks != Process.forks:
            raise StorageClosed(f"{self.location} was opened before a fork. {self.after_fork}")
        if sys.is_finalizing():  # the engine's threads have stopped and would never answer
            raise StorageClosed(f"{self.location} cannot be used while the interpreter shuts down. Close it before")

    async def close(self) -> None:
        """End this use of the engine; the last user closes it."""
        if self._release():
            await in_thread(self._close_now)  # the loop's executor would end with the main thread

    def close_now(self) -> None:
        """Close from code without an event loop, or which must not wait for it."""
        if self._release():
            self._close_now()

    def _release(self) -> bool:
        """Count one user less; True if it was the last user, which must close the engine."""
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
        """Send the commits that callers on this loop requested in its present iteration."""

    @abstractmethod
    def _close_now(self) -> None:
        """End the threads and close the connections. Called once."""


def _forked() -> None:
    """Replace the locks: a thread of the parent may have held a lock, and does not exist here to release it."""
    Process.forks += 1
    kinds = SharedEngine.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
        kind._open_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def refused(location: str) -> NotSupported:
    """Return the error of a write to a store that was opened read-only."""
    fix = "Call AgentRunner.open without read_only to write"
    return NotSupported(str(must(f"store {brief(location, 500)}", "be open for writing", Shown("read_only=True"), fix)))


def reject_commit(self: Engine, guard: Guard | None, ops: Sequence[Op]) -> NoReturn:
    """In place of the three methods with which an engine commits."""
    raise refused(self.location)


class ReadOnlyEngine(Engine):
    """Reads through another engine, which others of this process may use to write.

    Reads of the other engine may be its own commits, as on Redis: they do not pass through this object.
    """

    read_only = True
    commit = commit_from_thread = commit_nowait = reject_commit

    def __init__(self, engine: SharedEngine) -> None:
        self._engine = engine
        self.kind = engine.kind
        self.clock = engine.clock
        self.location = engine.location

    def __getattr__(self, name: str) -> Any:
        """Return what only this kind of engine provides, such as `ask`."""
        return getattr(self._engine, name)

    def share(self) -> ReadOnlyEngine:
        """Count one more user; see `SharedEngine.share`."""
        self._engine.share()
        return self

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await self._engine.read(fn, *args)

    async def fence_of(self, key: str) -> str | None:
        return await self._engine.fence_of(key)

    def add(self, operation_set: OperationSet) -> None:
        self._engine.add(operation_set)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._engine.listen(topic, wake)

    def lease_now(self) -> float:
        return self._engine.lease_now()

    async def close(self) -> None:
        await self._engine.close()

    def close_now(self) -> None:
        """Close from code without an event loop."""
        self._engine.close_now()
