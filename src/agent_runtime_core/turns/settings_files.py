"""Read small files of settings, and watch them for changes."""

from __future__ import annotations

import logging
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .._core.clock import Clock
from .._core.settings import POSITIVE_SECONDS
from .._core.threads import in_thread
from ..errors import InvalidArgument

log: logging.Logger = logging.getLogger("agent_runtime_core")

#: Bytes of one file.
MAX_BYTES = 256 * 1024
#: Seconds for which files must lie still before they are read: who writes one in parts is let finish.
STILL = 0.1
#: How often they are asked whether they do, before they are read all the same.
PATIENCE = 50
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
    """The contents of files by name, or why one of them cannot be used."""

    contents: dict[str, bytes]
    problem: str = ""


def twice(read: Callable[[], Reading], called: str) -> Reading:
    """Return what `read` returns two times in a row.

    Otherwise files that are replaced at this moment would be read half old, half new.
    """
    before = read()
    for _ in range(READINGS):
        now = read()
        if now == before:
            return now
        before = now
    return before._replace(problem=f"{called} changes while it is read")


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


class Reloadable(Protocol):
    """Something made of files."""

    def marks(self) -> dict[Path, Mark]: ...
    def reload(self) -> bool: ...


async def watch(source: Reloadable, interval: float, clock: Clock) -> None:
    """Reload `source` whenever its files have changed; files are looked at in a thread, never on the loop."""
    POSITIVE_SECONDS.check("interval", interval)
    seen: dict[Path, Mark] | None = None
    while True:
        marks = await in_thread(source.marks)
        for _ in range(PATIENCE):
            if marks == seen:
                break
            await clock.sleep(STILL)
            seen, marks = marks, await in_thread(source.marks)
        await in_thread(source.reload)
        await clock.sleep(interval)


class LoggedOnce:
    """Logs what is wrong with something once for as long as it stays so. `last` is it, or None."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said: object = None
        self.last: InvalidArgument | None = None

    def tell(self, error: InvalidArgument, content: object = None) -> None:
        """This is wrong, with that content of the files."""
        self.last = error
        if self._said != (said := (str(error), content)):
            self._said = said
            log.warning("%s cannot be used and the last good ones are kept: %s", self._what, error)

    def over(self) -> None:
        """All is well again."""
        self.last = self._said = None
