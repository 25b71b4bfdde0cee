"""Bars on time, held in the best of several tries: a machine that stands still for a moment breaks no promise.

And on work, which is counted and the same each time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

TRIES = 5
ROUNDS = 7


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


def times_another(call: Callable[[], object], other: Callable[[], object], most: float, times: int) -> None:
    """Hold what `call` costs the processor to `most` times what `other` costs; AssertionError if no try does.

    The two take turns, `times` calls each, and a try compares the least of ROUNDS turns: what a busy machine adds
    to one turn is not taken for the cost of the call.
    """
    took: list[float] = []
    for _ in range(TRIES):
        turns = [(_cpu(call, times), _cpu(other, times)) for _ in range(ROUNDS)]
        took.append(min(turn[0] for turn in turns) / min(turn[1] for turn in turns))
        if took[-1] < most:
            return
    raise AssertionError(f"not once below {most:g} times: {', '.join(f'{each:.3g}' for each in took)}")


def _cpu(call: Callable[[], object], times: int) -> float:
    since = time.process_time()
    for _ in range(times):
        call()
    return time.process_time() - since


@contextmanager
def work_in(*modules: ModuleType) -> Iterator[list[int]]:
    """Count the lines that Python carries out in these modules inside the block, each turn of a loop as one: the list
    gets their number."""
    files = {module.__file__ for module in modules}
    counted, before = 0, sys.gettrace()
    told: list[int] = []

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal counted
        counted += event == "line"
        return count

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return count if frame.f_code.co_filename in files else None

    sys.settrace(enter)
    try:
        yield told
    finally:
        sys.settrace(before)
        told.append(counted)
