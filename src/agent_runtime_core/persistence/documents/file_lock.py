"""A lock of a directory, for threads and processes. The system releases it when a process dies."""

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

LOCK: Final = "lock"  # the name of the lock file

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def locked(path: str, *, shared: bool = False, writable: bool = True) -> Iterator[None]:
    """Wait for the lock of a file, and hold it, alone or shared.

    Args:
        path: The lock file. It is created, unless `writable` is False.
        shared: Allow other shared holders at the same time. Windows has no shared lock.
        writable: Whether this user may write there.
    """
    descriptor = _acquire(path, shared, writable)
    try:
        yield
    finally:
        os.close(descriptor)


def _acquire(path: str, shared: bool, writable: bool) -> int:
    while True:
        descriptor = _open_or_create(path) if writable else os.open(path, _FLAGS | os.O_RDONLY)
        try:
            _lock(descriptor, shared)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageCorrupt(f"{path} must be a regular file. Move it away.")
            if _is_same_file(path, status):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The file was removed during the wait: another process may hold the lock of a new file with this name.
        os.close(descriptor)


def _open_or_create(path: str) -> int:
    try:
        descriptor = os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT, 0o600)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, 0o600)  # the umask may have removed permissions of the owner
    return descriptor


def _is_same_file(path: str, status: os.stat_result) -> bool:
    try:
        current = os.lstat(path)
    except FileNotFoundError:
        return False
    return (current.st_dev, current.st_ino) == (status.st_dev, status.st_ino)


def _lock(descriptor: int, shared: bool) -> None:
    if sys.platform == "win32":  # pragma: no cover - Windows
        while True:
            with suppress(OSError):  # LK_LOCK gives up after ten seconds
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
    else:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
