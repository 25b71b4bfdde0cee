"""An engine over one SQLite file: commits go in groups, one at a time; readers have connections of their own.

Between processes an exclusive sidecar lock is held around each group, which makes commits fair and
keeps them apart from checkpoints (SQLite before 3.51.3 can corrupt a WAL otherwise). The database
file itself is opened by SQLite alone: closing another descriptor of it would drop SQLite's locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar
from weakref import WeakSet

from ..._core.clock import SYSTEM, Clock
from ..._core.ids import new_ulid
from ..._core.per_loop import call_in_loop
from ..._core.threads import started
from ...errors import InvalidArgument, StorageBusy, StorageClosed, StorageError, brief
from ..base import FENCE_OPS, FENCE_REPLAYS, Guard, Op, OperationSet
from ..commit_request import CommitRequest, PendingCommits, wait_in_thread
from ..os_errors import storage_error, storage_errors
from ..shared_engine import SharedEngine
from .database import DatabaseFile, FileId, check_unused, checked, file_id, look
from .group_commit import PATIENCE, GroupCommitter
from .live_directory import make_directory
from .liveness import CommitLock, ProcessLiveness
from .notifier import FifoNotifier
from .one_name import check_one_name
from .transaction import DRIVER_ERRORS, RowCache, translate
from .wal import WriteAheadLog
from .writer import Writer

log: logging.Logger = logging.getLogger("agent_runtime_core")

READERS = 2
LARGE = 64 << 20  # bytes of a file that may take so long to compact that live runs lose their leases

_FENCES = (
    "CREATE TABLE arc_fence (key TEXT PRIMARY KEY, token TEXT NOT NULL) WITHOUT ROWID",
    # Not all that is in it is in force since a run's row is its fence: a library that does not know so, and has had the
    # file open since before, must not go on by it.
    "ALTER TABLE arc_fence RENAME TO arc_carried",
)


class SQLiteEngine(SharedEngine):
    """Use `SQLiteEngine.open(path)`: all backends of a process on one file share one engine."""

    kind = "sqlite"
    buffer_delay: float = 0.002
    after_fork = "open it only after the fork, or start the child with 'spawn' or 'forkserver' of multiprocessing"

    # One writer per file and process is what makes the promises true, so the table is the process's.
    _open: ClassVar[dict[str, SQLiteEngine]] = {}
    _open_lock = threading.Lock()
    # Files that were open when this process was forked off. SQLite keeps one note of its locks for all connections to a
    # file: with the parent's in it, it would take none here, and the parent's last connection would delete the log.
    _carried: ClassVar[set[FileId]] = set()
    # Those with connections, also while they are being opened or closed, when they are not in the table.
    _connected: ClassVar[WeakSet[SQLiteEngine]] = WeakSet()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, durability: str = "full", clock: Clock = SYSTEM) -> SQLiteEngine:
        if durability not in ("full", "normal"):
            raise InvalidArgument(f"durability is 'full' or 'normal', not {brief(durability)}")
        where = checked(path)
        with cls._open_lock:
            engine = cls._open.get(where)
            if engine is None or engine.is_of_parent:
                with storage_errors(where):
                    there = file_id(where)
                if there in cls._carried:
                    raise StorageClosed(f"{where} was open before a fork: {cls.after_fork}")
                engine = cls(where, durability, clock)
                cls._open[where] = engine
            elif engine.durability != durability:
                raise InvalidArgument(
                    f"{where} is open here with durability={engine.durability!r}, not {brief(durability)}"
                )
            return engine.share()

    def __init__(self, path: str, durability: str, clock: Clock) -> None:
        super().__init__(path, path, clock)
        self.path: str = path
        self.durability: str = durability
        self.known: RowCache = RowCache()
        self.fences: list[Callable[[Any, str], str | None]] = []
        self._concerns: set[str] = set()
        self._reads: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._reading = threading.Lock()
        self.dead_looked_at: float = -1.0  # lease time of the last look for dead holders
        flushes = durability == "full"
        live = Path(f"{path}.live")
        with contextlib.ExitStack() as undo, _storage_errors(path):
            check_one_name(path)
            # A file of ours never stands without its directory: in this order, another process is not making it now.
            if os.path.exists(path) and os.path.getsize(path) and not live.exists():
                look(path)
                check_unused(path, live)
            alone = make_directory(live, path)
            self._commit_lock = CommitLock(live)
            undo.callback(self._commit_lock.close)
            self._presence = ProcessLiveness(live, new_ulid(clock), clock, alone=alone)
            undo.callback(self._presence.close)
            self.process_id: str = self._presence.holder
            self._connected.add(self)
            undo.callback(self._connected.discard, self)
            self.file: DatabaseFile = DatabaseFile(path, self._commit_lock, flushes=flushes, patience=PATIENCE)
            undo.callback(self.file.writing.close)
            self.log: WriteAheadLog = WriteAheadLog(path, self.file.writing, flushes=flushes)
            self._bell = FifoNotifier(self._presence, clock, self.file.connect, self.file.disconnect)
            self.writer: Writer = self._make_writer(flushes)
            self.add(OperationSet("fence", FENCE_OPS, FENCE_REPLAYS, _FENCES))
            undo.pop_all()

    def _make_writer(self, flushes: bool) -> Writer:
        committer = GroupCommitter(self, self.file.writing, path=self.path, flushes=flushes)
        return Writer(committer, self.file, self._commit_lock, self.log, self._bell.notify)

    def add(self, concern: OperationSet) -> None:
        if concern.name in self._concerns:
            return
        self.file.migrate(concern)
        self.writer.add(concern)
        if concern.fence is not None:
            self.fences.append(concern.fence)
        self._concerns.add(concern.name)

    # -- writing

    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> CommitRequest:
        return CommitRequest(guard, ops, self)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        self._ensure_open()
        return self.writer.batches[loop].pending

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        self._ensure_open()
        return wait_in_thread(CommitRequest(guard, ops), self.submit, self.path, self.writer.committer.patience)

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        self._ensure_open()
        self.submit(CommitRequest(guard, ops))

    def submit(self, request: CommitRequest) -> None:
        """Pass a commit on to be carried out; the simulator schedules it instead."""
        if request.loop is not None:
            self.writer.batches[request.loop].send(request)
        elif request.done is not None:
            self.writer.enqueue([request])
        else:
            self.writer.post(request)

    # -- reading

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._ensure_open()
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
        with self._reading:
            self._ensure_open()  # closed by another thread meanwhile, there is nobody to read
            if not self._readers:
                self._readers.append(started(self._read_loop, "agent-runtime-reader"))
            self._reads.put((fn, args, loop, future))
            # Another reader only where those there are did not come to it.
            if len(self._readers) < READERS and self._reads.qsize() > 1:
                with contextlib.suppress(StorageError):  # they will
                    self._readers.append(started(self._read_loop, "agent-runtime-reader"))

    def _read_loop(self) -> None:
        conns: list[sqlite3.Connection] = []  # one, once it is needed
        while self._read_next(conns):  # and nothing of what was read is held meanwhile
            pass
        for conn in conns:
            self.file.disconnect(conn)

    def _read_next(self, conns: list[sqlite3.Connection]) -> bool:
        """Carry out the next read; False where there is none any more."""
        item = self._reads.get()
        if item is None:
            return False
        fn, args, loop, future = item
        result: Any = None
        error: Exception | None = None
        try:
            if not conns:
                conns.append(self.file.connect())
            result = self.view(conns[0], fn, args)
        except DRIVER_ERRORS as failure:
            error = translate(failure, self.path)
        except Exception as failure:  # noqa: BLE001 - it belongs to the caller of this read
            error = failure
        call_in_loop(loop, _answer, future, result, error)
        return True

    @staticmethod
    def view(conn: sqlite3.Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        conn.execute("BEGIN")
        try:
            return fn(conn, *args)
        except Exception as error:
            # A cursor half-way in one of its frames would keep this connection in the past for as long as it is kept.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            if conn.in_transaction:  # some errors end it by themselves
                conn.execute("ROLLBACK")

    # -- others on this file

    def dead_holders(self, holders: Sequence[str]) -> tuple[str, ...]:
        """Those of `holders` whose process is gone, so that their leases are free at once."""
        return self._presence.dead(holders)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._bell.listen(topic, wake)

    async def compact(self, *, always: bool = False) -> None:
        """Give the space of deleted rows back to the file system; StorageBusy where that cannot begin in time.

        A file of more than 64 MiB is left as it is, unless it is `always`: nobody can write for as long as it takes.
        """
        self._ensure_open()
        if not always and self._is_large():
            return
        loop, patience = asyncio.get_running_loop(), self.writer.committer.patience
        begun, done = asyncio.Event(), loop.create_future()
        given_up = False

        def tell(call: Callable[..., Any], *args: Any) -> None:
            call_in_loop(loop, call, *args)

        def job() -> None:
            error: BaseException | None = None
            try:
                with self.writer.exclusive():
                    if given_up:
                        return
                    tell(begun.set)
                    self.log.compact()
            except sqlite3.Error as cause:
                error = translate(cause, self.path)
            except OSError as cause:
                error = storage_error(cause, self.path)
            except Exception as cause:  # noqa: BLE001 - it belongs to the caller
                error = StorageError(f"{self.path}: {cause!r}")
            tell(_answer, done, None, error)
            tell(begun.set)

        self.writer.run_job(job)
        try:
            async with asyncio.timeout(patience):
                await begun.wait()
        except TimeoutError:
            given_up = True
            done.cancel()
            raise StorageBusy(
                f"{self.path} was in use for {patience:g} s without a break: it was not compacted, do it another time"
            ) from None
        await done

    def _is_large(self) -> bool:
        with storage_errors(self.path):
            size = os.path.getsize(self.path)
        if size <= LARGE:
            return False
        log.info(
            "%s has %d MiB and is not compacted, which would keep everybody from writing: what was deleted is written "
            "over; to give the space back, stop the workers, then call runner.vacuum(compact=True)",
            self.path, size >> 20,
        )  # fmt: skip
        return True

    # -- the end

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self.writer.batches[loop].flush()

    def _close_now(self) -> None:
        with self._reading:
            for _ in self._readers:
                self._reads.put(None)
        written = self.writer.close()
        self._bell.close(self._presence.notify_self, PATIENCE)
        for thread in self._readers:
            thread.join(PATIENCE)
        # What another thread is still using is left to it: a connection that is closed under it ends the process.
        if written:
            self.file.disconnect(self.file.writing)
            self._connected.discard(self)
        self._presence.close()
        if written:
            self._commit_lock.close()

    def _after_fork(self) -> None:
        file: DatabaseFile | None = getattr(self, "file", None)  # none while it is being opened
        if (there := file.ids[self.path] if file else file_id(self.path)) is not None:
            self._carried.add(there)
        # A copy of a lock's descriptor holds the lock, for as long as this child lives.
        self._presence.close(forked=True)
        self._commit_lock.close(forked=True)


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Raise what the system or the driver refuses as a storage error."""
    try:
        with storage_errors(path):
            yield
    except DRIVER_ERRORS as error:
        raise translate(error, path) from error


def _answer(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _forked() -> None:
    for engine in tuple(SQLiteEngine._connected):
        engine._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
