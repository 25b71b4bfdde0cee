"""Places for steps that are at work at once, on one loop; how many there are may change while they are taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable


class StepSlots:
    """Taken in order of arrival."""

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, most: Callable[[], int]) -> AsyncIterator[None]:
        """Inside, one is taken; it waits while `most()` are."""
        if self._waiting or self._taken >= most():
            await self._turn(most)
        else:
            self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._hand_on(most)

    async def _turn(self, most: Callable[[], int]) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._hand_on(most)  # there may be more of them by now
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
            else:
                self._taken -= 1  # it was given in the same moment
                self._hand_on(most)
            raise

    def _hand_on(self, most: Callable[[], int]) -> None:
        while self._waiting and self._taken < most():
            place = self._waiting.popleft()
            if not place.done():
                self._taken += 1
                place.set_result(None)
