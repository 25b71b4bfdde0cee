"""Which texts hold the words that are looked for, where no index can say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def strings(value: Any) -> Iterator[str]:
    """The texts in a value, keys of dicts among them."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            waiting += reversed([*each.keys(), *each.values()])
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += reversed(list(each))


def found_in(query: str, texts: list[str]) -> int:
    """How often the words of `query` occur, in any case; 0 where one of them does not, and for no words."""
    text = " ".join(texts).casefold()
    counts = [text.count(word) for word in query.casefold().split()]
    return sum(counts) if all(counts) else 0
