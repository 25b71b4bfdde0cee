"""Copy a SQLite file with its log, without opening it in SQLite, while other processes may write to it.

Only a file that this process has not open in SQLite may be copied: closing another descriptor of it drops the locks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from ...errors import StorageBusy

TRIES: Final = 20
TICK: Final = 0.02  # seconds after which a write has another modification time, on every file system
_HEADER: Final = 32  # bytes of the header of a log. SQLite writes another one when it starts the log again
COPIED: Final = ("-wal", "-journal")


def state_of(path: str) -> tuple[int, int, int, int] | None:
    """Return which file is at the path, its size and its modification time; None if there is none."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


def copy_file(path: str, target: str) -> None:
    """Copy the file and its log to `target`, so that SQLite finds one state of the file there.

    A commit only appends to the log, and SQLite ignores the end of a log that is incomplete. So a copy is good if the
    file itself was not written meanwhile, and its log did not begin anew.

    Raises:
        StorageBusy: Checkpoints came in between each time.
        OSError: The system refused it.
    """
    for _ in range(TRIES):
        before = _fixed_parts(path)
        time.sleep(TICK)
        shutil.copyfile(path, target)
        for suffix in COPIED:
            _copy(path + suffix, target + suffix)
        if before == _fixed_parts(path):
            return
    raise StorageBusy(f"{path} was written to each time it was copied, {TRIES} times. Try again")


def _fixed_parts(path: str) -> tuple[Any, ...]:
    """Return what must not change while the file and its log are copied."""
    try:
        with open(f"{path}-wal", "rb") as log:
            header = log.read(_HEADER)
    except FileNotFoundError:
        header = b""
    return state_of(path), header, state_of(f"{path}-journal")


def _copy(source: str, target: str) -> None:
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        if os.path.exists(target):  # of an earlier try
            os.unlink(target)


def temporary_directory(owner: object) -> tuple[str, Callable[[], object]]:
    """Create a directory for its owner alone, and return it with a function that deletes it.

    It is also deleted when `owner` is, and when the process ends.
    """
    directory = tempfile.mkdtemp(prefix="agent-runtime-")
    return directory, weakref.finalize(owner, _delete, directory, os.getpid())


def _delete(directory: str, process: int) -> None:
    if os.getpid() == process:  # a forked child must not delete the files of its parent
        shutil.rmtree(directory, ignore_errors=True)
