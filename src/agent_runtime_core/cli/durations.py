"""Durations of the command line: `500ms`, `25s`, `90m`, `1h30m`, `30d`, `2w`, or a number of seconds."""

from __future__ import annotations

import math
import re
from typing import Final

SECONDS_BY_UNIT: Final[dict[str, float]] = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
#: What a duration is, in messages and help.
DURATION: Final = "a duration such as 500ms, 25s, 1h30m or 30d"
POSITIVE_DURATION: Final = "a duration above 0, such as 500ms, 25s, 1h30m or 30d"

_PART = re.compile(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(SECONDS_BY_UNIT)})")


def seconds_in(text: str) -> float:
    """Return the seconds of a duration. A plain number is a number of seconds.

    Raises:
        ValueError: The text is no duration.
    """
    text = text.strip().lower()
    try:
        seconds = float(text)
    except ValueError:
        seconds = _sum_of_parts(text)
    if not 0 <= seconds < math.inf:
        raise ValueError("a duration must be finite and not negative")
    return seconds


def _sum_of_parts(text: str) -> float:
    parts = _PART.findall(text)
    units = [unit for _, unit in parts]
    # Each unit once, the largest first: `30m1h` or `1h1h` is more likely a typing error than a duration.
    in_order = sorted(set(units), key=SECONDS_BY_UNIT.__getitem__, reverse=True)
    if not parts or "".join(map("".join, parts)) != text or units != in_order:
        raise ValueError("not a duration")
    return math.fsum(float(number) * SECONDS_BY_UNIT[unit] for number, unit in parts)
