"""Cursors of lists: where the next page starts, bound to the filter of the list."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .._core.validation import must
from ..errors import InvalidArgument

_CHECK: Final = 12  # bytes of the checksum
_LARGEST: Final = 2**53
_LONGEST: Final = 2000  # characters: no cursor of this module is longer

Filter = Mapping[str, Any]


def cursor_of(position: Sequence[float | str], wanted: Filter) -> str:
    """Return the cursor for a position in the list with this filter, a mapping of JSON values."""
    text = json.dumps(list(position), separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(_checksum(text, wanted) + text).decode().rstrip("=")


def position_of(cursor: str, wanted: Filter, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the position of a cursor, which has one value of each kind.

    Raises:
        InvalidArgument: The cursor is of another filter, or not one of `cursor_of`.
    """
    try:
        data = base64.b64decode(cursor[:_LONGEST] + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found = json.loads(data[_CHECK:]) if data[:_CHECK] == _checksum(data[_CHECK:], wanted) else None
    except (binascii.Error, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) != len(kinds) or not all(map(_fits, found, kinds)):
        raise wrong_cursor(cursor)
    return found


def _fits(value: Any, kind: type | tuple[type, ...]) -> bool:
    # Anybody can compute the checksum, and a store cannot compare every number.
    return isinstance(value, kind) and (not isinstance(value, int | float) or abs(value) <= _LARGEST)


def wrong_cursor(cursor: str) -> InvalidArgument:
    """Return the error for a cursor that does not fit its list."""
    return must("cursor", "be `next` of a page with the same filter", cursor, "Leave it out for the first page")


def _checksum(text: bytes, wanted: Filter) -> bytes:
    # Not a secret: a forged position shows nothing that the same caller could not list.
    bound = json.dumps(wanted, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text + b"\0" + bound, digest_size=_CHECK, person=b"arc.cursor").digest()
