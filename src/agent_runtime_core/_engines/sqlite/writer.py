"""The writing connection of a SQLite file, and whose turn it is to use it.

Commits go in groups, each one transaction. A writer thread carries them out. To hand a commit to it and
to hear of the outcome wakes a sleeping thread twice, though, which takes longer than the commit itself
where nothing has to be flushed, or where the disk flushes fast. The few commits of one turn of an event
loop are therefore carried out on the loop, at the end of that turn, as long as no other thread or process
is writing and the last flushes were short: see `Writer.commit_on_loop`.

Measured: if the thread carries out all commits, a chain of 100 steps takes 2.8 times as long in NORMAL and 1.5
times in FULL.
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
from .transaction import ConnectionOwner
from .wal import WriteAheadLog

GROUP = 256  # commits in one transaction at most
ON_LOOP = 4  # commits of one turn that its loop carries out itself, at most
OPS_ON_LOOP = 16  # operations in one of them
SHORT_FLUSH = 0.001  # seconds a flush takes on average, at most, for a loop to wait for it
_Job = Callable[[], None]  # something that needs the connection, and is no commit


class Writer(GroupCommitter):
    """What writes to one file in this process, one group at a time."""

    def __init__(
        self,
        home: ConnectionOwner,
        file: DatabaseFile,
        lock: CommitLock,
        log: WriteAheadLog,
        ring: Callable[[set[str]], None],
        *,
        flushes: bool,
    ) -> None:
        super().__init__(home, file.writing, path=file.path, flushes=flushes)
        self._file = file
        self.lengthy: dict[str, Callable[..., bool]] = {}
        self.outboxes: PerLoop[LoopBatch] = PerLoop(self._new_batch)
        #: What was handed over together is one entry, so that the thread never finds half of a turn's commits.
        self.inbox: SimpleQueue[list[CommitRequest] | _Job | None] = SimpleQueue()
        self._left: list[CommitRequest] = []  # by the thread, of an entry that was more than a group
        self._commit_lock = lock
        self._log = log
        self._ring = ring
        self._thread: threading.Thread | None = None  # started with the first that needs it
        self._closed = False
        self._handed = 0  # commits and jobs that the thread has still to carry out
        self._count = threading.Lock()
        self._turn = threading.RLock()  # whose holder uses the connection; it knows whether that is this thread

    def add(self, concern: OperationSet) -> None:
        super().add(concern)
        self.lengthy |= {**dict.fromkeys(concern.not_repeatable, always), **concern.slow}

    # -- the callers' side

    def _new_batch(self, loop: asyncio.AbstractEventLoop) -> LoopBatch:
        return LoopBatch(loop, self.path, lambda: self.patience, self._carry_out, lambda: self.outboxes.pop(loop, None))

    def _carry_out(self, batch: list[CommitRequest]) -> None:
        """Carry out the commits of one turn of the running loop."""
        if self.commit_on_loop(batch):
            resolve(batch)
            return
        try:
            self.enqueue(batch)
        except StorageError as error:  # closed by another thread in this turn, or without one to hand it to
            for request in batch:
                request.error = error
            resolve(batch)

    def enqueue(self, requests: list[CommitRequest]) -> None:
        """Have the thread carry out commits, behind all that it was handed before."""
        self._pass_on(requests, len(requests))

    def run_job(self, job: _Job) -> None:
        """Have the thread do something that needs the connection."""
        self._pass_on(job, 1)

    def _pass_on(self, entry: list[CommitRequest] | _Job, count: int) -> None:
        with self._count:
            if self._closed:
                raise StorageClosed(f"{self.path} was closed")
            if self._thread is None:
                self._thread = started(self.run, "agent-runtime-writer")
            self._handed += count
            self.inbox.put(entry)

    def post(self, request: CommitRequest) -> None:
        """A commit nobody waits for: behind those of this turn of the loop, if there are any."""
        with contextlib.suppress(RuntimeError):
            outbox = self.outboxes.get(asyncio.get_running_loop())
            if outbox is not None and outbox.turn:
                outbox.turn.append(request)
                return
        self.enqueue([request])

    def commit_on_loop(self, batch: list[CommitRequest]) -> bool:
        """Carry out the commits of one turn of the running loop; False, with nothing done, if the thread has to.

        It has to where it is busy itself, so that groups form; where another process or program is
        writing; where a flush took long of late; and for what may take long by its nature.
        """
        if self._handed or self._flush > SHORT_FLUSH or len(batch) > ON_LOOP:
            return False
        lengthy = self.lengthy
        for request in batch:
            if len(request.ops) > OPS_ON_LOOP:
                return False
            for name, args in request.ops:
                if name in lengthy and lengthy[name](*args):
                    return False
        try:
            # Each lock is taken inside of what lets go of it: Ctrl-C may come as soon as it is.
            if not self._turn.acquire(blocking=False) or self._closed:
                return False
            try:
                if not self._commit_lock.try_acquire():
                    return False
                self._file.expect()
                if not self._begin(self._tx):
                    return False
                grown = self.commit_group(batch)
            finally:
                try:
                    self._commit_lock.release()
                except BaseException:  # a signal handler's, before it did anything
                    self._commit_lock.release()
                    raise
            self._tell_others()
        except BaseException as error:
            # It belongs to the callers; what interrupts the loop, to the loop as well.
            self._failed(batch, error)
            grown = False
            if not isinstance(error, Exception):
                resolve(batch)
                raise
        finally:
            try:  # noqa: SIM105 - suppress() may itself be interrupted
                self._turn.release()
            except RuntimeError:  # it is somebody else's
                pass
        if grown:
            with contextlib.suppress(StorageError):
                self.run_job(self._tend)
        return True

    # -- the thread

    def run(self) -> None:
        while not self._group_is_last():  # and holds nothing of one while it waits for the next
            pass

    def _group_is_last(self) -> bool:
        """Carry out the next group; whether the thread is to end."""
        batch, jobs, over = self._together()
        self.write(batch, jobs)
        return over

    def _together(self) -> tuple[list[CommitRequest], int, bool]:
        """The next group, what is left of the last one first; how many jobs were done; whether it is the end."""
        batch: list[CommitRequest] = []
        jobs = 0
        while (room := GROUP - len(batch)) > 0:
            if not self._left:
                if (batch or jobs) and self.inbox.empty():
                    break
                entry = self.inbox.get()
                if entry is None:
                    return batch, jobs, True
                if not isinstance(entry, list):
                    jobs += 1
                    with contextlib.suppress(Exception):  # those who wait for it are told by itself
                        entry()
                    continue
                self._left = entry
            batch += self._left[:room]
            self._left = self._left[room:]
        return batch, jobs, False

    def write(self, batch: list[CommitRequest], jobs: int = 0) -> None:
        """Commit a group, ring the bells, then tell the callers."""
        going = [r for r in batch if not r.withdrawn]
        if going:
            with self._turn:
                try:
                    with self._commit_lock:
                        self._file.expect()
                        self._wait_to_begin(self._tx)
                        if self.commit_group(going, once=self._has_once(going)):
                            self._log.maintain()
                    self._tell_others()
                except Exception as error:  # noqa: BLE001 - whatever it is, this thread has to go on for the others
                    self._failed(going, error)
        # Free before they are told: their next commits may be made where they are.
        with self._count:
            self._handed -= len(batch) + jobs
        resolve_all(going)

    def close(self) -> bool:
        """Carry out what was handed over, end the thread, and keep the turn; False if somebody does not give it up."""
        with self._count:
            self._closed = True
            self.inbox.put(None)
        if self._thread is not None:
            self._thread.join(self.patience)
        return self._turn.acquire(timeout=self.patience)

    def _tend(self) -> None:
        with self.exclusive():
            self._log.maintain()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """The turn to use the connection, for more than a group; no other process commits meanwhile."""
        with self._turn, self._commit_lock:
            yield

    def commit_group(self, batch: list[CommitRequest], *, once: bool = False) -> bool:
        """Commit a group in the transaction that has begun; True where the log has to be tended."""
        self._transact(self._tx, batch, once)
        return self._log.grown()

    def _tell_others(self) -> None:
        if self._tx.notified:
            topics, self._tx.notified = self._tx.notified, set()
            try:
                self._ring(topics)
            except OSError:
                return  # what was committed is
