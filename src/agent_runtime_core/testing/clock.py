"""Clocks for tests: one is moved by hand, one skips every sleep."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
from collections.abc import Sequence

from .._core.clock import Clock
from .._core.validation import must

START = 1_700_000_000.0  # 2023-11-14, far from any daylight saving change
MOMENT = 0.001  # real seconds that JumpingClock leaves to other running work before each jump


class VirtualClock(Clock):
    """A clock that only moves when the test calls `advance`. Pass it to a backend: `InMemoryQueue(clock=clock)`.

    `wall()` starts at `start` (seconds since the epoch), `boot()` at 0. `advance(seconds)` moves both, from any
    thread. `sleep` returns when its time is reached; sleepers wake in order of their times. `random` is seeded:
    the same seed gives the same ids and jitter.

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
        """Seconds until the next sleeper wakes; None without sleepers."""
        with self._lock:
            left = [due for due, _, woken in self._sleepers if not woken.done()]
            return min(left) - self._boot if left else None

    async def until_sleeping(self, count: int = 1) -> None:
        """Wait until at least `count` calls of `sleep` are waiting."""
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
        """Move both clocks forward and wake the sleepers whose time is reached.

        Raises:
            InvalidArgument: `seconds` is negative or NaN.
        """
        if not seconds >= 0:
            raise must("seconds", "be at least 0", seconds, "Use set_wall to move wall() back")
        with self._lock:
            self._wall += seconds
            self._boot += seconds
            due = []
            while self._sleepers and self._sleepers[0][0] <= self._boot:
                due.append(heapq.heappop(self._sleepers)[2])
        for woken in due:
            _wake(woken)

    def set_wall(self, seconds: float) -> None:
        """Set only the wall clock, as an administrator or a time server does. It may move back."""
        self._wall = seconds


class JumpingClock(VirtualClock):
    """A clock that jumps to the time of the next sleeper at once."""

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

    def drop_sleepers(self) -> None:
        """Forget all sleepers: their process was killed, so their times must not hold back later jumps."""
        self._until.clear()


class RunClock(Clock):
    """The shared time with the random values of one run: its n-th draw is the same in every process.

    Args:
        clock: The shared time.
        drawn: The values that earlier processes of the run drew, "random" or "uuid4" in order; they are skipped.
    """

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
