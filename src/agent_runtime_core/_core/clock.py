"""The only place that asks the machine what time it is, or for chance."""

from __future__ import annotations

import asyncio
import datetime as _dt
import os
import random
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial

# Counts through suspend where there is such a clock, so that a lease is lost when a laptop sleeps.
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


class Clock:
    """Wall time for people, boot time for leases, a sleep, and chance; a test passes another one."""

    #: The last id made in order of time, so that the next one can be above it.
    last_id: int = 0
    #: Ids that may be made yet of the same chance, in that millisecond of wall time.
    ids: Iterator[str] = iter(())
    ids_ms: int = -1

    def __init__(self, seed: int | None = None) -> None:
        # Seeded by the system where no seed is given: its own generator is a system call each time.
        self.random: random.Random = random.Random(seed)

    #: Seconds since the epoch; may jump.
    wall: Callable[[], float] = staticmethod(time.time)

    #: Seconds since this machine started, the same in every process on it; never goes back. Each step asks twice.
    boot: Callable[[], float] = staticmethod(
        partial(time.clock_gettime, _BOOT) if _BOOT is not None else time.monotonic
    )

    def forked(self) -> None:
        """Two processes must not draw the same ids."""
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
TOO_LATE = 1e11  # seconds: what falls due after the year 9999 has no date, and whoever lists it fails

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SYSTEM.forked)


def aware(seconds: float) -> _dt.datetime:
    """An aware UTC datetime of that many seconds since the epoch; ValueError or OverflowError where there is none."""
    try:
        return _dt.datetime.fromtimestamp(seconds, _dt.UTC)
    except OSError as error:  # as the system's own calendar says it
        raise OverflowError(f"{seconds!r} is no time that a calendar has") from error
