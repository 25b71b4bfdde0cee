"""Save only what the caller changed: what an object was read with, and how its changes are put into what is stored."""

from __future__ import annotations

import json
import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentityMap(Generic[T]):
    """A value for each object, as long as the object lives. The object need not be hashable; a copy has no value."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], T]] = {}

    def remember(self, thing: Any, value: T) -> None:
        at = id(thing)
        self._kept[at] = (weakref.ref(thing, lambda _: self._kept.pop(at, None)), value)

    def of(self, thing: Any) -> T | None:
        ref, value = self._kept.get(id(thing), (None, None))
        return value if ref is not None and ref() is thing else None

    def __len__(self) -> int:
        return len(self._kept)


def three_way_merge(mine: str, base: str | None, theirs: str | None) -> str:
    """Return `theirs` with the fields in which `mine` differs from `base`, or `mine` if one of them is None."""
    if base is None or theirs is None:
        return mine
    if mine == base:
        return theirs
    return json.dumps(json.loads(theirs) | changed_fields(mine, base), separators=(",", ":"))


def changed_fields(mine: str, base: str) -> dict[str, Any]:
    """Return the fields in which `mine` differs from `base`."""
    new, old = json.loads(mine), json.loads(base)
    # As texts: 1, 1.0 and True are equal.
    return {name: each for name, each in new.items() if json.dumps(each) != json.dumps(old.get(name))}
