"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading

from .._clock import Clock
from ..errors import InvalidArgument

START = 1_700_000_000.0  # 2023-11-14, far from any daylight saving change


class VirtualClock(Clock):
    """Time as an argument: give it to a backend (`InMemoryQueue(clock=clock)`), and move it with `advance`.

    `wall()` begins at `start` (seconds since the epoch) and `boot()` at 0; both stand still until
    `advance(seconds)`, from any thread. `sleep` returns when time has come that far, those who sleep
    in the order in which their time comes. `random` is seeded: the same seed gives the same ids and jitter.

        clock = VirtualClock()
        month = asyncio.ensure_future(clock.sleep(30 * 86400))
        await clock.until_sleeping()
        clock.advance(30 * 86400)
        await month
    """

    def __init__(self, start: float = START, *, seed: int = 0) -> None:
        super().__init__(seed)
        self._wall, self._boot = start, 0.0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._watchers: list[tuple[int, asyncio.Future[None]]] = []

    def wall(self) -> float:
        return self._wall

    def boot(self) -> float:
        return self._boot

    async def sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = loop.create_future()
        with self._lock:
            heapq.heappush(self._sleepers, (self._boot + seconds, next(self._numbers), woken))
            watchers = [watcher for count, watcher in self._watchers if count <= self._asleep()]
        for watcher in watchers:
            _wake(watcher)
        await woken

    def _asleep(self) -> int:
        return sum(not woken.done() for _, _, woken in self._sleepers)

    @property
    def next_due(self) -> float | None:
        """Seconds until the next sleeper wakes; None when nobody sleeps."""
        with self._lock:
            left = [due for due, _, woken in self._sleepers if not woken.done()]
            return min(left) - self._boot if left else None

    async def until_sleeping(self, count: int = 1) -> None:
        """Return as soon as at least `count` sleeps are under way."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, watcher)
        with self._lock:
            if self._asleep() >= count:
                return
            self._watchers.append(entry)
        try:
            await watcher
        finally:
            with self._lock:
                self._watchers.remove(entry)

    def advance(self, seconds: float) -> None:
        """Let that much time pass at once, and wake those whose time has come."""
        if not seconds >= 0:
            raise InvalidArgument(f"time moves on by a number of seconds of at least 0, not {seconds!r}")
        with self._lock:
            self._wall += seconds
            self._boot += seconds
            due = []
            while self._sleepers and self._sleepers[0][0] <= self._boot:
                due.append(heapq.heappop(self._sleepers)[2])
        for woken in due:
            _wake(woken)

    def set_wall(self, seconds: float) -> None:
        """Set the wall clock alone, as an administrator or a time server does: it may go back."""
        self._wall = seconds


def _wake(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # its loop is closed
        future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
