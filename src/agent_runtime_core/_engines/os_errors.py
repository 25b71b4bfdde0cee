"""Operating system errors as storage errors, and how files that other users could have put there are opened."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ..errors import StorageBusy, StorageCorrupt, StorageError, StorageFull

#: A link is not followed: it could lead to any file that this process may write.
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Raise each OSError of the block as a storage error that names its file, or else `path`.

    Raises:
        StorageFull: No space or no inode is left.
        StorageBusy: No file descriptor or no memory is left in the process or the system.
        StorageError: The system refused the operation for another reason.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):  # StorageBusy is a StorageError
            raise
        raise storage_error(error, error.filename or path) from error


def storage_error(error: OSError, path: object) -> StorageError:
    """Return the storage error that `error` on `path` means."""
    if isinstance(error, StorageError):  # StorageBusy is an OSError too
        return error
    reason = error.strerror or repr(error)
    if error.errno in _FULL:
        return StorageFull(f"no space to write {path} ({reason}); acknowledged writes are kept. Free space or inodes")
    if error.errno in _SHORT:
        return StorageBusy(
            f"{path} could not be opened ({reason}); nothing was written. Close files or raise the limit "
            "(ulimit -n), then try again"
        )
    if error.errno == errno.ELOOP:
        return StorageCorrupt(
            f"{path} must be a file, got a symbolic link, which is not followed. Replace it with a file"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StorageError(f"a parent of {path} is not a directory. Choose another path, or move that file away")
    if error.errno in _FORBIDDEN:
        return StorageError(
            f"{path} may not be read or written ({reason}). Grant the permission, or choose another path"
        )
    return StorageError(f"{path}: {reason}")
