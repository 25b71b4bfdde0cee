"""A SQLite database file: checks of its path, connections, and migrations."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ..._core.clock import SYSTEM
from ..._core.ids import path_text
from ..._core.lazy_import import load
from ..._core.validation import Shown, must, redacted_url
from ...errors import StorageBusy, StorageCorrupt, StorageError, StorageTooNew, brief
from ..base import OperationSet
from ..os_errors import storage_errors
from .live_directory import COMMIT, open_lock
from .liveness import CommitLock
from .transaction import DRIVER_ERRORS, translate

_VERSIONS = "CREATE TABLE IF NOT EXISTS arc_schema (concern TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
STORED_VERSIONS: Final = "SELECT concern, version FROM arc_schema"
#: Begins the name of the row that says which library wrote the schema of an operation set. A row, because earlier
#: releases insert rows of two columns. They read the rows of their own operation sets only.
_LIBRARY = "library of "

_MOVED = 0.5  # seconds that processes which open the file at the same time may hold a lock on it
_LOOK = 0.1  # seconds between checks that the file is still at its path


def checked(path: str | os.PathLike[str]) -> str:
    """Return the real path of a database file, or raise InvalidArgument if no such path can exist."""
    text = path_text(path)
    if text is None or text == ":memory:":
        raise must("path", "be the path of a database file", _quoted(path), "For a store in memory use memory://")
    where = os.path.realpath(text)
    if os.path.islink(where):
        raise must("path", "not be a symbolic link to itself", _quoted(text), "Delete the link, or choose another path")
    if os.path.isdir(where):
        raise must("path", "be a file", Shown(f"the directory {_quoted(text)}"), "Add the name of a file in it")
    if os.path.exists(where) and not os.path.isfile(where):
        got = Shown(f"{_quoted(text)}, which is a device, a pipe or a socket")
        raise must("path", "be a file", got, "Choose another path")
    if not os.path.isdir(os.path.dirname(where)):
        # A URL without its scheme, such as user:password@host/0, is read as a path.
        if (readable := redacted_url(text)) != text:
            fix = "Create the directory, or write a URL with its scheme, such as redis:// or postgresql://"
            raise must("path", "be in a directory that exists", _quoted(readable), fix)
        fix = f"Create the directory {_quoted(os.path.dirname(where))}"
        raise must("path", "be in a directory that exists", _quoted(text), fix)
    return where


def _quoted(path: object) -> Shown:
    return Shown(brief(path, 500))  # a path is longer than other values


def look(path: str) -> None:
    """Raise the driver's error for a file that is no database. Locks, writes and creates nothing."""
    uri = f"{Path(path).as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as conn:
        conn.execute("PRAGMA schema_version").fetchone()


def check_unused(path: str, live: str | os.PathLike[str]) -> None:
    """Raise StorageBusy for a file that was moved here while a process had it open under its old name.

    SQLite's own locks are on the file, whatever its name is. A program that uses it under this name made a `-shm`, and
    another process of ours the live directory.
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
    """Return SQLite's error if another connection holds a lock on the file; release all locks taken here."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as conn:
        try:
            conn.execute("PRAGMA locking_mode=EXCLUSIVE")
            conn.execute("BEGIN IMMEDIATE")
            conn.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            return error if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY else None
    return None


def check_version(path: str, name: str, versions: Mapping[str, object], newest: int) -> int:
    """Return the schema version of an operation set, 0 for none. Raise an error unless it can be migrated to `newest`.

    Args:
        path: The database file, for messages.
        name: The name of the operation set.
        versions: The rows of the table of versions.
        newest: The version of this library.

    Raises:
        StorageTooNew: The version is greater.
        StorageCorrupt: It is no version.
    """
    version = versions.get(name, 0)
    if type(version) is not int or version < 0:
        raise StorageCorrupt(
            f"{path}: its {name} schema has version {brief(version)}, which no release wrote. Restore a backup"
        )
    if version > newest:
        library = versions.get(f"{_LIBRARY}{name}")
        by = f", written by {brief(library)}" if isinstance(library, str) else ""
        raise StorageTooNew(
            f"{path}: its {name} schema has version {version}{by}, this library knows {newest}. "
            "Upgrade agent-runtime-core"
        )
    return version


FileId = tuple[int, int]


def file_id(path: str) -> FileId | None:
    """Return the device and inode of the file at the path; None if there is none."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    return there.st_dev, there.st_ino


class DatabaseFile:
    """A database file that is open. `lock` excludes commits of other processes while its schema or log changes."""

    def __init__(self, path: str, lock: CommitLock, *, flushes: bool, timeout: float) -> None:
        self.path: str = path
        self._lock = lock
        self._timeout = timeout
        self._synchronous = "FULL" if flushes else "NORMAL"
        self._looked = time.monotonic()
        with self._exclusive():
            self._create()
            self.writing: sqlite3.Connection = self.connect()
            try:
                self.writing.execute("PRAGMA journal_mode=WAL")
                self.writing.execute(_VERSIONS)
                self._versions: dict[str, object] = dict(self.writing.execute(STORED_VERSIONS))
                lock.record(name_of(path, os.path.dirname(lock.path)))
                #: The files at these paths. The log and its index exist once something was read.
                self.ids: dict[str, FileId] = {
                    each: there
                    for each in (path, f"{path}-wal", f"{path}-shm", lock.path)
                    if (there := file_id(each)) is not None
                }
                # Writers wait for locks themselves, or not at all.
                self.writing.execute("PRAGMA busy_timeout=0")
            except BaseException:
                self.writing.close()
                raise

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with storage_errors(self.path):
                had = stack.enter_context(self._lock.exclude_others(self._timeout))
            if not had:
                raise StorageBusy(
                    f"{self.path}: another process has been in a commit for {self._timeout:g} s. Check "
                    "whether it is suspended"
                )
            yield

    def _create(self) -> None:
        # Only a new file is opened here: closing a second descriptor of an open file would drop SQLite's locks.
        with contextlib.suppress(FileExistsError):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if hasattr(os, "fchmod"):
                    os.fchmod(fd, 0o600)  # the umask may have denied it to the owner
            finally:
                os.close(fd)

    def expect(self) -> None:
        """Raise StorageError if the file is not at its path any more; checks at most every `_LOOK` seconds.

        Without the file or its log, commits would be lost. Without the log's index or the lock file, other processes
        would overwrite them.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        for path, known in self.ids.items():
            if file_id(path) != known:
                raise StorageError(
                    f"{path} was deleted, moved or replaced while {'it' if path == self.path else self.path} was open "
                    "here. Close everything that uses it, put the right file there, and open it again"
                )
        self._looked = now

    def connect(self) -> sqlite3.Connection:
        """Open a connection that waits a limited time for programs outside this library."""
        conn = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=self._timeout / 2, cached_statements=256
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
        # Closing the last connection checkpoints, which must not coincide with another process's commit. If that
        # commit does not end, its process is connected, so this connection is not the last.
        with contextlib.ExitStack() as stack, contextlib.suppress(sqlite3.Error):
            with contextlib.suppress(OSError, StorageError):
                stack.enter_context(self._lock.exclude_others(self._timeout / 2))
            conn.close()

    def migrate(self, operation_set: OperationSet) -> None:
        """Migrate the schema of an operation set to its newest version.

        Raises:
            StorageTooNew: The schema of the file is newer.
        """
        if self._versions.get(operation_set.name, 0) == len(operation_set.migrations):
            return
        try:
            with self._exclusive():
                self._migrate(operation_set.name, operation_set.migrations)
        except DRIVER_ERRORS as error:
            raise translate(error, self.path) from error

    def _migrate(self, name: str, migrations: Sequence[str]) -> None:
        # On its own connection: another thread may be using the writing connection.
        conn = self.connect()
        try:
            # No flush: the next commit flushes the log up to itself.
            conn.execute("PRAGMA synchronous=NORMAL")
            # The application's own views, triggers and foreign keys need not be valid. Without these settings, a view
            # on a table that is gone makes ALTER TABLE fail, and a wrong foreign key to one of our tables a DELETE.
            conn.execute("PRAGMA legacy_alter_table=ON")
            conn.execute("PRAGMA foreign_keys=OFF")
            conn.execute("BEGIN IMMEDIATE")
            newest = len(migrations)
            version = check_version(self.path, name, dict(conn.execute(STORED_VERSIONS)), newest)
            for script in migrations[version:]:
                for statement in script.split(";\n"):
                    conn.execute(statement)
            if version != newest:
                # With a name before it, because SQLite would store "1.10" as a number.
                library = f"agent-runtime-core {load('agent_runtime_core:__version__')}"
                rows = ((name, newest), (f"{_LIBRARY}{name}", library))
                conn.executemany("INSERT OR REPLACE INTO arc_schema VALUES (?, ?)", rows)
            conn.execute("COMMIT")
        finally:
            conn.close()


MOUNTS: Final = Path("/proc/self/mountinfo")
_POINT: Final = 4  # the column of the mount point
_MOST: Final = 64  # bytes that `name_of` may have


def name_of(database: str, directory: str | Path) -> bytes:
    """Return what the lock file in the live directory says of this name: which database, and which directory.

    A hard link to the database is in another directory. So is a directory whose files were all linked (`cp -al`),
    although its lock file is the same.
    """
    return b"%d %d\n" % (os.stat(database).st_ino, os.stat(directory).st_ino)


def check_one_name(database: str) -> None:
    """Raise StorageError if `database` is a second name of a file, or may be a second name."""
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
            f"{database} must not be a separate mount point: its -wal and .live would stay outside of the mount. "
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
