"""A transaction on the writing connection of a SQLite file, and the storage errors of driver errors."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..._core.clock import Clock
from ...errors import StorageBusy, StorageCorrupt, StorageError, StorageFull
from ..base import MARK

MOST_KNOWN = 26_000  # entries remembered between transactions

_FULL_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
}
#: In a damaged file, the text of the driver's own messages may be undecodable.
DRIVER_ERRORS = (sqlite3.Error, UnicodeDecodeError)
#: Messages about damage for which the driver defines no code.
_DAMAGED = ("Could not decode to UTF-8", "unsupported file format")


def ours_to_tell(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Whether the error is about the file, and not about the statement that was executed."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    return code in _FULL_CODES or code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)


def translate(error: sqlite3.Error | UnicodeDecodeError, path: str) -> StorageError:
    """Return the storage error for a driver's error."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    if isinstance(error, UnicodeDecodeError) or any(sign in str(error) for sign in _DAMAGED):
        code = sqlite3.SQLITE_CORRUPT
    if code in _FULL_CODES:
        return StorageFull(f"no space to write {path} ({error}). Acknowledged writes are kept. Free some space")
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageBusy(
                f"{path} is locked by a program outside this library ({error}). Close it there, then try again"
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StorageCorrupt(f"{path} is not a readable database ({error}). It was not modified. Restore a backup")
        case sqlite3.SQLITE_CANTOPEN if _has_no_inode(path):
            return StorageFull(f"no inode is left to open {path} and its -wal and -shm ({error}). Delete some files")
        case sqlite3.SQLITE_CANTOPEN:
            return StorageError(
                f"{path}, or its -wal or -shm, could not be opened ({error}). Let this user read and write them and "
                "their directory; if many files are open, raise the limit (ulimit -n)"
            )
        case sqlite3.SQLITE_READONLY:
            return StorageError(
                f"{path} cannot be written ({error}). Let the user of this process write it, and its -wal and -shm"
            )
        case _:
            return StorageError(f"{path}: {error}")


def _has_no_inode(path: str) -> bool:
    """Whether the number of inodes of the file system is fixed and all are in use, which SQLite does not report."""
    if not hasattr(os, "statvfs"):  # pragma: no cover - Windows
        return False
    try:
        there = os.statvfs(os.path.dirname(path))
    except OSError:
        return False
    return there.f_files > 0 == there.f_ffree


class RowCache:
    """Values of the file that the writing connection keeps, valid until another connection commits.

    Measured: without it, a chain of 100 steps takes 1.1 to 1.3 times as long in NORMAL, and a drain with 16 slots 1.1
    times.
    """

    def __init__(self) -> None:
        self.fences: dict[str, str | None] = {}
        self.counters: dict[str, int] = {}
        self.journals: dict[str, int] = {}
        self.rows: dict[str, Any] = {}
        #: The mark of a file that is moved; "" if it was not read.
        self.mark: str | None = ""
        self._version = -1

    def check(self, conn: sqlite3.Connection) -> None:
        """Clear the cache if another connection committed. Called at the start of each transaction."""
        version = conn.execute("PRAGMA data_version").fetchone()[0]
        entries = len(self.fences) + len(self.counters) + len(self.journals) + len(self.rows)
        if version != self._version or entries > MOST_KNOWN:
            self._version = version
            self.forget()

    def forget(self) -> None:
        self.fences.clear()
        self.counters.clear()
        self.journals.clear()
        self.rows.clear()
        self.mark = ""


def own_fence(conn: sqlite3.Connection, key: str) -> str | None:
    """Return the fence of a key that is stored in no row of an operation set."""
    row = conn.execute("SELECT token FROM arc_carried WHERE key = ?", (key,)).fetchone()
    token: str | None = row[0] if row else None
    return token


class ConnectionOwner(Protocol):
    """What a transaction needs from its engine."""

    clock: Clock
    known: RowCache
    dead_looked_at: float
    fences: list[Callable[[Any, str], str | None]]

    def dead_holders(self, holders: Sequence[str]) -> tuple[str, ...]: ...


class SQLiteTx:
    """An open transaction on the writing connection."""

    __slots__ = ("_fences", "conn", "counters", "engine", "execute", "journals", "notified", "rows")

    def __init__(self, engine: ConnectionOwner, conn: sqlite3.Connection) -> None:
        self.engine: ConnectionOwner = engine
        self.conn: sqlite3.Connection = conn
        self._fences = engine.known.fences
        #: Numbers that an operation set keeps between transactions; cleared when another connection commits.
        self.counters: dict[str, int] = engine.known.counters
        #: The key of the first record of a run.
        self.journals: dict[str, int] = engine.known.journals
        #: Rows that the queue wrote; cleared at the same time. Journals use their `arrival`.
        self.rows: dict[str, Any] = engine.known.rows
        # Not `execute` of one cursor, which is faster: after an error on Python 3.11 the cursor keeps its statement,
        # and with it the transaction of a connection that was closed.
        self.execute: Callable[..., sqlite3.Cursor] = conn.execute
        self.notified: set[str] = set()

    def notify(self, topic: str) -> None:
        self.notified.add(topic)

    def fence(self, key: str, token: str | None) -> None:
        self._fences.pop(key, None)  # read again later: a row of an operation set overrides this table
        if key == MARK:
            self.engine.known.mark = ""
        if token is None:
            self.execute("DELETE FROM arc_carried WHERE key = ?", (key,))
        else:
            self.execute("INSERT OR REPLACE INTO arc_carried VALUES (?, ?)", (key, token))

    def fenced(self, key: str) -> str | None:
        try:
            return self._fences[key]
        except KeyError:
            token = self._fences[key] = self._stored_fence(key)
            return token

    def mark(self) -> str | None:
        """Return the mark of a file that is moved; see `moving_mark`."""
        if self.engine.known.mark == "":
            self.engine.known.mark = own_fence(self.conn, MARK)
        return self.engine.known.mark

    def _stored_fence(self, key: str) -> str | None:
        for fence in self.engine.fences:
            if (held := fence(self, key)) is not None:
                return held
        return own_fence(self.conn, key)

    def held(self, key: str, token: str | None) -> None:
        """Cache a fence that an operation set wrote to its own row."""
        if token is None:  # mostly of a claim that ended: its fence is not needed again
            self._fences.pop(key, None)
        else:
            self._fences[key] = token
