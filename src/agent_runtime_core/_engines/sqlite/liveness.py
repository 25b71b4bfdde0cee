"""Coordinate the processes on one database file: a lock around commits, proof of life, and notifications.

All three are files in the directory `<database>.live/`. A process proves that it lives by a lock on
`<holder>.lock`, which the kernel frees when the process dies and keeps while it is stopped. A process is notified
through its FIFO `<holder>.bell`: others write the first letter of each topic to it. Without a FIFO, listeners poll
the database.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..._core.clock import Clock
from ..._core.log import log
from ...errors import StorageError
from ..notifier import Notifier
from .live_directory import COMMIT, list_holders, make_fifo, open_fifo, open_lock, remove

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]


RESCAN = 0.05  # seconds between scans for FIFOs of new processes
_RETRY = 0.001  # seconds between tries to get a lock that another process holds
_POLL = 0.5  # seconds between polls of data_version while there is a FIFO
_POLL_WITHOUT_FIFO = 0.005
_RETRY_FIFO = 5.0  # seconds between tries to create a FIFO, after no descriptor or no inode was left
_POLL_READ_ONLY = 0.05  # seconds between two looks of a process that only reads


class CommitLock:
    """The exclusive lock around each group commit. The system grants it to processes in order of arrival."""

    def __init__(self, directory: Path) -> None:
        self.path: str = str(directory / COMMIT)
        self._fd = open_lock(self.path, os.O_CREAT)
        self._exclusive_fds: set[int] = set()

    def record(self, name: bytes) -> None:
        """Write the name of the database into the lock file."""
        with contextlib.suppress(OSError):  # the disk is full: the name is only needed once there are hard links
            os.lseek(self._fd, 0, os.SEEK_SET)
            if os.read(self._fd, len(name) + 1) != name:
                os.lseek(self._fd, 0, os.SEEK_SET)
                os.ftruncate(self._fd, os.write(self._fd, name))

    def try_acquire(self) -> bool:
        """Acquire the lock; False if another process holds it."""
        return fcntl is None or _locked(self._fd)

    def release(self) -> None:
        if fcntl is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def __enter__(self) -> None:
        if fcntl is not None:
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextlib.contextmanager
    def exclude_others(self, seconds: float) -> Iterator[bool]:
        """Exclude all commits in the block, including commits of this process.

        Yields:
            False if the lock was not released within `seconds`, for example by a process that was stopped in a commit.
        """
        if fcntl is None:  # pragma: no cover - Windows
            yield True
            return
        # On another descriptor: two locks of this process on one descriptor are both released by the first release.
        fd = open_lock(self.path)
        self._exclusive_fds.add(fd)
        until = time.monotonic() + seconds
        try:
            # By polling: flock() takes no time limit.
            while not (acquired := _locked(fd)) and time.monotonic() < until:
                time.sleep(_RETRY)
            yield acquired
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # explicitly: a forked child may have a copy of the descriptor
            self._exclusive_fds.discard(fd)
            os.close(fd)

    def close(self, *, forked: bool = False) -> None:
        # Cleared first: a child that is forked at this moment closes the descriptor that it finds here.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        while forked and self._exclusive_fds:
            os.close(self._exclusive_fds.pop())


def _locked(fd: int) -> bool:
    """Lock the file; False if another process already locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class ProcessLiveness:
    """Proves that this process lives, finds dead processes, and notifies the others.

    `is_new` says that the directory was just created, so that no other process uses it.
    """

    def __init__(self, directory: Path, holder: str, clock: Clock, *, is_new: bool = False) -> None:
        self.directory = directory
        self._clock = clock
        self.holder = holder if fcntl is not None else ""
        self.fifo: int | None = None
        self._warned = False
        self._peers: dict[str, int] = {}
        self._scanned_at = clock.boot() if is_new else -1.0
        self._lock_fd = self._prove_life() if self.holder else -1
        if not is_new:  # no claim names processes without a run, so nothing else would find their files
            with contextlib.suppress(OSError):  # the next process deletes them
                self.dead(list_holders(directory, ".lock"))

    def _prove_life(self) -> int:
        # Locked before it gets its name, so that no process sees it unlocked.
        hidden = self.directory / f".{self.holder}"
        with contextlib.ExitStack() as undo:
            undo.callback(remove, hidden)
            fd = open_lock(hidden, os.O_CREAT | os.O_EXCL)
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(hidden, self._lock_path(self.holder))
            undo.pop_all()
        return fd

    def _lock_path(self, holder: str) -> Path:
        return self.directory / f"{holder}.lock"

    def dead(self, holders: Iterable[str]) -> tuple[str, ...]:
        """Return the `holders` whose process is dead, and delete their files."""
        return tuple(h for h in holders if h and h != self.holder and self._is_dead(h))

    def _is_dead(self, holder: str) -> bool:
        if fcntl is None:  # pragma: no cover - Windows
            return False
        try:
            fd = open_lock(self._lock_path(holder))
        except FileNotFoundError:
            return True
        except (OSError, StorageError):
            return False  # no permission, or no descriptor left: a process that cannot be checked may be alive
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            self._clear(holder)
            return True
        finally:
            os.close(fd)

    def _clear(self, holder: str) -> None:
        for suffix in ("lock", "bell"):
            remove(self.directory / f"{holder}.{suffix}")

    # -- notifications

    def open_fifo(self) -> bool:
        """Create this process's FIFO; False if that is impossible now, so that listeners must poll."""
        if self.fifo is None and self.holder and hasattr(os, "mkfifo"):
            path = self.directory / f"{self.holder}.bell"
            try:
                self.fifo = make_fifo(path)
            except (OSError, StorageError) as error:
                if not self._warned:
                    self._warned = True
                    log.warning("no FIFO at %s (%s): commits of other processes are found by polling", path, error)
        return self.fifo is not None

    def wait(self, seconds: float) -> str:
        """Return the first letters of the topics notified since the last call, waiting at most `seconds`."""
        assert self.fifo is not None
        # Not select(): it crashes on a descriptor above 1023.
        poll = select.poll()
        poll.register(self.fifo, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return ""
        try:
            return os.read(self.fifo, 4096).decode("ascii", "replace")
        except OSError:  # another thread read it, or it failed: the notifier also polls the database
            return ""

    def notify(self, topics: Iterable[str]) -> None:
        """Notify all other processes. Only the owner of the writing connection calls this."""
        known = tuple(self._peers)
        if known:
            self._notify(known, topics)
        now = self._clock.boot()
        if not 0 <= now - self._scanned_at < RESCAN:
            self._scanned_at = now
            with contextlib.suppress(OSError):  # a process missed now is found by a later scan, or polls
                self._rescan()
            if new := [name for name in self._peers if name not in known]:
                self._notify(new, topics)

    def _notify(self, names: Iterable[str], topics: Iterable[str]) -> None:
        letters = "".join(sorted({topic[0] for topic in topics})).encode("ascii")
        for name in names:
            try:
                os.write(self._peers[name], letters)
            except BlockingIOError:
                continue  # full, so its reader will wake anyway
            except OSError:
                os.close(self._peers.pop(name))

    def notify_self(self) -> None:
        if self.fifo is not None:
            with contextlib.suppress(OSError):
                os.write(self.fifo, b"!")

    def _rescan(self) -> None:
        found = list_holders(self.directory, ".bell") - {self.holder}
        for gone in set(self._peers) - found:
            os.close(self._peers.pop(gone))
        for holder in found - set(self._peers):
            try:
                self._peers[holder] = open_fifo(self.directory / f"{holder}.bell", os.O_WRONLY)
            except StorageError:
                continue
            except OSError as error:
                if error.errno == errno.ENXIO and self._is_dead(holder):  # no process opened it for reading
                    self._clear(holder)

    def close(self, *, forked: bool = False) -> None:
        """Close the descriptors and delete this process's files; a forked child keeps the files of its parent."""
        peers, fifo, lock = self._peers, self.fifo, self._lock_fd
        self._peers, self.fifo, self._lock_fd = {}, None, -1
        for fd in [*peers.values(), *([fifo] if fifo is not None else [])]:
            os.close(fd)
        if lock >= 0:
            os.close(lock)
            if not forked:
                self._clear(self.holder)


class FifoNotifier(Notifier):
    """Wakes listeners when other processes write to the FIFO. Its thread also polls the file, often without a FIFO."""

    def __init__(
        self, liveness: ProcessLiveness, clock: Clock, connect: Callable[[], sqlite3.Connection],
        disconnect: Callable[[sqlite3.Connection], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._liveness = liveness
        self._clock = clock
        self._connect = connect
        self._disconnect = disconnect

    def _setup(self) -> None:
        self._liveness.open_fifo()

    def notify(self, topics: set[str]) -> None:
        """Wake the listeners of this process and notify the other processes."""
        if self._listeners:
            self.wake(topics)
        self._liveness.notify(topics)

    def _run(self) -> None:
        # Opened by the first poll, which wakes all listeners: many processes end before that.
        conn: sqlite3.Connection | None = None
        version: int | None = None
        # A process that scanned for FIFOs just before this FIFO was created does not write to it yet.
        unseen_until = self._clock.boot() + 2 * RESCAN
        retry_at = self._clock.boot() + _RETRY_FIFO
        while not self._closed:
            if unseen_until and self._clock.boot() >= unseen_until:
                unseen_until = 0.0
                self.wake()
            if self._liveness.fifo is None and self._clock.boot() >= retry_at:
                retry_at = self._clock.boot() + _RETRY_FIFO
                if self._liveness.open_fifo():
                    unseen_until = self._clock.boot() + 2 * RESCAN
            if self._liveness.fifo is not None:
                letters = self._liveness.wait(2 * RESCAN if unseen_until else _POLL)
            else:
                threading.Event().wait(_POLL_WITHOUT_FIFO)
                letters = ""
            if letters:
                self.wake({t for t in tuple(self._listeners) if t[0] in letters})
                continue
            with contextlib.suppress(sqlite3.Error):
                conn = conn or self._connect()
                seen = conn.execute("PRAGMA data_version").fetchone()[0]
                if seen != version:
                    version = seen
                    self.wake()
        if conn is not None:
            self._disconnect(conn)


class PollingNotifier(Notifier):
    """Wakes all listeners when `signature()` changes, for a process that may not create a FIFO."""

    def __init__(self, signature: Callable[[], object]) -> None:
        super().__init__()
        self._signature = signature
        self._stopping = threading.Event()

    def stop(self, timeout: float) -> None:
        """End the thread."""
        self.close(self._stopping.set, timeout)

    def _run(self) -> None:
        seen: object = None
        changed = False
        while not self._stopping.wait(_POLL_READ_ONLY):
            with contextlib.suppress(OSError):
                now = self._signature()
                # Once more after a change: a later commit may have the same modification time.
                wakes, changed = changed or now != seen, now != seen
                seen = now
                if wakes:
                    self.wake()
