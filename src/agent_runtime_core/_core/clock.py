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

# This clock counts while the machine is suspended, so that leases expire when a laptop sleeps.
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


class Clock:
    """Wall time for people, boot time for leases, sleep, and random values. Tests pass another clock."""

    #: The last UUIDv7, without its fixed bits, so that the next one can be greater.
    last_id: int = 0
    #: The next ids that share their random bits, for the millisecond `ids_ms` of wall time.
    ids: Iterator[str] = iter(())
    ids_ms: int = -1

    def __init__(self, seed: int | None = None) -> None:
        # A generator in this process, because that of the system would cost a system call each time.
        self.random: random.Random = random.Random(seed)

    #: Seconds since the epoch; may jump.
    wall: Callable[[], float] = staticmethod(time.time)

    #: Seconds since this machine started, the same in every process on it; never goes back. Each step reads it twice.
    boot: Callable[[], float] = staticmethod(
        partial(time.clock_gettime, _BOOT) if _BOOT is not None else time.monotonic
    )

    def forked(self) -> None:
        """Reseed in a forked child, which would draw the same ids as its parent otherwise."""
        self.random.seed()
        self.ids = iter(())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Call `callback` in the running loop, in an empty context, after so many seconds.

        The seconds are those of the event loop, which a test clock does not move. In the context of its caller the
        callback would belong to a run, and keep what the caller's context variables hold.
        """
        return asyncio.get_running_loop().call_later(seconds, callback, context=Context())


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
    except (OverflowError, ValueError):  # a datetime has at most four digits for the year
        return f"{seconds:.0f} s since 1970"
