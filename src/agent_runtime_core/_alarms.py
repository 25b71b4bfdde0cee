"""One timer of an event loop for many who wait, of whom few are still there when their time comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from operator import itemgetter

_NEVER = float("inf")


class Alarms:
    """Wakes those of one event loop whose time has come. To set one and drop it costs less than a timer of the loop."""

    def __init__(self) -> None:
        self._set: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = _NEVER  # by the time of the loop

    def set(self, who: Hashable, seconds: float, wake: Callable[[], None]) -> None:
        """Call `wake` in so many seconds, from the running loop, in place of what was set for them before."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        self._set[who] = (at, wake)
        if at < self._rings_at:
            self._ring_at(loop, at)

    def drop(self, who: Hashable) -> None:
        self._set.pop(who, None)

    def _ring_at(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at, self._timer = at, loop.call_at(at, self._ring)

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        # Its time is one at which something is due, even where the loop's clock is not quite there.
        now, self._rings_at, self._timer = max(loop.time(), self._rings_at), _NEVER, None
        for _, who in sorted(((at, who) for who, (at, _) in self._set.items() if at <= now), key=itemgetter(0)):
            _, wake = self._set.pop(who)
            loop.call_soon(wake)
        if self._set:
            self._ring_at(loop, min(at for at, _ in self._set.values()))


_alarms: dict[asyncio.AbstractEventLoop, Alarms] = {}


def alarms(loop: asyncio.AbstractEventLoop) -> Alarms:
    """Those of that event loop."""
    found = _alarms.get(loop)
    if found is None:
        for closed in [each for each in tuple(_alarms) if each.is_closed()]:
            _alarms.pop(closed, None)
        found = _alarms[loop] = Alarms()
    return found
