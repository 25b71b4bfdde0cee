"""One timer of an event loop for many who wait, of whom few are still there when their time comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextvars import Context
from operator import itemgetter

_NEVER = float("inf")


class Alarms:
    """Wakes those whose time has come, each in the event loop that was running when it was set.

    To set one and drop it costs less than a timer of the loop. What is woken runs in that context, or in an empty one:
    never in that of whoever happened to set the first.
    """

    def __init__(self, context: Context | None = None) -> None:
        self._context = Context() if context is None else context
        self._in: dict[asyncio.AbstractEventLoop, _Alarms] = {}

    def set(self, who: Hashable, seconds: float, wake: Callable[[], None]) -> None:
        """Call `wake` in so many seconds, in place of what was set for them before."""
        self._here().set(who, seconds, wake)

    def drop(self, who: Hashable) -> None:
        self._here().waiting.pop(who, None)

    def _here(self) -> _Alarms:
        loop = asyncio.get_running_loop()
        found = self._in.get(loop)
        if found is None:
            for closed in [each for each in tuple(self._in) if each.is_closed()]:
                self._in.pop(closed, None)
            found = self._in[loop] = _Alarms(loop, self._context)
        return found


class _Alarms:
    """Those of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        self.waiting: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._loop = loop
        self._context = context
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = _NEVER  # by the time of the loop

    def set(self, who: Hashable, seconds: float, wake: Callable[[], None]) -> None:
        at = self._loop.time() + seconds
        self.waiting[who] = (at, wake)
        if at < self._rings_at:
            self._ring_at(at)

    def _ring_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at, self._timer = at, self._loop.call_at(at, self._ring, context=self._context)

    def _ring(self) -> None:
        # Its time is one at which something is due, even where the loop's clock is not quite there.
        now, self._rings_at, self._timer = max(self._loop.time(), self._rings_at), _NEVER, None
        for _, who in sorted(((at, who) for who, (at, _) in self.waiting.items() if at <= now), key=itemgetter(0)):
            self._wake(who, now)
        if self.waiting:
            self._ring_at(min(at for at, _ in self.waiting.values()))

    def _wake(self, who: Hashable, now: float) -> None:
        at, wake = self.waiting.get(who, (_NEVER, None))
        if wake is None or at > now:
            return  # one that was woken before has dropped it, or set it anew
        del self.waiting[who]
        try:
            wake()
        except Exception as error:  # noqa: BLE001 - the others are to be woken all the same
            self._loop.call_exception_handler({"message": f"{wake!r} failed", "exception": error})
