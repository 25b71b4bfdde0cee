"""Reject a database file under a second name.

The log `-wal`, its index `-shm` and the directory `.live` are found by the name of the file. Two processes that open
one file under two names share none of them: each overwrites what the other has committed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from ...errors import StorageError
from .live_directory import COMMIT, open_lock

MOUNTS: Final = Path("/proc/self/mountinfo")
_POINT: Final = 4  # the column of the mount point
_MOST: Final = 64  # bytes that `name_of` may have


def name_of(database: str, directory: str | Path) -> bytes:
    """Return what the lock file in the live directory says of this name: which database, and which directory.

    A hard link to the database has another directory. So has a directory whose files were all linked (`cp -al`),
    although its lock file is the same.
    """
    return b"%d %d\n" % (os.stat(database).st_ino, os.stat(directory).st_ino)


def check_one_name(database: str) -> None:
    """Raise StorageError if `database` is a second name of a file, or may be one."""
    try:
        links = os.stat(database).st_nlink
    except FileNotFoundError:
        return
    if links > 1 and not _is_first(database):
        raise StorageError(
            f"{database} must have one name, got {links} hard links: its -wal and .live are found by name, so two "
            "processes under two names would overwrite each other's commits. Use the name under which it was opened "
            f"first, or delete the other links; to use a backup that was made of links, copy it: cp {database} NEW"
        )
    if _is_mounted(database):
        raise StorageError(
            f"{database} must not be a mount point of its own: its -wal and .live would stay outside of the mount. "
            "Mount the directory, not the file"
        )


def _is_first(database: str) -> bool:
    directory = f"{database}.live"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, StorageError):
        fd = open_lock(os.path.join(directory, COMMIT))
        try:
            return os.read(fd, _MOST) == name_of(database, directory)
        finally:
            os.close(fd)
    return False


def _is_mounted(path: str) -> bool:
    """Whether something is mounted on the path itself; False where the system does not say."""
    point = os.fsencode(path)
    for special in b"\\ \t\n":  # written as octal numbers there
        point = point.replace(bytes([special]), b"\\%03o" % special)
    try:
        lines = MOUNTS.read_bytes().split(b"\n")
    except OSError:
        return False
    return any(point in line.split(b" ")[_POINT : _POINT + 1] for line in lines)
