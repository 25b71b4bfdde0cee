"""Values of an enum as callers give them."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from ...errors import InvalidArgument

E = TypeVar("E", bound=Enum)


def choice(kind: type[E], value: Any, what: str) -> E:
    """The member, or that of this value. InvalidArgument: there is none."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(each.name for each in kind)
        raise InvalidArgument(f"{value!r:.80} is no {what}: there are {names}") from None
