"""The engine on one PostgreSQL database, for many processes on many machines."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, cast

from ..._core.clock import SYSTEM, Clock
from ..._core.lazy_import import load
from ..._core.log import log
from ..._core.validation import Shown, must
from ...errors import StorageBusy, StorageCorrupt, StorageError, StorageFull, StorageOutdated
from ..backend import OnEngine, hold_shared, known_options
from ..base import MARK, Backend, OperationSet
from ..sqlite.database import check_version
from ..threaded import ThreadedEngine, ThreadedTx
from .connection import PostgresConnection
from .notifier import PostgresNotifier
from .schema import TABLES
from .url import PostgresAddress, driver, postgres_place

#: Begins a transaction that writes. The lock makes it wait for a move of the store, which locks the table alone.
_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '4s'; "
    "LOCK TABLE arc_fences IN ROW EXCLUSIVE MODE; "
    "SELECT extract(epoch FROM clock_timestamp())::float8, (SELECT token FROM arc_fences WHERE key = 'moved')"
)
_BEGIN_READ: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LOCK_RUNS: Final = "SELECT 1 FROM arc_runs WHERE run_id = ANY(?) ORDER BY run_id FOR NO KEY UPDATE"
_LOCK_STORE: Final = "LOCK TABLE arc_fences IN ACCESS EXCLUSIVE MODE"
NOW: Final = "extract(epoch FROM clock_timestamp())::float8"
_VERSIONS: Final = (
    'CREATE TABLE IF NOT EXISTS arc_schema (concern text COLLATE "C" PRIMARY KEY, version int NOT NULL, library text)'
)
_MIGRATION_LOCK: Final = 0x61726300  # of all schemas: two migrations at the same time are rare
_MIGRATION_SECONDS: Final = 30.0
_LOST: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "53300", "25006", "55000"})
_CONFLICT: Final = frozenset({"40001", "40P01", "23505", "55P03"})
_FULL: Final = frozenset({"53100", "53200"})
_CORRUPT: Final = frozenset({"XX001", "XX002"})


class PostgresTx(ThreadedTx):
    """An open transaction.

    Attributes:
        now: The time of the server, in seconds since 1970.
        rows: Rows of runs that this transaction has locked.
    """

    conn: PostgresConnection
    engine: PostgresEngine

    def __init__(self, engine: Any, conn: Any, began: tuple[float, str | None] = (0.0, None)) -> None:
        super().__init__(engine, conn)
        self.now: float = began[0]
        self.moved: str | None = began[1]
        self.rows: dict[str, Any] = {}
        self.logs: set[str] = set()  # runs whose event numbers this transaction has locked
        self.counters: dict[str, int] = {}
        self.execute: Callable[..., Any] = conn.execute


class PostgresEngine(ThreadedEngine):
    """The engine of a process on one database and schema. Use `PostgresEngine.open(url)`, which shares it."""

    kind = "postgres"
    server_clock = True
    transaction_class = PostgresTx

    place: PostgresAddress

    @classmethod
    def parsed(cls, place: str) -> PostgresAddress:
        driver()  # a missing package is reported before a wrong URL
        return postgres_place(place)

    def __init__(self, key: Hashable, place: PostgresAddress, clock: Clock) -> None:
        super().__init__(key, place, clock)
        self._unmigrated: list[OperationSet] = [TABLES]
        self._migration = threading.Lock()
        self._begin = _BEGIN
        self._notifier = PostgresNotifier(place, self.wake)

    async def store_wall(self) -> float:
        return float(await self.read(server_time)) if self.by_server else self.clock.wall()

    # -- connections

    def connect(self, *, writes: bool) -> PostgresConnection:
        conn = PostgresConnection(self.place, self.clock if self.by_server else None)
        try:
            if self._unmigrated:
                self._migrate(conn)
        except BaseException:
            conn.close()
            raise
        return conn

    def disconnect(self, conn: PostgresConnection) -> None:
        conn.close()

    def begin(self, conn: PostgresConnection, *, writes: bool) -> Any:
        if self._unmigrated:
            self._migrate(conn)
        return conn.run(_BEGIN if writes else _BEGIN_READ)

    def end(self, conn: PostgresConnection) -> None:
        conn.run("COMMIT")

    def roll_back(self, conn: PostgresConnection) -> None:
        if conn.in_transaction:
            conn.run("ROLLBACK")

    def execute_batch(
        self, conn: PostgresConnection, statements: Sequence[tuple[str, Sequence[Any]]], keys: Sequence[str]
    ) -> list[list[Any]]:
        if self._unmigrated:
            self._migrate(conn)
        if len(statements) > 1 and keys:
            return conn.pipelined([(_LOCK_RUNS, (keys,)), *statements])[1:]
        return conn.pipelined(statements)

    # -- fences

    def stored_fence(self, conn: PostgresConnection, key: str, *, lock: bool) -> str | None:
        if lock:  # in a statement before, because a statement reads what was committed when it began
            conn.execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 1))", (key,))
        row = conn.execute("SELECT token FROM arc_fences WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def store_fence(self, tx: Any, key: str, token: str | None) -> None:
        if key == MARK:
            tx.conn.run(_LOCK_STORE)
            tx.moved = token
        if token is None:
            tx.execute("DELETE FROM arc_fences WHERE key = ?", (key,))
        else:
            tx.execute(
                "INSERT INTO arc_fences VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET token = excluded.token",
                (key, token),
            )

    def mark(self, tx: Any) -> str | None:
        return cast("str | None", tx.moved)

    # -- errors

    def is_of_driver(self, error: BaseException) -> bool:
        return isinstance(error, driver().Error)

    def is_lost(self, error: BaseException) -> bool:
        if not isinstance(error, driver().Error):
            return isinstance(error, OSError)
        state = error.sqlstate
        if state is None:
            return isinstance(error, driver().OperationalError | driver().InterfaceError)
        return state in _LOST or state.startswith("08")

    def is_conflict(self, error: BaseException) -> bool:
        return isinstance(error, driver().Error) and error.sqlstate in _CONFLICT

    def translate(self, error: BaseException) -> StorageError:
        state, text = getattr(error, "sqlstate", None), f"{error!s:.300}".strip()
        if state in _FULL:
            return StorageFull(f"no space to write {self.location} ({text}). Acknowledged writes are kept. Free some")
        if state in _CORRUPT:
            return StorageCorrupt(f"{self.location} is damaged ({text}). Restore a backup")
        if state in ("42P01", "42703", "3F000"):
            return StorageOutdated(f"{self.location} lacks tables ({text}). Run: agent-runtime migrate {self.location}")
        return StorageError(f"{self.location}: {text}")

    # -- the schema

    def migrate(self, operation_set: OperationSet) -> None:
        self._unmigrated.append(operation_set)  # by the next thread that connects or begins

    def _migrate(self, conn: PostgresConnection) -> None:
        with self._migration:
            waiting = [*self._unmigrated]
            if waiting:
                migrate(conn, str(self.place), waiting)
                del self._unmigrated[: len(waiting)]

    # -- other processes on this server

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        self._notifier.start()
        return cast("Callable[[], None]", super().listen(topic, wake))

    def notify_others(self, topics: set[str]) -> None:
        self._notifier.send(topics)

    def _close_now(self) -> None:
        super()._close_now()
        self._notifier.close(self.timeout)


def server_time(conn: PostgresConnection) -> float:
    """Return the time of the server, in seconds since 1970."""
    return float(conn.execute(f"SELECT {NOW}").fetchone()[0])


def migrate(conn: PostgresConnection, name: str, operation_sets: Sequence[OperationSet]) -> None:
    """Bring the tables of operation sets to their newest version.

    Raises:
        StorageTooNew: The stored schema is newer.
        StorageOutdated: The user may not change the schema.
    """
    wanted = {each.name: len(each.migrations) for each in operation_sets}
    if _versions(conn, wanted) == wanted:
        return
    try:
        _migrate_alone(conn, name, operation_sets)
    except driver().errors.InsufficientPrivilege as error:
        raise StorageOutdated(
            f"{name}: the schema {conn.schema} must be created or updated, and the user may not do that "
            f"({error!s:.200}). Run: agent-runtime migrate {name}"
        ) from error


def _versions(conn: PostgresConnection, wanted: dict[str, int]) -> dict[str, Any]:
    if conn.execute("SELECT to_regclass(?)", (f"{conn.schema}.schema",)).fetchone()[0] is None:
        return {}
    found = dict(conn.execute("SELECT concern, version FROM arc_schema").fetchall())
    return {name: found.get(name, 0) for name in wanted}


def _migrate_alone(conn: PostgresConnection, name: str, operation_sets: Sequence[OperationSet]) -> None:
    until = time.monotonic() + _MIGRATION_SECONDS
    while True:
        conn.run("BEGIN; SET LOCAL lock_timeout = '3s'")
        try:
            # A wait inside of the server would hold a snapshot.
            if conn.execute("SELECT pg_try_advisory_xact_lock(?)", (_MIGRATION_LOCK,)).fetchone()[0]:
                _apply_migrations(conn, name, operation_sets)
                conn.run("COMMIT")
                return
        except driver().errors.LockNotAvailable as error:
            log.warning("%s: the migration waits for other transactions (%s)", name, error)
        finally:
            if conn.in_transaction and not conn.is_broken:
                with contextlib.suppress(driver().Error):
                    conn.run("ROLLBACK")
        if time.monotonic() > until:
            raise StorageBusy(
                f"{name}: the schema {conn.schema} was locked for {_MIGRATION_SECONDS:g} s. Try again later"
            )
        time.sleep(random.uniform(0.02, 0.1))


def _apply_migrations(conn: PostgresConnection, name: str, operation_sets: Sequence[OperationSet]) -> None:
    if conn.execute("SELECT to_regnamespace(?)", (conn.schema,)).fetchone()[0] is None:
        conn.run(f"CREATE SCHEMA {conn.schema}")
    if conn.execute("SELECT to_regclass(?)", (f"{conn.schema}.schema",)).fetchone()[0] is None:
        conn.run(_VERSIONS)
    stored = dict(conn.execute("SELECT concern, version FROM arc_schema").fetchall())
    for each in operation_sets:
        newest = len(each.migrations)
        version = check_version(name, each.name, stored, newest)
        for script in each.migrations[version:]:
            conn.run(script)
        if version != newest:
            conn.execute(
                "INSERT INTO arc_schema VALUES (?, ?, ?) ON CONFLICT (concern)"
                " DO UPDATE SET version = excluded.version, library = excluded.library",
                (each.name, newest, load("agent_runtime_core:__version__")),
            )


class PostgresBackend(OnEngine, Backend):
    """A backend in one PostgreSQL database, which all processes that reach it share."""

    engine: PostgresEngine

    def __init__(
        self, url: str | None = None, *, engine: PostgresEngine | None = None, clock: Clock = SYSTEM, **options: Any
    ) -> None:
        with known_options(type(self), options):
            cast(Any, super()).__init__(clock=getattr(engine, "clock", clock), **options)
        if engine is None and url is None:
            fix = "Pass url='postgresql://host/database'"
            raise must("the url of a PostgreSQL backend", "be passed", Shown("none"), fix)
        hold_shared(self, engine, lambda: PostgresEngine.open(url or "", clock=clock))
