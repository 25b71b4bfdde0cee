"""Run the function of a `ctx.transaction` inside a commit of PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ...errors import brief
from .url import driver

SECONDS = 1.0  # for one statement of the function


class UserTransaction:
    """What `ctx.transaction` passes to its function: SQL inside the commit of the step's own record.

    It works until the function returns, and only in the thread that runs the function.
    """

    def __init__(self, name: str, raw: Any) -> None:
        self._name, self._raw = name, raw
        self._thread: int | None = threading.get_ident()

    def execute(self, query: Any, params: Any = None) -> Any:
        """Execute one statement; as `psycopg.Connection.execute`."""
        self._check()
        return self._raw.execute(query, params)

    def executemany(self, query: Any, params: Iterable[Any]) -> Any:
        """Execute one statement for each of `params`; as `psycopg.Cursor.executemany`."""
        self._check()
        cursor = self._raw.cursor()
        cursor.executemany(query, params)
        return cursor

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the connection of ctx.transaction has no {name!r}: use execute(query, params) and "
            "executemany(query, rows); the library commits or rolls back"
        )

    def _check(self) -> None:
        if self._thread != threading.get_ident():
            when = "after its function returned" if self._thread is None else "in another thread"
            raise driver().ProgrammingError(
                f"the connection of transaction {brief(self._name)} must not be used {when}. Call ctx.transaction again"
            )

    def _end(self) -> None:
        self._thread = None


def run(tx: Any, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `fn(connection, *args)` in a savepoint of the transaction and return its result."""
    conn = tx.conn
    handed = UserTransaction(name, conn.raw)
    conn.run(f"SAVEPOINT of_user; SET LOCAL statement_timeout = {int(SECONDS * 1000)}")
    try:
        result = fn(handed, *args)
    except BaseException:
        if not conn.is_broken:
            conn.run("ROLLBACK TO of_user")
        raise
    finally:
        handed._end()
    conn.run("SET LOCAL statement_timeout = 0; RELEASE of_user")
    return result
