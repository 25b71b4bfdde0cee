"""The directory `<database>.live/`, in which the processes on one database file find each other.

In a directory that others may write, another user can create it first or put links into it. So no link is followed,
and only files with names that this library gives are opened or deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ..._core.clock import Clock
from ..._core.log import log
from ...errors import StorageError
from ..base import READER_SECONDS
from ..os_errors import NO_LINK

COMMIT: Final = "commit.lock"

_HOLDER: Final = re.compile("[0-9A-HJKMNP-TV-Z]{26}")  # a ULID, see `new_ulid`
_FLAGS: Final = NO_LINK | getattr(os, "O_NONBLOCK", 0)  # a FIFO must not be waited for
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def make_directory(directory: Path, database: str) -> bool:
    """Create the directory for its owner alone, or check the existing directory.

    Returns:
        Whether it was created.

    Raises:
        StorageError: It is no directory, or belongs to another user.
        OSError: The system refused it.
    """
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        _check(directory, database)
        return False
    if os.stat(directory).st_mode & 0o700 != 0o700:  # the umask took something away from the owner
        os.chmod(directory, 0o700)
    with contextlib.suppress(FileNotFoundError):
        _give(directory, os.stat(database).st_uid)
    return True


def _check(directory: Path, database: str) -> None:
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "a file"
        raise StorageError(f"{directory} must be a directory, got {what}. Move it away, then open {database} again")
    if hasattr(os, "geteuid") and found.st_uid not in (0, os.geteuid(), *_owners(database, os.path.dirname(database))):
        raise StorageError(
            f"{directory} must belong to the user of this process or of {database}, got user id {found.st_uid}. "
            f"Move it away while no process uses {database}"
        )
    if found.st_mode & _OTHERS_WRITE or found.st_mode & 0o700 != 0o700:
        # A file system without permissions shows the same for all of its files, and ignores this or refuses it.
        with contextlib.suppress(OSError):
            os.chmod(directory, 0o700)
            if os.lstat(directory).st_mode != found.st_mode:
                log.warning("%s had mode %o, changed to 700", directory, stat.S_IMODE(found.st_mode))


def _owners(*paths: str) -> Iterable[int]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield os.stat(path).st_uid


def _give(file: int | Path, user: int) -> None:
    """As root, give a file to the owner of the database: its own processes could not open it otherwise."""
    if hasattr(os, "geteuid") and os.geteuid() == 0 != user:
        with contextlib.suppress(OSError):
            os.chown(file, user, -1, follow_symlinks=isinstance(file, int))


def open_lock(path: str | Path, flags: int = 0) -> int:
    """Open a lock file of the directory.

    Raises:
        StorageError: It is no regular file.
        OSError: The system refused it.
    """
    return _open(path, os.O_RDWR | flags, stat.S_IFREG, is_new=flags & os.O_CREAT != 0)


def open_fifo(path: str | Path, flags: int) -> int:
    """Open a FIFO of the directory; raises as `open_lock`."""
    return _open(path, flags, stat.S_IFIFO, is_new=False)


def _open(path: str | Path, flags: int, kind: int, *, is_new: bool) -> int:
    fd = os.open(path, flags | _FLAGS, 0o600)
    try:
        found = os.fstat(fd)
        if stat.S_IFMT(found.st_mode) != kind:
            raise StorageError(f"{path} is not a file of this library. Move it away")
        if is_new:
            if found.st_mode & 0o600 != 0o600 and hasattr(os, "fchmod"):  # the umask took it away from the owner
                os.fchmod(fd, 0o600)
            _give(fd, os.stat(os.path.dirname(path)).st_uid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_fifo(path: Path) -> int:
    """Create a FIFO and open it for reading and writing, so that it never reads as closed.

    Raises:
        StorageError: Something else uses its name.
        OSError: The system, or this file system, does not support FIFOs, or refused it.
    """
    with contextlib.suppress(FileExistsError):  # an earlier try created it and could not open it
        os.mkfifo(path, 0o600)
    try:
        found = os.lstat(path).st_mode
        if stat.S_ISFIFO(found) and found & 0o600 != 0o600:  # the umask took it away from the owner
            os.chmod(path, 0o600)
        return _open(path, os.O_RDWR, stat.S_IFIFO, is_new=True)
    except BaseException:
        remove(path)  # others would open it again and again
        raise


def remove(path: Path) -> None:
    """Delete a file, if it is there and the system allows it."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def list_holders(directory: Path, suffix: str) -> set[str]:
    """Return the holders that have a file with that suffix in the directory; files of other programs are ignored."""
    names = (name.removesuffix(suffix) for name in os.listdir(directory) if name.endswith(suffix))
    return {name for name in names if _HOLDER.fullmatch(name)}


FORGOTTEN: Final = 60.0  # seconds after which the file of a reader that was killed is deleted
_SIZE: Final = 64


class ReaderFiles:
    """The reports of readers, of this process and of others.

    Args:
        path: The database file.
        clock: Its boot time is the same in all processes of this machine.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path, self._directory, self._clock = path, Path(f"{path}.live"), clock
        self._open: dict[tuple[str, str], int] = {}

    def report(self, run_id: str, reader: str, sequence: int) -> None:
        """Note that a reader of this process read up to this sequence."""
        fd = self._open.get((run_id, reader))
        if fd is None:
            make_directory(self._of(run_id), self._path)
            fd = self._open[run_id, reader] = open_lock(self._of(run_id) / reader, os.O_CREAT)
        os.pwrite(fd, f"{sequence:020d} {self._clock.boot():020.6f}".encode(), 0)

    def withdraw(self, run_id: str, reader: str) -> None:
        """Note that a reader of this process does not read any more."""
        fd = self._open.pop((run_id, reader), None)
        if fd is not None:
            os.close(fd)
            self._delete(run_id, reader)

    def read(self, run_id: str) -> dict[str, int]:
        """Return the sequences of the readers that have reported within the last 2 seconds."""
        now, found = self._clock.boot(), dict[str, int]()
        with contextlib.suppress(FileNotFoundError):
            for reader in os.listdir(self._of(run_id)):
                sequence, at = self._read(self._of(run_id) / reader)
                if now - at <= READER_SECONDS:
                    found[reader] = sequence
                elif now - at > FORGOTTEN:
                    self._delete(run_id, reader)
        return found

    def close(self) -> None:
        """Withdraw all readers of this process."""
        for run_id, reader in [*self._open]:
            self.withdraw(run_id, reader)

    def _of(self, run_id: str) -> Path:
        return self._directory / f"{run_id}.readers"

    def _read(self, path: Path) -> tuple[int, float]:
        """Return what a file says; a file without a report is as old as the machine."""
        try:
            fd = open_lock(path)
        except (OSError, StorageError):
            return 0, self._clock.boot()
        try:
            sequence, _, at = os.read(fd, _SIZE).partition(b" ")
            return int(sequence), float(at)
        except ValueError:
            return 0, 0.0
        finally:
            os.close(fd)

    def _delete(self, run_id: str, reader: str) -> None:
        remove(self._of(run_id) / reader)
        with contextlib.suppress(OSError):  # there are others
            os.rmdir(self._of(run_id))
