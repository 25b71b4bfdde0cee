"""One timer of an event loop for many who wait, of whom few are still there when their time comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any

from ._core.per_loop import PerLoop

_NEVER = float("inf")
FEW = 64  # alarms that are no longer set, which nobody minds
#: [when it rings, the how manieth it is, for whom, what it calls]; the last two are None in one that is no longer set,
#: which keeps its place among the times.
_Alarm = list[Any]


class Alarms:
    """Wakes those whose time has come, each in the event loop that was running when it was set.

    To set one and drop it costs less than a timer of the loop. What is woken runs in that context, or in an empty one:
    never in that of whoever happened to set the first.
    """

    def __init__(self, context: Context | None = None) -> None:
        run_in = Context() if context is None else context
        self._in: PerLoop[_Alarms] = PerLoop(lambda loop: _Alarms(loop, run_in))

    def set(self, who: Hashable, seconds: float, wake: Callable[[], None]) -> None:
        """Call `wake` in so many seconds, in place of what was set for them before."""
        self._in[asyncio.get_running_loop()].set(who, seconds, wake)

    def drop(self, who: Hashable) -> None:
        self._in[asyncio.get_running_loop()].drop(who)


class _Alarms:
    """Those of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        self.waiting: dict[Hashable, _Alarm] = {}
        self._loop = loop
        self._context = context
        self._times: list[_Alarm] = []  # a heap of them, and of some that are no longer set
        self._set = 0  # how many were set
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = _NEVER  # by the time of the loop

    def set(self, who: Hashable, seconds: float, wake: Callable[[], None]) -> None:
        self.drop(who)
        at, self._set = self._loop.time() + seconds, self._set + 1
        self.waiting[who] = alarm = [at, self._set, who, wake]
        if len(self._times) > 2 * len(self.waiting) + FEW:
            self._times = list(self.waiting.values())
            heapify(self._times)
        else:
            heappush(self._times, alarm)
        if at < self._rings_at:
            self._ring_at(at)

    def drop(self, who: Hashable) -> None:
        if (alarm := self.waiting.pop(who, None)) is not None:
            alarm[2] = alarm[3] = None  # nothing is kept for what nobody waits for

    def _ring_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at, self._timer = at, self._loop.call_at(at, self._ring, context=self._context)

    def _ring(self) -> None:
        # Its time is one at which something is due, even where the loop's clock is not quite there.
        now, self._rings_at, self._timer = max(self._loop.time(), self._rings_at), _NEVER, None
        times, due = self._times, []  # and not what those that are woken set, however soon it is
        while times and (times[0][0] <= now or times[0][3] is None):
            due.append(heappop(times))
        for alarm in due:
            _, _, who, wake = alarm  # as one that was woken before has left it
            if wake is not None:
                self.drop(who)
                self._wake(wake)
        if times and times[0][0] < self._rings_at:
            self._ring_at(times[0][0])

    def _wake(self, wake: Callable[[], None]) -> None:
        try:
            wake()
        except Exception as error:  # noqa: BLE001 - the others are to be woken all the same
            self._loop.call_exception_handler({"message": f"{wake!r} failed", "exception": error})
