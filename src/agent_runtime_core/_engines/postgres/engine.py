"""The engine on one PostgreSQL database, for many processes on many machines."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Self, cast

from ..._core.clock import SYSTEM, Clock
from ..._core.validation import Shown, must
from ...errors import StorageBusy, StorageCorrupt, StorageError, StorageFull
from ..backend import OnEngine, hold_shared, known_options
from ..base import MARK, Backend, OperationSet
from ..commit_request import CommitRequest, LoopBatch
from ..shared_engine import SafetyFinding
from ..threaded import ThreadedEngine, ThreadedTx
from .connection import PostgresConnection
from .migration import migrate, outdated, require_schema
from .notifier import PostgresNotifier
from .safety_checks import IsStandby, check, identity, reported, server_changed, warn
from .schema import TABLES
from .url import PostgresAddress, driver, postgres_place
from .user_transaction import AppliedMeanwhile, FunctionThreads, apply

#: Begins a transaction that writes. The lock makes it wait for a move of the store, which locks the table alone.
_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'; "
    "LOCK TABLE arc_fences IN ROW EXCLUSIVE MODE; "
    "SELECT extract(epoch FROM clock_timestamp())::float8, (SELECT token FROM arc_fences WHERE key = 'moved')"
)
#: For the connection of the commits, which finds rows by their keys. The server plans each statement once, instead of
#: each time it is executed. A plan made for an empty table must not read the whole table when it is full.
#: Not behind a pooler, where another client would get the settings: there the server process changes.
_PLAN_ONCE: Final = (
    "SELECT set_config('plan_cache_mode', 'force_generic_plan', false), set_config('enable_seqscan', 'off', false),"
    " set_config('jit', 'off', false) WHERE pg_backend_pid() = ?"
)
_BEGIN_READ: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LOCK_RUNS: Final = "SELECT 1 FROM arc_runs WHERE run_id = ANY(?) ORDER BY run_id FOR NO KEY UPDATE"
_LOCK_ROWS: Final = "SELECT run_id FROM arc_runs WHERE run_id = ANY(?) ORDER BY run_id FOR NO KEY UPDATE"
_LOCK_LOGS: Final = "SELECT count(pg_advisory_xact_lock(hashtextextended(id, 3))) FROM unnest(?::text[]) AS l (id)"
_LOCK_STORE: Final = "LOCK TABLE arc_fences IN ACCESS EXCLUSIVE MODE"
NOW: Final = "extract(epoch FROM clock_timestamp())::float8"
_LOST: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "53300", "25006", "55000"})
_CONFLICT: Final = frozenset({"40001", "40P01", "23505", "55P03"})
# The driver gives such an error no code.
_REFUSED: Final = re.compile("FATAL: .*(does not exist|authentication failed|pg_hba.conf)")
_NEW_RUNS: Final = frozenset({"queue.insert", "queue.take"})  # heartbeats must not wait for the functions of users
_FULL: Final = frozenset({"53100", "53200"})
_CORRUPT: Final = frozenset({"XX001", "XX002"})


class PostgresTx(ThreadedTx):
    """An open transaction.

    Attributes:
        now: The time of the server, in seconds since 1970.
        rows: Rows of runs that this transaction locked.
    """

    conn: PostgresConnection
    engine: PostgresEngine

    def __init__(self, engine: Any, conn: Any, began: tuple[float, str | None] = (0.0, None)) -> None:
        super().__init__(engine, conn)
        self.now: float = began[0]
        self.moved: str | None = began[1]
        self.rows: dict[str, Any] = {}
        self.logs: set[str] = set()  # runs whose event numbers this transaction locked
        self.shared: set[str] = set()  # names of states that this transaction locked before its operations
        self.counters: dict[str, int] = {}
        self.execute: Callable[..., Any] = conn.execute

    def lock_logs(self, requests: Sequence[CommitRequest]) -> None:
        """Lock the logs of several runs or topics in one order, so that no two transactions wait for each other.

        A queue locks the rows of runs before that.
        """
        ops = [op for request in requests for op in request.ops if op.name.startswith(("events.", "journal."))]
        logs = {op.args[0] for op in ops} - self.rows.keys()
        if len(logs) > 1:
            rows = {row[0] for row in self.execute(_LOCK_ROWS, ([*logs],))}
            self.execute(_LOCK_LOGS, (sorted(logs - rows),))
            self.logs |= logs


class PostgresEngine(ThreadedEngine):
    """The engine of a process on one database and schema. Use `PostgresEngine.open(url)`, which shares it."""

    kind: str = "postgres"
    server_clock: ClassVar[bool] = True
    transaction_class: ClassVar[type[ThreadedTx]] = PostgresTx

    place: PostgresAddress

    @classmethod
    def open(cls, place: Any, *, clock: Clock = SYSTEM, read_only: bool = False) -> Self:
        """Open the engine, or share it. With `read_only` it creates no table, and a role that only reads suffices."""
        return super().open(replace(cls.parsed(place), reads_only=read_only), clock=clock)

    @classmethod
    def parsed(cls, place: Any) -> PostgresAddress:
        driver()  # a missing package is reported before a wrong URL
        return place if isinstance(place, PostgresAddress) else postgres_place(place)

    def __init__(self, key: Hashable, place: PostgresAddress, clock: Clock) -> None:
        super().__init__(key, place, clock)
        self.location: str = place.shown()
        self._unmigrated: list[OperationSet] = [TABLES]
        self._migration = threading.Lock()
        #: What was unsafe when this process connected last.
        self.safety_findings: list[SafetyFinding] = []
        self._server = ""
        self._notifier = PostgresNotifier(place, self.wake)
        self._functions = FunctionThreads(self._has_function, self.commit_each, self._inbox.put)

    async def store_wall(self) -> float:
        return float(await self.read(server_time)) if self.by_server else self.clock.wall()

    # -- connections

    def connect(self, *, writes: bool) -> PostgresConnection:
        try:
            conn = PostgresConnection(self.place, self.clock if self.by_server else None)
        except driver().OperationalError as error:
            if _REFUSED.search(str(error)) and "," not in self.location:  # another host may take the connection
                fix = "Check the user, the password and the name of the database in the URL"
                raise StorageError(f"{self.location} refused the connection ({error!s:.300}). {fix}") from error
            raise
        try:
            found = check(reported(conn), self.place, reads_only=self.place.reads_only)
            if self._unmigrated:
                self._migrate(conn)
            self._connected(conn, found)
            if threading.current_thread() is self._writer:
                conn.execute(_PLAN_ONCE, (conn.raw.info.backend_pid,))
        except BaseException:
            conn.close()
            raise
        return conn

    def _connected(self, conn: PostgresConnection, found: list[SafetyFinding]) -> None:
        self.safety_findings = found
        warn(found, conn, self.place)
        server = identity(conn)
        if server_changed(server, self._server, conn, self.place):
            self.wake()  # the commits that others waited for may be lost
        self._server = server or self._server

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

    # -- functions of users

    def set_aside(self, batch: list[CommitRequest]) -> list[CommitRequest]:
        return self._functions.set_aside(batch)

    def sets_aside(self, request: CommitRequest, error: BaseException) -> bool:
        # Its run id or key is used by a run in an open transaction of the application, which may take long to end.
        waits = getattr(error, "sqlstate", None) == "55P03" and all(name in _NEW_RUNS for name, _ in request.ops)
        if waits := waits and threading.current_thread() is self._writer:
            self._functions.add(request)
        return waits

    def begin_set_aside(self) -> None:
        self._functions.begin()

    def _apply(self, tx: Any, request: CommitRequest) -> bool:
        if tx.moved is None and self._has_function([request]):
            return apply(self, tx, request)
        return super()._apply(tx, request)

    def _new_batch(self, loop: asyncio.AbstractEventLoop) -> LoopBatch:
        batch = super()._new_batch(loop)
        batch.pending.is_slow = lambda: self._functions.is_open
        return batch

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

    def is_repeatable(self, error: BaseException) -> bool:
        """Return whether an error in a function of a user is none of its statements: it is called again."""
        return self.is_lost(error) or getattr(error, "sqlstate", None) in ("40001", "40P01")

    def is_conflict(self, error: BaseException) -> bool:
        return isinstance(error, AppliedMeanwhile) or getattr(error, "sqlstate", None) in _CONFLICT

    def _unavailable(self, error: BaseException, fix: str) -> StorageBusy:
        if isinstance(error, IsStandby) or getattr(error, "sqlstate", None) == "25006":
            return StorageBusy(
                f"{self.location} is read-only ({error!s:.300}), and was for {self.timeout:g} s. The outcome of the "
                "write is unknown. Repeat it when the primary answers, or name the primary in the URL"
            )
        return super()._unavailable(error, fix)

    def translate(self, error: BaseException) -> StorageError:
        state, text = getattr(error, "sqlstate", None), f"{error!s:.300}".strip()
        if state in _FULL:
            return StorageFull(f"no space to write {self.location} ({text}). Acknowledged writes are kept. Free some")
        if state in _CORRUPT:
            return StorageCorrupt(f"{self.location} is damaged ({text}). Restore a backup")
        if state in ("42P01", "42703", "3F000", "42501"):
            return outdated(self.place, f"lacks tables, or rights of this user ({text})")
        return StorageError(f"{self.location}: {text}")

    # -- the schema

    def migrate(self, operation_set: OperationSet) -> None:
        self._unmigrated.append(operation_set)  # by the next thread that connects or begins

    def _migrate(self, conn: PostgresConnection) -> None:
        with self._migration:
            waiting = [*self._unmigrated]
            if waiting:
                (require_schema if self.place.reads_only else migrate)(conn, self.place, waiting)
                del self._unmigrated[: len(waiting)]

    # -- other processes on this server

    @property
    def channel(self) -> str:
        """The channel of the notifications."""
        return self._notifier.channel

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        self._notifier.start()
        return cast("Callable[[], None]", super().listen(topic, wake))

    @property
    def hears(self) -> bool:
        """Whether the listening connection was found to hear notifications."""
        return self._notifier.hears

    def notify_others(self, topics: set[str]) -> None:
        self._notifier.send(topics)

    def _close_now(self) -> None:
        super()._close_now()
        self._functions.close(self.location, self.timeout)
        self._notifier.close(self.timeout)


def server_time(conn: PostgresConnection) -> float:
    """Return the time of the server, in seconds since 1970."""
    return float(conn.execute(f"SELECT {NOW}").fetchone()[0])


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
