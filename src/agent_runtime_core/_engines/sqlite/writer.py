"""The writing connection of a SQLite file, and which thread uses it next.

Commits are grouped, and each group is one transaction. A writer thread commits the groups. To hand a commit to that
thread and to get its outcome wakes a sleeping thread twice, which takes longer than the commit itself if nothing has
to be flushed or the disk flushes fast. The few commits of one event-loop iteration are therefore committed on the loop,
at the end of the iteration, while no other thread or process writes and the last flushes were short: see
`Writer.commit_on_loop`.

Measured: if the thread commits everything, a chain of 100 steps takes 2.8 times as long in NORMAL and 1.5 times in
FULL.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from ..._core.per_loop import PerLoop
from ..._core.threads import started
from ...errors import StorageClosed, StorageError
from ..base import OperationSet, always
from ..commit_request import CommitRequest, LoopBatch, resolve, resolve_all
from .database import DatabaseFile
from .group_commit import GroupCommitter
from .liveness import CommitLock
from .wal import WriteAheadLog

GROUP = 256  # commits in one transaction, at most
ON_LOOP = 4  # commits of one iteration that its loop commits itself, at most
OPS_ON_LOOP = 16  # operations in one of them
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
        self._queued = 0  # commits and jobs that the thread has not finished
        self._inbox_lock = threading.Lock()
        self._connection_lock = threading.RLock()  # its owner uses the connection

    def add(self, operation_set: OperationSet) -> None:
        self.committer.add(operation_set)
        self.slow |= {**dict.fromkeys(operation_set.not_repeatable, always), **operation_set.slow}

    # -- for callers

    def _new_batch(self, loop: asyncio.AbstractEventLoop) -> LoopBatch:
        path, committer = self._file.path, self.committer
        return LoopBatch(
            loop, path, lambda: committer.timeout, self._commit_batch, lambda: self.batches.pop(loop, None)
        )

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
        """Commit a request without a waiting caller, after those of this loop iteration, if there are any."""
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

    # -- for the thread

    def run(self) -> None:
        while not self._commit_next_group():  # keeps no group alive while it waits for the next one
            pass

    def _commit_next_group(self) -> bool:
        """Commit the next group; True if it was the last one."""
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
        """Commit a group in the transaction that has begun; True if the write-ahead log needs maintenance."""
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
