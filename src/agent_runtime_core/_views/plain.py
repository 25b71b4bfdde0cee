"""Stored JSON as plain values that every JSON reader understands, also if it has types that this process lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .._core.clock import aware
from .._core.codec.json import encode
from .._core.codec.plain import is_plain, plain_tree
from .._core.validation import redacted
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


def plain_of(value: Any) -> Any:
    """Return plain JSON of a value: what JSON lacks, such as a datetime, becomes a string."""
    return plain_value(encode(value))


def json_bytes(value: Any) -> bytes:
    """Return JSON in UTF-8. A stored text may have a lone surrogate, which becomes an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


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


def without_secrets(value: Any) -> Any:
    """Return a copy of a JSON tree in which *** replaces the secrets of URLs."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redacted(key) if isinstance(key, str) else key: without_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return value
