"""In-memory engine of a simulated process that is killed at a chosen write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from .._engines.base import Guard, Op
from .._engines.memory import MemoryEngine
from ..errors import StorageClosed

#: Called with the operations of each write and False before the write, and with True once it was applied.
OnWrite = Callable[[Sequence[Op], bool], None]


class CrashPoint(NamedTuple):
    """Kill a process at its n-th write: before it is applied, or after it is applied and before the reply."""

    n: int
    applied: bool

    def __str__(self) -> str:
        return f"after write {self.n} was applied" if self.applied else f"before write {self.n}"


class ProcessKilled(BaseException):
    """The simulated process was killed. A BaseException, so that `except Exception` cannot catch it."""


class KillableEngine(MemoryEngine):
    """The shared store as one simulated process sees it: it counts writes, and never replies after the kill."""

    def __init__(
        self, store: MemoryEngine, crash_point: CrashPoint | None, on_write: OnWrite, kill: Callable[[], None]
    ) -> None:
        super().__init__(store.clock)
        self.tables: dict[str, dict[Any, Any]] = store.tables
        self._lock = store._lock
        self.writes: int = 0
        self.fatal: Sequence[Op] | None = None  # the operations of the write at which the process was killed
        self._crash_point, self._on_write, self._kill = crash_point, on_write, kill

    def apply(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        with self._lock:
            if self.fatal is not None:
                raise ProcessKilled
            self.writes += 1
            self._on_write(ops, False)
            crash_point = self._crash_point
            if crash_point is None or crash_point.n != self.writes:
                return self._apply(guard, ops)
            try:
                if crash_point.applied:
                    self._apply(guard, ops)
            finally:
                self.fatal = ops
                self._kill()
            raise ProcessKilled

    def _apply(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        results = super().apply(guard, ops)
        self._on_write(ops, True)
        return results

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        with contextlib.suppress(ProcessKilled):
            return self.apply(guard, ops)
        return cast("list[Any]", await _wait_forever())

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        with contextlib.suppress(ProcessKilled):
            return self.apply(guard, ops)
        raise StorageClosed("this process was killed")

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        with contextlib.suppress(ProcessKilled):
            super().commit_nowait(guard, ops)

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await _wait_forever() if self.fatal is not None else await super().read(fn, *args)

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        """Start no heartbeat: time does not pass and no other worker claims the run."""
        return lambda: None


async def _wait_forever() -> Any:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # SimulatedProcess.dispose closes the coroutine, without a running event loop
        raise ProcessKilled from None
    return await loop.create_future()
