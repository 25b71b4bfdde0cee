"""Clocks for tests: you move the first by hand, the second skips every sleep."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from .._core.clock import Clock
from .._core.validation import must

START = 1_700_000_000.0  # 2023-11-14, far from any daylight saving change
_WALL_END: ContextVar[float] = ContextVar("virtual_wall_end")  # of the duration that this task sleeps for
FAR = 1e9  # seconds by which a clock is moved to see what follows it
MOMENT = 0.001  # real seconds that JumpingClock leaves to other running work before each jump


class VirtualClock(Clock):
    """A clock that only moves when the test calls `advance`. Pass it to a backend: `InMemoryQueue(clock=clock)`.

    `wall()` starts at `start` (seconds since the epoch), `boot()` and `monotonic()` at 0. `advance(seconds)` moves all,
    from any thread. `suspend(seconds)` moves all but `monotonic()`, as a suspended machine does. `sleep` returns when
    its time is reached; sleepers wake in order of their times. `random` is seeded: the same seed gives the same ids and
    jitter.

        clock = VirtualClock()
        month = asyncio.ensure_future(clock.sleep(30 * 86400))
        await clock.until_sleeping()
        clock.advance(30 * 86400)
        await month

    Args:
        start: The time of the wall clock at first, in seconds since the epoch.
        seed: The seed of the random values.

    Examples:
        >>> from agent_runtime_core.testing import VirtualClock
        >>> clock = VirtualClock(start=1000.0)
        >>> clock.advance(60)
        >>> clock.wall(), clock.monotonic()
        (1060.0, 60.0)
    """

    wall_check: float = math.inf  # `set_wall` and `suspend` wake who sleeps for a duration

    def __init__(self, start: float = START, *, seed: int = 0) -> None:
        super().__init__(seed)
        self._wall, self._boot, self._suspended = start, 0.0, 0.0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        #: When a sleeper wakes by the monotonic clock, its number, its future, and when it wakes by the wall clock.
        self._sleepers: list[tuple[float, int, asyncio.Future[None], float]] = []
        self._watchers: list[tuple[int, asyncio.Future[None]]] = []

    def wall(self) -> float:
        return self._wall

    def boot(self) -> float:
        return self._boot

    def monotonic(self) -> float:
        return self._awake()

    def _awake(self) -> float:
        """Return the monotonic time, even for a subclass whose clocks move when they are read."""
        return self._boot - self._suspended

    async def sleep_for(self, seconds: float) -> None:
        token = _WALL_END.set(self._wall + seconds)
        try:
            await super().sleep_for(seconds)
        finally:
            _WALL_END.reset(token)

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` moves the clock by that many seconds.

        Args:
            seconds: The seconds to wait.
        """
        loop = asyncio.get_running_loop()
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = loop.create_future()
        with self._lock:
            entry = (self._awake() + seconds, next(self._numbers), woken, _WALL_END.get(math.inf))
            heapq.heappush(self._sleepers, entry)
            watchers = [watcher for count, watcher in self._watchers if count <= self._asleep()]
        for watcher in watchers:
            _wake(watcher)
        await woken

    def _asleep(self) -> int:
        return sum(not woken.done() for _, _, woken, _ in self._sleepers)

    @property
    def next_due(self) -> float | None:
        """Seconds until the next sleeper wakes; None without sleepers."""
        with self._lock:
            left = [due for due, _, woken, _ in self._sleepers if not woken.done()]
            return min(left) - self._awake() if left else None

    async def until_sleeping(self, count: int = 1) -> None:
        """Wait until at least `count` calls of `sleep` are waiting.

        Args:
            count: How many calls.
        """
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
        """Move all clocks forward and wake the sleepers whose time is reached.

        Args:
            seconds: The seconds to move by.

        Raises:
            InvalidArgument: `seconds` is negative or NaN.
        """
        if not seconds >= 0:
            raise must("seconds", "be at least 0", seconds, "Use set_wall to move wall() back")
        with self._lock:
            self._wall += seconds
            self._boot += seconds
            now, due = self._awake(), []
            while self._sleepers and self._sleepers[0][0] <= now:
                due.append(heapq.heappop(self._sleepers)[2])
        for woken in due:
            _wake(woken)

    def suspend(self, seconds: float) -> None:
        """Move `wall()` and `boot()` forward and not `monotonic()`, as a machine does that is suspended so long.

        Durations that are over by the wall clock end; other sleepers sleep on.

        Args:
            seconds: The length of the suspend.

        Raises:
            InvalidArgument: `seconds` is negative or NaN.

        Examples:
            >>> from agent_runtime_core.testing import VirtualClock
            >>> clock = VirtualClock(start=0.0)
            >>> clock.suspend(60)
            >>> clock.boot(), clock.monotonic()
            (60.0, 0.0)
        """
        if not seconds >= 0:
            raise must("seconds", "be at least 0", seconds)
        with self._lock:
            self._boot += seconds
            self._suspended += seconds
        self.set_wall(self._wall + seconds)

    def moves(self, read: Callable[[], float]) -> bool:
        """Return whether `read()` follows this clock, which is moved for as long as that takes.

        Args:
            read: Returns a time.
        """
        before, now = read(), (self._wall, self._boot)
        self._wall, self._boot = self._wall + FAR, self._boot + FAR
        try:
            return read() - before > FAR / 2
        finally:
            self._wall, self._boot = now

    def set_wall(self, seconds: float) -> None:
        """Set only the wall clock, as an administrator or a time server does. It may move back.

        Args:
            seconds: The new time, in seconds since the epoch.
        """
        self._wall = seconds
        with self._lock:
            due = [entry for entry in self._sleepers if entry[3] <= seconds]
            for entry in due:
                self._sleepers.remove(entry)
            heapq.heapify(self._sleepers)
        for _, _, woken, _ in due:
            _wake(woken)


class JumpingClock(VirtualClock):
    """A clock that jumps to the time of the next sleeper immediately."""

    def __init__(self) -> None:
        super().__init__()
        self._until: dict[object, float] = {}

    async def sleep(self, seconds: float) -> None:
        sleeper, until = object(), self.monotonic() + seconds
        self._until[sleeper] = until
        try:
            await asyncio.sleep(0)
            while self.monotonic() < until:
                await asyncio.sleep(MOMENT)
                self.advance(max(min(self._until.values()) - self.monotonic(), 0.0))
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
        self.shared: Clock = clock
        for name in drawn:
            _ = self.random.random() if name == "random" else self.random.getrandbits(128)

    def wall(self) -> float:
        return self.shared.wall()

    def boot(self) -> float:
        return self.shared.boot()

    def monotonic(self) -> float:
        return self.shared.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self.shared.sleep(seconds)

    async def sleep_for(self, seconds: float) -> None:
        await self.shared.sleep_for(seconds)


def not_followed_by(clock: Clock, read: Callable[[], float]) -> VirtualClock | None:
    """Return the clock of a test on which `clock` is based, if `read()` does not follow it; else None."""
    while isinstance(clock, RunClock):
        clock = clock.shared
    return clock if isinstance(clock, VirtualClock) and not clock.moves(read) else None


def _wake(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # its loop is closed
        future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
