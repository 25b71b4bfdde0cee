"""Run the functions of `ctx.transaction`, each in a transaction on a separate connection.

The function comes first, and only then is the run locked: its claim is checked, and its record is stored. So a slow
function delays neither heartbeats nor other runs. If the claim is superseded before that, nothing is committed.

Later commits of the same run wait for its function. Otherwise its record would be stored after a record with a greater
number.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, NoReturn

from ..._core.threads import started
from ...errors import LeaseLost, StorageBusy, StorageClosed, brief
from ..base import FunctionFailed
from ..commit_request import CommitRequest, resolve_all
from .url import driver

STATEMENT_SECONDS: Final = 10.0
MOST_OPEN: Final = 4  # functions of one process at the same time, each with a connection
_IN_TRANSACTION: Final = 2  # `psycopg.pq.TransactionStatus.INTRANS`
_BEGIN: Final = f"SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = '{STATEMENT_SECONDS:g}s'"
# A deferred constraint that is broken is the function's error, not the error of its commit.
_END: Final = "SET CONSTRAINTS ALL IMMEDIATE; SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = 0"
# Each use of a table, in a view or a trigger too, locks it until the end of the transaction. The library locked
# `fences`, and looked into `journal`.
_USED: Final = (
    "SELECT c.relname FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE l.pid = pg_backend_pid()"
    " AND l.locktype = 'relation' AND c.relnamespace = to_regnamespace(?) AND c.relkind IN ('r', 'v', 'S')"
    " AND (c.relname, l.mode) NOT IN (('fences', 'RowExclusiveLock'), ('fences', 'AccessShareLock'),"
    " ('journal', 'AccessShareLock')) LIMIT 1"
)
_NOT_CODE: Final = re.compile(
    r"--[^\n]*|/\*.*?\*/|\b[eE]'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'|\$(\w*)\$.*?\$\1\$", re.DOTALL
)
_FIRST: Final = re.compile(r"\s*(\w+(?:\s+(?:LOCAL|CONSTRAINTS|(?:WORK\s+|TRANSACTION\s+)?TO)\b)?)", re.IGNORECASE)
_TEMPORARY: Final = re.compile(r"\s*CREATE\s+(?:\w+\s+)?TEMP(?:ORARY)?\b(?!.*\bON\s+COMMIT\s+DROP\b)", re.I | re.DOTALL)
_ENDS: Final = {"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "PREPARE"}
ENDS: Final = "begin, commit or roll back: the library commits it together with the record of its step"
_OF_SESSION: Final = {"SET", "RESET", "DISCARD", "LISTEN", "UNLISTEN", "LOAD", "EXECUTE", "DEALLOCATE", "DECLARE"}


class AppliedMeanwhile(Exception):
    """An earlier try of the same commit, whose reply was lost, was applied while the function ran."""


class _Guard:
    """What the connection of one function may be used for.

    Args:
        name: The name of the step.
        schema: The schema of the library.
    """

    def __init__(self, name: str, schema: str) -> None:
        self._name, self._schema = brief(name), schema
        self._reserved = re.compile(rf'(?<![\w."])(?:{schema}|"{schema}")\s*\.\s*"?(\w*)', re.IGNORECASE)
        self._thread: int | None = threading.get_ident()

    def check(self) -> None:
        """Raise ProgrammingError outside of the function or its thread."""
        if self._thread != threading.get_ident():
            when = "after its function returned" if self._thread is None else "in another thread"
            raise driver().ProgrammingError(
                f"the connection of transaction {self._name} must not be used {when}. Call ctx.transaction again"
            )

    def check_query(self, query: Any, raw: Any) -> None:
        """Raise InsufficientPrivilege for a statement that would end the transaction, or outlive it."""
        self.check()
        if hasattr(query, "as_string"):
            query = query.as_string(raw)
        text = _NOT_CODE.sub(" ", query.decode("utf-8", "replace") if isinstance(query, bytes) else str(query))
        text = text.strip().rstrip("; \n\t")
        if ";" in text:
            raise self.denied("execute several statements together: execute one at a time")
        found = _FIRST.match(text)
        first = found[1].upper() if found else ""
        if first in _ENDS:
            raise self.denied(ENDS)
        if first in _OF_SESSION:
            raise self.denied(f"use {first}: the connection is used again. SET LOCAL ends with the transaction")
        if _TEMPORARY.match(text):
            raise self.denied("create temporary tables that outlive it. Add ON COMMIT DROP")
        if (used := self._reserved.search(text)) is not None:
            raise self.denied_table(used[1])

    def denied_table(self, table: str) -> Exception:
        """Return the error for the use of a table of this library."""
        return self.denied(
            f"use table {self._schema}.{table}: the schema {self._schema} is reserved for the tables of this library. "
            "Use tables of another schema, and runner.get_run() to read a run"
        )

    def denied(self, what: str) -> Exception:
        """Return the error for something that a function may not do."""
        error: Exception = driver().errors.InsufficientPrivilege(f"transaction {self._name} may not {what}")
        return error

    def end(self) -> None:
        """Refuse further use."""
        self._thread = None


@cache
def _cursor_class() -> Any:
    class UserCursor(driver().Cursor):  # type: ignore[misc]
        """A cursor that ends with its transaction."""

        def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
            self.connection.guard.check_query(query, self.connection)
            return super().execute(query, params, **options)

        def executemany(self, query: Any, params: Any, **options: Any) -> Any:
            self.connection.guard.check_query(query, self.connection)
            return super().executemany(query, params, **options)

        def stream(self, query: Any, params: Any = None, **options: Any) -> Any:
            self.connection.guard.check_query(query, self.connection)
            return super().stream(query, params, **options)

        def copy(self, statement: Any, params: Any = None, **options: Any) -> Any:
            self.connection.guard.check_query(statement, self.connection)
            return super().copy(statement, params, **options)

        def fetchone(self) -> Any:
            self.connection.guard.check()
            return super().fetchone()

        def fetchmany(self, size: int = 0) -> Any:
            self.connection.guard.check()
            return super().fetchmany(size)

        def fetchall(self) -> Any:
            self.connection.guard.check()
            return super().fetchall()

    return UserCursor


@cache
def _connection_class() -> Any:
    """Return the class of the connections of functions, which psycopg and SQLAlchemy accept as theirs."""

    class UserTransaction(driver().Connection):  # type: ignore[misc]
        """What `ctx.transaction` passes to its function: SQL inside the commit of the step's own record.

        It is a second object for the library's connection, without prepared statements, whose names are of the first.
        """

        def __init__(self, raw: Any, guard: _Guard) -> None:
            super().__init__(raw.pgconn)
            self.guard, self.cursor_factory, self.prepare_threshold = guard, _cursor_class(), None

        def __del__(self) -> None:
            """It is not closed: the library uses the connection again."""

        def cursor(self, name: str = "", **options: Any) -> Any:
            self.guard.check()
            if name:
                raise self.guard.denied("use a cursor of the server: read the rows of a statement")
            return super().cursor(name, **options)

        def executemany(self, query: Any, params: Any, **options: Any) -> Any:
            """Execute one statement for each of `params`; as on a cursor."""
            cursor = self.cursor()
            cursor.executemany(query, params, **options)
            return cursor

        def transaction(self, *args: Any, **options: Any) -> Any:
            self.guard.check()
            return super().transaction(*args, **options)

        def _refuse(self, *_: Any, **__: Any) -> NoReturn:
            self.guard.check()
            raise self.guard.denied(ENDS)

        commit = rollback = close = cancel = cancel_safe = pipeline = notifies = __enter__ = _refuse
        tpc_begin = tpc_prepare = tpc_commit = tpc_rollback = set_autocommit = set_isolation_level = _refuse

    return UserTransaction


def run(tx: Any, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `fn(connection, *args)` in the open transaction, before this locks any run, and return its result.

    Raises:
        FunctionFailed: The function raised an error, or did what it may not.
        Exception: The connection was lost, or another transaction is the cause: the function is called again.
    """
    conn = tx.conn
    guard = _Guard(name, conn.schema)
    conn.run(_BEGIN)
    try:
        try:
            result = fn(_connection_class()(conn.raw, guard), *args)
        finally:
            guard.end()
        if conn.raw.info.transaction_status != _IN_TRANSACTION and not conn.is_broken:
            raise driver().errors.InFailedSqlTransaction(
                f"a statement of transaction {brief(name)} failed, so PostgreSQL commits nothing of it. Let the "
                "function raise that error"
            )
        conn.run(_END)
        if (used := conn.execute(_USED, (conn.schema,)).fetchone()) is not None:
            raise guard.denied_table(used[0])
    except BaseException as error:
        if conn.is_broken or tx.engine.is_repeatable(error):
            raise
        raise FunctionFailed(error) from error
    return result


def apply(engine: Any, tx: Any, request: CommitRequest) -> bool:
    """Apply a request with a function; False if nothing of it may be committed."""
    guard, finish = request.guard, []
    try:
        for name, args in request.ops:
            if name in engine.not_repeatable:
                finish.append(engine.operations[name](tx, *args))
        if guard is not None and tx.fenced(guard.key) != guard.token:
            raise LeaseLost(guard.key, guard.token)
        request.result = [
            finish.pop(0)() if name in engine.not_repeatable else engine.operations[name](tx, *args)
            for name, args in request.ops
        ]
    except Exception as error:
        if engine.is_lost(error) or engine.is_conflict(error):
            raise
        if isinstance(error, FunctionFailed):
            request.error = error.error
        else:
            request.error = engine.translate(error) if engine.is_of_driver(error) else error
        return False
    return True


class _Ended(CommitRequest):
    """In the queue of the writer: a function ended, and later commits of its run follow."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        super().__init__(None, ())
        self.key: Hashable = key


class FunctionThreads:
    """Commits with a function of a user, next to the writer.

    Args:
        has_function: Whether a request contains such a function.
        commit_each: Commits requests in the thread that calls it, on a separate connection.
        put: Puts a request into the queue of the writer.
    """

    def __init__(
        self,
        has_function: Callable[[Sequence[CommitRequest]], bool],
        commit_each: Callable[[Iterator[CommitRequest]], None],
        put: Callable[[CommitRequest], None],
    ) -> None:
        self._has_function, self._commit_each, self._put = has_function, commit_each, put
        self._held: dict[Hashable, list[CommitRequest]] = {}  # by run, behind its function
        self._next: deque[CommitRequest] = deque()
        self._inbox: SimpleQueue[CommitRequest | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0

    @property
    def is_open(self) -> bool:
        """Whether a function runs, or waits for a running function."""
        return bool(self._held)

    def set_aside(self, batch: Sequence[CommitRequest]) -> list[CommitRequest]:
        """Return the requests that the writer commits now. `begin` begins the functions after them."""
        if not self._held and not self._has_function(batch):
            return [*batch]
        now: list[CommitRequest] = []
        for request in batch:
            if isinstance(request, _Ended):
                self._open -= 1
                for each in self._held.pop(request.key):
                    self._sort(each, now)
            else:
                self._sort(request, now)
        return now

    def _sort(self, request: CommitRequest, now: list[CommitRequest]) -> None:
        key: Hashable = request if request.guard is None else request.guard.key
        if key in self._held:
            self._held[key].append(request)
        elif self._has_function([request]):
            self.add(request)
        elif not request.timed_out:
            now.append(request)

    def add(self, request: CommitRequest) -> None:
        """Have the threads commit a request, and let later requests of its run wait for it."""
        self._held[request if request.guard is None else request.guard.key] = []
        self._next.append(request)

    def begin(self) -> None:
        """Begin functions, after the earlier commits of their runs."""
        while self._next:
            request = self._next.popleft()
            self._open += 1
            try:
                if len(self._threads) < min(self._open, MOST_OPEN):
                    self._threads.append(started(self._run, "agent-runtime-transaction"))
            except StorageBusy as error:
                if not self._threads:
                    request.error = error
                    self._end(request)
                    continue
            self._inbox.put(request)

    def _run(self) -> None:
        self._commit_each(self._requests())

    def _requests(self) -> Iterator[CommitRequest]:
        while (request := self._inbox.get()) is not None:
            if not request.timed_out:
                yield request
            self._end(request)

    def _end(self, request: CommitRequest) -> None:
        self._put(_Ended(request if request.guard is None else request.guard.key))
        resolve_all([request])

    def close(self, location: str, timeout: float) -> None:
        """End the threads after their functions, and refuse what waits for these."""
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join(timeout)
        waiting = [*self._next, *(each for held in self._held.values() for each in held)]
        for request in waiting:
            request.error = StorageClosed(f"{location} was closed. Open it again")
        resolve_all(waiting)
