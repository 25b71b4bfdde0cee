"""What commands write: lines, tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .._clock import aware


def say(line: str) -> None:
    _put(plain(line))


def field(name: str, value: object) -> None:
    _put(f"{name.replace('_', ' '):<16}  {plain(value)}")


def warn(line: str) -> None:
    sys.stderr.write(f"agent-runtime: {plain(line)}\n")


def tell(value: Any) -> None:
    """As JSON."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    _put(text if _sayable(text) == text else json.dumps(value, indent=2, default=str))


def plain(text: object) -> str:
    """On one line, and with nothing in it that a terminal would act upon."""
    line = " ".join(str(text).split())
    return "".join(each if each.isprintable() else "?" for each in line)


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """One line for each, under the names of the columns."""
    cells = [[name.upper() for name in columns], *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for each in cells:
        _put("  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)).rstrip())


def _put(line: str) -> None:
    sys.stdout.write(f"{_sayable(line)}\n")


def _sayable(text: str) -> str:
    """The text with a question mark for all that this output has no character for."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _cell(value: object) -> str:
    return "-" if value in (None, "") else plain(value)


def when(seconds: float | None) -> str | None:
    return aware(seconds).isoformat(timespec="seconds") if seconds else None
