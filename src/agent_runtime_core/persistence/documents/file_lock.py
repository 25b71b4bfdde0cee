"""One writer at a time on a directory, among threads and processes; the system lets go when a process dies."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...errors import StorageBusy, StorageCorrupt

if sys.platform == "win32":  # pragma: no cover - Windows
    import msvcrt
else:
    import fcntl

LOCK: Final = "lock"  # its name in the directory

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)

_RETRY = 0.002  # seconds between tries


@contextmanager
def locked(path: str, *, writable: bool = True, patience: float | None = None) -> Iterator[None]:
    """Hold the lock of that file, which is made if need be.

    Blocks until it is free, in order of arrival; with `patience`, for so many seconds, after which it is StorageBusy.
    """
    descriptor = _taken(path, writable, patience)
    try:
        yield
    finally:
        os.close(descriptor)


def _taken(path: str, writable: bool, patience: float | None) -> int:
    while True:
        descriptor = _made(path) if writable else os.open(path, _FLAGS | os.O_RDONLY)
        try:
            _lock(descriptor, path, patience)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StorageCorrupt(f"{path} is no regular file: move it away")
            if _still_there(path, found):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # It was removed while we waited: others may hold its successor.
        os.close(descriptor)


def _made(path: str) -> int:
    try:
        descriptor = os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT, 0o600)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, 0o600)  # whatever the umask left of it
    return descriptor


def _still_there(path: str, found: os.stat_result) -> bool:
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino)


def _lock(descriptor: int, path: str, patience: float | None) -> None:
    if patience is None and sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    until = None if patience is None else time.monotonic() + patience
    while not _lock_now(descriptor):
        if until is not None and time.monotonic() > until:
            raise StorageBusy(f"{path} is held by another process for longer than {patience:g} s; try again")
        time.sleep(_RETRY)


def _lock_now(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":  # pragma: no cover - Windows
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
