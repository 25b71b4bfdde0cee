"""Write lines, tables, JSON, tracebacks and log records of the command line.

All output may contain text of models, users and servers. It passes `shown`, which hides the passwords of URLs and
replaces characters that a terminal interprets.
"""

from __future__ import annotations

import contextlib
import datetime as _dt
import json
import logging
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .._core.clock import SYSTEM, shown_duration
from .._core.validation import redacted
from .._views.plain import without_secrets

#: Fields that are times.
_TIMES: Final = (
    "created_at",
    "scheduled_at",
    "started_at",
    "ended_at",
    "deadline",
    "timestamp",
    "last_seen_at",
    "ends_at",
    "next_tick",
    "last_tick",
)


def shown(text: object) -> str:
    """Return the text with *** for secrets of URLs and ? for control, direction and other invisible characters."""
    return _visible(redacted(str(text)))


def escaped(text: object) -> str:
    """Return the text as `shown`, on one line."""
    return _visible(" ".join(redacted(str(text)).split()))


def _visible(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def print_line(line: str) -> None:
    _write_line(escaped(line))


def print_text(text: str) -> None:
    """Write text of this library of several lines."""
    for line in text.splitlines():
        _write_line(line)


def print_columns(*cells: tuple[object, int]) -> None:
    """Write cells on one line, each as wide as its number says."""
    _write_line("  ".join(escaped(text).ljust(width) for text, width in cells).rstrip())


def counted(count: int, what: str) -> str:
    """Return a number of things: `1 run`, `2 runs`."""
    return f"{count} {what}{'s' * (count != 1)}"


def field(name: str, value: object) -> None:
    _write_line(f"{name.replace('_', ' '):<16}  {escaped(value)}")


def warn(line: str) -> None:
    sys.stderr.write(f"agent-runtime: {escaped(line)}\n")


def report(args: Namespace, data: Mapping[str, Any], line: str, refusal: str | None = None) -> int:
    """Write what a command did, as `data` with --json, or why it did nothing; return the exit status."""
    if args.json:
        print_json(data)
    elif refusal is None:
        print_line(line)
    if refusal is not None:
        warn(refusal)
    return 0 if refusal is None else 1


def trace(error: BaseException) -> None:
    """Write a traceback to stderr."""
    sys.stderr.write(_lines("".join(traceback.format_exception(error))))


def _lines(text: str) -> str:
    return "".join(f"{shown(line)}\n" for line in text.splitlines())


class LogFormatter(logging.Formatter):
    """Writes a record on one line, and its traceback below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _lines(super().formatException(ei)).rstrip("\n")

    def formatStack(self, stack_info: str) -> str:
        return _lines(super().formatStack(stack_info)).rstrip("\n")


@contextlib.contextmanager
def only_logged(level: int = logging.ERROR) -> Iterator[None]:
    """Log only records of this level inside the block, because the command itself reports the rest."""
    logger = logging.getLogger("agent_runtime_core")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def prints_on_stderr() -> Iterator[None]:
    """Send what the user's code prints to stderr: stdout takes the output of the command, perhaps as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(value: Any) -> None:
    """Write JSON. Characters that a terminal interprets are written as JSON escapes."""
    _write_line(json_text(value, 2))


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON without secrets and without characters that a terminal interprets."""
    text = json.dumps(
        without_secrets(value), ensure_ascii=False, indent=indent, default=lambda other: redacted(str(other))
    )
    all_encodable = _encodable(text) == text
    return "".join(
        each if each == "\n" or (each.isprintable() and (all_encodable or each.isascii())) else _escaped(each)
        for each in text
    )


def _escaped(character: str) -> str:
    """Return the JSON escapes of a character. json.dumps() leaves U+007F as it is."""
    code = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[at : at + 4]}" for at in range(0, len(code), 4))


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Write one line for each row, below the names of the columns, without `optional` columns that are empty."""
    columns = [name for name in columns if name not in optional or any(row.get(name) for row in rows)]
    cells = [[name.upper() for name in columns], *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for each in cells:
        _write_line("  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)).rstrip())


def _write_line(line: str) -> None:
    sys.stdout.write(f"{_encodable(line)}\n")


def _encodable(text: str) -> str:
    """Return the text with ? for characters that stdout cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _cell(value: object) -> str:
    return "-" if value in (None, "") else escaped(value)


def human_time(text: str, *, local: bool = True) -> str:
    """Return an ISO 8601 time for people: `2026-11-25 19:41 UTC (20:41 local, 3 min ago)`.

    Args:
        text: The time, with its UTC offset.
        local: Also show the local time, unless the local zone is UTC.
    """
    there = _dt.datetime.fromisoformat(text).astimezone(_dt.UTC)
    here = there.astimezone()
    notes = []
    if local and here.utcoffset():
        date = "" if here.date() == there.date() else f"{here:%Y-%m-%d} "
        notes.append(f"{date}{here:%H:%M} local")
    ago = SYSTEM.wall() - there.timestamp()
    notes.append(f"{shown_duration(ago)} ago" if ago >= 0 else f"in {shown_duration(-ago)}")
    return f"{there:%Y-%m-%d %H:%M} UTC ({', '.join(notes)})"


def with_human_times(fields: Mapping[str, Any], *, local: bool = True) -> dict[str, Any]:
    """Return the fields of a run, a step or an event, with their times for people."""
    return {
        name: human_time(value, local=local) if name in _TIMES and value else value for name, value in fields.items()
    }


def human_size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def json_line(value: Any, *, flush: bool = True) -> None:
    """Write JSON on one line; by default pass it on immediately, because another program may be reading."""
    _write_line(json_text(value))
    if flush:
        sys.stdout.flush()
