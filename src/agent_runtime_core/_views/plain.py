"""Stored JSON as plain values that every JSON reader understands, even if it contains types that this process lacks."""

from __future__ import annotations

import datetime as _dt
import json
from collections.abc import Mapping
from typing import Any, Final

from .._core.clock import aware
from .._core.codec.json import encode, plain_text
from .._core.codec.tagged import FOREIGN, REVIVE, STATE, TAG
from .._core.validation import redacted
from ..errors import StorageCorrupt, UnserialisableResult


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
    """Return JSON in UTF-8. A stored text may contain a lone surrogate, which becomes an escape."""
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


_MOMENTS: Final = frozenset({"datetime", "time"})
_QUOTED: Final = f'"{TAG}"'
_FOREIGN: Final = ("\n", "\r", "NaN", "Infinity")


def plain_json(text: str) -> str:
    """Return stored JSON text as JSON without tags of types, on one line and in ASCII.

    Text without tags is returned unchanged. A UUID, Decimal, datetime, date or time becomes a string, bytes a string in
    Base64, a timedelta its number of seconds, a tuple or set a list, a dataclass or model a dict of its fields, and an
    Enum the name of its member (a Flag its number). No type needs to be registered. NaN and infinities, which this
    library never stores, become null.

    Raises:
        UnserialisableResult: The text is no JSON.
    """
    if is_plain(text):
        return text
    try:
        return plain_text(plain_tree(json.loads(text, parse_constant=_null, parse_float=_finite)))
    except RecursionError as error:
        raise UnserialisableResult("$", "nested too deeply to be read") from error
    except ValueError as error:
        raise UnserialisableResult("$", f"the stored text was changed: {error}. Restore a backup") from error


def is_plain(text: str) -> bool:
    """Return whether stored JSON text contains no tags, and is one line of ASCII as the codec writes it."""
    if "$" in text and _QUOTED in text:
        return False
    # Another program may have written the other forms.
    return text.isascii() and not any(mark in text for mark in _FOREIGN)


def plain_tree(tree: Any) -> Any:
    """Return a parsed JSON tree without tags of types, as `plain_json` does. The tree itself is not changed."""
    kind = type(tree)
    if kind is list:
        return [plain_tree(item) for item in tree]
    if kind is not dict:
        return tree
    tag, form = tree.get(TAG), tree.get("v")
    if type(tag) is not str or len(tree) != 2 or "v" not in tree:
        return _plain_dict(tree)
    if tag == "dict" and type(form) is dict:
        return _plain_dict(form)
    try:
        if tag == "text":
            return "".join(form)
        if tag == "timedelta":
            return _dt.timedelta(*form).total_seconds()
        if tag == FOREIGN:
            return plain_tree(form[1])
        if tag == STATE:
            return plain_tree(form[1]) | plain_tree(form[0])
        if tag in _MOMENTS and type(form) is list:
            return _moment(tag, form)
    except (LookupError, TypeError, ValueError, OverflowError):
        pass  # a form that a later version wrote, or a changed one
    return plain_tree(form)


def _plain_dict(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: plain_tree(item) for key, item in tree.items()}


def _moment(tag: str, form: list[Any]) -> str:
    try:
        moment: _dt.datetime | _dt.time = REVIVE[tag](form)  # type: ignore[assignment]
    except LookupError:  # this machine does not know the time zone
        return str(form[0])
    return moment.isoformat()


def _null(_: str) -> None:
    return None


def _finite(text: str) -> float | None:
    number = float(text)
    return number if number - number == 0.0 else None
