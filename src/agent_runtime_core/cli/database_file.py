"""Check the file of a SQLite store: owner, permissions, journal mode, free space and file system."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .findings import ERROR, OK, WARNING, Finding
from .output import human_size

_MOUNTS: Final = "/proc/self/mountinfo"
#: File systems on which several machines, or a guest and its host, share files. SQLite's locks are not safe there.
_NETWORK: Final = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "lustre",
    "gfs2", "ocfs2", "beegfs", "fuse.s3fs", "fuse.gcsfuse", "vboxsf", "virtiofs", "prl_fs", "drvfs",
})  # fmt: skip
_LEAST_FREE: Final = 256 * 1024 * 1024  # bytes


def file_checks(path: str) -> Iterator[Finding]:
    """Yield what is right and wrong with the database file at that path."""
    path = os.path.realpath(path)
    if not os.path.isfile(path):
        return
    directory = os.path.dirname(path)
    yield from _permissions(path, directory)
    yield _journal_mode(path)
    yield from _free_space(path, directory)
    kind = file_system_of(path)
    if kind in _NETWORK:
        yield Finding(
            WARNING, "file system", f"{path} is on {kind}, where the locks of SQLite do not exclude other machines",
            "Move the file to a local disk, or use Redis",
        )  # fmt: skip
    elif kind is not None:
        yield Finding(OK, "file system", kind)


def _free_space(path: str, directory: str) -> Iterator[Finding]:
    if not hasattr(os, "statvfs"):
        return
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    size = sum(os.path.getsize(each) for each in (path, f"{path}-wal") if os.path.exists(each))
    about = f"{human_size(free)} free for a store of {human_size(size)}"
    enough = free > max(_LEAST_FREE, size // 10)
    yield Finding(OK if enough else WARNING, "disk", about, "" if enough else "Free some space, or run vacuum")


def _permissions(path: str, directory: str) -> Iterator[Finding]:
    there = os.stat(path)
    mode = stat.S_IMODE(there.st_mode)
    about = f"{path} belongs to user id {there.st_uid} with mode {mode:o}"
    if not os.access(path, os.R_OK | os.W_OK):
        yield Finding(ERROR, "permissions", f"{about}, and this user cannot write it", "Use the user of the workers")
    elif mode & (stat.S_IROTH | stat.S_IWOTH):
        yield Finding(WARNING, "permissions", f"{about}, so other users can read it", f"chmod 600 {path}")
    else:
        yield Finding(OK, "permissions", about)
    if not os.access(directory, os.W_OK | os.X_OK):
        yield Finding(
            ERROR, "permissions", f"this user cannot create files in {directory}", "SQLite needs that for its log"
        )
    elif os.stat(directory).st_mode & stat.S_IWOTH and not os.stat(directory).st_mode & stat.S_ISVTX:
        yield Finding(WARNING, "permissions", f"other users can replace files in {directory}", f"chmod o-w {directory}")


def _journal_mode(path: str) -> Finding:
    try:
        with contextlib.closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)) as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    except sqlite3.Error as error:
        return Finding(ERROR, "journal mode", f"{path} cannot be read: {error}", "Restore a backup")
    if mode == "wal":
        return Finding(OK, "journal mode", "wal")
    return Finding(WARNING, "journal mode", f"{mode}; the next process that opens the file changes it to wal")


def file_system_of(path: str, mounts: str = _MOUNTS) -> str | None:
    """Return the type of the file system of a path, as Linux names it; None if it is unknown."""
    try:
        lines = Path(mounts).read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= best:
            best, kind = len(point), after.split()[0]
    return kind
