"""One object for each event loop, calls into an event loop from any thread, and long work in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

T = TypeVar("T")


class PerLoop(dict[asyncio.AbstractEventLoop, T]):
    """Objects by event loop: `objects[loop]` makes the object of a loop on its first use.

    Objects of closed loops are dropped when another loop is new. It is a dict because commits look their loop up, and
    a method call would cost more than the look-up. Each loop is only added by its own thread.

    Args:
        make: Makes the object of a loop.
        close: Receives each object whose loop is closed.
    """

    def __init__(
        self, make: Callable[[asyncio.AbstractEventLoop], T], close: Callable[[T], object] = lambda closed: None
    ) -> None:
        self._make = make
        self._close = close

    def __missing__(self, loop: asyncio.AbstractEventLoop) -> T:
        # A copy, because other threads add their loops and drop closed ones at the same time.
        for closed in [each for each in tuple(self) if each.is_closed()]:
            try:
                found = self.pop(closed)
            except KeyError:
                continue
            self._close(found)
        self[loop] = made = self._make(loop)
        return made

    def here(self) -> T:
        """Return the object of the running loop."""
        return self[asyncio.get_running_loop()]


def call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """Call `callback(*args)` in `loop` soon; callable from any thread and from signal handlers.

    Returns:
        False if the loop is closed, so that nothing will be called.
    """
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True


LONGEST_SLICE: Final = 0.003  # seconds of work between two iterations of the event loop


async def sliced(items: Iterable[T]) -> list[T]:
    """Return the items of a lazy iterable, such as `map(decode, texts)`, and yield to the event loop every 3 ms."""
    found: list[T] = []
    until = time.perf_counter() + LONGEST_SLICE
    for item in items:
        found.append(item)
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + LONGEST_SLICE
    return found
