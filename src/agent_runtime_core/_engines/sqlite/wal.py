"""The WAL of a SQLite file: kept from growing, and its file from being extended commit by commit."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3

WAL_SIZE = 4 << 20  # bytes after which the holder of the commit lock checkpoints
WAIT_MS = 50  # how long a checkpoint waits for readers
COMPACT_WAIT_MS = 3000
_FRAME = 4096 + 24  # bytes of a page in the WAL
_AHEAD, _MOST_AHEAD = 1 << 17, 1 << 18  # bytes by which it is extended at once: first, and then
_PASSIVE = "PRAGMA wal_checkpoint(PASSIVE)"
_RESTART = "PRAGMA wal_checkpoint(RESTART)"


class WriteAheadLog:
    """The log as the writing connection sees to it, under the commit lock.

    A flush that has to extend the file costs twice one that does not, so the file is extended ahead of
    its use up to its usual size, from the first group on and a little at a time, as a loop may do it. After
    each checkpoint it is begun anew from its start, and never truncated. What lies behind the last frame
    has no valid checksum and is not read.
    """

    def __init__(self, path: str, conn: sqlite3.Connection, *, flushes: bool) -> None:
        self._wal: str = f"{path}-wal"
        self._conn: sqlite3.Connection = conn
        self._flushes: bool = flushes
        self._groups: int = 0  # since the log was last looked at
        self._before: int = 0  # and those from when it was begun anew until then
        self._look_after: int = 1  # many a process makes no more, and others leave it all to those
        self._per_group: float = 1.5  # frames of the log that a group takes, until it is known better
        self._size: float = math.inf  # bytes it had when it was last looked at

    def grown(self) -> bool:
        """A group was committed; whether the log is to be tended now, which takes longer than a group."""
        self._groups += 1
        if self._groups < self._look_after:
            return False
        size, ahead = 0, _MOST_AHEAD
        with contextlib.suppress(OSError, sqlite3.Error):
            size = os.stat(self._wal).st_size
            if size >= WAL_SIZE:
                return True
            if self._is_short(size):
                ahead = min(max(size, _AHEAD), _MOST_AHEAD)
                size = self._extend(ahead)
        self._size = size
        self._look_again(ahead // _FRAME)
        return False

    def _is_short(self, size: int) -> bool:
        # Where commits are large it is not the extending that takes the time, and without flushes nothing.
        return self._flushes and size - self._size < 8 * _FRAME * self._groups

    def _look_again(self, frames: int) -> None:
        """When it will have grown by so many frames, about."""
        self._before += self._groups
        self._groups, self._look_after = 0, max(1, int(frames / self._per_group * 0.8))

    def maintain(self) -> None:
        frames = _MOST_AHEAD // _FRAME
        try:
            size = os.stat(self._wal).st_size
            if size >= WAL_SIZE:
                # Far beyond its size, readers are in the way: then it is worth a moment to wait for them.
                frames = self._checkpoint(_RESTART if size > 4 * WAL_SIZE else _PASSIVE)
                # Others write too, in turns: what was seen of them is forgotten slowly.
                groups = max(self._before + self._groups, 1)
                self._per_group = max(frames / groups, self._per_group * 0.95, 1.0)
                self._before = self._groups = 0
                frames = WAL_SIZE // _FRAME
        except (OSError, sqlite3.Error):
            pass  # another time
        self._look_again(frames)

    def _checkpoint(self, mode: str) -> int:
        """How many frames the log had."""
        self._conn.execute(f"PRAGMA busy_timeout={WAIT_MS}")
        try:
            frames: int = self._conn.execute(mode).fetchone()[1]
            return frames
        finally:
            self._conn.execute("PRAGMA busy_timeout=0")

    def compact(self) -> None:
        """Give the space of deleted rows back to the file system, and that of the log."""
        self._conn.execute(f"PRAGMA busy_timeout={COMPACT_WAIT_MS}")
        try:
            self._conn.execute("VACUUM")
            self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._conn.execute("PRAGMA busy_timeout=0")

    def _extend(self, ahead: int) -> int:
        """Its new size. The next commit flushes it."""
        # Under SQLite's own lock: zeros over what a program outside this library adds would ruin the file.
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            size, fd = os.stat(self._wal).st_size, os.open(self._wal, os.O_WRONLY)
            try:
                os.lseek(fd, size, os.SEEK_SET)
                return size + os.write(fd, bytes(ahead))
            finally:
                os.close(fd)
        finally:
            self._conn.execute("ROLLBACK")
