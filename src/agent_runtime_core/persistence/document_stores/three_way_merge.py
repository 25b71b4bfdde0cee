"""Merge the changes of a caller into a stored document, so that changes of other writers are kept."""

from __future__ import annotations

import json
import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentityMap(Generic[T]):
    """Values by the identity of objects. A value is dropped with its object.

    The objects need not be hashable. A copy of an object has no value.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def remember(self, thing: Any, value: T) -> None:
        """Set the value of an object."""
        object_id = id(thing)
        self._entries[object_id] = (weakref.ref(thing, lambda _: self._entries.pop(object_id, None)), value)

    def of(self, thing: Any) -> T | None:
        """Return the value of an object, or None."""
        ref, value = self._entries.get(id(thing), (None, None))
        return value if ref is not None and ref() is thing else None

    def __len__(self) -> int:
        return len(self._entries)


def three_way_merge(mine: str, base: str | None, theirs: str | None) -> str:
    """Return `theirs` with the fields in which `mine` differs from `base`. All are JSON objects.

    If `base` or `theirs` is None, return `mine`.
    """
    if base is None or theirs is None:
        return mine
    if mine == base:
        return theirs
    return json.dumps(json.loads(theirs) | changed_fields(mine, base), separators=(",", ":"))


def changed_fields(mine: str, base: str) -> dict[str, Any]:
    """Return the fields in which `mine` differs from `base`."""
    new, old = json.loads(mine), json.loads(base)
    # The JSON texts are compared, because 1 == 1.0 == True.
    return {name: each for name, each in new.items() if json.dumps(each) != json.dumps(old.get(name))}
