"""A transaction on the writing connection of a SQLite file, and what a driver's error means."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

from .._clock import Clock
from ..errors import StorageBusy, StorageCorrupt, StorageError, StorageFull

MOST_KNOWN = 20_000  # entries remembered between transactions
USER_SQL_LIMIT = 1.0  # seconds of SQL a ctx.transaction may take on the writer thread

_OUR_PREFIX = "arc_"  # of names of tables, in whatever case: to SQLite they are the same
_OUR_NAMES = "SELECT name FROM sqlite_master WHERE name LIKE 'arc!_%' ESCAPE '!'"
#: What these tell second is the name of a column.
_OF_COLUMNS = (sqlite3.SQLITE_READ, sqlite3.SQLITE_UPDATE)
_FULL_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
}
#: In a damaged file, the driver's own messages may be no text.
DRIVER_ERRORS = (sqlite3.Error, UnicodeDecodeError)
#: Damage that the driver has no code for.
_DAMAGED = ("Could not decode to UTF-8", "unsupported file format")
_FORBIDDEN_TO_USERS = {
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_SAVEPOINT,
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
}
#: How a table or view is made that stands before those of the file: before one of ours, too, where it is renamed to
#: that, as the new name is not told.
_TEMPORARY = (sqlite3.SQLITE_INSERT, "temp")


def ours_to_tell(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Whether the error is about the file, and not about what somebody asked of it."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    return code in _FULL_CODES or code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)


def translate(error: sqlite3.Error | UnicodeDecodeError, path: str) -> StorageError:
    """The error of ours that a driver's error means."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    if isinstance(error, UnicodeDecodeError) or any(sign in str(error) for sign in _DAMAGED):
        code = sqlite3.SQLITE_CORRUPT
    if code in _FULL_CODES:
        return StorageFull(f"no space to write {path} ({error}); nothing acknowledged is lost, free some and go on")
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageBusy(f"{path} is locked by a program outside this library ({error})")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StorageCorrupt(f"{path} is not a readable database ({error}); it is left as it is: restore a backup")
        case sqlite3.SQLITE_CANTOPEN if _has_no_inode(path):
            return StorageFull(f"no inode is left to open {path} and its -wal and -shm ({error}). Delete some files")
        case sqlite3.SQLITE_CANTOPEN:
            return StorageError(
                f"{path}, or its -wal or -shm, could not be opened ({error}). Let this user read and write them and "
                "their directory; if many files are open, raise the limit (ulimit -n)"
            )
        case sqlite3.SQLITE_READONLY:
            return StorageError(f"{path} cannot be written ({error}): let our user write it, and its -wal and -shm")
        case _:
            return StorageError(f"{path}: {error}")


def _has_no_inode(path: str) -> bool:
    """Whether the file system of the file has a fixed number of inodes, and all are in use: SQLite does not say so."""
    if not hasattr(os, "statvfs"):  # pragma: no cover - Windows
        return False
    try:
        there = os.statvfs(os.path.dirname(path))
    except OSError:
        return False
    return there.f_files > 0 == there.f_ffree


class FunctionFailed(Exception):
    """What a user's function raised, for the user: the driver's refusal of its SQL, or what is meant to end a program,
    which is for its caller to heed and not for the thread that writes for all."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class UserTransaction:
    """What `ctx.transaction` hands to its function: SQL inside the commit of the step's own record."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self._conn = conn
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self._cursor().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        return self._cursor().executemany(sql, parameters)

    def check(self) -> None:
        """Refuse to go on where SQLite undid it all, as it does for some errors: what came now would stand alone."""
        if not self._conn.in_transaction:
            raise sqlite3.OperationalError("an earlier statement failed so that SQLite rolled back the transaction")

    def _cursor(self) -> sqlite3.Cursor:
        self.check()
        cursor = self._conn.cursor()
        self._cursors.add(cursor)
        return cursor

    def close(self) -> None:
        """Close its cursors: one that is kept half-way would hold the writing connection in the past."""
        for cursor in tuple(self._cursors):
            cursor.close()


class Known:
    """What the writing connection remembers of the file, true as long as nobody else has committed to it."""

    def __init__(self) -> None:
        self.fences: dict[str, str | None] = {}
        self.counters: dict[str, int] = {}
        self.rows: dict[str, Any] = {}
        self._version = -1

    def check(self, conn: sqlite3.Connection) -> None:
        """To be called when a transaction has begun: SQLite tells whether another connection changed anything."""
        version = conn.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version or len(self.fences) + len(self.counters) + len(self.rows) > MOST_KNOWN:
            self._version = version
            self.forget()

    def forget(self) -> None:
        self.fences.clear()
        self.counters.clear()
        self.rows.clear()


class Home(Protocol):
    """What a transaction needs of its engine."""

    clock: Clock
    known: Known
    dead_looked_at: float
    fences: list[Callable[[Any, str], str | None]]

    def dead_holders(self, holders: Sequence[str]) -> tuple[str, ...]: ...


class SQLiteTx:
    """An open transaction on the writing connection."""

    __slots__ = ("_conn", "_fences", "counters", "engine", "execute", "rings", "rows")

    def __init__(self, engine: Home, conn: sqlite3.Connection) -> None:
        self.engine: Home = engine
        self._conn = conn
        self._fences = engine.known.fences
        #: Numbers a concern may keep here from one transaction to the next; forgotten when somebody else commits.
        self.counters: dict[str, int] = engine.known.counters
        #: Rows that a concern has written, under the same terms.
        self.rows: dict[str, Any] = engine.known.rows
        # Not that of one cursor for all, which is faster: after an error, Python 3.11 has it keep its statement, and so
        # the transaction of a connection that was closed meanwhile.
        self.execute: Callable[..., sqlite3.Cursor] = conn.execute
        self.rings: set[str] = set()

    def ring(self, topic: str) -> None:
        self.rings.add(topic)

    def fence(self, key: str, token: str | None) -> None:
        self._fences.pop(key, None)  # looked up anew: a concern's own row goes before what is stored here
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

    def _stored_fence(self, key: str) -> str | None:
        for fence in self.engine.fences:
            if (held := fence(self, key)) is not None:
                return held
        row = self.execute("SELECT token FROM arc_carried WHERE key = ?", (key,)).fetchone()
        token: str | None = row[0] if row else None
        return token

    def held(self, key: str, token: str | None) -> None:
        """What a concern's own row says of that fence from now on."""
        if token is None:  # of one that has ended, mostly: it is not asked for again
            self._fences.pop(key, None)
        else:
            self._fences[key] = token

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a user's function here, kept off our tables and our transaction control, and in the file."""
        conn, clock = self._conn, self.engine.clock
        until = clock.boot() + USER_SQL_LIMIT
        before = conn.execute(_OUR_NAMES).fetchall()
        altered = False  # what a table is renamed to is not told

        def allowed(action: int, one: str | None, two: str | None, database: str | None, _: str | None) -> int:
            nonlocal altered
            altered = altered or action == sqlite3.SQLITE_ALTER_TABLE
            names = (one,) if action in _OF_COLUMNS else (one, two)
            ours = any(name and name.lower().startswith(_OUR_PREFIX) for name in names)
            forbidden = action in _FORBIDDEN_TO_USERS or (action, database) == _TEMPORARY
            return sqlite3.SQLITE_DENY if ours or forbidden else sqlite3.SQLITE_OK

        conn.execute("SAVEPOINT arc_user")
        conn.set_authorizer(allowed)
        conn.set_progress_handler(lambda: clock.boot() > until, 10_000)
        handed = UserTransaction(conn)
        try:
            result = fn(handed, *args)
            handed.check()
            if altered and conn.execute(_OUR_NAMES).fetchall() != before:
                raise sqlite3.DatabaseError("not authorized: names that begin with arc_ are those of this library")
        except BaseException as error:
            self._uncall(conn, handed)
            if conn.in_transaction:
                conn.execute("ROLLBACK TO arc_user")
                conn.execute("RELEASE arc_user")
            if (isinstance(error, DRIVER_ERRORS) and not ours_to_tell(error)) or not isinstance(error, Exception):
                raise FunctionFailed(error) from error
            raise
        self._uncall(conn, handed)
        conn.execute("RELEASE arc_user")
        return result

    @staticmethod
    def _uncall(conn: sqlite3.Connection, handed: UserTransaction) -> None:
        handed.close()
        conn.set_authorizer(None)
        conn.set_progress_handler(None, 0)
