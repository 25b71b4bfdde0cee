"""Execute statements on a connection of the application, inside its open transaction.

No package is imported for that: a connection can only be of a class whose package is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..._core.threads import in_thread
from ..._core.validation import Shown, must
from ...errors import InvalidArgument
from .connection import NAMED
from .url import driver

_IDLE = 0  # `psycopg.pq.TransactionStatus.IDLE`
_KINDS = (
    "be an open connection of psycopg, asyncpg or Django, or a connection or session of SQLAlchemy, to the PostgreSQL "
    "database of the runner"
)
_NO_TABLES = frozenset({"42P01", "3F000"})


class _Kind(NamedTuple):
    """How statements are executed on one kind of connection.

    Attributes:
        fetch: Returns the first row of a statement; a coroutine function if `is_async`.
        is_async: Whether the connection belongs to an event loop.
        of_thread: Whether only the thread of the caller may use it.
    """

    fetch: Callable[[Any, str, Mapping[str, Any]], Any]
    is_async: bool = False
    of_thread: bool = False


def _is(connection: object, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(connection, tuple(getattr(loaded, name) for name in names))


def _kind(connection: object) -> _Kind:
    if _is(connection, "psycopg", "Connection"):
        return _Kind(_of_psycopg)
    if _is(connection, "psycopg", "AsyncConnection"):
        return _Kind(_of_async_psycopg, is_async=True)
    if _is(connection, "asyncpg", "Connection"):
        return _Kind(_of_asyncpg, is_async=True)
    if _is(connection, "sqlalchemy.ext.asyncio", "AsyncConnection", "AsyncSession", "async_scoped_session"):
        return _Kind(_of_async_sqlalchemy, is_async=True)
    if _is(connection, "sqlalchemy", "Connection") or _is(connection, "sqlalchemy.orm", "Session", "scoped_session"):
        return _Kind(_of_sqlalchemy)
    if _is(connection, "django.db.backends.base.base", "BaseDatabaseWrapper") or _is(
        connection, "django.utils.connection", "ConnectionProxy"
    ):
        return _Kind(_of_django, of_thread=True)
    # Not its repr, which may have a password.
    raise must("connection", _KINDS, Shown(f"{type(connection).__module__}.{type(connection).__qualname__}"))


def check_connection(connection: object, *, sync: bool) -> None:
    """Check that statements can be executed on a connection by a call with or without `await`.

    Raises:
        InvalidArgument: It is of an unknown kind, or of a kind for the other call.
    """
    kind = _kind(connection)
    if sync and kind.is_async:
        raise must("connection", "not be async in submit_sync", Shown("an async one"), "Use await runner.submit(…)")
    if not sync and kind.of_thread:
        fix = "Use runner.submit_sync(…) in code without await, as in sync_to_async"
        raise must("connection", "not belong to a thread in submit", Shown("the connection of Django"), fix)


async def fetch(connection: Any, statement: str, values: Mapping[str, Any]) -> Any:
    """Execute a statement with `:name` on a connection, and return its first row."""
    kind = _kind(connection)
    with _Explained():
        if kind.is_async:
            return await kind.fetch(connection, statement, values)
        return await in_thread(kind.fetch, connection, statement, values)  # it would block the event loop


def fetch_sync(connection: Any, statement: str, values: Mapping[str, Any]) -> Any:
    """Do as `fetch`, in the thread of the caller."""
    with _Explained():
        return _kind(connection).fetch(connection, statement, values)


class _Explained:
    """Explains the error of a database without the tables of this library. Other errors are the caller's."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for each in (error, getattr(error, "orig", None), getattr(error, "__cause__", None)):
            if getattr(each, "sqlstate", None) in _NO_TABLES:
                raise other_database("a database without its tables") from error


def other_database(got: str) -> InvalidArgument:
    """Return the error for a connection to another database than the runner's."""
    return must("connection", "be to the database and schema of the runner", Shown(got), "Roll its transaction back")


def _no_transaction(begin: str) -> InvalidArgument:
    return must("connection", "have an open transaction", Shown("one in autocommit mode"), f"Call it within {begin}")


# -- psycopg


def _of_psycopg(conn: Any, statement: str, values: Mapping[str, Any]) -> Any:
    psycopg = _begun(conn)
    # Of this class, whatever the cursors and rows of the application are.
    with psycopg.Cursor(conn, row_factory=psycopg.rows.tuple_row) as cursor:
        return cursor.execute(_pyformat(statement), values).fetchone()


async def _of_async_psycopg(conn: Any, statement: str, values: Mapping[str, Any]) -> Any:
    psycopg = _begun(conn)
    async with psycopg.AsyncCursor(conn, row_factory=psycopg.rows.tuple_row) as cursor:
        await cursor.execute(_pyformat(statement), values)
        return await cursor.fetchone()


def _begun(conn: Any) -> Any:
    if conn.autocommit and conn.info.transaction_status == _IDLE:
        raise _no_transaction("`with connection.transaction():`")
    return driver()


def _pyformat(statement: str) -> str:
    return NAMED.sub(r"%(\1)s", statement)


# -- asyncpg


async def _of_asyncpg(conn: Any, statement: str, values: Mapping[str, Any]) -> Any:
    if not conn.is_in_transaction():
        raise _no_transaction("`async with connection.transaction():`")
    names = [*values]
    numbered = NAMED.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    return await conn.fetchrow(numbered, *values.values())


# -- SQLAlchemy


def _of_sqlalchemy(conn: Any, statement: str, values: Mapping[str, Any]) -> Any:
    if not _is(conn, "sqlalchemy", "Connection"):
        conn = conn.connection()
    return conn.execute(_text(conn, statement), values).fetchone()


async def _of_async_sqlalchemy(conn: Any, statement: str, values: Mapping[str, Any]) -> Any:
    if not _is(conn, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        conn = await conn.connection()
    return (await conn.execute(_text(conn.sync_connection, statement), values)).fetchone()


def _text(conn: Any, statement: str) -> Any:
    if conn.dialect.name != "postgresql":
        raise other_database(f"one to {conn.dialect.name}")
    if getattr(conn.connection.dbapi_connection, "autocommit", False):
        raise _no_transaction("`with engine.begin() as connection:`, without isolation_level='AUTOCOMMIT'")
    return sys.modules["sqlalchemy"].text(statement)


# -- Django


def _of_django(conn: Any, statement: str, values: Mapping[str, Any]) -> Any:
    if conn.vendor != "postgresql":
        raise other_database(f"one to {conn.vendor}")
    if not conn.in_atomic_block and conn.get_autocommit():
        raise _no_transaction("`with transaction.atomic():`")
    with conn.cursor() as cursor:
        cursor.execute(_pyformat(statement), dict(values))
        return cursor.fetchone()
