"""Run the function of a `ctx.transaction` inside a commit, and keep it off the tables and settings of this library."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from ...errors import brief
from ..base import FunctionFailed
from .transaction import DRIVER_ERRORS, SQLiteTx, ours_to_tell

SQL_LIMIT = 1.0  # seconds of SQL on the writer thread

T = TypeVar("T")

_PREFIX = "arc_"  # of the names of our tables, in any case: SQLite ignores case
_MENTIONED = re.compile(rf"(?<!\w){_PREFIX}\w*", re.IGNORECASE)
_SCHEMA = "SELECT type, name, sql FROM sqlite_master"
_PARENTS = 'SELECT "table" FROM pragma_foreign_key_list(?)'
_SEQUENCE = "sqlite_sequence"  # the next number of each AUTOINCREMENT table, ours too
#: The second argument of these is the name of a column.
_OF_COLUMNS = (sqlite3.SQLITE_READ, sqlite3.SQLITE_UPDATE)
_WRITES = (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE)
_ALTERS = (sqlite3.SQLITE_ALTER_TABLE, sqlite3.SQLITE_DROP_TABLE)
_CREATES = (
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_VTABLE,
    sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_CREATE_TRIGGER,
)
_ENDS = "begin, commit or roll back: the library commits it together with the record of its step"
_TEMPORARY = "create temporary tables, views or triggers: they would hide those of the file. Create one in the file"
_FORBIDDEN = {
    sqlite3.SQLITE_TRANSACTION: _ENDS,
    sqlite3.SQLITE_SAVEPOINT: _ENDS,
    sqlite3.SQLITE_ATTACH: "attach another database: its rows would not be in the same commit",
    sqlite3.SQLITE_DETACH: "detach a database",
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER: _TEMPORARY,
}


class _Guard:
    """The authorizer of one function, and the reason for its last denial.

    SQLite does not call an authorizer for the new name of a table, the parent of a foreign key, or the body of a view
    or trigger, so what was created is looked at after the function.
    """

    def __init__(self, name: str, conn: sqlite3.Connection) -> None:
        self._who = f"transaction {brief(name)} may not"
        self._conn = conn
        self._before = set(conn.execute(_SCHEMA))
        self._created = False
        self._alters = False  # the statement that is compiled now
        self.reason: str | None = None

    def begin_statement(self) -> None:
        self.reason, self._alters = None, False

    def allows(self, action: int, one: str | None, two: str | None, database: str | None, inner: str | None) -> int:
        self._alters = self._alters or action in _ALTERS
        self._created = self._created or self._alters or action in _CREATES
        reason = self._denial(action, one, two, database, inner)
        if reason is None:
            return sqlite3.SQLITE_OK
        self.reason = self.reason or reason
        return sqlite3.SQLITE_DENY

    def _denial(
        self, action: int, one: str | None, two: str | None, database: str | None, inner: str | None
    ) -> str | None:
        """Return why an action is denied, None if it is allowed. `inner` is the trigger, view or CTE with it."""
        if action in _FORBIDDEN:
            return f"{self._who} {_FORBIDDEN[action]}"
        for name in (one,) if action in _OF_COLUMNS else (two, one):
            if name and name.lower().startswith(_PREFIX):
                return self._reserved(name, f" in {brief(inner)}" if inner else "")
        if action == sqlite3.SQLITE_PRAGMA and (one, two) != ("data_version", None):  # a table of FTS5 reads that one
            return f"{self._who} use PRAGMA {one}: the settings of the connection are those of the library"
        # A temporary table, even a table that is renamed to one of our names, is found before it.
        if (action, database) == (sqlite3.SQLITE_INSERT, "temp"):
            return f"{self._who} {_TEMPORARY}"
        if one == _SEQUENCE and action in _WRITES and not self._alters:  # SQLite itself writes it for those
            return f"{self._who} write {_SEQUENCE}: it has the numbers of the library's tables too"
        return None

    def _reserved(self, name: str, where: str = "") -> str:
        return (
            f"{self._who} use table {brief(name)}{where}: names starting with {_PREFIX} are reserved for the tables of "
            "this library, whose rows only the library may read or write. Use tables with other names, and "
            "runner.get_run() to read a run"
        )

    def check_created(self) -> None:
        """Raise sqlite3.DatabaseError if what was created or renamed is, or uses, one of our tables."""
        if not self._created:
            return
        for kind, name, sql in set(self._conn.execute(_SCHEMA)) - self._before:
            for used in (name, *self._used_by(kind, name, sql or "")):
                if used.lower().startswith(_PREFIX):
                    where = "" if used == name else f" in {kind} {brief(name)}"
                    raise sqlite3.DatabaseError(self._reserved(used, where))

    def _used_by(self, kind: str, name: str, sql: str) -> Iterable[str]:
        if kind == "table" and not sql[:14].upper().startswith("CREATE VIRTUAL"):
            return [parent for (parent,) in self._conn.execute(_PARENTS, (name,))]
        return [] if kind == "index" else _MENTIONED.findall(sql)


class UserTransaction:
    """What `ctx.transaction` passes to its function: SQL inside the commit of the step's own record.

    It works until the function returns, and only in the thread that runs the function.
    """

    def __init__(self, name: str, conn: sqlite3.Connection, guard: _Guard) -> None:
        self._name = name
        self._conn = conn
        self._guard = guard
        self._thread: int | None = threading.get_ident()
        self._cursors: WeakSet[UserCursor] = WeakSet()

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Execute one statement; as `sqlite3.Connection.execute`."""
        return self._cursor().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        """Execute one statement for each of `parameters`; as `sqlite3.Connection.executemany`."""
        return self._cursor().executemany(sql, parameters)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the connection of ctx.transaction has no {name!r}: use execute(sql, parameters) and "
            "executemany(sql, rows); the library commits or rolls back"
        )

    def _cursor(self) -> UserCursor:
        self._check()
        cursor = UserCursor(self._conn, self)
        self._cursors.add(cursor)
        return cursor

    def _check(self) -> None:
        if self._thread != threading.get_ident():
            time.sleep(0)  # a thread that tries again and again would keep the interpreter lock from all others
            when = "after its function returned" if self._thread is None else "in another thread"
            raise sqlite3.ProgrammingError(
                f"the connection of transaction {brief(self._name)} must not be used {when}. Call ctx.transaction again"
            )
        # What came after a rollback would be committed alone.
        if not self._conn.in_transaction:
            raise sqlite3.OperationalError("an earlier statement failed so that SQLite rolled back the transaction")

    def _run(self, call: Callable[..., T], *args: Any) -> T:
        self._check()
        self._guard.begin_statement()
        try:
            return call(*args)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_AUTH or self._guard.reason is None:
                raise
            raise sqlite3.DatabaseError(self._guard.reason) from error

    def _end(self) -> None:
        """Refuse further use. A cursor that is kept half-way would hold the writing connection in the past."""
        self._thread = None
        for cursor in tuple(self._cursors):
            cursor.close()


class UserCursor(sqlite3.Cursor):
    """A cursor that ends with its transaction and does not lead to the writing connection."""

    def __init__(self, conn: sqlite3.Connection, transaction: UserTransaction) -> None:
        super().__init__(conn)
        self._transaction = transaction

    @property
    def connection(self) -> Any:
        return self._transaction

    def execute(self, sql: str, parameters: Any = ()) -> UserCursor:
        self._transaction._run(super().execute, sql, parameters)
        return self

    def executemany(self, sql: str, parameters: Iterable[Any]) -> UserCursor:
        self._transaction._run(super().executemany, sql, parameters)
        return self

    def executescript(self, script: str) -> NoReturn:
        raise sqlite3.ProgrammingError("executescript would commit first: execute one statement at a time")

    def __next__(self) -> Any:
        return self._transaction._run(super().__next__)

    def fetchone(self) -> Any:
        return self._transaction._run(super().fetchone)

    def fetchmany(self, size: int | None = None) -> list[Any]:
        return self._transaction._run(super().fetchmany, self.arraysize if size is None else size)

    def fetchall(self) -> list[Any]:
        return self._transaction._run(super().fetchall)


def run(tx: SQLiteTx, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `fn(connection, *args)` in a savepoint of the transaction and return its result.

    Raises:
        FunctionFailed: The function's own SQL was refused, or it raised what ends a program.
        Exception: What the function raised.
    """
    conn, clock = tx.conn, tx.engine.clock
    until = clock.monotonic() + SQL_LIMIT
    guard = _Guard(name, conn)
    handed = UserTransaction(name, conn, guard)
    conn.execute("SAVEPOINT arc_user")
    conn.set_authorizer(guard.allows)
    conn.set_progress_handler(lambda: clock.monotonic() > until, 10_000)
    try:
        try:
            result = fn(handed, *args)
            handed._check()
        finally:
            handed._end()
            conn.set_authorizer(None)
            conn.set_progress_handler(None, 0)
        guard.check_created()
    except BaseException as error:
        if conn.in_transaction:
            conn.execute("ROLLBACK TO arc_user")
            conn.execute("RELEASE arc_user")
        if (isinstance(error, DRIVER_ERRORS) and not ours_to_tell(error)) or not isinstance(error, Exception):
            raise FunctionFailed(error) from error
        raise
    conn.execute("RELEASE arc_user")
    return result
