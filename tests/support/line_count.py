"""Count the lines of Python that a block executes: work that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any


@contextmanager
def count_lines(*modules: ModuleType) -> Iterator[list[int]]:
    """Count the lines that the block executes in `modules`; each iteration of a loop counts.

    The list that the block receives gets the count when the block ends.
    """
    files = {module.__file__ for module in modules}
    counted, before = 0, sys.gettrace()
    counts: list[int] = []

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal counted
        counted += event == "line"
        return count

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return count if frame.f_code.co_filename in files else None

    sys.settrace(enter)
    try:
        yield counts
    finally:
        sys.settrace(before)
        counts.append(counted)
