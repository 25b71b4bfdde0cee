"""Split text into words for full-text search. All backends use the same words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 100_000  # characters of a text that are searchable

# A run of letters and digits is a word. In scripts without spaces between words, each character is a word.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")
_MARKS = re.compile("[\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """Return the words of a text in order, without case and accents."""
    text = text[:LONGEST]
    if not text.isascii():
        text = _MARKS.sub("", unicodedata.normalize("NFKD", text))
    return _WORD.findall(text.casefold())


def folded(text: str) -> str:
    """Return the words of a text, separated by spaces."""
    return " ".join(words_of(text))


def best(wanted: Sequence[str], texts: Iterable[tuple[str, float, str]], limit: int | None) -> list[str]:
    """Return at most `limit` keys of the texts that contain all words of `wanted`.

    The texts with the most matching words come first, then those with the highest rank.

    Args:
        wanted: The words. The last one also matches words that begin with it.
        texts: (key, rank, folded words) of each text.
        limit: At most this many keys. None: all.
    """
    if not wanted:
        return []
    complete_words, last_word = set(wanted[:-1]), wanted[-1]
    found = []
    for key, rank, words in texts:
        if all(word in words for word in wanted):  # as a part of any word: a fast check that excludes most texts
            counts = Counter(words.split(" "))
            hits = [counts[word] for word in complete_words]
            hits.append(sum(count for word, count in counts.items() if word.startswith(last_word)))
            if all(hits):
                found.append((-sum(hits), -rank, key))
    return [key for _, _, key in sorted(found)[:limit]]


def text_in(content: Any) -> str:
    """Return a string itself. Of a list or dict, return all strings in it except keys, one on each line."""
    found: list[str] = []
    remaining = [content]
    while remaining:
        each = remaining.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict):
            remaining.extend(reversed(each.values()))
        elif isinstance(each, list | tuple):
            remaining.extend(reversed(each))
    return "\n".join(found)
