"""Which tests run beside others, and which alone, where the processes of pytest-xdist share the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

with contextlib.suppress(ImportError):
    import fcntl


class Room:
    """Many tests at a time, or one alone: a lock of readers and a writer between processes.

    It is two files in `folder`, which is the same for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._door, self._room = (os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("door", "room"))

    @contextmanager
    def entered(self, alone: bool) -> Iterator[None]:
        # Who waits to be alone keeps the door, so that nobody else comes in before.
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)
