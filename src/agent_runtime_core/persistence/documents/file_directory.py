"""A directory of ours: what is read and written below it, durably, for its owner alone, and never through a link.

Paths are relative to the directory, with "/" between their parts. What the system refuses is told as an error of ours.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator

from ..._engines.os_errors import NO_LINK, storage_error
from ...errors import StorageCorrupt, StorageError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

DRAFTS = "drafts"
_FLUSHERS = 8  # threads at once: the disk flushes what comes together in one go


@contextlib.contextmanager
def told(path: str) -> Iterator[None]:
    """An OSError about `path` as one of ours; a file that is not there stays FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise storage_error(error, path) from error


class DurableDirectory:
    """`root` and what is below it."""

    def __init__(self, root: str) -> None:
        self.root: str = root
        self._seen = False
        self._drafted = 0

    def path(self, where: str) -> str:
        return os.path.join(self.root, *where.split("/")) if where else self.root

    def there(self) -> bool:
        """Whether the directory exists; StorageError: it did, and no longer does, or it is no directory."""
        seen = self._seen  # before looking: another thread may see it made meanwhile
        with told(self.root):
            try:
                found = os.stat(self.root)
            except FileNotFoundError:
                if seen:
                    raise StorageError(
                        f"{self.root} was removed while it was in use: what it kept is gone; put it back, "
                        "or open a new store"
                    ) from None
                return False
        if not stat.S_ISDIR(found.st_mode):
            raise StorageError(f"{self.root} is a file, no directory: move it away, or name another place")
        self._seen = True
        return True

    # -- reading

    def read(self, where: str, largest: int | None = None) -> bytes:
        """Return the whole of a file.

        Raises:
            FileNotFoundError: There is no such file.
            StorageCorrupt: It is no regular file, or larger than `largest` bytes.
        """
        path = self.path(where)
        self._check(os.path.dirname(where))
        with told(path):
            # A pipe must not be waited for.
            descriptor = os.open(path, os.O_RDONLY | NO_LINK | getattr(os, "O_NONBLOCK", 0))
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                os.close(descriptor)
                raise StorageCorrupt(f"{path} is no regular file: move it away")
            if largest is not None and about.st_size > largest:
                os.close(descriptor)
                raise StorageCorrupt(f"{path} must have at most {largest:,} bytes, got {about.st_size:,}")
            with open(descriptor, "rb") as file:
                return file.read()

    def names(self, where: str) -> list[str]:
        """What is in a directory; nothing where there is none."""
        self._check(where)
        with told(self.path(where)):
            try:
                return os.listdir(self.path(where))
            except FileNotFoundError:
                return []

    def directories(self, where: str) -> dict[str, int]:
        """The directories in a directory, with their modification times in ns; StorageCorrupt for a link."""
        self._check(where)
        found = {}
        with told(self.path(where)), contextlib.suppress(FileNotFoundError), os.scandir(self.path(where)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
                elif entry.is_symlink():
                    raise StorageCorrupt(f"{entry.path} is a symbolic link, which is not followed: put a file there")
        return found

    def modified(self, where: str) -> int | None:
        """The modification time of a directory in ns; None: there is none."""
        found = self._check(where)
        return None if found is None else found.st_mtime_ns

    def _check(self, where: str) -> os.stat_result | None:
        """Look at a directory. No part of its path may be a link, which would lead out of the root."""
        if not where:
            return None
        self._check(where.rpartition("/")[0])
        try:
            found = os.lstat(self.path(where))
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(found.st_mode):
            raise StorageCorrupt(f"{self.path(where)} is no directory: move it away")
        return found

    # -- writing, by whoever has the lock

    def make(self, where: str) -> None:
        """A directory and those above it, for its owner alone."""
        if not where:
            self._make_root(self.root)
            self._seen = True
        elif self._check(where) is None:
            self.make(where.rpartition("/")[0])
            self._make(self.path(where))

    def _make_root(self, path: str) -> None:
        if not os.path.isdir(path):
            if not os.path.lexists(os.path.dirname(path)):
                self._make_root(os.path.dirname(path))
            self._make(path)

    def _make(self, path: str) -> None:
        with told(path), contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # whatever the umask left of it
            _flush(os.path.dirname(path) or os.sep)

    def draft(self, data: bytes) -> str:
        """Write a file under a name of its own, to be flushed and renamed to its place; that name."""
        self.make(DRAFTS)
        self._check(DRAFTS)
        self._drafted += 1
        where = f"{DRAFTS}/{os.getpid()}-{id(self):x}-{self._drafted}"
        path = self.path(where)
        try:
            with told(path):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
                with open(descriptor, "wb") as file:
                    if hasattr(os, "fchmod"):
                        os.fchmod(descriptor, 0o600)
                    file.write(data)
        except BaseException:
            self.remove(where)
            raise
        return where

    def drafts(self) -> list[str]:
        return [f"{DRAFTS}/{name}" for name in self.names(DRAFTS)]

    def rename(self, source: str, target: str) -> None:
        self._check(os.path.dirname(target))
        with told(self.path(target)):
            os.replace(self.path(source), self.path(target))

    def remove(self, where: str) -> None:
        """Whether it is there or not."""
        self._check(os.path.dirname(where))
        with told(self.path(where)), contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(where))

    def flush(self, *wheres: str) -> None:
        """Make files, and the names in directories, durable; several side by side, which costs little more than one."""
        left, errors = iter(wheres), list[Exception]()

        def work() -> None:
            for where in left:
                try:
                    with told(self.path(where)), contextlib.suppress(FileNotFoundError):
                        _flush(self.path(where))
                except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for this thread
                    errors.append(error)

        others = [threading.Thread(target=work, daemon=True) for _ in range(min(len(wheres), _FLUSHERS) - 1)]
        for each in others:
            each.start()
        work()
        for each in others:
            each.join()
        if errors:
            raise errors[0]


def _flush(path: str) -> None:
    windows = os.name == "nt"
    if windows and os.path.isdir(path):  # pragma: no cover - Windows has no such thing
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
