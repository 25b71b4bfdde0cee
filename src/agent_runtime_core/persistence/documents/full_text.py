"""The words that a full-text search finds a document by, the same ones on each technology."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 100_000  # characters of a text that are looked at for words

# A run of letters and digits is a word. Scripts that leave no space between words have each character for one.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")
_MARKS = re.compile("[\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """The words of a text in their order, without case and accents."""
    text = text[:LONGEST]
    if not text.isascii():
        text = _MARKS.sub("", unicodedata.normalize("NFKD", text))
    return _WORD.findall(text.casefold())


def folded(text: str) -> str:
    """The words of a text with spaces between them."""
    return " ".join(words_of(text))


def best(wanted: Sequence[str], texts: Iterable[tuple[str, float, str]], limit: int | None) -> list[str]:
    """Keys of the (key, rank, folded words) that have all of `wanted`: those with the most first, then the newest."""
    if not wanted:
        return []
    whole, start = set(wanted[:-1]), wanted[-1]
    found = []
    for key, rank, words in texts:
        if all(word in words for word in wanted):  # as a part of some word, which is quick to tell
            counts = Counter(words.split(" "))
            hits = [counts[word] for word in whole]
            hits.append(sum(count for word, count in counts.items() if word.startswith(start)))
            if all(hits):
                found.append((-sum(hits), -rank, key))
    return [key for _, _, key in sorted(found)[:limit]]


def text_in(content: Any) -> str:
    """Return a string itself; of lists and dicts all strings in them that are no keys, one on each line."""
    found: list[str] = []
    left = [content]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            left.extend(reversed(each.values()))
        elif isinstance(each, list | tuple):
            left.extend(reversed(each))
    return "\n".join(found)
