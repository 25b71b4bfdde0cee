"""The limit of pending runs."""

from __future__ import annotations

import asyncio
from typing import Final

from ..queue.base import RunQueue
from .errors import Problem

RETRY_SECONDS: Final = 5
_COUNT_SECONDS: Final = 1.0  # age of the number of pending runs at which it is read again


class PendingRuns:
    """How many runs are pending: read at most once per second, plus those stored here since."""

    def __init__(self) -> None:
        self._count = 0
        self._until = 0.0
        self._counting = asyncio.Lock()

    async def check(self, queue: RunQueue, most: int | None) -> None:
        """Count one more, or raise Problem 429 if `most` runs are pending."""
        if most is None:
            return
        async with self._counting:  # the others wait for the number, or they would count on an older one
            now = queue.clock.boot()
            if now >= self._until:
                counts = await queue.counts()
                self._count = sum(number for (status, _), number in counts.runs.items() if status == "pending")
                self._until = now + _COUNT_SECONDS
        if self._count >= most:
            raise Problem.of(
                429, f"The queue has its limit of {most} pending runs. Repeat the request later.",
                type="urn:agent-runtime:queue-full", headers={"Retry-After": str(RETRY_SECONDS)},
            )  # fmt: skip
        self._count += 1

    def release(self) -> None:
        """Count one less: the run that `check` has counted was not stored."""
        self._count = max(self._count - 1, 0)
