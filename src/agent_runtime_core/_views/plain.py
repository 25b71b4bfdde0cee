"""Stored JSON as plain values that every JSON reader understands, also if it has types that this process lacks."""

from __future__ import annotations

import json
from typing import Any

from .._core.clock import aware
from .._core.codec.plain import is_plain, plain_tree
from ..errors import StorageCorrupt


def plain_value(text: str | None) -> Any:
    """Return the value of stored JSON without type tags, as `plain_json` does; None for None.

    Raises:
        StorageCorrupt: It is no JSON.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
        return value if is_plain(text) else plain_tree(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageCorrupt(
            "stored JSON must be as this library wrote it, got other text. Restore a backup"
        ) from error


def iso_time(seconds: float | None, timespec: str = "milliseconds") -> str | None:
    """Return a wall time in RFC 3339, in UTC; None for none."""
    return aware(seconds).isoformat(timespec=timespec) if seconds else None


def shortened_error(error: Any) -> dict[str, Any] | None:
    """Return type and message of a stored error, None if there is none."""
    if not error:
        return None
    if not isinstance(error, dict):
        return {"type": "Error", "message": str(error)}
    return {"type": error.get("type") or "Error", "message": error.get("message") or ""}
