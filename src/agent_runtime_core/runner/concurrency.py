"""The slots of a worker: how many of its runs go on at once, and which of those that waited is the next to."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator

from .._core.clock import Clock
from .._core.context_vars import start_helper
from .._execution.run_control import RunControl

REGAIN_TIMEOUT = 5.0  # seconds a run waits for a slot here, then others may have it
UNLIMITED = sys.maxsize  # slots where no loop says how many


class ConcurrencySlots:
    """Whoever comes back from a wait has a free one in order of arrival, and before any run that is claimed."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self.count: int = UNLIMITED
        self.busy: int = 0  # runs that use one: those that only wait do not
        self.waiting: dict[RunControl, list[asyncio.Future[bool]]] = {}  # for one, which is so only where none is free
        self.draining: bool = False  # nobody waits for one any more
        self._claimed_for = 0  # are kept for what a claim brings
        self._clock = clock
        self._ring = ring

    @property
    def free(self) -> int:
        return self.count - self.busy - self._claimed_for

    def take(self, place: RunControl) -> None:
        place.without_slot = False
        self.busy += 1

    def release(self, place: RunControl) -> None:
        """The run only waits, or has ended."""
        if not place.without_slot:
            place.without_slot = True
            self.busy -= 1
            self._grant_free_slots()
            self._ring()

    async def regain(self, place: RunControl) -> bool:
        """Go on when there is a slot; False where it takes so long that others had better have the run."""
        if not place.without_slot:
            return True
        if self.free > 0:
            self.take(place)
            return True
        return not self.draining and await self._wait_for_slot(place)

    def reclaim(self, place: RunControl) -> None:
        """Count a run that works again, even if no slot is free: its code runs already and cannot be delayed."""
        if place.without_slot:
            self.take(place)
            for turn in self.waiting.pop(place, ()):
                _grant(turn, True)

    async def _wait_for_slot(self, place: RunControl) -> bool:
        turn = asyncio.get_running_loop().create_future()
        turns = self.waiting.setdefault(place, [])
        turns.append(turn)
        timer = start_helper(self._clock.sleep(REGAIN_TIMEOUT))
        timer.add_done_callback(lambda _: _grant(turn, False))
        try:
            return bool(await turn)
        finally:
            timer.cancel()
            turns.remove(turn)
            if not turns and self.waiting.get(place) is turns:
                del self.waiting[place]

    def _grant_free_slots(self) -> None:
        while self.waiting and self.free > 0:
            place = next(iter(self.waiting))
            turns = [turn for turn in self.waiting.pop(place) if not turn.done()]
            if turns:  # else nobody is there who would leave it
                self.take(place)
            for turn in turns:
                _grant(turn, True)

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """So many are for what a claim brings, which is under way."""
        self._claimed_for = count
        try:
            yield
        finally:
            self._claimed_for = 0
            self._grant_free_slots()

    def stop_waiting(self) -> None:
        """What waits for a slot is not to wait any longer."""
        self.draining = True
        for turns in self.waiting.values():
            _grant(next((turn for turn in turns if not turn.done()), turns[0]), False)

    def resize(self, count: int = UNLIMITED) -> None:
        self.count, self.draining = count, False
        self._grant_free_slots()


def _grant(turn: asyncio.Future[bool], has_slot: bool) -> None:
    if not turn.done():
        turn.set_result(has_slot)
