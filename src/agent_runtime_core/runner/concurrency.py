"""Limit how many runs of a worker execute at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator

from .._core.clock import Clock
from .._core.context_vars import start_helper
from .._execution.run_control import RunControl

REGAIN_TIMEOUT = 5.0  # seconds that a run waits for a slot before it is released to the queue
UNLIMITED = sys.maxsize  # slots while no `run_loop` sets their number


class ConcurrencySlots:
    """The slots of a worker.

    A run that waits releases its slot. When it continues it gets the next free one, in order of arrival and before
    newly claimed runs. After `REGAIN_TIMEOUT` seconds without one it is released to the queue.

    Args:
        clock: The clock of the worker.
        notify: Called when a slot becomes free.
    """

    def __init__(self, clock: Clock, notify: Callable[[], None]) -> None:
        self.count: int = UNLIMITED
        self.busy: int = 0  # runs that use a slot; runs that only wait use none
        self.waiting: dict[RunControl, list[asyncio.Future[bool]]] = {}  # runs that wait for a slot; none is free then
        self.draining: bool = False  # runs do not wait for a slot any more
        self._reserved = 0  # slots for the runs of a claim that is being made
        self._clock = clock
        self._notify = notify

    @property
    def free(self) -> int:
        """The slots that are neither used nor reserved."""
        return self.count - self.busy - self._reserved

    def take(self, control: RunControl) -> None:
        """Have the run use a slot."""
        control.without_slot = False
        self.busy += 1

    def release(self, control: RunControl) -> None:
        """Free the slot of a run that only waits, or has ended."""
        if not control.without_slot:
            control.without_slot = True
            self.busy -= 1
            self._grant_free_slots()
            self._notify()

    async def regain(self, control: RunControl) -> bool:
        """Wait until the run has a slot again; return False if it must be released to the queue instead."""
        if not control.without_slot:
            return True
        if self.free > 0:
            self.take(control)
            return True
        return not self.draining and await self._wait_for_slot(control)

    def reclaim(self, control: RunControl) -> None:
        """Count a run that works again, even if no slot is free: its code runs already and cannot be delayed."""
        if control.without_slot:
            self.take(control)
            for future in self.waiting.pop(control, ()):
                _grant(future, True)

    async def _wait_for_slot(self, control: RunControl) -> bool:
        future = asyncio.get_running_loop().create_future()
        futures = self.waiting.setdefault(control, [])
        futures.append(future)
        timer = start_helper(self._clock.sleep(REGAIN_TIMEOUT))
        timer.add_done_callback(lambda _: _grant(future, False))
        try:
            return bool(await future)
        finally:
            timer.cancel()
            futures.remove(future)
            if not futures and self.waiting.get(control) is futures:
                del self.waiting[control]

    def _grant_free_slots(self) -> None:
        while self.waiting and self.free > 0:
            control = next(iter(self.waiting))
            futures = [future for future in self.waiting.pop(control) if not future.done()]
            if futures:  # else no run waits that would release the slot
                self.take(control)
            for future in futures:
                _grant(future, True)

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve slots for the runs of a claim while the block makes it."""
        self._reserved = count
        try:
            yield
        finally:
            self._reserved = 0
            self._grant_free_slots()

    def stop_waiting(self) -> None:
        """Have the runs that wait for a slot released to the queue."""
        self.draining = True
        for futures in self.waiting.values():
            _grant(next((future for future in futures if not future.done()), futures[0]), False)

    def resize(self, count: int = UNLIMITED) -> None:
        """Set how many runs may use a slot."""
        self.count, self.draining = count, False
        self._grant_free_slots()


def _grant(future: asyncio.Future[bool], has_slot: bool) -> None:
    if not future.done():
        future.set_result(has_slot)
