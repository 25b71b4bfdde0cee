"""What a store remembers of the objects that it gave out, as long as somebody holds them."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Seen(Generic[T]):
    """A value beside an object that cannot be a key of a dict; a copy of the object has none."""

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
