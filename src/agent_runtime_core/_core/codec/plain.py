"""Stored JSON as JSON that any client understands: without the tags of types."""

from __future__ import annotations

import datetime as _dt
import json
from typing import Any, Final

from ...errors import UnserialisableResult
from .json import plain_text
from .tagged import FOREIGN, REVIVE, STATE, TAG

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
    """Return whether stored JSON text has no tags, and is one line of ASCII as the codec writes it."""
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
