"""The slots of a worker: how many of its runs go on at once, and which of those that waited is the next to."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator

from .._core.clock import Clock
from .._core.context_vars import start_helper
from .._execution.run_control import Place

PATIENCE = 5.0  # seconds a run waits for a slot here, then others may have it
UNBOUND = sys.maxsize  # slots where no loop says how many


class Slots:
    """Whoever comes back from a wait has a free one in order of arrival, and before any run that is claimed."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self.count: int = UNBOUND
        self.busy: int = 0  # runs that use one: those that only wait do not
        self.waiting: dict[Place, list[asyncio.Future[bool]]] = {}  # for one, which is so only where none is free
        self.draining: bool = False  # nobody waits for one any more
        self._claimed_for = 0  # are kept for what a claim brings
        self._clock = clock
        self._ring = ring

    @property
    def free(self) -> int:
        return self.count - self.busy - self._claimed_for

    def take(self, place: Place) -> None:
        place.away = False
        self.busy += 1

    def leave(self, place: Place) -> None:
        """The run only waits, or has ended."""
        if not place.away:
            place.away = True
            self.busy -= 1
            self._pass_on()
            self._ring()

    async def back(self, place: Place) -> bool:
        """Go on when there is a slot; False where it takes so long that others had better have the run."""
        if not place.away:
            return True
        if self.free > 0:
            self.take(place)
            return True
        return not self.draining and await self._turn(place)

    def retake(self, place: Place) -> None:
        """Count a run that works again, even if no slot is free: its code runs already and cannot be delayed."""
        if place.away:
            self.take(place)
            for turn in self.waiting.pop(place, ()):
                _tell(turn, True)

    async def _turn(self, place: Place) -> bool:
        turn = asyncio.get_running_loop().create_future()
        turns = self.waiting.setdefault(place, [])
        turns.append(turn)
        timer = start_helper(self._clock.sleep(PATIENCE))
        timer.add_done_callback(lambda _: _tell(turn, False))
        try:
            return bool(await turn)
        finally:
            timer.cancel()
            turns.remove(turn)
            if not turns and self.waiting.get(place) is turns:
                del self.waiting[place]

    def _pass_on(self) -> None:
        while self.waiting and self.free > 0:
            place = next(iter(self.waiting))
            turns = [turn for turn in self.waiting.pop(place) if not turn.done()]
            if turns:  # else nobody is there who would leave it
                self.take(place)
            for turn in turns:
                _tell(turn, True)

    @contextlib.contextmanager
    def kept(self, count: int) -> Iterator[None]:
        """So many are for what a claim brings, which is under way."""
        self._claimed_for = count
        try:
            yield
        finally:
            self._claimed_for = 0
            self._pass_on()

    def drain(self) -> None:
        """What waits for a slot is not to wait any longer."""
        self.draining = True
        for turns in self.waiting.values():
            _tell(next((turn for turn in turns if not turn.done()), turns[0]), False)

    def allow(self, count: int = UNBOUND) -> None:
        self.count, self.draining = count, False
        self._pass_on()


def _tell(turn: asyncio.Future[bool], has_slot: bool) -> None:
    if not turn.done():
        turn.set_result(has_slot)
