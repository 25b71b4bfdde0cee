"""Keys of the caller's as keys of documents: the same text, but for what some stores cannot keep."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from ...errors import InvalidArgument, brief

# A NUL cuts text off in some stores, and lone surrogates have no UTF-8; an escape stands for each.
_ESCAPED = re.compile("[\x00\x1b\ud800-\udfff]")
_ESCAPE = re.compile("\x1b([0-9a-f]{4})")


def stored_key(key: Any, what: str = "key") -> str:
    """The document key of any string but the empty one; what begins alike begins alike there too."""
    if not isinstance(key, str) or not key:
        raise InvalidArgument(f"a {what} is a string that is not empty, not {brief(key)}")
    return escaped(key)


def escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"\x1b{ord(found[0]):04x}", text)


def original(key: str) -> str:
    """What `escaped` was given."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), key)


def id_text(value: Any, what: str) -> str:
    """The text of a UUID; that of a string which is one, too."""
    if isinstance(value, UUID):
        return str(value)
    try:
        return str(UUID(value))
    except (TypeError, ValueError, AttributeError):
        raise InvalidArgument(f"the id of a {what} is a UUID, not {brief(value)}") from None
