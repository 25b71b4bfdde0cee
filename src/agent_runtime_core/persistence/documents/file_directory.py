"""A directory whose files are written durably, with access for the owner only, and never through a symbolic link.

Paths are relative to the directory, with "/" as separator. An OSError is raised as a StorageError.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ..._engines.os_errors import NO_LINK, storage_error
from ...errors import StorageCorrupt, StorageError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

DRAFTS = "drafts"
_FLUSH_THREADS = 8  # concurrent flushes: the disk combines them


@contextlib.contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Raise an OSError about `path` as a StorageError, except FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise storage_error(error, path) from error


class DurableDirectory:
    """The files and directories below `root`."""

    def __init__(self, root: str) -> None:
        self.root: str = root
        self._existed = False
        self._draft_count = 0

    def path(self, relative: str) -> str:
        """Return the absolute path for a relative path."""
        return os.path.join(self.root, *relative.split("/")) if relative else self.root

    def exists(self) -> bool:
        """Return whether the directory exists.

        Raises:
            StorageError: It existed before, or it is not a directory.
        """
        existed = self._existed  # read before the check, because another thread may create the directory after it
        with storage_errors(self.root):
            try:
                found = os.stat(self.root)
            except FileNotFoundError:
                if existed:
                    raise StorageError(
                        f"{self.root} was removed while it was in use, with all its documents. Restore it, or open "
                        "a new store."
                    ) from None
                return False
        if not stat.S_ISDIR(found.st_mode):
            raise StorageError(f"{self.root} must be a directory, got a file. Move it away, or use another directory.")
        self._existed = True
        return True

    # -- reading

    def read(self, relative: str, largest: int | None = None) -> bytes:
        """Return the whole of a file.

        Raises:
            FileNotFoundError: There is no such file.
            StorageCorrupt: It is not a regular file, or larger than `largest` bytes.
        """
        path = self.path(relative)
        self._check(os.path.dirname(relative))
        with storage_errors(path):
            # Opening a named pipe would block until another process writes to it.
            descriptor = os.open(path, os.O_RDONLY | NO_LINK | getattr(os, "O_NONBLOCK", 0))
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.close(descriptor)
                raise StorageCorrupt(f"{path} must be a regular file. Move it away.")
            if largest is not None and status.st_size > largest:
                os.close(descriptor)
                raise StorageCorrupt(
                    f"{path} must have at most {largest:,} bytes, got {status.st_size:,}. Move it away."
                )
            with open(descriptor, "rb") as file:
                return file.read()

    def names(self, relative: str) -> list[str]:
        """Return the names in a directory. If it does not exist, there are none."""
        self._check(relative)
        with storage_errors(self.path(relative)):
            try:
                return os.listdir(self.path(relative))
            except FileNotFoundError:
                return []

    def directories(self, relative: str) -> dict[str, int]:
        """Return the directories in a directory, with their modification times in ns.

        Raises:
            StorageCorrupt: It contains a symbolic link.
        """
        self._check(relative)
        found = {}
        with (
            storage_errors(self.path(relative)),
            contextlib.suppress(FileNotFoundError),
            os.scandir(self.path(relative)) as entries,
        ):
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
                elif entry.is_symlink():
                    raise StorageCorrupt(f"{entry.path} must not be a symbolic link. Replace it by a file.")
        return found

    def modified(self, relative: str) -> int | None:
        """Return the modification time of a directory in ns, or None if it does not exist."""
        found = self._check(relative)
        return None if found is None else found.st_mtime_ns

    def _check(self, relative: str) -> os.stat_result | None:
        """Return the status of a directory, or None if it does not exist.

        No part of its path may be a symbolic link, which could lead out of the root.
        """
        if not relative:
            return None
        self._check(relative.rpartition("/")[0])
        try:
            found = os.lstat(self.path(relative))
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(found.st_mode):
            raise StorageCorrupt(f"{self.path(relative)} must be a directory. Move it away.")
        return found

    # -- writing. The caller holds the lock

    def make(self, relative: str) -> None:
        """Create a directory and its parents, with access for the owner only."""
        if not relative:
            self._make_root(self.root)
            self._existed = True
        elif self._check(relative) is None:
            self.make(relative.rpartition("/")[0])
            self._make(self.path(relative))

    def _make_root(self, path: str) -> None:
        if not os.path.isdir(path):
            if not os.path.lexists(os.path.dirname(path)):
                self._make_root(os.path.dirname(path))
            self._make(path)

    def _make(self, path: str) -> None:
        with storage_errors(path), contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # the umask may have removed permissions of the owner
            _flush(os.path.dirname(path) or os.sep)

    def draft(self, data: bytes) -> str:
        """Write a file under a temporary name, and return the name. The caller flushes the file and renames it."""
        self.make(DRAFTS)
        self._check(DRAFTS)
        self._draft_count += 1
        relative = f"{DRAFTS}/{os.getpid()}-{id(self):x}-{self._draft_count}"
        path = self.path(relative)
        try:
            with storage_errors(path):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
                with open(descriptor, "wb") as file:
                    if hasattr(os, "fchmod"):
                        os.fchmod(descriptor, 0o600)
                    file.write(data)
        except BaseException:
            self.remove(relative)
            raise
        return relative

    def drafts(self) -> list[str]:
        """Return the files that were written but not renamed."""
        return [f"{DRAFTS}/{name}" for name in self.names(DRAFTS)]

    def rename(self, source: str, target: str) -> None:
        """Rename a file. It replaces an existing file."""
        self._check(os.path.dirname(target))
        with storage_errors(self.path(target)):
            os.replace(self.path(source), self.path(target))

    def remove(self, relative: str) -> None:
        """Remove a file, if it exists."""
        self._check(os.path.dirname(relative))
        with storage_errors(self.path(relative)), contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(relative))

    def flush(self, *paths: str) -> None:
        """Make files, and the names in directories, durable.

        They are flushed concurrently, which costs little more than one flush.
        """
        remaining, errors = iter(paths), list[Exception]()

        def flush_remaining() -> None:
            for relative in remaining:
                try:
                    with storage_errors(self.path(relative)), contextlib.suppress(FileNotFoundError):
                        _flush(self.path(relative))
                except Exception as error:  # noqa: BLE001 - raised by the thread that called flush
                    errors.append(error)

        others = [
            threading.Thread(target=flush_remaining, daemon=True) for _ in range(min(len(paths), _FLUSH_THREADS) - 1)
        ]
        for each in others:
            each.start()
        flush_remaining()
        for each in others:
            each.join()
        if errors:
            raise errors[0]


def _flush(path: str) -> None:
    windows = os.name == "nt"
    if windows and os.path.isdir(path):  # pragma: no cover - Windows cannot flush a directory
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:  # pragma: no cover - macOS
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


if sys.platform == "win32":  # pragma: no cover - Windows
    import msvcrt
else:
    import fcntl

LOCK: Final = "lock"  # the name of the lock file

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def locked(path: str, *, shared: bool = False, writable: bool = True) -> Iterator[None]:
    """Wait for the lock of a file, and hold it, alone or shared.

    Args:
        path: The lock file. It is created, unless `writable` is False.
        shared: Allow other shared holders at the same time. Windows has no shared lock.
        writable: Whether this user may write there.
    """
    descriptor = _acquire(path, shared, writable)
    try:
        yield
    finally:
        os.close(descriptor)


def _acquire(path: str, shared: bool, writable: bool) -> int:
    while True:
        descriptor = _open_or_create(path) if writable else os.open(path, _FLAGS | os.O_RDONLY)
        try:
            _lock(descriptor, shared)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageCorrupt(f"{path} must be a regular file. Move it away.")
            if _is_same_file(path, status):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The file was removed during the wait: another process may hold the lock of a new file with this name.
        os.close(descriptor)


def _open_or_create(path: str) -> int:
    try:
        descriptor = os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT, 0o600)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, 0o600)  # the umask may have removed permissions of the owner
    return descriptor


def _is_same_file(path: str, status: os.stat_result) -> bool:
    try:
        current = os.lstat(path)
    except FileNotFoundError:
        return False
    return (current.st_dev, current.st_ino) == (status.st_dev, status.st_ino)


def _lock(descriptor: int, shared: bool) -> None:
    if sys.platform == "win32":  # pragma: no cover - Windows
        while True:
            with suppress(OSError):  # LK_LOCK gives up after ten seconds
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
    else:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
