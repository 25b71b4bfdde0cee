"""An engine on a driver whose calls block: one thread applies the commits, and a few threads read.

Commits are applied in the order of the calls. Those that wait together are one transaction. A connection that is lost
is opened again, and the transaction is repeated: each operation is idempotent, and a commit whose claim was superseded
meanwhile is answered from what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final, Self

from .._core.clock import SYSTEM, Clock
from .._core.log import log
from .._core.per_loop import PerLoop, call_in_loop
from .._core.threads import started
from .._core.validation import redacted_url
from ..errors import LeaseLost, NotSupported, StorageBusy, StorageClosed, StorageError
from .base import (
    FENCE_OPS,
    FENCE_REPLAYS,
    MARK,
    Batch,
    FunctionFailed,
    Guard,
    NotApplied,
    Op,
    OperationSet,
    Outcome,
    moved,
)
from .commit_request import CommitRequest, LoopBatch, PendingCommits, resolve_all, wait_in_thread
from .shared_engine import Process, SharedEngine

COMMIT_TIMEOUT: Final = 6.0  # seconds a caller waits; well under a third of the shortest sensible lease
MOST_TOGETHER: Final = 64  # commits of one transaction
READERS: Final = 2  # threads that read, at most
_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds before a transaction is repeated

IN_ORDER: Final = 0.02  # seconds for which the result of a read waits for the results of reads before it


class _Read:
    """A read, and its outcome once `done`."""

    __slots__ = ("args", "done", "error", "fn", "future", "loop", "result")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        self.fn, self.args, self.future = fn, args, future
        self.loop = future.get_loop()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False


class ThreadedTx:
    """An open transaction, which operations get as their first argument.

    Args:
        began: What `ThreadedEngine.begin` returned.

    Attributes:
        engine: The engine.
        conn: What `ThreadedEngine.connect` returned.
        now: The time of the server, if `ThreadedEngine.begin` returns it; see `ThreadedEngine.server_clock`.
        notified: The topics whose listeners are woken after the commit.
        repeats: Whether the operation may have been applied before, in a commit whose reply was lost.
    """

    def __init__(self, engine: Any, conn: Any, began: Any = None) -> None:
        self.engine: Any = engine
        self.conn: Any = conn
        self.now: float = began if isinstance(began, float) else 0.0
        self.notified: set[str] = set()
        self.repeats: bool = False

    def notify(self, topic: str) -> None:
        """Wake the listeners of a topic after the commit.

        Args:
            topic: The topic.
        """
        self.notified.add(topic)

    def fence(self, key: str, token: str | None) -> None:
        """Store the fence of a key, or delete it.

        Args:
            key: The key.
            token: The fence. None deletes it.
        """
        self.engine.store_fence(self, key, token)

    def fenced(self, key: str) -> str | None:
        """Return the fence of a key, and keep other transactions from changing it before the end of this transaction.

        Args:
            key: The key.
        """
        for fence in self.engine.fences:
            if (token := fence(self, key)) is not None:
                return str(token)
        token = self.engine.stored_fence(self.conn, key, lock=True)
        return None if token is None else str(token)


class ThreadedEngine(SharedEngine):
    """The base class of an engine on a driver whose calls block.

    A subclass defines `connect`, `begin`, `stored_fence`, `store_fence`, `is_lost` and `is_conflict`, and sets
    `driver_errors`. It overrides `end`, `roll_back` and `disconnect` if the connection lacks `commit()`, `rollback()`
    and `close()`. The class brings the threads, the order of commits, groups, repeats after a lost connection, guards,
    reads, listening in this process, and `close`.

    Open an engine with `open`, so that all backends of a process on one store share it.

    Args:
        key: Identifies the engine in the table of the open engines of its class.
        place: Where the store is: what `parsed` returned. `str(place)` is in error messages, without the password of a
            URL.
        clock: The clock of this engine and its backends.
    """

    kind = "custom"
    #: The base classes of the errors of the driver.
    driver_errors: ClassVar[tuple[type[BaseException], ...]] = ()

    #: Whether leases are measured by the clock of the server, which `begin` returns: several machines share the server.
    #: The queue then uses `ServerLeases`.
    server_clock: ClassVar[bool] = False
    #: Seconds that a write without a waiting caller may be buffered, to be sent with the next commit.
    buffer_delay: float = 0.002
    #: The class of the transactions.
    transaction_class: ClassVar[type[ThreadedTx]] = ThreadedTx

    _open: ClassVar[dict[Any, Any]] = {}
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._open, cls._open_lock = {}, threading.Lock()

    @classmethod
    def open(cls, place: Any, *, clock: Clock = SYSTEM) -> Self:
        """Return the open engine of this process at a place, or open it. It does not wait for the server.

        Args:
            place: Where the store is: a path, a URL, or what else `parsed` accepts.
            clock: The clock of this engine and its backends. Engines with different clocks are different engines.
        """
        place = cls.parsed(place)
        key = (place, id(clock), Process.forks)
        with cls._open_lock:
            engine: Self | None = cls._open.get(key)
            if engine is None:
                engine = cls._open[key] = cls(key, place, clock)
            return engine.share()

    @classmethod
    def parsed(cls, place: Any) -> Any:
        """Return a place as the engine keeps it, or raise InvalidArgument. By default it is the place that was passed.

        The result is hashable, equal for equal stores, and `str` of it is what messages show.

        Args:
            place: Where the store is.
        """
        return place

    def __init__(self, key: Hashable, place: Any, clock: Clock) -> None:
        super().__init__(key, redacted_url(place) if isinstance(place, str) and "://" in place else str(place), clock)
        self.place: Any = place
        #: Whether leases are measured by the clock of the server. A test that passes its own clock moves that clock.
        self.by_server: bool = self.server_clock and clock is SYSTEM
        #: Seconds that a caller waits for a commit.
        self.timeout: float = COMMIT_TIMEOUT
        self.operations: dict[str, Callable[..., Any]] = {}
        self.replays: dict[str, Callable[..., Any]] = {}
        self.fences: list[Callable[[Any, str], str | None]] = []
        self.batches: dict[tuple[str, ...], Batch] = {}
        self.locks: list[Callable[[Any, Sequence[CommitRequest]], None]] = []
        self.not_repeatable: frozenset[str] = frozenset()
        self._one_statement: frozenset[Callable[..., Any]] = frozenset()
        self._added: set[str] = set()
        self._batches: PerLoop[LoopBatch] = PerLoop(self._new_batch)
        self._inbox: SimpleQueue[CommitRequest | None] = SimpleQueue()
        self._reads: SimpleQueue[_Read | None] = SimpleQueue()
        self._unanswered: deque[_Read] = deque()  # in the order of the calls
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._readers: list[threading.Thread] = []
        self._open_reads = 0
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._stopped = False
        self._register(OperationSet("fence", FENCE_OPS, FENCE_REPLAYS))

    # -- what a subclass defines

    @abstractmethod
    def connect(self, *, writes: bool) -> Any:
        """Open a connection, in the thread that will use it.

        Args:
            writes: Whether it is the connection of the commits. The others only read.

        Returns:
            The connection.
        """

    def disconnect(self, conn: Any) -> None:
        """Close a connection, which may be broken. By default with `conn.close()`.

        Args:
            conn: The connection.
        """
        conn.close()

    @abstractmethod
    def begin(self, conn: Any, *, writes: bool) -> Any:
        """Begin a transaction; without `writes`, a transaction that sees the same data in all its statements.

        Args:
            conn: The connection.
            writes: Whether the transaction writes.

        Returns:
            With `server_clock`, the time of the server as a float. The argument `began` of your `transaction_class`.
        """

    def end(self, conn: Any) -> None:
        """Commit the transaction. When it returns, the writes are durable. By default with `conn.commit()`.

        Args:
            conn: The connection.
        """
        conn.commit()

    def roll_back(self, conn: Any) -> None:
        """Undo the open transaction, if any. By default with `conn.rollback()`.

        Args:
            conn: The connection.
        """
        conn.rollback()

    @abstractmethod
    def stored_fence(self, conn: Any, key: str, *, lock: bool) -> str | None:
        """Return the fence of a key that is in no row of an operation set.

        With `lock`, no other transaction can store a fence of the key before this transaction ends.

        Args:
            conn: The connection.
            key: The key.
            lock: Whether no other transaction may store a fence of the key before this transaction ends.
        """

    @abstractmethod
    def store_fence(self, tx: Any, key: str, token: str | None) -> None:
        """Store the fence of a key, or delete it.

        Args:
            tx: The open transaction.
            key: The key.
            token: The fence. None deletes it.
        """

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Return whether an error of the driver means that the connection or the server is gone.

        Args:
            error: The error.
        """

    @abstractmethod
    def is_conflict(self, error: BaseException) -> bool:
        """Return whether another transaction is the cause of an error, so that a repetition may succeed.

        That includes unique keys: another transaction stored the same key after this transaction looked for it.

        Args:
            error: The error.
        """

    def is_of_driver(self, error: BaseException) -> bool:
        """Return whether the driver raised an error, which `translate` translates.

        Args:
            error: The error.
        """
        return isinstance(error, self.driver_errors)

    def translate(self, error: BaseException) -> StorageError:
        """Return the error that callers get for an error of the driver that is neither of these.

        Args:
            error: The error.
        """
        return StorageError(f"{self.location}: {error!s:.300}")

    def migrate(self, operation_set: OperationSet) -> None:
        """Create or update the tables of an operation set. By default they exist, or `connect` creates them.

        Args:
            operation_set: The operation set.
        """

    def notify_others(self, topics: set[str]) -> None:
        """Notify other processes of topics, after a commit. It must not block for long.

        Define it, and call `wake` for the topics of other processes, or the backends of this engine poll.

        Args:
            topics: The topics.
        """

    def lease_now(self) -> float:
        """Return the time on the clock of leases: 0 if it is the server's, so that all times are seconds from now."""
        return 0.0 if self.by_server else self.clock.boot()

    # -- the operations

    def add(self, operation_set: OperationSet) -> None:
        if operation_set.name not in self._added:
            self.migrate(operation_set)
            self._register(operation_set)

    def _register(self, operation_set: OperationSet) -> None:
        self.operations.update(operation_set.operations)
        self.replays.update(operation_set.replays)
        self.not_repeatable |= operation_set.not_repeatable
        self._one_statement |= operation_set.one_statement
        self.batches.update(operation_set.batches)
        if operation_set.fence is not None:
            self.fences.append(operation_set.fence)
        if operation_set.lock is not None:
            self.locks.append(operation_set.lock)
        self._added.add(operation_set.name)

    # -- for callers

    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> CommitRequest:
        return CommitRequest(guard, ops, self)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        self._ensure_open()
        return self._batches[loop].pending

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._ensure_open()
        return wait_in_thread(CommitRequest(guard, ops), self.submit, self.location, self.timeout * 1.2)

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> Outcome:
        self._ensure_open()
        request = CommitRequest(guard, ops)
        with contextlib.suppress(RuntimeError):
            self._batches.here().send(request)
            return request
        self.submit(request)
        return request

    def submit(self, request: CommitRequest) -> None:
        """Pass on a commit, to be applied after every earlier one of the same caller.

        Args:
            request: The commit.
        """
        if request.loop is not None:
            self._batches[request.loop].send(request)
        else:
            self._put([request])

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._ensure_open()
        read = _Read(fn, args, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._stopped:
                raise self._closed_error()
            self._unanswered.append(read)
            self._reads.put(read)
            self._open_reads += 1
            if len(self._readers) < min(READERS, self._open_reads):
                self._readers.append(started(self._read_all, "agent-runtime-reader"))
        return await read.future

    async def fence_of(self, key: str) -> str | None:
        token: str | None = await self.read(partial(self.stored_fence, lock=False), key)
        return token

    def listen(self, topic: str, wake: Callable[[], None]) -> Any:
        """Call `wake()`, from any thread, after commits of this process that notify `topic`, and when `wake` is called.

        Args:
            topic: The topic.
            wake: Called after each of these commits.

        Returns:
            A function that removes the listener; None if `notify_others` is not defined, so that callers poll.
        """
        if type(self).notify_others is ThreadedEngine.notify_others:
            return None
        with self._lock:
            self._listeners.setdefault(topic, []).append(wake)

        def stop() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._listeners.get(topic, []).remove(wake)

        return stop

    def wake(self, topics: set[str] | None = None) -> None:
        """Wake the listeners of these topics, or all, from any thread.

        Args:
            topics: The topics. If None, all.
        """
        with self._lock:
            chosen = [*self._listeners] if topics is None else topics
            found = [wake for topic in chosen for wake in self._listeners.get(topic, ())]
        for each in found:
            with contextlib.suppress(RuntimeError):  # the listener's event loop is closed
                each()

    def _new_batch(self, loop: asyncio.AbstractEventLoop) -> LoopBatch:
        # A caller waits longer than the writer tries, whose error says more.
        return LoopBatch(loop, self.location, lambda: self.timeout * 1.2, self._put)

    def _put(self, requests: Sequence[CommitRequest]) -> None:
        with self._lock:
            if self._stopped:
                for request in requests:
                    request.error = self._closed_error()
                resolve_all(requests)
                return
            for request in requests:
                self._inbox.put(request)
            if self._writer is None:
                self._writer = started(self._write_all, "agent-runtime-writer")

    def _closed_error(self) -> StorageClosed:
        return StorageClosed(f"{self.location} was closed. Open it again")

    # -- the thread of the commits

    def _write_all(self) -> None:
        session = _Session(self, writes=True)
        while batch := self._next_batch():
            left = self.set_aside([request for request in batch if not request.timed_out])
            try:
                if left:
                    self._commit(session, left)
            except BaseException as error:  # noqa: BLE001 - of the subclass. This thread must go on for other callers
                session.drop()
                for request in left:
                    if request.result is None and request.error is None:
                        request.error = error
            resolve_all([each for each in left if each.result is not None or each.error is not None])
            self.begin_set_aside()
        session.close()

    def set_aside(self, batch: list[CommitRequest]) -> list[CommitRequest]:
        """Return the requests that the thread of the commits applies now, without the requests of another thread."""
        return batch

    def sets_aside(self, request: CommitRequest, error: BaseException) -> bool:
        """Set a request aside that would wait for a transaction of the application, and return whether it was."""
        return False

    def begin_set_aside(self) -> None:
        """Begin what was set aside, after the requests before it."""

    def commit_each(self, requests: Iterable[CommitRequest]) -> None:
        """Apply requests in this thread, each in a transaction on a separate connection.

        Args:
            requests: The requests.
        """
        session = _Session(self, writes=True)
        for request in requests:
            self._commit(session, [request])
        session.close()

    def _next_batch(self) -> list[CommitRequest]:
        """Return the requests that wait together; none after the last request."""
        batch: list[CommitRequest] = []
        request = self._inbox.get()
        while request is not None:
            batch.append(request)
            if len(batch) == MOST_TOGETHER:
                return batch
            try:
                request = self._inbox.get_nowait()
            except Empty:
                return batch
        if batch:
            self._inbox.put(None)  # for the next call
        return batch

    def _commit(self, session: _Session, batch: list[CommitRequest]) -> None:
        """Apply a group, and set the result or the error of each of its requests."""
        batch = [request for request in batch if not request.timed_out]  # its caller received an error
        if not batch:
            return
        if len(batch) > 1 and self.not_repeatable and self._has_function(batch):
            for request in batch:  # no function of a user is called again because another request failed
                self._commit(session, [request])
            return
        until, pause = time.monotonic() + self.timeout, _PAUSE
        while True:
            error = self._tried(session, batch)
            batch = [request for request in batch if request.result is None and request.error is None]
            if error is None or not batch or (len(batch) == 1 and self.sets_aside(batch[0], error)):
                return
            if self.is_lost(error):
                session.drop()
            elif not self.is_conflict(error) or len(batch) > 1:
                if len(batch) == 1:
                    batch[0].error = self._translated(error)
                    return
                # A request failed: the others are applied as if each were alone.
                for request in batch:
                    self._commit(session, [request])
                return
            if time.monotonic() + pause > until:
                for request in batch:
                    request.error = self._unavailable(
                        error, "The outcome of the write is unknown. Repeat it: every write is idempotent"
                    )
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _has_function(self, batch: Sequence[CommitRequest]) -> bool:
        return any(op.name in self.not_repeatable for request in batch for op in request.ops)

    def _unavailable(self, error: BaseException, fix: str) -> StorageBusy:
        what = "did not answer" if self.is_lost(error) else "refused a transaction because of others"
        return StorageBusy(f"{self.location} {what} for {self.timeout:g} s ({error!s:.300}). {fix}")

    def _translated(self, error: BaseException) -> BaseException:
        return self.translate(error) if self.is_of_driver(error) else error

    def _tried(self, session: _Session, batch: list[CommitRequest]) -> BaseException | None:
        """Apply a group; return the error for which those without an outcome are not stored."""
        topics = set[str]()
        try:
            conn = session.connection()
            for shape, part in self._parts(batch):
                left = part if shape is None else self._apply_batches(conn, part, topics)
                if left and not self._apply_together(conn, left, topics):
                    return _OneFailed()
        except Exception as error:  # noqa: BLE001 - of the driver; `_commit` decides what follows
            session.roll_back()
            return error
        finally:
            if topics:
                self._notify(topics)
        return None

    def _notify(self, topics: set[str]) -> None:
        try:
            self.wake(topics)
            self.notify_others(topics)
        except Exception:
            log.exception("%s: listeners were not notified of a commit", self.location)

    def _parts(self, batch: Sequence[CommitRequest]) -> list[tuple[bool | None, list[CommitRequest]]]:
        """Return the requests in parts, in their order: those that batches apply, at most one for a run, and others."""
        parts: list[tuple[bool | None, list[CommitRequest]]] = []
        keys = set[object]()
        for request in batch:
            found = self.batches.get(self._shape(request))
            is_batched = (not request.repeats and found is not None and found.fits(request)) or None
            named = {_run_of(op) for op in request.ops} if is_batched else set()
            if not parts or parts[-1][0] is not is_batched or not keys.isdisjoint(named):
                parts.append((is_batched, []))
                keys.clear()
            parts[-1][1].append(request)
            keys |= named - {None}
        return parts

    @staticmethod
    def _shape(request: CommitRequest) -> tuple[str, ...]:
        return tuple(dict.fromkeys([name for name, _ in request.ops]))

    def _apply_batches(self, conn: Any, requests: Sequence[CommitRequest], topics: set[str]) -> list[CommitRequest]:
        """Apply requests by their batches, in one transaction, and return those that were left alone."""
        started_batches = [
            (batch, batch.apply(self, part), part)
            for batch, part in _consecutive((self.batches[self._shape(request)], request) for request in requests)
        ]
        wanted = [next(steps) for _, steps, _ in started_batches]
        keys = sorted({request.guard.key for request in requests if request.guard is not None})
        with self._committing(requests):
            rows = self.execute_batch(conn, [statement for statements in wanted for statement in statements], keys)
        left = list[CommitRequest]()
        for (batch, steps, part), statements in zip(started_batches, wanted, strict=True):
            mine, rows = rows[: len(statements)], rows[len(statements) :]
            try:
                steps.send(mine)
            except StopIteration as end:
                left += end.value
                if len(end.value) < len(part):
                    topics |= batch.topics
        return left

    @contextlib.contextmanager
    def _committing(self, batch: Sequence[CommitRequest]) -> Iterator[None]:
        """Mark these requests if the connection is lost in the block, as they may have been applied."""
        try:
            yield
        except Exception as error:
            if self.is_lost(error):
                for request in batch:
                    request.repeats = True
            raise

    def execute_batch(
        self, conn: Any, statements: Sequence[tuple[str, Sequence[Any]]], keys: Sequence[str]
    ) -> list[list[Any]]:
        """Execute statements in one transaction, and return the rows of each. Needed for operation sets with batches.

        All transactions must lock the rows of runs in one order. So several statements need a lock of `keys`, the runs
        of their claims, before the first statement. Each statement must leave alone what it may not change: a run whose
        claim is another claim, and a store with `MARK`.

        Args:
            conn: The connection.
            statements: Pairs of a statement and its values.
            keys: The runs of the claims.

        Returns:
            The rows of each statement.

        Raises:
            NotSupported: The engine does not define it.
        """
        raise NotSupported(f"{type(self).__name__} does not define execute_batch, so it takes no batches")

    def _apply_together(self, conn: Any, batch: Sequence[CommitRequest], topics: set[str]) -> bool:
        """Apply a group in one transaction. False if one of several requests failed; then nothing is stored."""
        tx = self.transaction_class(self, conn, self.begin(conn, writes=True))
        try:
            for lock in self.locks:
                lock(tx, batch)
            for request in batch:
                if not self._apply(tx, request):
                    self.roll_back(conn)
                    if len(batch) > 1:
                        _forget(batch)
                    return len(batch) == 1  # its error is its outcome
            with self._committing(batch):
                self.end(conn)
        except BaseException:
            _forget(batch)
            raise
        topics |= tx.notified
        return True

    def _apply(self, tx: Any, request: CommitRequest) -> bool:
        """Apply one request; False if it failed where it may have written."""
        guard, tx.repeats = request.guard, request.repeats
        try:
            if guard is not None and tx.fenced(guard.key) != guard.token:
                request.result, request.error = self._replayed(tx, guard, request.ops)
                return True
            if (guard is None or guard.key != MARK) and (mark := self.mark(tx)) is not None:
                request.error = moved(self.location, mark)
                return True
            request.result = [self.operations[name](tx, *args) for name, args in request.ops]
            return True
        except FunctionFailed as failed:
            request.error = failed.error
            return False
        except Exception as error:
            if self.is_lost(error) or self.is_conflict(error):
                raise
            request.error = self._translated(error)
            return False

    def mark(self, tx: Any) -> str | None:
        """Return the mark of a store that is moved; see `MARK`.

        Args:
            tx: The open transaction.
        """
        return self.stored_fence(tx.conn, MARK, lock=True)

    def _replayed(self, tx: Any, guard: Guard, ops: Sequence[Op]) -> tuple[list[Any] | None, LeaseLost | None]:
        """Return the results of a superseded claim's operations if all were applied before, else LeaseLost."""
        try:
            return [self.replays[name](tx, *args) for name, args in ops], None
        except (KeyError, NotApplied):
            return None, LeaseLost(guard.key, guard.token)

    # -- the threads of the reads

    def _read_all(self) -> None:
        session = _Session(self, writes=False)
        while self._read_next(session):  # keeps no result alive while it waits
            pass
        session.close()

    def _read_next(self, session: _Session) -> bool:
        read = self._reads.get()
        if read is None:
            return False
        try:
            read.result, read.error = self._read_now(session, read.fn, read.args)
        except BaseException as failure:  # noqa: BLE001 - of the subclass. This thread must go on for other callers
            session.drop()
            read.error = failure
        with self._lock:
            self._open_reads -= 1
        self._answer(read)
        return True

    def _read_now(
        self, session: _Session, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Any, BaseException | None]:
        """Return the result and the error of a read, one of which is None."""
        until, pause = time.monotonic() + self.timeout, _PAUSE
        while True:
            try:
                conn = session.connection()
                if fn in self._one_statement:
                    return fn(conn, *args), None
                self.begin(conn, writes=False)
                result = fn(conn, *args)
                self.end(conn)
                return result, None
            except Exception as failure:  # noqa: BLE001 - raised to the caller of this read
                error = failure
            session.roll_back()
            if self.is_lost(error):
                session.drop()
            elif not self.is_conflict(error):
                return None, self._translated(error)
            if self._closed or time.monotonic() + pause > until:
                return None, self._unavailable(error, "Try again")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _answer(self, read: _Read) -> None:
        """Answer a read after those before it, unless they take long.

        Tasks that read at the same time continue in the order of their calls, as on the other engines.
        """
        with self._lock:
            read.done = True
            while self._unanswered and self._unanswered[0].done:
                first = self._unanswered.popleft()
                call_in_loop(first.loop, _answer, first)
            if self._unanswered and read in self._unanswered:
                call_in_loop(read.loop, read.loop.call_later, IN_ORDER, self._answer_alone, read)

    def _answer_alone(self, read: _Read) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._unanswered.remove(read)
        _answer(read)

    # -- the end

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._batches[loop].flush(everything=True)

    def _close_now(self) -> None:
        with self._lock:
            self._stopped = True
            threads = [*self._readers, *([self._writer] if self._writer is not None else [])]
            self._inbox.put(None)
            for _ in self._readers:
                self._reads.put(None)
        for thread in threads:
            thread.join(self.timeout)


def _run_of(op: Op) -> object:
    """Return the id of the run that an operation names first, or None."""
    first = op.args[0] if op.args else None
    return first if isinstance(first, str) else getattr(first, "run_id", None)


def _consecutive(requests: Iterable[tuple[Batch, CommitRequest]]) -> Iterator[tuple[Batch, list[CommitRequest]]]:
    """Yield groups of requests of one shape, so that all are applied in the order of the calls."""
    for _, group in groupby(requests, key=lambda each: id(each[0])):
        pairs = list(group)
        yield pairs[0][0], [request for _, request in pairs]


def _forget(batch: Sequence[CommitRequest]) -> None:
    """Remove the outcomes of requests whose transaction was not committed."""
    for request in batch:
        request.result = request.error = None


class _OneFailed(Exception):
    """One request of a group failed in its operations."""


class _Session:
    """The connection of one thread, opened when it is needed."""

    def __init__(self, engine: ThreadedEngine, *, writes: bool) -> None:
        self._engine = engine
        self._writes = writes
        self._conn: Any = None

    def connection(self) -> Any:
        if self._conn is None:
            self._conn = self._engine.connect(writes=self._writes)
        return self._conn

    def roll_back(self) -> None:
        """Undo what an error left open; without that, drop the connection."""
        if self._conn is not None:
            try:
                self._engine.roll_back(self._conn)
            except Exception:  # noqa: BLE001 - the connection is broken
                self.drop()

    def drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                self._engine.disconnect(conn)

    close = drop


def _answer(read: _Read) -> None:
    """Set the outcome of a read, unless its caller was cancelled."""
    if read.future.done():
        return
    if read.error is not None:
        read.future.set_exception(read.error)
    else:
        read.future.set_result(read.result)
