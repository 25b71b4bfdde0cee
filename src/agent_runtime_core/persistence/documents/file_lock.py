"""A lock of a directory among threads and processes; the system releases it when a process dies."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ...errors import StorageCorrupt

if sys.platform == "win32":  # pragma: no cover - Windows
    import msvcrt
else:
    import fcntl

LOCK: Final = "lock"  # its name in the directory

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def locked(path: str, *, shared: bool = False, writable: bool = True) -> Iterator[None]:
    """Hold the lock of that file alone, or with others that share it, once it is free.

    Args:
        path: The lock file. It is created, unless `writable` is False.
        shared: Let others hold it at the same time if they share it too. Windows has no shared lock.
        writable: Whether this user may write there.
    """
    descriptor = _taken(path, shared, writable)
    try:
        yield
    finally:
        os.close(descriptor)


def _taken(path: str, shared: bool, writable: bool) -> int:
    while True:
        descriptor = _made(path) if writable else os.open(path, _FLAGS | os.O_RDONLY)
        try:
            _lock(descriptor, shared)
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


def _lock(descriptor: int, shared: bool) -> None:
    if sys.platform == "win32":  # pragma: no cover - Windows
        while True:
            with suppress(OSError):  # LK_LOCK gives up after ten seconds
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
    else:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
