"""Read small settings files, and watch them for changes."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .._core.clock import Clock
from .._core.log import log
from .._core.settings import POSITIVE_SECONDS
from .._core.threads import in_thread
from .._core.validation import Shown, must
from ..errors import InvalidArgument

#: The largest settings file, in bytes.
MAX_BYTES = 256 * 1024
#: Seconds without a change before files are read, so that a file written in parts is not read half-way.
SETTLE_SECONDS = 0.1
#: Checks for changes before files that keep changing are read all the same.
MAX_SETTLE_CHECKS = 50
#: Reads until two in a row have the same content.
MAX_READS = 5

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

#: The attributes that change when a file is modified or replaced; None for a missing file.
Mark = tuple[int, int, int, int, int] | None


def mark_of(path: Path) -> Mark:
    """Return the device, inode number, size and times of the file, without opening it."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_file(path: Path, called: str, inside: Path | None = None) -> bytes:
    """Return the content of a regular file; links are followed, but not out of the folder `inside`.

    Raises:
        InvalidArgument: The file is missing, not a regular file, larger than MAX_BYTES, outside `inside` or not
            readable. The message names it as `called`.
    """
    try:
        real = path.resolve(strict=True)
        if inside is not None and not real.is_relative_to(inside.resolve(strict=True)):
            raise must(called, "be inside its folder", Shown(f"a link to {real}"), "Copy the file there")
        return _read(real, called)
    except FileNotFoundError as error:
        raise InvalidArgument(f"{called} not found. Create it.") from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError before Python 3.13
        if isinstance(error, InvalidArgument):
            raise
        raise must(called, "be readable", Shown(f"an error: {error}")) from error


def _read(real: Path, called: str) -> bytes:
    # Non-blocking: opening a named pipe would wait for a writer.
    descriptor = os.open(real, _FLAGS | getattr(os, "O_NOFOLLOW", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise must(called, "be a regular file", Shown("a directory or a device"), "Move it away")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise must(called, f"have at most {MAX_BYTES:,} bytes", Shown("more"))
    return content


class Reading(NamedTuple):
    """The contents of files by name; `problem` is why one of them cannot be used."""

    contents: dict[str, bytes]
    problem: str = ""


def read_until_stable(read: Callable[[], Reading], called: str) -> Reading:
    """Call `read` until it returns the same content twice in a row.

    A single read of files that are being replaced would mix old and new ones.
    """
    before = read()
    for _ in range(MAX_READS):
        now = read()
        if now == before:
            return now
        before = now
    return before._replace(
        problem=f"{called} must not change while it is read, got {MAX_READS} different versions. Load it again."
    )


def tables_in(content: bytes, called: str) -> dict[str, Any]:
    """Return the tables of a TOML file. The InvalidArgument of an invalid one names the file and the line."""
    try:
        return tomllib.loads(text_in(content, called))
    except (ValueError, RecursionError) as error:
        # A number with more digits than Python reads raises a ValueError that is not a TOMLDecodeError.
        raise must(called, "be valid TOML", Shown(f"an error: {error}")) from error


def text_in(content: bytes, called: str) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise must(called, "be UTF-8", Shown(f"{error.reason} at byte {error.start}")) from error


class Reloadable(Protocol):
    """Something that is loaded from files."""

    def marks(self) -> dict[Path, Mark]:
        """Return a mark of each file, which changes when the file does."""

    def reload(self) -> bool:
        """Load the files again. Return whether anything changed."""


async def watch(source: Reloadable, interval: float, clock: Clock) -> None:
    """Reload `source` every `interval` seconds, once its files stop changing; files are read in a thread."""
    POSITIVE_SECONDS.check("interval", interval)
    seen: dict[Path, Mark] | None = None
    while True:
        marks = await in_thread(source.marks)
        for _ in range(MAX_SETTLE_CHECKS):
            if marks == seen:
                break
            await clock.sleep(SETTLE_SECONDS)
            seen, marks = marks, await in_thread(source.marks)
        await in_thread(source.reload)
        await clock.sleep(interval)


class LoggedOnce:
    """Logs an error once until it changes or is cleared. `last` is the present error, or None."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged: object = None
        self.last: InvalidArgument | None = None

    def report(self, error: InvalidArgument, content: object = None) -> None:
        """Log the error, unless it was the last one and the files had the same content."""
        self.last = error
        if self._logged != (reported := (str(error), content)):
            self._logged = reported
            log.warning("%s cannot be used; the last valid version is kept: %s", self._what, error)

    def clear(self) -> None:
        """Forget the error, because the files are valid again."""
        self.last = self._logged = None
