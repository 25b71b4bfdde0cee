"""A SQLite database file as this library keeps it: where it may lie, its connections, its schema."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from ..._core.clock import SYSTEM
from ..._core.ids import path_text
from ...errors import InvalidArgument, StorageBusy, StorageCorrupt, StorageError, StorageTooNew, brief
from ..base import OperationSet
from ..os_errors import storage_errors
from .liveness import CommitLock
from .one_name import name_of
from .transaction import DRIVER_ERRORS, translate

_VERSIONS = "CREATE TABLE IF NOT EXISTS arc_schema (concern TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"

_MOVED = 0.5  # seconds that processes which open the file at the same time may hold a lock on it
_LOOK = 0.1  # seconds between looks whether the file is still there


def checked(path: str | os.PathLike[str]) -> str:
    """The real path of a database file; InvalidArgument for what cannot be one."""
    text = path_text(path)
    if text is None or text == ":memory:":
        raise InvalidArgument(
            f"{brief(path, 500)} is no path of a database file; for one that is never kept use memory://"
        )
    where = os.path.realpath(text)
    if os.path.islink(where):
        raise InvalidArgument(f"{brief(text, 500)} is a link that leads round in a circle")
    if os.path.isdir(where):
        raise InvalidArgument(f"{brief(text, 500)} is a directory, not a database file")
    if os.path.exists(where) and not os.path.isfile(where):
        raise InvalidArgument(f"{brief(text, 500)} is a device, a pipe or a socket, not a database file")
    if not os.path.isdir(os.path.dirname(where)):
        raise InvalidArgument(f"{brief(text, 500)}: the directory {brief(os.path.dirname(where), 500)} does not exist")
    return where


def look(path: str) -> None:
    """Let the driver refuse a file that is no database, with nothing locked, written or made beside it."""
    uri = f"{Path(path).as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as conn:
        conn.execute("PRAGMA schema_version").fetchone()


def check_unused(path: str, live: str | os.PathLike[str]) -> None:
    """Raise StorageBusy for a file that was moved here while a process had it open under its old name.

    SQLite's own locks are on the file, whatever its name is. A program that has it open under this name has made a
    `-shm`, and another process of ours the live directory.
    """
    until = time.monotonic() + _MOVED
    while (busy := _lock_error(path)) is not None and not os.path.exists(f"{path}-shm") and not os.path.exists(live):
        if time.monotonic() > until:
            raise StorageBusy(
                f"{path} is in use, but not under this name: another process opened it before it was moved here. "
                "End that process first, and move its -wal too"
            ) from busy
        # Processes that check at the same time must not wait for each other's read locks: none would get further.
        time.sleep(SYSTEM.random.uniform(0.001, 0.02))


def _lock_error(path: str) -> sqlite3.OperationalError | None:
    """Return SQLite's error if another connection has a lock on the file; release all locks taken here."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as conn:
        try:
            conn.execute("PRAGMA locking_mode=EXCLUSIVE")
            conn.execute("BEGIN IMMEDIATE")
            conn.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            return error if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY else None
    return None


FileId = tuple[int, int]


def file_id(path: str) -> FileId | None:
    """Which file is at the path."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    return there.st_dev, there.st_ino


class DatabaseFile:
    """The file, prepared for use; `lock` keeps other processes' commits apart from what it does."""

    def __init__(self, path: str, lock: CommitLock, *, flushes: bool, patience: float) -> None:
        self.path: str = path
        self._lock = lock
        self._patience = patience
        self._synchronous = "FULL" if flushes else "NORMAL"
        self._looked = time.monotonic()
        with self._alone():
            self._create()
            self.writing: sqlite3.Connection = self.connect()
            try:
                self.writing.execute("PRAGMA journal_mode=WAL")
                self.writing.execute(_VERSIONS)
                self._versions: dict[str, int] = dict(self.writing.execute("SELECT concern, version FROM arc_schema"))
                lock.record(name_of(path, os.path.dirname(lock.path)))
                #: Which files are at these paths. The log and its index are there once something was read.
                self.ids: dict[str, FileId] = {
                    each: there
                    for each in (path, f"{path}-wal", f"{path}-shm", lock.path)
                    if (there := file_id(each)) is not None
                }
                # Whoever writes waits in its own way, or not at all.
                self.writing.execute("PRAGMA busy_timeout=0")
            except BaseException:
                self.writing.close()
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with storage_errors(self.path):
                had = stack.enter_context(self._lock.exclude_others(self._patience))
            if not had:
                raise StorageBusy(
                    f"{self.path}: another process is in a commit for {self._patience:g} s already; was it stopped?"
                )
            yield

    def _create(self) -> None:
        # Only a file that was not there yet is opened here: closing another descriptor would drop SQLite's locks.
        with contextlib.suppress(FileExistsError):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if hasattr(os, "fchmod"):
                    os.fchmod(fd, 0o600)  # the umask may have taken it away from the owner
            finally:
                os.close(fd)

    def expect(self) -> None:
        """StorageError, within moments, where the file is not at its path any more: what is written would be lost.

        So it would be without its log; without the log's index, or the lock, others would write over it.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        for path, known in self.ids.items():
            if file_id(path) != known:
                raise StorageError(
                    f"{path} was deleted, moved or replaced while {'it' if path == self.path else self.path} was open "
                    "here: close all that use it, put the right file there, and open it again"
                )
        self._looked = now

    def connect(self) -> sqlite3.Connection:
        """A connection that waits for programs outside this library, but not for ever."""
        conn = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=self._patience / 2, cached_statements=256
        )
        try:
            conn.execute(f"PRAGMA synchronous={self._synchronous}")
            for pragma in ("wal_autocheckpoint=0", "foreign_keys=ON", "trusted_schema=OFF", "fullfsync=ON"):
                conn.execute(f"PRAGMA {pragma}")
        except BaseException:
            conn.close()
            raise
        return conn

    def disconnect(self, conn: sqlite3.Connection) -> None:
        # The last connection to close checkpoints, which must not meet another process's commit. One that does not end
        # is of a process that is connected too.
        with contextlib.ExitStack() as stack, contextlib.suppress(sqlite3.Error):
            with contextlib.suppress(OSError, StorageError):
                stack.enter_context(self._lock.exclude_others(self._patience / 2))
            conn.close()

    def migrate(self, concern: OperationSet) -> None:
        """Bring the concern's schema to its newest version; StorageTooNew where the file's is newer."""
        if self._versions.get(concern.name, 0) == len(concern.migrations):
            return
        try:
            with self._alone():
                self._migrate(concern)
        except DRIVER_ERRORS as error:
            raise translate(error, self.path) from error

    def _migrate(self, concern: OperationSet) -> None:
        # On a connection of its own: the writing one belongs to whoever has the turn to write.
        conn = self.connect()
        try:
            # No flush: the first commit that matters flushes the log up to itself.
            conn.execute("PRAGMA synchronous=NORMAL")
            # The application's own views, triggers and foreign keys need not be valid. Without these settings, a view
            # on a table that is gone makes ALTER TABLE fail, and a wrong foreign key to one of our tables a DELETE.
            conn.execute("PRAGMA legacy_alter_table=ON")
            conn.execute("PRAGMA foreign_keys=OFF")
            conn.execute("BEGIN IMMEDIATE")
            row = conn.execute("SELECT version FROM arc_schema WHERE concern = ?", (concern.name,)).fetchone()
            version, newest = (row[0] if row else 0), len(concern.migrations)
            if type(version) is not int or version < 0:
                raise StorageCorrupt(
                    f"{self.path}: its {concern.name} schema has version {brief(version)}, which none has: "
                    "restore a backup"
                )
            if version > newest:
                raise StorageTooNew(
                    f"{self.path}: its {concern.name} schema has version {version}, this library knows {newest}; "
                    "upgrade agent-runtime-core"
                )
            for script in concern.migrations[version:]:
                for statement in script.split(";\n"):
                    conn.execute(statement)
            if version != newest:
                conn.execute("INSERT OR REPLACE INTO arc_schema VALUES (?, ?)", (concern.name, newest))
            conn.execute("COMMIT")
        finally:
            conn.close()
