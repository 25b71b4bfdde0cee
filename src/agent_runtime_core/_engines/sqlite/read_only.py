"""Read a SQLite file without writing, locking or creating anything.

The file is read in one of three ways, which `ReadOnlySQLite.source` chooses before each read:

closed   There is no log. SQLite opens it as immutable, without locks. A read during which the file changed is
         repeated.
open     There are a log and an index of the log (`-shm`), as while a process uses it, and after a crash. SQLite
         follows the log through that index, and does not write to it. Writers wait for no reader.
copied   SQLite could not read it without writing: the index of the log is missing, a rollback journal is there, or
         its schema is older. It is copied to a temporary directory, and migrated there. Later commits are not seen.

A set of tables that the file does not contain yet (no conversation was stored) is read from an empty file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple
from weakref import WeakSet

from ..._core.clock import SYSTEM, Clock
from ..._core.validation import Shown, must
from ...errors import InvalidArgument, StorageBusy, StorageError, brief
from ..base import FENCE_OPS, FENCE_REPLAYS, OperationSet
from ..os_errors import storage_errors
from ..shared_engine import SharedEngine, reject_commit
from .database import STORED_VERSIONS, check_version, checked
from .engine import FENCES, SQLiteEngine
from .group_commit import COMMIT_TIMEOUT
from .liveness import PollingNotifier
from .readers import Readers, view
from .transaction import DRIVER_ERRORS, own_fence, translate

IDLE: Final = 1.0  # seconds after which a connection is closed: a worker that ends cannot delete the log before
TRIES: Final = 50
PAUSE: Final = 0.02  # seconds between them
CLOSED: Final = "immutable=1"
OPEN: Final = "readonly_shm=1"
#: Errors while a process opens, closes or recovers the file.
_PASSING: Final = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PROTOCOL,
)  # fmt: skip


class Source(NamedTuple):
    """What a connection reads. It is opened again when a field changes."""

    path: str
    how: str  # CLOSED or OPEN
    state: tuple[int, ...]
    empty: str | None  # a file with the tables that `path` lacks
    changes: int  # of `empty` and of the copy


class ReadOnlySQLite(SharedEngine):
    """An engine that only reads a SQLite file. Use `ReadOnlySQLite.open(path)`, which counts its first user."""

    kind = "sqlite"
    read_only = True
    commit = commit_from_thread = commit_nowait = reject_commit

    _open: ClassVar[dict[str, Any]] = {}  # not shared: it holds no lock that a second one could lack
    _open_lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, clock: Clock = SYSTEM) -> ReadOnlySQLite:
        """Open an existing file.

        Raises:
            InvalidArgument: There is no file, or it is no store.
            StorageCorrupt: It is no database.
            StorageTooNew: A later version of this library wrote it.
        """
        where = checked(path)
        if not os.path.exists(where):
            fix = "Check the path, or create the store with AgentRunner.open(path) without read_only"
            raise must("path", "be an existing file with read_only=True", Shown(brief(os.fspath(path), 500)), fix)
        return cls(where, clock).share()

    def __init__(self, path: str, clock: Clock) -> None:
        super().__init__(path, path, clock)
        self.path: str = path
        self._lock = threading.RLock()  # while a copy is made
        self._copy: str | None = None
        self._empty: str | None = None
        self._changes = 0
        self._remove: Callable[[], object] = lambda: None  # deletes the temporary directory
        self._directory: str | None = None
        self._added: set[str] = set()  # names of operation sets
        self._sessions: WeakSet[FileSession] = WeakSet()
        self.readers: Readers = Readers(path, self._new_session, self._ensure_open, IDLE)
        self._notifier = PollingNotifier(self._signature)
        try:
            self._versions: dict[str, Any] = self._stored_versions()
            self.add(OperationSet("fence", FENCE_OPS, FENCE_REPLAYS, FENCES))
        except BaseException:
            self._remove()
            raise
        SQLiteEngine.connected.add(self)

    def _new_session(self) -> FileSession:
        session = FileSession(self)
        self._sessions.add(session)
        return session

    def _stored_versions(self) -> dict[str, Any]:
        found = self._read_now(_versions)
        if found is None:
            raise self._no_store()
        return dict(found)

    def _read_now(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Read in the thread of the caller."""
        session = self._new_session()
        try:
            return session.read(fn, args)
        except DRIVER_ERRORS as error:
            raise translate(error, self.path) from error
        finally:
            session.close()

    def _no_store(self) -> InvalidArgument:
        """Return the error for a file without the tables of this library."""
        got = Shown(f"{brief(self.path, 500)}, which has no tables of one")
        return must("path", "be a store of this library", got, "Check the path. Of a copy, copy the -wal file too")

    def back_up(self, target: str) -> None:
        """Write the file as it is at one moment to the new file `target`. Workers may write meanwhile."""
        with self._lock:
            self._read_now(_backed_up, target)

    def problems(self) -> list[str]:
        """Return what SQLite finds wrong with the pages and indexes of the file."""
        found: list[str] = self._read_now(_problems)
        return found

    # -- where to read

    def source(self) -> Source:
        """Return what to read now. If it must be a copy, the copy is made."""
        with self._lock, storage_errors(self.path):
            if self._copy is None:
                state = state_of(self.path)
                if state is None:
                    raise StorageError(f"{self.path} was deleted or moved while it was open here. Open it again")
                if not state[2]:  # SQLite would delete its log
                    raise self._no_store()
                if not _has(f"{self.path}-journal"):
                    if not _has(f"{self.path}-wal"):
                        return Source(self.path, CLOSED, state, self._empty, self._changes)
                    if os.access(f"{self.path}-shm", os.R_OK):
                        return Source(self.path, OPEN, state[:2], self._empty, self._changes)
                self._use_copy(_copied)
                assert self._copy is not None
            return Source(self._copy, CLOSED, (), None, self._changes)

    def _temporary(self, name: str) -> str:
        """Return the path of a file in the temporary directory."""
        if self._directory is None:
            self._directory, self._remove = temporary_directory(self)
        return os.path.join(self._directory, name)

    def _use_copy(self, make: Callable[[str, str], None]) -> None:
        """Have all reads use a copy of the file from now on."""
        target = self._temporary("copy.db")
        with storage_errors(target):
            make(self.path, target)
        self._changes += 1
        self._copy = target

    def _migrate(self, target: str, operation_set: OperationSet) -> None:
        """Bring an operation set in a temporary file to its newest version."""
        engine = SQLiteEngine(target, "normal", self.clock).share()
        try:
            engine.add(operation_set)
        finally:
            engine.close_now()
        self._changes += 1

    # -- the engine

    def add(self, operation_set: OperationSet) -> None:
        with self._lock:
            if operation_set.name in self._added:
                return
            newest = len(operation_set.migrations)
            version = check_version(self.path, operation_set.name, self._versions, newest)
            if version != newest:
                if version and self._copy is None:
                    self._use_copy(lambda _, target: self.back_up(target))
                target = self._copy
                if target is None:
                    target = self._empty = self._temporary("empty.db")
                self._migrate(target, operation_set)
            self._added.add(operation_set.name)

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._ensure_open()
        return await self.readers.read(fn, args)

    async def fence_of(self, key: str) -> str | None:
        token: str | None = await self.read(own_fence, key)
        return token

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._notifier.listen(topic, wake)

    def _signature(self) -> tuple[Any, ...]:
        """Return what changes when another process commits."""
        return state_of(self.path), state_of(f"{self.path}-wal")

    def _flush(self, loop: object) -> None:
        """Do nothing: there are no commits."""

    def _close_now(self) -> None:
        self.readers.stop()
        self._notifier.stop(COMMIT_TIMEOUT)
        self.readers.join(COMMIT_TIMEOUT)
        self._remove()

    def forked(self) -> None:
        """Called in a forked child. SQLite recorded this process's locks there, if the file was open."""
        if any(session.source is not None and session.source.how == OPEN for session in tuple(self._sessions)):
            SQLiteEngine.carry(self.path)


class FileSession:
    """What a thread reads with: at most one connection."""

    def __init__(self, engine: ReadOnlySQLite) -> None:
        self._engine = engine
        self._conn: sqlite3.Connection | None = None
        self.source: Source | None = None  # of the connection

    def read(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return `fn(view, *args)`, from one state of the file.

        Raises:
            StorageBusy: The file was written to during each of many tries.
        """
        for left in reversed(range(TRIES)):
            source = self._engine.source()
            error: Exception | None = None
            result: Any = None
            try:
                result = view(self._connection(source), fn, args)
            except Exception as failure:  # noqa: BLE001 - raised below, unless it is due to a change of the file
                error = failure
            if source.how == OPEN:
                again = error is not None and left > 0 and _passes(error)
            else:
                again = self._engine.source() != source
            if not again:
                if error is not None:
                    raise error
                return result
            self.close()
            time.sleep(PAUSE)
        raise StorageBusy(f"{self._engine.path} was written to each time it was read, {TRIES} times. Try again")

    def _connection(self, source: Source) -> sqlite3.Connection:
        if self._conn is None or self.source != source:
            self.close()
            self._conn = _connect(source)
            self.source = source
        return self._conn

    def close(self) -> None:
        """Close the connection."""
        conn, self._conn, self.source = self._conn, None, None
        if conn is not None:
            with contextlib.suppress(sqlite3.Error):
                conn.close()


def _connect(source: Source) -> sqlite3.Connection:
    conn = sqlite3.connect(
        _uri(source.path, source.how), uri=True, isolation_level=None, check_same_thread=False,
        timeout=COMMIT_TIMEOUT / 2, cached_statements=256,
    )  # fmt: skip
    try:
        # In memory: without a directory for temporary files, SQLite would sort in the current directory.
        for pragma in ("query_only=ON", "trusted_schema=OFF", "temp_store=MEMORY"):
            conn.execute(f"PRAGMA {pragma}")
        if source.empty is not None:
            # SQLite takes a table from the first file that contains it, so from `path` as soon as it is there.
            conn.execute("ATTACH ? AS arc_empty", (_uri(source.empty, CLOSED),))
    except BaseException:
        conn.close()
        raise
    return conn


def _uri(path: str, how: str) -> str:
    return f"{Path(path).as_uri()}?mode=ro&{how}"


def _has(path: str) -> bool:
    """Whether the file exists and is not empty."""
    state = state_of(path)
    return state is not None and state[2] > 0


def _passes(error: Exception) -> bool:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in _PASSING


def _versions(conn: sqlite3.Connection) -> list[tuple[str, Any]] | None:
    """Return the versions of the operation sets, None if the file is no store."""
    if conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'arc_schema'").fetchone() is None:
        return None
    return conn.execute(STORED_VERSIONS).fetchall()


def _copied(path: str, target: str) -> None:
    """Copy the file as it is on disk, and apply its log to the copy."""
    copy_file(path, target)
    with _full_at(target), contextlib.closing(sqlite3.connect(target)) as copy:  # closing it removes its log
        copy.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _backed_up(conn: sqlite3.Connection, target: str) -> None:
    with _full_at(target), contextlib.closing(sqlite3.connect(target)) as copy:
        conn.backup(copy)


def _problems(conn: sqlite3.Connection) -> list[str]:
    found = [str(text) for (text,) in conn.execute("PRAGMA integrity_check(20)")]
    return [] if found == ["ok"] else found


@contextlib.contextmanager
def _full_at(target: str) -> Iterator[None]:
    """Name the copy in the error of a full disk: the file that it is made of may be on another disk."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise translate(error, target) from error
        raise


COPY_ATTEMPTS: Final = 20
TICK: Final = 0.02  # seconds after which the modification time of a write differs, on every file system
_HEADER: Final = 32  # bytes of the header of a log. SQLite writes another header when it starts the log again
COPIED: Final = ("-wal", "-journal")


def state_of(path: str) -> tuple[int, int, int, int] | None:
    """Return which file is at the path, its size and its modification time; None if there is none."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


def copy_file(path: str, target: str) -> None:
    """Copy the file and its log to `target`, so that SQLite finds one state of the file there.

    A commit only appends to the log, and SQLite ignores the end of a log that is incomplete. So a copy is good if the
    file itself was not written meanwhile, and its log did not begin anew.

    Raises:
        StorageBusy: Checkpoints came in between each time.
        OSError: The system refused it.
    """
    for _ in range(COPY_ATTEMPTS):
        before = _fixed_parts(path)
        time.sleep(TICK)
        shutil.copyfile(path, target)
        for suffix in COPIED:
            _copy(path + suffix, target + suffix)
        if before == _fixed_parts(path):
            return
    raise StorageBusy(f"{path} was written to each time it was copied, {COPY_ATTEMPTS} times. Try again")


def _fixed_parts(path: str) -> tuple[Any, ...]:
    """Return what must not change while the file and its log are copied."""
    try:
        with open(f"{path}-wal", "rb") as log:
            header = log.read(_HEADER)
    except FileNotFoundError:
        header = b""
    return state_of(path), header, state_of(f"{path}-journal")


def _copy(source: str, target: str) -> None:
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        if os.path.exists(target):  # of an earlier try
            os.unlink(target)


def temporary_directory(owner: object) -> tuple[str, Callable[[], object]]:
    """Create a directory for its owner alone, and return it with a function that deletes it.

    It is also deleted when `owner` is, and when the process ends.
    """
    directory = tempfile.mkdtemp(prefix="agent-runtime-")
    return directory, weakref.finalize(owner, _delete, directory, os.getpid())


def _delete(directory: str, process: int) -> None:
    if os.getpid() == process:  # a forked child must not delete the files of its parent
        shutil.rmtree(directory, ignore_errors=True)
