"""The only place that asks the machine what time it is, or for chance."""

from __future__ import annotations

import asyncio
import datetime as _dt
import random
import time

# Counts through suspend where there is such a clock, so that a lease is lost when a laptop sleeps.
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


class Clock:
    """Wall time for people, boot time for leases, a sleep, and chance; a test passes another one."""

    def __init__(self, seed: int | None = None) -> None:
        self.random = random.Random(seed) if seed is not None else random.SystemRandom()

    def wall(self) -> float:
        """Seconds since the epoch; may jump."""
        return time.time()

    def boot(self) -> float:
        """Seconds since this machine started, the same in every process on it; never goes back."""
        return time.clock_gettime(_BOOT) if _BOOT is not None else time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM = Clock()


def aware(seconds: float) -> _dt.datetime:
    """An aware UTC datetime of that many seconds since the epoch."""
    return _dt.datetime.fromtimestamp(seconds, _dt.UTC)
