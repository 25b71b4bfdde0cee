"""Clocks and randomness. No other module reads the time of the machine or draws random values."""

from __future__ import annotations

import asyncio
import datetime as _dt
import os
import random
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial
from typing import Any

# This clock counts while the machine is suspended. Where there is none, leases do not run out in a suspend.
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


class Clock:
    """Three clocks, sleep, and random values. Tests pass another clock.

    * `wall` shows the time of day, and jumps when somebody sets it. A `deadline=` is compared with it alone.
    * `boot` never goes back and counts while the machine is suspended. Leases are written in it, because it is the same
      for all processes of the machine. It also measures how long something took that is only reported.
    * `monotonic` never goes back and stands still while the machine is suspended. Time limits of steps, attempts and
      calls are measured by it, so that a suspend does not use them up.

    A duration (a sleep, a delay, the time limit of a wait) ends when the wall clock or the monotonic clock says so,
    whichever is first: a machine that was suspended over its end is late otherwise, and so is a machine whose wall
    clock was set back.
    """

    #: Most seconds between two reads of the wall clock while a duration lasts in memory.
    wall_check: float = 5.0

    last_id: int = 0
    """The last UUIDv7, without its fixed bits, so that the next one can be greater."""
    ids: Iterator[str] = iter(())
    """The next ids that share their random bits, for the millisecond `ids_ms` of wall time."""
    ids_ms: int = -1
    """The millisecond of wall time that `ids` are for; -1 before the first."""

    def __init__(self, seed: int | None = None) -> None:
        # A generator in this process, because the generator of the system would cost a system call each time.
        self.random: random.Random = random.Random(seed)

    #: Seconds since the epoch; may jump.
    wall: Callable[[], float] = staticmethod(time.time)

    #: Seconds since this machine started, the same in every process on it; never goes back. Each step reads it twice.
    boot: Callable[[], float] = staticmethod(
        partial(time.clock_gettime, _BOOT) if _BOOT is not None else time.monotonic
    )

    #: Seconds that this machine was awake since some moment; never goes back. Only differences within a process count.
    monotonic: Callable[[], float] = staticmethod(time.monotonic)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "boot" in vars(cls) and "monotonic" not in vars(cls):
            # A clock that was written before `monotonic` existed. With the machine's, it would show suspends.
            cls.monotonic = _boot_of  # type: ignore[assignment]

    def forked(self) -> None:
        """Reseed in a forked child, which would draw the same ids as its parent otherwise."""
        self.random.seed()
        self.ids = iter(())

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds.

        Args:
            seconds: The seconds to wait.
        """
        await asyncio.sleep(seconds)

    async def sleep_for(self, seconds: float) -> None:
        """Sleep for a duration: until the wall clock or the sleep itself says that it is over.

        Args:
            seconds: The seconds to wait.
        """
        until = self.wall() + seconds
        while seconds > 0:
            step = min(seconds, self.wall_check)
            await self.sleep(step)
            seconds = min(seconds - step, until - self.wall())

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Call `callback` in the running loop, in an empty context, after so many seconds.

        The seconds are measured by the event loop, which a test clock does not move. In the context of its caller the
        callback would belong to a run, and keep what the caller's context variables hold.

        Args:
            seconds: The seconds to wait.
            callback: The function to call.

        Returns:
            A handle that can cancel the call.
        """
        return asyncio.get_running_loop().call_later(seconds, callback, context=Context())


def _boot_of(clock: Clock) -> float:
    return clock.boot()


class Duration:
    """A time span that ends when the wall clock or the monotonic clock says so, whichever is first.

    Args:
        clock: The clock.
        seconds: Its length.
        until: Where it ends by the wall clock, if it began earlier; then at most `seconds` are left of it.
        monotonic_end: Where it ends by the monotonic clock, if this process knows.
    """

    __slots__ = ("_clock", "monotonic_end", "until")

    def __init__(
        self, clock: Clock, seconds: float, until: float | None = None, monotonic_end: float | None = None
    ) -> None:
        self._clock = clock
        self.until: float = clock.wall() + seconds if until is None else until
        if monotonic_end is None:
            # If the wall clock was set back since it began, it does not last longer than it was to.
            monotonic_end = clock.monotonic() + min(seconds, max(self.until - clock.wall(), 0.0))
        self.monotonic_end: float = monotonic_end

    def left(self) -> float:
        """Return the seconds that are left of it; at most 0 once it ended."""
        return min(self.until - self._clock.wall(), self.monotonic_end - self._clock.monotonic())


SYSTEM = Clock()
TOO_LATE = 1e11  # seconds: a time after the year 9999 is no datetime, and to list such a run would fail

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SYSTEM.forked)


def aware(seconds: float) -> _dt.datetime:
    """Return the aware UTC datetime of that many seconds since the epoch.

    Raises:
        ValueError, OverflowError: There is no such datetime.
    """
    try:
        return _dt.datetime.fromtimestamp(seconds, _dt.UTC)
    except OSError as error:  # raised by the system's own calendar
        raise OverflowError(f"{seconds!r} seconds is outside the range of the calendar") from error


def shown_duration(seconds: float) -> str:
    """Return a duration for people, in the largest unit that it fills."""
    seconds = max(seconds, 0.0)  # the clocks of two machines differ
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def human_time(seconds: float) -> str:
    """Return a wall-clock time for people, in UTC and to the minute: `2026-11-25 19:41 UTC`."""
    try:
        return f"{aware(seconds):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError):  # the year of a datetime is limited to four digits
        return f"{seconds:.0f} s since 1970"
