"""The engine on one SQLite file: one group of commits at a time; readers have their own connections.

An exclusive lock on a separate file is held around each group. It makes commits of several processes fair and excludes
checkpoints, because SQLite before 3.51.3 can corrupt the WAL otherwise. Only SQLite opens the database file itself:
closing another descriptor of it would drop SQLite's locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakSet

from ..._core.clock import SYSTEM, Clock
from ..._core.ids import new_ulid
from ..._core.log import log
from ..._core.per_loop import call_in_loop
from ..._core.validation import Shown, must
from ...errors import StorageBusy, StorageClosed, StorageError, brief
from ..base import FENCE_OPS, FENCE_REPLAYS, Guard, Op, OperationSet, Outcome
from ..commit_request import CommitRequest, PendingCommits, wait_in_thread
from ..os_errors import storage_error, storage_errors
from ..shared_engine import SharedEngine
from .database import DatabaseFile, FileId, check_one_name, check_unused, checked, file_id, look
from .group_commit import COMMIT_TIMEOUT, GroupCommitter
from .live_directory import make_directory
from .liveness import CommitLock, FifoNotifier, ProcessLiveness
from .readers import Readers, answer, view
from .transaction import DRIVER_ERRORS, RowCache, own_fence, translate
from .writer import WriteAheadLog, Writer

#: Short reads on an event loop, after which the task pauses once. A task that repeats a read until it finds something
#: would otherwise never let another task write it.
READS_ON_LOOP = 16
LARGE = 64 << 20  # bytes of a file; to compact a larger one may take so long that live runs lose their leases

FENCES = (
    "CREATE TABLE arc_fence (key TEXT PRIMARY KEY, token TEXT NOT NULL) WITHOUT ROWID",
    # Since the row of a run is its fence, this table may contain outdated tokens. Renamed, because an older library
    # that still uses the file must fail instead of using them.
    "ALTER TABLE arc_fence RENAME TO arc_carried",
)


_Made = TypeVar("_Made")


class HasConnections(Protocol):
    """An engine with connections to a SQLite file."""

    def forked(self) -> None:
        """Called in a child process that was forked while the engine was open."""


class SQLiteEngine(SharedEngine):
    """The engine of a process on one file. Use `SQLiteEngine.open(path)`, which shares it."""

    kind = "sqlite"
    buffer_delay: float = 0.002
    after_fork = "Open it only after the fork, or start the child with 'spawn' or 'forkserver' of multiprocessing"

    # One table for the process, because a file must have one writer in each process.
    _open: ClassVar[dict[str, SQLiteEngine]] = {}
    _open_lock = threading.Lock()
    # Files that were open when this process was forked. SQLite records its locks once for all connections to a file.
    # With the parent's locks recorded it would acquire none here. The parent's last connection would delete the log.
    _carried: ClassVar[set[FileId]] = set()
    #: Engines with connections, including engines that are being opened or closed, when they are not in the table.
    connected: ClassVar[WeakSet[HasConnections]] = WeakSet()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, durability: str = "full", clock: Clock = SYSTEM) -> SQLiteEngine:
        if durability not in ("full", "normal"):
            raise must("durability", "be 'full' or 'normal'", durability)
        where = checked(path)
        with cls._open_lock:
            engine = cls._open.get(where)
            if engine is None or engine.is_of_parent:
                with storage_errors(where):
                    there = file_id(where)
                if there in cls._carried:
                    raise StorageClosed(f"{where} was open before a fork. {cls.after_fork}")
                engine = cls(where, durability, clock)
                cls._open[where] = engine
            else:
                engine._require_durability(durability)
            return engine.share()

    @classmethod
    def check_durability(cls, path: str | os.PathLike[str], durability: str) -> None:
        """Raise InvalidArgument if the file is open in this process with another durability."""
        with cls._open_lock:
            engine = cls._open.get(checked(path))
            if engine is not None and not engine.is_of_parent:
                engine._require_durability(durability)

    def _require_durability(self, durability: str) -> None:
        """Reject a second durability: the only writer of the file in this process can use just one durability."""
        if self.durability != durability:
            raise must(
                f"durability of {self.path}",
                "be the same for all its users in this process",
                Shown(f"{brief(durability)} while it is open with {self.durability!r}"),
                "Set it once with configure(durability=...), or pass the same durability= to each open",
            )

    def __init__(self, path: str, durability: str, clock: Clock) -> None:
        super().__init__(path, path, clock)
        self.path: str = path
        self.durability: str = durability
        self.known: RowCache = RowCache()
        self.fences: list[Callable[[Any, str], str | None]] = []
        self._added: set[str] = set()  # names of operation sets
        self._short_reads: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._reads_on_loop = 0
        self.readers: Readers = Readers(path, lambda: _Session(self.file), self._ensure_open)
        self.dead_looked_at: float = -1.0  # boot time of the last check for dead processes
        flushes = durability == "full"
        live = Path(f"{path}.live")
        with contextlib.ExitStack() as undo, _storage_errors(path):
            check_one_name(path)
            # A database without its directory is not being created by another process: that makes the directory first.
            if os.path.exists(path) and os.path.getsize(path) and not live.exists():
                look(path)
                check_unused(path, live)
            is_new = make_directory(live, path)
            self._commit_lock = CommitLock(live)
            undo.callback(self._commit_lock.close)
            self._liveness = ProcessLiveness(live, new_ulid(clock), clock, is_new=is_new)
            undo.callback(self._liveness.close)
            self.process_id: str = self._liveness.holder
            self.connected.add(self)
            undo.callback(self.connected.discard, self)
            self.file: DatabaseFile = DatabaseFile(path, self._commit_lock, flushes=flushes, timeout=COMMIT_TIMEOUT)
            undo.callback(self.file.writing.close)
            self.log: WriteAheadLog = WriteAheadLog(path, self.file.writing, flushes=flushes)
            self._notifier = FifoNotifier(self._liveness, clock, self.file.connect, self.file.disconnect)
            self.writer: Writer = self._make_writer(flushes)
            self.add(OperationSet("fence", FENCE_OPS, FENCE_REPLAYS, FENCES))
            undo.pop_all()

    def _make_writer(self, flushes: bool) -> Writer:
        committer = GroupCommitter(self, self.file.writing, path=self.path, flushes=flushes)
        return Writer(committer, self.file, self._commit_lock, self.log, self._notifier.notify)

    def add(self, operation_set: OperationSet) -> None:
        if operation_set.name in self._added:
            return
        self.file.migrate(operation_set)
        self.writer.add(operation_set)
        self._short_reads |= operation_set.short_reads
        if operation_set.fence is not None:
            self.fences.append(operation_set.fence)
        self._added.add(operation_set.name)

    # -- writing

    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> CommitRequest:
        return CommitRequest(guard, ops, self)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        self._ensure_open()
        return self.writer.batches[loop].pending

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._ensure_open()
        return wait_in_thread(CommitRequest(guard, ops), self.submit, self.path, self.writer.committer.timeout)

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> Outcome:
        self._ensure_open()
        request = CommitRequest(guard, ops)
        self.submit(request)
        return request

    def submit(self, request: CommitRequest) -> None:
        """Pass on a commit, to be applied after every earlier one of the same caller. The simulator overrides this."""
        if request.loop is not None:
            self.writer.batches[request.loop].send(request)
        elif request.done is not None:
            self.writer.enqueue([request])
        else:
            self.writer.post(request)

    # -- reading

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._ensure_open()
        short = self._short_reads.get(fn)
        if short is not None and (found := self.writer.read_on_loop(short, args)) is not None:
            self._reads_on_loop += 1
            if not self._reads_on_loop % READS_ON_LOOP:
                await asyncio.sleep(0)
            return found
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.submit_read(fn, args, loop, future)
        return await future

    async def fence_of(self, key: str) -> str | None:
        token: str | None = await self.read(own_fence, key)
        return token

    def submit_read(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        """Pass on a read. The simulator overrides this."""
        self.readers.submit(fn, args, loop, future)

    # -- other processes on this file

    def dead_holders(self, holders: Sequence[str]) -> tuple[str, ...]:
        """Return the `holders` whose process is dead, so that their leases expire immediately."""
        return self._liveness.dead(holders)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._notifier.listen(topic, wake)

    async def compact(self, *, always: bool = False) -> bool:
        """Return the space of deleted rows to the file system. Return whether that was done.

        No process can write during that time. So a file of more than 64 MiB is not compacted, unless `always` is set.

        Raises:
            StorageBusy: It could not begin in time.
        """
        self._ensure_open()
        if not always and self._is_large():
            return False
        await self._alone(self.log.compact)
        return True

    async def set_secure_delete(self, mode: str) -> str:
        """Choose what is overwritten of what this process deletes: "ON", "OFF" or "FAST". Return the mode before."""
        return await self._alone(partial(self.log.set_secure_delete, mode))

    async def empty_log(self) -> bool:
        """Move all of the log to the file and truncate it. Return whether that was possible: no reader needed it."""
        return await self._alone(partial(self.log.compact, only_log=True))

    async def _alone(self, work: Callable[[], _Made]) -> _Made:
        """Run a function that uses the connection, while no process writes; return what it returns.

        Raises:
            StorageBusy: It could not begin in time.
        """
        self._ensure_open()
        loop, timeout = asyncio.get_running_loop(), self.writer.committer.timeout
        running: asyncio.Event = asyncio.Event()
        done: asyncio.Future[_Made] = loop.create_future()
        timed_out = False

        def job() -> None:
            error: BaseException | None = None
            found: Any = None
            try:
                with self.writer.exclusive():
                    if timed_out:
                        return
                    call_in_loop(loop, running.set)
                    found = work()
            except sqlite3.Error as cause:
                error = translate(cause, self.path)
            except OSError as cause:
                error = storage_error(cause, self.path)
            except Exception as cause:  # noqa: BLE001 - raised to the caller
                error = StorageError(f"{self.path}: {cause!r}")
            call_in_loop(loop, answer, done, found, error)
            call_in_loop(loop, running.set)

        self.writer.run_job(job)
        try:
            async with asyncio.timeout(timeout):
                await running.wait()
        except TimeoutError:
            timed_out = True
            done.cancel()
            raise StorageBusy(
                f"{self.path} was in use for {timeout:g} s without a break, so it was not compacted. Try again later"
            ) from None
        return await done

    def _is_large(self) -> bool:
        with storage_errors(self.path):
            size = os.path.getsize(self.path)
        if size <= LARGE:
            return False
        log.info(
            "%s has %d MiB and was not compacted, because no process could write during that time. The "
            "space of deleted "
            "rows is reused. To return it to the file system, stop the workers, then call runner.vacuum(compact=True)",
            self.path,
            size >> 20,
        )
        return True

    # -- closing

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self.writer.batches[loop].flush(everything=True)

    def _close_now(self) -> None:
        self.readers.stop()
        written = self.writer.close()
        self._notifier.close(self._liveness.notify_self, COMMIT_TIMEOUT)
        self.readers.join(COMMIT_TIMEOUT)
        # A connection that another thread still uses stays open: closing it would crash the process.
        if written:
            self.file.disconnect(self.file.writing)
            self.connected.discard(self)
        self._liveness.close()
        if written:
            self._commit_lock.close()

    @classmethod
    def carry(cls, path: str, there: FileId | None = None) -> None:
        """Reject the file in this forked process: the parent had it open."""
        if (carried := there or file_id(path)) is not None:
            cls._carried.add(carried)

    def forked(self) -> None:
        file: DatabaseFile | None = getattr(self, "file", None)  # None while the engine is being opened
        self.carry(self.path, file.ids[self.path] if file else None)
        # A copy of a lock's descriptor would hold the lock for as long as this child lives.
        self._liveness.close(forked=True)
        self._commit_lock.close(forked=True)


class _Session:
    """What a reader thread reads with: at most one connection, opened by the first read."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self._conn: sqlite3.Connection | None = None

    def read(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._conn is None:
            self._conn = self._file.connect()
        return view(self._conn, fn, args)

    def close(self) -> None:
        if self._conn is not None:
            self._file.disconnect(self._conn)
            self._conn = None


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Raise errors of the system and of the driver as storage errors."""
    try:
        with storage_errors(path):
            yield
    except DRIVER_ERRORS as error:
        raise translate(error, path) from error


def _forked() -> None:
    for engine in tuple(SQLiteEngine.connected):
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
