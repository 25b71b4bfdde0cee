"""Work on many items in an event loop, which runs its other tasks in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")

LONGEST: Final = 0.003  # seconds of work between two iterations of the event loop


async def sliced(items: Iterable[T]) -> list[T]:
    """Return the items of a lazy iterable, such as `map(decode, texts)`, and yield to the event loop every 3 ms."""
    found: list[T] = []
    until = time.perf_counter() + LONGEST
    for item in items:
        found.append(item)
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + LONGEST
    return found
