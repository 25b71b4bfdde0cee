"""Engines that were opened read-only: they read, and reject every commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .._core.validation import Shown, must
from ..errors import NotSupported, brief
from .base import Engine, Guard, Op, OperationSet
from .shared_engine import SharedEngine


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
        """Return what only this kind of engine has, such as `ask`."""
        return getattr(self._engine, name)

    def share(self) -> ReadOnlyEngine:
        """Count one more user; see `SharedEngine.share`."""
        self._engine.share()
        return self

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await self._engine.read(fn, *args)

    def add(self, operation_set: OperationSet) -> None:
        self._engine.add(operation_set)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._engine.listen(topic, wake)

    def lease_now(self) -> float:
        return self._engine.lease_now()

    async def close(self) -> None:
        await self._engine.close()

    def close_now(self) -> None:
        """Close from code that has no event loop."""
        self._engine.close_now()
