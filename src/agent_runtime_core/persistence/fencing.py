"""Whose writes these are: the claim of the run whose code is being carried out, wherever it was called from.

Only our own document stores look at it. Where the queue is on the same engine the fence is the claim itself;
elsewhere each write brings its claim along, which a greater one that came before refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from .._engines.base import INSTALL, Committer, Guard, Op
from ..errors import LeaseLost


class FencedWrites:
    """The claim of one attempt on a run. `guard` names it as it is now; `home` is the engine of the queue.

    Once the attempt is `over`, what it left running writes nothing any more.
    """

    def __init__(self, guard: Callable[[], Guard], home: Committer, over: Callable[[], bool] = lambda: False) -> None:
        self._guard, self._home, self._over = guard, home, over

    async def commit(self, target: Committer, ops: Sequence[Op]) -> list[Any]:
        """Apply `ops` only while the claim holds."""
        guard = self._guard()
        if self._over() or not guard.token:
            raise LeaseLost(*guard)
        if target is self._home:
            return await target.commit(guard, ops)
        return (await target.commit(None, [Op(INSTALL, tuple(guard)), *ops]))[1:]

    async def install(self, target: Committer) -> None:
        """Have every earlier claim on the run refused there."""
        if target is not self._home:
            await target.commit(None, [Op(INSTALL, tuple(self._guard()))])


CURRENT_CLAIM: ContextVar[FencedWrites | None] = ContextVar("agent_runtime_core_claim", default=None)
