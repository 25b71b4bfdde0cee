"""Fence the writes of a run's code to document stores, so that a superseded claim writes nothing.

The claim is found through a context variable, from any code that the run calls. Only the built-in stores use it. If the
queue is on the same engine, a write is guarded by the claim itself. On another engine each write carries its fencing
token, and the engine rejects it after a greater token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from .._engines.base import INSTALL, Committer, Guard, Op
from ..errors import LeaseLost


class FencedWrites:
    """Commits writes under the claim of one attempt of a run.

    Args:
        guard: Returns the present claim.
        queue_engine: The engine of the queue.
        ended: Whether the attempt ended. Code that it left running can then write no more.
    """

    def __init__(self, guard: Callable[[], Guard], queue_engine: Committer, ended: Callable[[], bool] = bool) -> None:
        self._guard, self._queue_engine, self._ended = guard, queue_engine, ended

    def guard(self) -> Guard:
        """Return the present claim."""
        return self._guard()

    async def admit(self, guard: Guard) -> None:
        """Raise unless the code may write under this claim."""
        if self._ended() or not guard.token:
            raise LeaseLost(*guard)

    async def commit(self, target: Committer, ops: Sequence[Op]) -> list[Any]:
        """Commit `ops` if the claim is still valid.

        Raises:
            LeaseLost: The claim was superseded or released, or the attempt ended.
        """
        guard = self.guard()
        await self.admit(guard)
        if target is self._queue_engine:
            return await target.commit(guard, ops)
        return (await target.commit(None, [Op(INSTALL, tuple(guard)), *ops]))[1:]

    async def install(self, target: Committer) -> None:
        """Make the engine `target` reject every earlier claim on the run."""
        if target is not self._queue_engine:
            await target.commit(None, [Op(INSTALL, tuple(self.guard()))])


CURRENT_CLAIM: ContextVar[FencedWrites | None] = ContextVar("agent_runtime_core_claim", default=None)
