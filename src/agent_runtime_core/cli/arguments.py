"""Read the arguments of commands: numbers, durations, times and JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime as _dt
import math
import re
from typing import Any, Final

from .._core.arguments import checked_tenant
from .._core.clock import SYSTEM
from .._core.codec.json import loads_strict
from .._core.validation import redacted, unknown
from ..errors import InvalidArgument, brief
from ..status import TERMINAL

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


_FINAL: Final = sorted(each.value for each in TERMINAL)


def _invalid(constraint: str, text: str, fix: str = "") -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {constraint}, got {brief(redacted(text))}{'. ' if fix else ''}{fix}")


def positive_int(text: str) -> int:
    # int() raises ValueError for more than 4,300 digits; 18 digits are more than any count needs.
    if not text.isdecimal() or not (number := int(text[:18])):
        raise _invalid("an integer above 0", text)
    return number


def count(text: str) -> int:
    if not text.isdecimal():
        raise _invalid("an integer of at least 0", text)
    return int(text[:18])


def port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65_535:
        raise _invalid("a port from 0 to 65535", text)
    return int(text)


def priority(text: str) -> int:
    with contextlib.suppress(ValueError):
        if -(2**31) <= (number := int(text[:18])) < 2**31:
            return number
    raise _invalid("a 32-bit integer", text)


def tenant(text: str) -> str:
    try:
        return checked_tenant(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def duration(text: str) -> float:
    try:
        return seconds_in(text)
    except ValueError:
        raise _invalid(DURATION, text) from None


def positive_duration(text: str) -> float:
    if not (seconds := duration(text)):
        raise _invalid(POSITIVE_DURATION, text)
    return seconds


def usd(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise _invalid("an amount in USD of at least 0", text)


def json_value(text: str) -> Any:
    try:
        return loads_strict(text)
    except (ValueError, RecursionError) as error:
        message = f"must be JSON, got {brief(redacted(text))} ({error}). Put quotes around a string: '\"yes\"'"
        raise argparse.ArgumentTypeError(message) from None


def json_object(text: str) -> dict[str, Any]:
    value = json_value(text)
    if not isinstance(value, dict):
        raise _invalid("a JSON object", text, """Example: '{"city": "Paris"}'""")
    return value


def pair(text: str) -> tuple[str, str]:
    """Return the key and the value in KEY=VALUE."""
    key, found, value = text.partition("=")
    if not found or not key:
        raise _invalid("KEY=VALUE", text)
    return key, value


def retention(text: str) -> tuple[str, float]:
    status, _, kept = text.partition("=")
    with contextlib.suppress(ValueError):
        seconds = seconds_in(kept)
        if status not in _FINAL:
            raise argparse.ArgumentTypeError(unknown("final status", redacted(status), _FINAL))
        return status, seconds
    raise _invalid("STATUS=DURATION", text, "Example: succeeded=30d")


def point_in_time(text: str) -> float:
    """Return the wall time of a duration from now, or of an ISO 8601 time. A time without a zone is local."""
    return _time(text, 1, "a duration from now or an ISO 8601 time")


def time_ago(text: str) -> float:
    """Return the wall time of a duration ago, or of an ISO 8601 time. A time without a zone is local."""
    return _time(text, -1, "a duration ago or an ISO 8601 time")


def _time(text: str, sign: int, constraint: str) -> float:
    with contextlib.suppress(ValueError):
        return SYSTEM.wall() + sign * seconds_in(text)
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return _dt.datetime.fromisoformat(text).timestamp()
    raise _invalid(constraint, text, "Example: 2h, or 2026-11-25T19:41Z")
