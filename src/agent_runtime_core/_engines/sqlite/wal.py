"""The write-ahead log of a SQLite file: checkpoints limit its size, and it is extended ahead of use."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3

WAL_SIZE = 4 << 20  # bytes after which the holder of the commit lock checkpoints
WAIT_MS = 50  # how long a checkpoint waits for readers
COMPACT_WAIT_MS = 3000
_FRAME = 4096 + 24  # bytes of a page in the WAL
_AHEAD, _MOST_AHEAD = 1 << 17, 1 << 18  # bytes by which it is extended: the first time, and later
_PASSIVE = "PRAGMA wal_checkpoint(PASSIVE)"
_RESTART = "PRAGMA wal_checkpoint(RESTART)"


class WriteAheadLog:
    """Maintains the log. Its caller owns the writing connection and the commit lock.

    A flush that extends the file costs twice as much as one that does not. So the file is extended ahead of its use up
    to its usual size, in small parts, because an event loop may do it. After a checkpoint SQLite writes from the start
    of the file, which is never truncated. Bytes after the last frame have no valid checksum and are not read.
    """

    def __init__(self, path: str, conn: sqlite3.Connection, *, flushes: bool) -> None:
        self._wal: str = f"{path}-wal"
        self._conn: sqlite3.Connection = conn
        self._flushes: bool = flushes
        self._groups: int = 0  # committed since the last check
        self._before: int = 0  # committed between the last checkpoint and the last check
        self._look_after: int = 1  # groups until the next check; 1, because many processes commit no more than one
        self._per_group: float = 1.5  # frames of the log that a group takes; an estimate, measured later
        self._size: float = math.inf  # bytes at the last check

    def grown(self) -> bool:
        """Count a committed group; True if `maintain` is due, which takes longer than a group."""
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
        # With large commits the time is not spent on extending, and without flushes extending costs nothing.
        return self._flushes and size - self._size < 8 * _FRAME * self._groups

    def _look_again(self, frames: int) -> None:
        """Schedule the next check for when the log will have grown by about so many frames."""
        self._before += self._groups
        self._groups, self._look_after = 0, max(1, int(frames / self._per_group * 0.8))

    def maintain(self) -> None:
        frames = _MOST_AHEAD // _FRAME
        try:
            size = os.stat(self._wal).st_size
            if size >= WAL_SIZE:
                # Far above its size, readers block checkpoints: then it is worth waiting for them a moment.
                frames = self._checkpoint(_RESTART if size > 4 * WAL_SIZE else _PASSIVE)
                # Other processes write too, so the estimate decays slowly.
                groups = max(self._before + self._groups, 1)
                self._per_group = max(frames / groups, self._per_group * 0.95, 1.0)
                self._before = self._groups = 0
                frames = WAL_SIZE // _FRAME
        except (OSError, sqlite3.Error):
            pass  # tried again at the next check
        self._look_again(frames)

    def _checkpoint(self, mode: str) -> int:
        """Checkpoint and return the number of frames that the log had."""
        self._conn.execute(f"PRAGMA busy_timeout={WAIT_MS}")
        try:
            frames: int = self._conn.execute(mode).fetchone()[1]
            return frames
        finally:
            self._conn.execute("PRAGMA busy_timeout=0")

    def compact(self) -> None:
        """Return the space of deleted rows and of the log to the file system."""
        self._conn.execute(f"PRAGMA busy_timeout={COMPACT_WAIT_MS}")
        try:
            self._conn.execute("VACUUM")
            self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._conn.execute("PRAGMA busy_timeout=0")

    def _extend(self, ahead: int) -> int:
        """Append `ahead` zero bytes and return the new size. The next commit flushes them."""
        # Under SQLite's own lock: zeros written over frames of a program outside this library would damage the file.
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
