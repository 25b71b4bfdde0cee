"""An engine over one SQLite file: one thread writes, in groups; readers have connections of their own.

Between processes an exclusive sidecar lock is held around each group, which makes commits fair and
keeps them apart from checkpoints (SQLite before 3.51.3 can corrupt a WAL otherwise). The database
file itself is opened by SQLite alone: closing another descriptor of it would drop SQLite's locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from .._clock import SYSTEM, Clock
from .._ids import new_ulid
from ..errors import (
    InvalidArgument,
    LeaseLost,
    StorageBusy,
    StorageClosed,
    StorageError,
    StorageTooNew,
)
from .base import FENCE_OPS, Concern, Engine, Guard, NotApplied, Op, every
from .presence import RESCAN, CommitLock, Presence
from .sqlite_log import Log
from .sqlite_tx import DRIVER_ERRORS, FunctionFailed, Known, SQLiteTx, translate

PATIENCE = 6.0  # seconds a caller waits; well under a third of the shortest sensible lease
AT_ONCE = 8  # callers told in one turn of their loop
GROUP = 256  # commits in one transaction at most
READERS = 2
_POLL = 0.5  # seconds between looks at data_version behind the bell
_POLL_WITHOUT_BELL = 0.005

_FENCE_SCHEMA = "CREATE TABLE arc_fence (key TEXT PRIMARY KEY, token TEXT NOT NULL) WITHOUT ROWID"


class Request:
    """One commit on its way to the writer thread and back."""

    __slots__ = ("deadline", "done", "error", "future", "guard", "loop", "ops", "result", "told", "withdrawn")

    def __init__(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        self.guard: Guard | None = guard
        self.ops: Sequence[Op] = ops
        self.result: list[Any] | None = None
        self.error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.future: asyncio.Future[None] | None = None
        self.done: threading.Event | None = None
        self.deadline: float = 0.0
        self.withdrawn: bool = False
        self.told: bool = False  # on its loop: the outcome is known, not only computed


def _settle(requests: list[Request]) -> None:
    if len(requests) > AT_ONCE:
        # Each wakes a task: all at once they would hold the loop for as long as all of them take.
        assert requests[0].loop is not None
        requests[0].loop.call_soon(_settle, requests[AT_ONCE:])
        requests = requests[:AT_ONCE]
    for request in requests:
        request.told = True
        if request.future is not None and not request.future.done():
            request.future.set_result(None)


class SQLiteEngine(Engine):
    """Use `SQLiteEngine.open(path)`: all backends of a process on one file share one engine."""

    kind = "sqlite"
    linger: float = 0.002

    # One writer thread per file and process is what makes the promises true, so the table is the process's.
    _open: ClassVar[dict[str, SQLiteEngine]] = {}
    _open_lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, durability: str = "full", clock: Clock = SYSTEM) -> SQLiteEngine:
        if durability not in ("full", "normal"):
            raise InvalidArgument(f"durability is 'full' or 'normal', not {durability!r}")
        where = _checked(path)
        with cls._open_lock:
            engine = cls._open.get(where)
            if engine is None or engine._pid != os.getpid():
                engine = cls(where, durability, clock)
                cls._open[where] = engine
            elif engine.durability != durability:
                raise InvalidArgument(f"{where} is open here with durability={engine.durability!r}, not {durability!r}")
            return engine.share()

    def share(self) -> SQLiteEngine:
        """This engine, for one more user, who closes it too."""
        self._users += 1
        return self

    def __init__(self, path: str, durability: str, clock: Clock) -> None:
        self.path: str = path
        self.durability: str = durability
        self.clock: Clock = clock
        self._pid = os.getpid()
        self._users = 0
        self._lock = threading.Lock()
        self.known: Known = Known()
        self._ops: dict[str, Callable[..., Any]] = {}
        self._applied: dict[str, Callable[..., Any]] = {}
        self._concerns: set[str] = set()
        self._once: frozenset[str] = frozenset()
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._pending: dict[Request, None] = {}
        self._watching: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._inbox: SimpleQueue[Request | Callable[[], None] | None] = SimpleQueue()
        self._reads: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._bell_thread: threading.Thread | None = None
        self._closed = False
        self.dead_looked_at: float = -1.0  # lease time of the last look for dead holders
        self._synchronous = "FULL" if durability == "full" else "NORMAL"
        live = Path(f"{path}.live")
        try:
            live.mkdir(mode=0o700, exist_ok=True)
            self._commit_lock = CommitLock(live)
            self._presence = Presence(live, new_ulid(clock), clock)
        except OSError as error:
            raise StorageError(f"cannot keep {path} here: {error}") from error
        self.holder: str = self._presence.holder
        with contextlib.ExitStack() as undo:
            undo.callback(self._commit_lock.close)
            undo.callback(self._presence.close)
            try:
                with self._commit_lock:
                    _create_private(path)
                    self._conn = self._connect()
                    undo.callback(self._conn.close)
                    self._prepare()
                self.log: Log = Log(path, self._conn, flushes=durability == "full", busy_ms=int(PATIENCE * 500))
            except DRIVER_ERRORS as error:
                raise translate(error, path) from error
            self.add(Concern("fence", FENCE_OPS, {}, (_FENCE_SCHEMA,)))
            undo.pop_all()
        self._start()

    # -- opening

    def _connect(self) -> sqlite3.Connection:
        conn = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=PATIENCE / 2, cached_statements=256
        )
        try:
            conn.execute(f"PRAGMA synchronous={self._synchronous}")
            for pragma in ("wal_autocheckpoint=0", "foreign_keys=ON", "trusted_schema=OFF", "fullfsync=ON"):
                conn.execute(f"PRAGMA {pragma}")
        except BaseException:
            conn.close()
            raise
        return conn

    def _prepare(self) -> None:
        self._conn.execute("PRAGMA journal_mode=WAL")
        self._conn.execute(
            "CREATE TABLE IF NOT EXISTS arc_schema (concern TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
        )
        self._versions: dict[str, int] = dict(self._conn.execute("SELECT concern, version FROM arc_schema"))

    def add(self, concern: Concern) -> None:
        if concern.name in self._concerns:
            return
        try:
            if self._versions.get(concern.name, 0) != len(concern.migrations):
                with self._commit_lock:
                    self._migrate(concern)
        except DRIVER_ERRORS as error:
            raise translate(error, self.path) from error
        self._ops.update(concern.ops)
        self._applied.update(concern.applied)
        self._concerns.add(concern.name)
        self._once |= concern.once

    def _migrate(self, concern: Concern) -> None:
        # On a connection of its own: the writing one belongs to the writer thread.
        conn = self._connect()
        try:
            # No flush: the first commit that matters flushes the log up to itself.
            conn.execute("PRAGMA synchronous=NORMAL")
            conn.execute("BEGIN IMMEDIATE")
            row = conn.execute("SELECT version FROM arc_schema WHERE concern = ?", (concern.name,)).fetchone()
            version, newest = (row[0] if row else 0), len(concern.migrations)
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

    def _start(self) -> None:
        self._thread(self._write_loop, "agent-runtime-writer")
        for _ in range(READERS):
            self._thread(self._read_loop, "agent-runtime-reader")

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _usable(self) -> None:
        if self._closed:
            raise StorageClosed(f"{self.path} was closed")
        if self._pid != os.getpid():
            raise StorageClosed(f"{self.path} was opened before a fork; open it again in this process")

    # -- writing: the callers' side

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._usable()
        request = Request(guard, ops)
        request.loop = loop = asyncio.get_running_loop()
        request.future = loop.create_future()
        request.deadline = loop.time() + PATIENCE
        self._pending[request] = None
        if loop not in self._watching:
            self._watching.add(loop)
            loop.call_later(PATIENCE / 4, self._watch, loop)
        self.submit(request)
        try:
            await request.future
        except asyncio.CancelledError:
            await self._drain(request)
            raise
        finally:
            self._pending.pop(request, None)
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    async def _drain(self, request: Request) -> None:
        """Wait for the outcome of a commit whose caller was cancelled, through more cancellations."""
        while not request.told:
            assert request.loop is not None
            request.future = request.loop.create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await request.future

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail what has waited too long; one timer per loop and no timer per commit."""
        now = loop.time()
        mine = [r for r in self._pending if r.loop is loop]
        for request in mine:
            if request.deadline < now and request.error is None and request.result is None:
                request.withdrawn = True
                request.error = StorageBusy(
                    f"{self.path} did not answer within {PATIENCE:g} s; whether the write landed is unknown, "
                    "repeating it is safe"
                )
                _settle([request])
        if mine:
            loop.call_later(PATIENCE / 4, self._watch, loop)
        else:
            self._watching.discard(loop)

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._usable()
        request = Request(guard, ops)
        request.done = threading.Event()
        self.submit(request)
        if not request.done.wait(PATIENCE):
            request.withdrawn = True
            raise StorageBusy(f"{self.path} did not answer within {PATIENCE:g} s")
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def post(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        self._usable()
        self.submit(Request(guard, ops))

    def submit(self, request: Request) -> None:
        """Hand a commit to the writer thread; the simulator schedules it instead."""
        self._inbox.put(request)

    # -- writing: the writer thread

    def _write_loop(self) -> None:
        inbox = self._inbox
        while True:
            item = inbox.get()
            batch: list[Request] = []
            while True:
                if item is None:
                    self.write(batch)
                    return
                if isinstance(item, Request):
                    batch.append(item)
                else:
                    item()
                if len(batch) >= GROUP or inbox.empty():
                    break
                item = inbox.get()
            self.write(batch)

    def write(self, batch: list[Request]) -> None:
        """Commit a group, then tell the callers and ring the bells."""
        batch = [r for r in batch if not r.withdrawn]
        if not batch:
            return
        tx = SQLiteTx(self, self._conn)
        try:
            with self._commit_lock:
                self._transact(tx, batch)
                self.log.grown()
        except Exception as error:  # noqa: BLE001 - whatever it is, this thread has to go on for the others
            self._roll_back()
            for request in batch:
                request.error = request.error or StorageError(f"{self.path}: {error!r}")
        self._deliver(batch)
        if tx.rings:
            self._ring(tx.rings)

    def _transact(self, tx: SQLiteTx, batch: list[Request]) -> None:
        """Commit a group; as if each request were alone, should one of them fail half-way."""
        once = self._once and any(name in self._once for request in batch for name, _ in request.ops)
        try:
            tx.execute("BEGIN IMMEDIATE")
            self.known.check(self._conn)
            if once or not self._apply_all(tx, batch):
                self._apply_each(tx, batch)
            tx.execute("COMMIT")
        except sqlite3.Error as error:
            # The transaction as a whole failed: nothing of it landed.
            self._roll_back()
            if len(batch) == 1:
                batch[0].result, batch[0].error = None, translate(error, self.path)
                return
            for request in batch:
                request.result = request.error = None
                self._transact(tx, [request])

    def _apply_all(self, tx: SQLiteTx, batch: list[Request]) -> bool:
        """Apply all requests without a savepoint each; False, with nothing applied, if one fails in its operations."""
        for request in batch:
            if not self._apply(tx, request):
                tx.execute("ROLLBACK")
                self.known.forget()
                tx.execute("BEGIN IMMEDIATE")
                for each in batch:
                    each.result = each.error = None
                return False
        return True

    def _apply_each(self, tx: SQLiteTx, batch: list[Request]) -> None:
        for request in batch:
            tx.execute("SAVEPOINT arc_one")
            if not self._apply(tx, request):
                tx.execute("ROLLBACK TO arc_one")
                self.known.forget()
            tx.execute("RELEASE arc_one")

    def _roll_back(self) -> None:
        self.known.forget()
        if self._conn.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._conn.execute("ROLLBACK")

    def _apply(self, tx: SQLiteTx, request: Request) -> bool:
        """Apply one request; False if it failed where it may have written."""
        guard = request.guard
        try:
            if guard is not None and tx.fenced(guard.key) != guard.token:
                request.result, request.error = self._replay(tx, guard, request.ops)
                return True
            ops, results = self._ops, []
            for name, args in request.ops:
                results.append(ops[name](tx, *args))
            request.result = results
            return True
        except sqlite3.Error as error:
            if not self._conn.in_transaction:
                raise
            request.error = translate(error, self.path)
        except FunctionFailed as failed:
            request.error = failed.error
        except Exception as error:  # noqa: BLE001 - it belongs to the caller of this request, not to the group
            request.error = error
        return False

    def _replay(self, tx: SQLiteTx, guard: Guard, ops: Sequence[Op]) -> tuple[list[Any] | None, LeaseLost | None]:
        """The results of a superseded claim's operations if all were applied before, or why not; writes nothing."""
        try:
            return [self._applied[name](tx, *args) for name, args in ops], None
        except (KeyError, NotApplied):
            return None, LeaseLost(guard.key, guard.token)

    def _deliver(self, batch: list[Request]) -> None:
        loops: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        for request in batch:
            if request.loop is not None:
                loops.setdefault(request.loop, []).append(request)
            elif request.done is not None:
                request.done.set()
        for loop, requests in loops.items():
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, requests)

    # -- reading

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._usable()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.submit_read(fn, args, loop, future)
        return await future

    def submit_read(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        self._reads.put((fn, args, loop, future))

    def _read_loop(self) -> None:
        conn: sqlite3.Connection | None = None
        while (item := self._reads.get()) is not None:
            fn, args, loop, future = item
            result: Any = None
            error: Exception | None = None
            try:
                conn = conn or self._connect()
                result = self.view(conn, fn, args)
            except DRIVER_ERRORS as failure:
                error = translate(failure, self.path)
            except Exception as failure:  # noqa: BLE001 - it belongs to the caller of this read
                error = failure
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_answer, future, result, error)
        if conn is not None:
            self._close_connection(conn)

    @staticmethod
    def view(conn: sqlite3.Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        conn.execute("BEGIN")
        try:
            return fn(conn, *args)
        finally:
            if conn.in_transaction:  # some errors end it by themselves
                conn.execute("ROLLBACK")

    # -- others on this file

    def dead_holders(self, holders: Sequence[str]) -> tuple[str, ...]:
        """Those of `holders` whose process is gone, so that their leases are free at once."""
        return self._presence.dead(holders)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            if self._bell_thread is None:
                self._bell_thread = self._hang_bell()
            listeners = self._listeners.setdefault(topic, [])
            listeners.append(wake)

        def stop() -> None:
            if wake in listeners:
                listeners.remove(wake)

        return stop

    def _hang_bell(self) -> threading.Thread | None:
        self._presence.hang_bell()
        return self._thread(self._bell_loop, "agent-runtime-bell")

    def _bell_loop(self) -> None:
        conn = self._connect()
        version = conn.execute("PRAGMA data_version").fetchone()[0]
        # Who listed the bells just before this one hung does not ring it yet.
        unheard = self.clock.boot() + 2 * RESCAN
        while not self._closed:
            if unheard and self.clock.boot() >= unheard:
                unheard = 0.0
                self._wake(set(self._listeners))
            if self._presence.bell is not None:
                letters = self._presence.wait(2 * RESCAN if unheard else _POLL)
            else:
                threading.Event().wait(_POLL_WITHOUT_BELL)
                letters = ""
            if letters:
                self._wake({t for t in tuple(self._listeners) if t[0] in letters})
                continue
            with contextlib.suppress(sqlite3.Error):
                seen = conn.execute("PRAGMA data_version").fetchone()[0]
                if seen != version:
                    version = seen
                    self._wake(set(self._listeners))
        self._close_connection(conn)

    def _ring(self, topics: set[str]) -> None:
        self._wake(topics)
        self._presence.ring("".join(sorted({topic[0] for topic in topics})))

    def _wake(self, topics: set[str]) -> None:
        for topic in topics:
            for wake in tuple(self._listeners.get(topic, ())):
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    wake()

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        return every(fn, interval)

    async def compact(self) -> None:
        """Give the space of deleted rows back to the file system."""
        self._usable()
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def job() -> None:
            error: BaseException | None = None
            try:
                with self._commit_lock:
                    self._conn.execute("VACUUM")
                    self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.Error as cause:
                error = translate(cause, self.path)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_answer, done, None, error)

        self._inbox.put(job)
        await done

    # -- the end

    def _close_connection(self, conn: sqlite3.Connection) -> None:
        # The last connection to close checkpoints, which must not meet another process's commit.
        with contextlib.suppress(OSError, sqlite3.Error), self._commit_lock:
            conn.close()

    async def close(self) -> None:
        if self._let_go():
            await asyncio.get_running_loop().run_in_executor(None, self._shut)

    def close_now(self) -> None:
        """`close` for those who have no loop, or must not wait for one."""
        if self._let_go():
            self._shut()

    def _let_go(self) -> bool:
        """One user less; True for the last one, who has to shut."""
        with self._open_lock:
            self._users -= 1
            if self._users > 0 or self._closed:
                return False
            self._closed = True
            if self._open.get(self.path) is self:
                del self._open[self.path]
        return self._pid == os.getpid()

    def _shut(self) -> None:
        self._inbox.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        self._presence.ring_self()
        for thread in self._threads:
            thread.join(PATIENCE)
        self._close_connection(self._conn)
        self._presence.close()
        self._commit_lock.close()

    def _after_fork(self) -> None:
        # A copy of a lock's descriptor holds the lock, for as long as this child lives.
        self._presence.close(forked=True)
        self._commit_lock.close()


def _answer(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _checked(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not text or "\0" in text or text == ":memory:":
        raise InvalidArgument(f"{text!r} is no path of a database file; for one that is never kept use memory://")
    where = os.path.realpath(text)
    if os.path.isdir(where):
        raise InvalidArgument(f"{text!r} is a directory, not a database file")
    if not os.path.isdir(os.path.dirname(where)):
        raise InvalidArgument(f"{text!r}: the directory {os.path.dirname(where)!r} does not exist")
    return where


def _create_private(path: str) -> None:
    # Only a file that was not there yet is opened here: see the module's docstring.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _forked() -> None:
    for engine in SQLiteEngine._open.values():
        engine._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
