"""Small files as they are at one moment: regular ones, of a limited length, that lie where they should."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._clock import SYSTEM, Clock
from ..errors import InvalidArgument

#: Bytes of one file.
MAX_BYTES = 256 * 1024
#: Seconds. Two writes within one tick of a file system's clock leave the same time: a younger file is read again.
FRESH = 2.0
#: Readings until two in a row are the same.
READINGS = 5

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

#: What tells a file from an earlier one of its name; None where there is none.
Mark = tuple[int, int, int, int, int] | None


def mark_of(path: Path) -> Mark:
    """Device, number, length and times of the file, without opening it."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def settled(marks: Mapping[Path, Mark], clock: Clock = SYSTEM) -> bool:
    """Whether equal marks mean equal files: all are there, and none was changed just now."""
    return all(mark is not None and max(mark[3:]) / 1e9 < clock.wall() - FRESH for mark in marks.values())


def read_file(path: Path, called: str, inside: Path | None = None) -> bytes:
    """The content of a regular file; a link is followed, out of the folder `inside` it is refused.

    InvalidArgument says what is wrong with it: missing, no file, longer than MAX_BYTES, outside, not readable.
    """
    try:
        real = path.resolve(strict=True)
        if inside is not None and not real.is_relative_to(inside.resolve(strict=True)):
            raise InvalidArgument(f"{called} leads out of its folder, to {real}: copy the file there")
        return _read(real, called)
    except FileNotFoundError as error:
        raise InvalidArgument(f"{called} is not there") from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError before Python 3.13
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{called} cannot be read: {error}") from error


def _read(real: Path, called: str) -> bytes:
    # Not blocking: a pipe of that name would wait for a writer.
    descriptor = os.open(real, _FLAGS | getattr(os, "O_NOFOLLOW", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidArgument(f"{called} is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise InvalidArgument(f"{called} is longer than {MAX_BYTES} bytes")
    return content


class Reading(NamedTuple):
    """Files as they were read, by name, with their marks from before; and what was wrong with them."""

    contents: dict[str, bytes]
    marks: dict[Path, Mark]
    problem: str = ""


def twice(read: Callable[[], Reading], called: str) -> Reading:
    """What `read` gives two times in a row, so that files that are being replaced are not seen half old, half new."""
    before = read()
    for _ in range(READINGS):
        now = read()
        if now == before:
            return now
        before = now
    return before._replace(problem=f"{called} changes while it is read")


def has_changed(marks: Mapping[Path, Mark]) -> bool:
    """Whether any of the files is not what it was."""
    return any(mark_of(path) != mark for path, mark in marks.items())


def tables_in(content: bytes, called: str) -> dict[str, Any]:
    """Return the tables of a TOML file; InvalidArgument names the file and the line."""
    try:
        return tomllib.loads(text_in(content, called))
    except (ValueError, RecursionError) as error:
        # For a number of more digits than Python reads it is a ValueError that is not a TOMLDecodeError.
        raise InvalidArgument(f"{called} is not TOML: {error}") from error


def text_in(content: bytes, called: str) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{called} is not UTF-8: {error.reason} at byte {error.start}") from error
