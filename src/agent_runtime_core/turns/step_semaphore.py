"""A limit on the steps that run at once on one event loop. The limit may change while steps run."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable


class StepSlots:
    """Concurrency slots for steps, granted in order of arrival."""

    def __init__(self) -> None:
        self._in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def acquired(self, limit: Callable[[], int]) -> AsyncIterator[None]:
        """Hold a slot inside the block. Waits while `limit()` slots are in use."""
        if self._waiting or self._in_use >= limit():
            await self._wait(limit)
        else:
            self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1
            self._wake_waiters(limit)

    async def _wait(self, limit: Callable[[], int]) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._wake_waiters(limit)  # the limit may have grown
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)
            else:
                self._in_use -= 1  # granted at the moment of the cancellation
                self._wake_waiters(limit)
            raise

    def _wake_waiters(self, limit: Callable[[], int]) -> None:
        while self._waiting and self._in_use < limit():
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._in_use += 1
                waiter.set_result(None)
