"""What a simulated process sees of a store that it is killed at: one write is its last, and nothing answers it then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from .._engines.base import Guard, Op
from .._engines.memory import MemoryEngine
from ..errors import StorageClosed

#: Hears of each write before it is tried, and of each one that landed.
Watch = Callable[[Sequence[Op], bool], None]


class CrashPoint(NamedTuple):
    """A process is killed at its n-th write: before that lands, or after it landed and before the answer is seen."""

    n: int
    landed: bool

    def __str__(self) -> str:
        return f"{'after' if self.landed else 'before'} write {self.n}{' landed' if self.landed else ''}"


class ProcessKilled(BaseException):
    """This process is dead, and nothing in it mends that."""


class KillableEngine(MemoryEngine):
    """What one life sees of a store: it counts writes, and answers nothing any more once that life is over."""

    def __init__(self, store: MemoryEngine, blow: CrashPoint | None, watch: Watch, die: Callable[[], None]) -> None:
        super().__init__(store.clock)
        self.tables: dict[str, dict[Any, Any]] = store.tables
        self._lock = store._lock
        self.writes: int = 0
        self.fatal: Sequence[Op] | None = None  # the operations of the write it was killed at
        self._blow, self._watch, self._die = blow, watch, die

    def apply(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        with self._lock:
            if self.fatal is not None:
                raise ProcessKilled
            self.writes += 1
            self._watch(ops, False)
            blow = self._blow
            if blow is None or blow.n != self.writes:
                return self._land(guard, ops)
            try:
                if blow.landed:
                    self._land(guard, ops)
            finally:
                self.fatal = ops
                self._die()
            raise ProcessKilled

    def _land(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        results = super().apply(guard, ops)
        self._watch(ops, True)
        return results

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        with contextlib.suppress(ProcessKilled):
            return self.apply(guard, ops)
        return cast("list[Any]", await _for_ever())

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        with contextlib.suppress(ProcessKilled):
            return self.apply(guard, ops)
        raise StorageClosed("this process was killed")

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        with contextlib.suppress(ProcessKilled):
            super().commit_nowait(guard, ops)

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await _for_ever() if self.fatal is not None else await super().read(fn, *args)

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        """Never: time stands still, and nobody else claims."""
        return lambda: None


async def _for_ever() -> Any:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # it is being buried
        raise ProcessKilled from None
    return await loop.create_future()
