"""The writing connection of a SQLite file, and which thread uses it next.

Commits are grouped, and each group is one transaction. A writer thread commits the groups. To hand a commit to that
thread and to get its outcome wakes a sleeping thread twice, which takes longer than the commit itself if nothing must
to be flushed or the disk flushes fast. The few commits of one event-loop iteration are therefore committed on the loop,
at the end of the iteration, while no other thread or process writes and the last flushes were short: see
`Writer.commit_on_loop`. A task that alone commits does not wait for the end of the iteration: see
`LoopBatch.commit_now`.

Measured: if the thread commits everything, a chain of 100 steps takes 2.8 times as long in NORMAL and 1.5 times in
FULL.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from ..._core.per_loop import PerLoop
from ..._core.threads import started
from ...errors import StorageClosed, StorageError
from ..base import OperationSet, always
from ..commit_request import CommitRequest, LoopBatch, resolve, resolve_all
from .database import DatabaseFile
from .group_commit import GroupCommitter
from .liveness import CommitLock
from .transaction import DRIVER_ERRORS

WAL_SIZE = 4 << 20  # bytes after which the holder of the commit lock checkpoints
WAIT_MS = 50  # how long a checkpoint waits for readers
COMPACT_WAIT_MS = 3000
_FRAME = 4096 + 24  # bytes of a page in the WAL
_AHEAD, _MOST_AHEAD = 1 << 17, 1 << 18  # bytes by which it is extended: the first time, and later
_SECURE_DELETE = ("OFF", "ON", "FAST")
_PASSIVE = "PRAGMA wal_checkpoint(PASSIVE)"
_RESTART = "PRAGMA wal_checkpoint(RESTART)"


class WriteAheadLog:
    """Maintains the log. Its caller owns the writing connection and the commit lock.

    A flush that extends the file costs twice as much as a flush that does not. So the file is extended ahead of its use
    up to its usual size, in small parts, because an event loop may do it. After a checkpoint SQLite writes from the
    start of the file, which is never truncated. Bytes after the last frame have no valid checksum and are not read.
    """

    def __init__(self, path: str, conn: sqlite3.Connection, *, flushes: bool) -> None:
        self._wal: str = f"{path}-wal"
        self._conn: sqlite3.Connection = conn
        self._flushes: bool = flushes
        self._groups: int = 0  # committed since the last check
        self._before: int = 0  # committed between the last checkpoint and the last check
        self._look_after: int = 1  # groups until the next check; 1, because many processes commit no more than one
        self._per_group: float = 1.5  # frames of the log that a group takes; an estimate, measured later
        self._size: float = math.inf  # bytes at the last check

    def grown(self) -> bool:
        """Count a committed group; True if `maintain` is due, which takes longer than a group."""
        self._groups += 1
        if self._groups < self._look_after:
            return False
        size, ahead = 0, _MOST_AHEAD
        with contextlib.suppress(OSError, sqlite3.Error):
            size = os.stat(self._wal).st_size
            if size >= WAL_SIZE:
                return True
            if self._is_short(size):
                ahead = min(max(size, _AHEAD), _MOST_AHEAD)
                size = self._extend(ahead)
        self._size = size
        self._look_again(ahead // _FRAME)
        return False

    def _is_short(self, size: int) -> bool:
        # With large commits the time is not spent on extending, and without flushes extending costs nothing.
        return self._flushes and size - self._size < 8 * _FRAME * self._groups

    def _look_again(self, frames: int) -> None:
        """Schedule the next check for when the log will have grown by about so many frames."""
        self._before += self._groups
        self._groups, self._look_after = 0, max(1, int(frames / self._per_group * 0.8))

    def maintain(self) -> None:
        frames = _MOST_AHEAD // _FRAME
        try:
            size = os.stat(self._wal).st_size
            if size >= WAL_SIZE:
                # Far above its size, readers block checkpoints: then it is worth waiting for them a moment.
                frames = self._checkpoint(_RESTART if size > 4 * WAL_SIZE else _PASSIVE)
                # Other processes write too, so the estimate decays slowly.
                groups = max(self._before + self._groups, 1)
                self._per_group = max(frames / groups, self._per_group * 0.95, 1.0)
                self._before = self._groups = 0
                frames = WAL_SIZE // _FRAME
        except (OSError, sqlite3.Error):
            pass  # tried again at the next check
        self._look_again(frames)

    def _checkpoint(self, mode: str) -> int:
        """Checkpoint and return the number of frames that the log had."""
        self._conn.execute(f"PRAGMA busy_timeout={WAIT_MS}")
        try:
            frames: int = self._conn.execute(mode).fetchone()[1]
            return frames
        finally:
            self._conn.execute("PRAGMA busy_timeout=0")

    def compact(self, *, only_log: bool = False) -> bool:
        """Return the space of deleted rows and of the log to the file system, and whether the log is empty."""
        self._conn.execute(f"PRAGMA busy_timeout={COMPACT_WAIT_MS}")
        try:
            if not only_log:
                self._conn.execute("VACUUM")
            busy: int = self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            return not busy
        finally:
            self._conn.execute("PRAGMA busy_timeout=0")

    def set_secure_delete(self, mode: str) -> str:
        """Choose what SQLite overwrites of what this process deletes: "ON", "OFF" or "FAST". Return the mode before."""
        before = _SECURE_DELETE[self._conn.execute("PRAGMA secure_delete").fetchone()[0]]
        self._conn.execute(f"PRAGMA secure_delete={mode}")
        return before

    def _extend(self, ahead: int) -> int:
        """Append `ahead` zero bytes and return the new size. The next commit flushes them."""
        # Under SQLite's own lock: zeros written over frames of a program outside this library would damage the file.
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            size, fd = os.stat(self._wal).st_size, os.open(self._wal, os.O_WRONLY)
            try:
                os.lseek(fd, size, os.SEEK_SET)
                return size + os.write(fd, bytes(ahead))
            finally:
                os.close(fd)
        finally:
            self._conn.execute("ROLLBACK")


GROUP = 256  # commits in one transaction, at most
ON_LOOP = 4  # commits of one iteration that its loop commits itself, at most
OPS_ON_LOOP = 16  # operations in such a commit
SHORT_FLUSH = 0.001  # average seconds of a flush up to which a loop waits for it
_Job = Callable[[], None]  # needs the connection, and is no commit


class Writer:
    """Writes to one file for this process, one group at a time."""

    def __init__(
        self,
        committer: GroupCommitter,
        file: DatabaseFile,
        lock: CommitLock,
        log: WriteAheadLog,
        notify: Callable[[set[str]], None],
    ) -> None:
        self.committer: GroupCommitter = committer
        self.slow: dict[str, Callable[..., bool]] = {}
        self.batches: PerLoop[LoopBatch] = PerLoop(self._new_batch)
        #: Commits that were enqueued together are one entry, so that the thread never finds half of an iteration.
        self.inbox: SimpleQueue[list[CommitRequest] | _Job | None] = SimpleQueue()
        self._file = file
        self._rest: list[CommitRequest] = []  # of an entry that was larger than a group; used by the thread only
        self._commit_lock = lock
        self._log = log
        self._notify = notify
        self._thread: threading.Thread | None = None  # started with the first entry
        self._closed = False
        self._queued = 0  # commits and jobs that the thread did not finish
        self._inbox_lock = threading.Lock()
        self._connection_lock = threading.RLock()  # its owner uses the connection

    def add(self, operation_set: OperationSet) -> None:
        self.committer.add(operation_set)
        self.slow |= {**dict.fromkeys(operation_set.not_repeatable, always), **operation_set.slow}

    # -- for callers

    def _new_batch(self, loop: asyncio.AbstractEventLoop) -> LoopBatch:
        path, committer = self._file.path, self.committer
        return LoopBatch(
            loop, path, lambda: committer.timeout, self._commit_batch, lambda: self.batches.pop(loop, None),
            self.commit_on_loop,
        )  # fmt: skip

    def _commit_batch(self, batch: list[CommitRequest]) -> None:
        """Commit what one iteration of the running loop requested."""
        if self.commit_on_loop(batch):
            resolve(batch)
            return
        try:
            self.enqueue(batch)
        except StorageError as error:  # another thread closed the writer, or no thread can be started
            for request in batch:
                request.error = error
            resolve(batch)

    def enqueue(self, requests: list[CommitRequest]) -> None:
        """Let the thread commit these requests, after everything that was enqueued before."""
        self._put(requests, len(requests))

    def run_job(self, job: _Job) -> None:
        """Let the thread run a function that needs the connection."""
        self._put(job, 1)

    def _put(self, entry: list[CommitRequest] | _Job, count: int) -> None:
        with self._inbox_lock:
            if self._closed:
                raise StorageClosed(f"{self._file.path} was closed. Open it again")
            if self._thread is None:
                self._thread = started(self.run, "agent-runtime-writer")
            self._queued += count
            self.inbox.put(entry)

    def post(self, request: CommitRequest) -> None:
        """Commit a request without a waiting caller, after the commits of this loop iteration, if there are any."""
        with contextlib.suppress(RuntimeError):
            batch = self.batches.get(asyncio.get_running_loop())
            if batch is not None and batch.requests:
                batch.requests.append(request)
                return
        self.enqueue([request])

    def commit_on_loop(self, batch: list[CommitRequest]) -> bool:
        """Commit what one iteration of the running loop requested; False, with nothing done, if the thread must do it.

        The thread must do it if it is busy itself, so that groups form; if another process or program is writing; if
        the last flushes were slow; and for operations that are slow by their nature.
        """
        committer = self.committer
        if self._queued or committer.flush_seconds > SHORT_FLUSH or len(batch) > ON_LOOP:
            return False
        slow = self.slow
        for request in batch:
            if len(request.ops) > OPS_ON_LOOP:
                return False
            for name, args in request.ops:
                if name in slow and slow[name](*args):
                    return False
        try:
            # Each lock is acquired inside the block that releases it: Ctrl-C may come right after it was acquired.
            if not self._connection_lock.acquire(blocking=False) or self._closed:
                return False
            try:
                if not self._commit_lock.try_acquire():
                    return False
                self._file.expect()
                if not committer.begin():
                    return False
                needs_maintenance = self.commit_group(batch)
            finally:
                try:
                    self._commit_lock.release()
                except BaseException:  # raised by a signal handler, before the lock was released
                    self._commit_lock.release()
                    raise
            self._notify_others()
        except BaseException as error:
            # Raised to the callers; an interrupt of the loop is raised to the loop as well.
            committer.fail(batch, error)
            needs_maintenance = False
            if not isinstance(error, Exception):
                resolve(batch)
                raise
        finally:
            try:  # noqa: SIM105 - suppress() may itself be interrupted
                self._connection_lock.release()
            except RuntimeError:  # another thread owns it
                pass
        if needs_maintenance:
            with contextlib.suppress(StorageError):
                self.run_job(self._maintain)
        return True

    def read_on_loop(self, short: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Read with the writing connection; None if a thread must read instead.

        A thread must read if the writer thread is busy, so that the loop never waits for the connection; if the
        connection is in a transaction, of which the read would see a part; if there is too much to read for an event
        loop; and if the read failed: it fails there too, and is reported. The simulator overrides this.
        """
        if self._queued:
            return None
        try:
            conn = self.committer.conn
            if not self._connection_lock.acquire(blocking=False) or self._closed or conn.in_transaction:
                return None
            return short(conn, *args)
        except DRIVER_ERRORS:
            return None
        finally:
            try:  # noqa: SIM105 - suppress() may itself be interrupted
                self._connection_lock.release()
            except RuntimeError:  # another thread owns it
                pass

    # -- for the thread

    def run(self) -> None:
        while not self._commit_next_group():  # keeps no group alive while it waits for the next group
            pass

    def _commit_next_group(self) -> bool:
        """Commit the next group; True if it was the last group."""
        batch, jobs, is_last = self._next_group()
        self.write(batch, jobs)
        return is_last

    def _next_group(self) -> tuple[list[CommitRequest], int, bool]:
        """Return the next group, the number of jobs that were run, and whether it is the last group."""
        batch: list[CommitRequest] = []
        jobs = 0
        while (free := GROUP - len(batch)) > 0:
            if not self._rest:
                if (batch or jobs) and self.inbox.empty():
                    break
                entry = self.inbox.get()
                if entry is None:
                    return batch, jobs, True
                if not isinstance(entry, list):
                    jobs += 1
                    with contextlib.suppress(Exception):  # a job reports its errors itself
                        entry()
                    continue
                self._rest = entry
            batch += self._rest[:free]
            self._rest = self._rest[free:]
        return batch, jobs, False

    def write(self, batch: list[CommitRequest], jobs: int = 0) -> None:
        """Commit a group, notify listeners, then resolve the requests."""
        wanted = [request for request in batch if not request.timed_out]
        if wanted:
            with self._connection_lock:
                try:
                    with self._commit_lock:
                        self._file.expect()
                        self.committer.wait_to_begin()
                        if self.commit_group(wanted, once=self.committer.runs_user_function(wanted)):
                            self._log.maintain()
                    self._notify_others()
                except Exception as error:  # noqa: BLE001 - raised to these callers; the thread serves others
                    self.committer.fail(wanted, error)
        # Counted down before the callers continue, so that their next commits may be made on their loops.
        with self._inbox_lock:
            self._queued -= len(batch) + jobs
        resolve_all(wanted)

    def close(self) -> bool:
        """Commit what was enqueued, end the thread, and keep the connection lock; False if another thread holds it."""
        with self._inbox_lock:
            self._closed = True
            self.inbox.put(None)
        if self._thread is not None:
            self._thread.join(self.committer.timeout)
        return self._connection_lock.acquire(timeout=self.committer.timeout)

    def _maintain(self) -> None:
        with self.exclusive():
            self._log.maintain()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the connection for more than a group. No other process commits in the block."""
        with self._connection_lock, self._commit_lock:
            yield

    def commit_group(self, batch: list[CommitRequest], *, once: bool = False) -> bool:
        """Commit a group in the open transaction; True if the write-ahead log needs maintenance."""
        self.committer.commit(batch, once=once)
        return self._log.grown()

    def _notify_others(self) -> None:
        tx = self.committer.transaction
        if tx.notified:
            topics, tx.notified = tx.notified, set()
            try:
                self._notify(topics)
            except OSError:
                return  # the commit was stored: listeners poll
