"""The words of what people search through, and how well they answer a query."""

from __future__ import annotations

import re
from typing import Any

# What an index cannot keep: it cuts text at a NUL, and lone surrogates have no UTF-8.
_UNKEPT = re.compile("[\x00\ud800-\udfff]")


def words_of(content: Any) -> str:
    """A text itself; of lists and dicts all strings in them, one below the other; a type or role is no word."""
    return "\n".join(_strings(content))


def indexed(content: Any) -> str:
    """The words as an index takes them."""
    return _UNKEPT.sub(" ", words_of(content))


def _strings(content: Any) -> list[str]:
    found: list[str] = []
    left = [content]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            left.extend(list(each.values())[::-1])
        elif isinstance(each, list | tuple):
            left.extend(each[::-1])
    return found


def score(text: str, query: str) -> int:
    """How often the words of the query stand in the text; 0 where one of them is missing."""
    folded = text.casefold()
    counts = [folded.count(word) for word in query.casefold().split()]
    return sum(counts) if all(counts) else 0
