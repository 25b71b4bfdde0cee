"""Bars on time, held in the best of several tries: a machine that stands still for a moment breaks no promise."""

from __future__ import annotations

import time
from collections.abc import Iterator

TRIES = 5


def within(seconds: float, tries: int = TRIES) -> Iterator[None]:
    """Go round until one turn of the loop's body takes less than `seconds`; AssertionError if none does.

    `for _ in within(0.05): value = work()`. What the body does is done again, so it has to come to the same.
    """
    took: list[float] = []
    for _ in range(tries):
        since = time.perf_counter()
        yield
        took.append(time.perf_counter() - since)
        if took[-1] < seconds:
            return
    raise AssertionError(f"not once within {seconds:g} s: {', '.join(f'{each:.3g}' for each in took)} s")
