"""Encode a large value in slices, between which an event loop can run other tasks.

To encode 10 MB takes 50 ms. A thread would not help, because `json` holds the interpreter's lock while it encodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final

from ..validation import MAX_DEPTH
from .json import LOOK, has_pair, plain_left, plain_text
from .tagged import HALVES, PART, TAG, oversize, refused_for_weight, size_budget

LARGE: Final = 256 * 1024  # weight of a value that is encoded without a pause, at most
_ENTRY: Final = 5 * PART
_ITEM: Final = 2 * PART


class NotSliced(Exception):
    """Only `encode` can encode this value, or name the part that it refuses."""


def slices(value: object, max_bytes: int) -> Iterator[str]:
    """Yield the text that `encode` returns for a plain value, in slices that take a few milliseconds each.

    The value must not change before the last slice.

    Raises:
        NotSliced: `encode` must decide.
        UnserialisableResult: The value is too large.
    """
    slicer, length = _Slicer(value, max_bytes), 0
    for text in slicer.of(value, MAX_DEPTH):
        length += len(text)
        yield text
    if length > max_bytes:
        raise oversize(max_bytes, f"{length:,}")


class _Slicer:
    def __init__(self, whole: object, max_bytes: int) -> None:
        self._whole = whole
        self._max_bytes = max_bytes
        self._left = size_budget(max_bytes)

    def _spend(self, weight: int) -> None:
        self._left -= weight
        if self._left < 0:
            raise refused_for_weight(self._whole, self._max_bytes)

    def of(self, tree: Any, depth: int) -> Iterator[str]:
        if type(tree) is str:
            yield from self._string(tree)
        elif type(tree) is dict and depth > 0 and TAG not in tree:
            yield "{"
            yield from self._items(tree.items(), depth, {})
            yield "}"
        elif type(tree) is list and depth > 0:
            yield "["
            yield from self._items(enumerate(tree), depth, [])
            yield "]"
        else:
            raise NotSliced

    def _string(self, text: str) -> Iterator[str]:
        self._spend(len(text))
        yield '"'
        for start in range(0, len(text), LARGE):
            written = quote(text[start : start + LARGE])[1:-1]
            # With the next character, which may be the second half of the last character.
            if "\\ud" in written and HALVES.search(text, start, start + LARGE + 1) is not None:
                raise NotSliced
            yield written
        yield '"'

    def _items(self, items: Iterable[tuple[Any, Any]], depth: int, empty: Any) -> Iterator[str]:
        """Yield the entries of a dict or the items of a list, with as many in a slice as weigh `LARGE`."""
        group, room, before = empty.copy(), LARGE, ""
        for key, item in items:
            cost = _ITEM
            if type(empty) is dict:
                if type(key) is not str:
                    raise NotSliced
                cost = _ENTRY + len(key)
            left = plain_left(item, depth - 1, room - cost)
            if left < 0 and group:
                yield before + self._group(group, LARGE - room)
                group, room, before = empty.copy(), LARGE, ","
                left = plain_left(item, depth - 1, room - cost)
            if left == LOOK:
                raise NotSliced
            if left < 0:
                self._spend(cost)
                yield before + (f"{_text(key)}:" if type(empty) is dict else "")
                yield from self.of(item, depth - 1)
                before = ","
                continue
            if type(empty) is dict:
                group[key] = item
            else:
                group.append(item)
            room = left
        if group:
            yield before + self._group(group, LARGE - room)

    def _group(self, group: Any, weight: int) -> str:
        self._spend(weight)
        return _text(group)[1:-1]


def _text(value: object) -> str:
    try:
        text = plain_text(value)
    except (TypeError, ValueError):
        raise NotSliced from None
    if has_pair(text, value):
        raise NotSliced
    return text
