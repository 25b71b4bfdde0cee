"""Clocks for tests: one that stands still until it is moved, and one that jumps over every sleep."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
from collections.abc import Sequence

from .._core.clock import Clock
from ..errors import InvalidArgument, brief

START = 1_700_000_000.0  # 2023-11-14, far from any daylight saving change
MOMENT = 0.001  # real seconds that a jumping clock gives to what is under way beside a sleep


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
            raise InvalidArgument(f"time moves on by a number of seconds of at least 0, not {brief(seconds)}")
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


class JumpingClock(VirtualClock):
    """A clock that jumps to the time of the next sleeper as soon as somebody sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self._until: dict[object, float] = {}

    async def sleep(self, seconds: float) -> None:
        sleeper, until = object(), self.boot() + seconds
        self._until[sleeper] = until
        try:
            await asyncio.sleep(0)
            while self.boot() < until:
                await asyncio.sleep(MOMENT)
                self.advance(max(min(self._until.values()) - self.boot(), 0.0))
        finally:
            self._until.pop(sleeper, None)

    def forget(self) -> None:
        """Nobody sleeps any more: those who did are dead."""
        self._until.clear()


class RunClock(Clock):
    """The time of all, and the chance of one run: the n-th number that it draws is the same in every life."""

    def __init__(self, clock: Clock, drawn: Sequence[str]) -> None:
        super().__init__(seed=1)
        self._clock = clock
        for name in drawn:
            _ = self.random.random() if name == "random" else self.random.getrandbits(128)

    def wall(self) -> float:
        return self._clock.wall()

    def boot(self) -> float:
        return self._clock.boot()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


def _wake(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # its loop is closed
        future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
