"""Numbers as people write them: digits, words, signs; read from a list of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_SMALL: Final = {
    word: value
    for value, word in enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
            "sixteen",
            "seventeen",
            "eighteen",
            "nineteen",
        ]
    )
}
_TENS: Final = {
    word: 10 * value
    for value, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
_SCALES: Final = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
TENS: Final = frozenset(_TENS)
#: All that can be part of a number.
WORDS: Final = frozenset({*_SMALL, *_TENS, *_SCALES, "hundred", "a", "and", "point"})

Number = int | float


_LONGEST: Final = 300  # digits; a float has at most 309


def is_digits(word: str) -> bool:
    return len(word) <= _LONGEST and word.isascii() and (word[0].isdigit() or (word[0] == "." and len(word) > 1))


def number_at(words: Sequence[str], at: int, *, joined: bool = True) -> tuple[Number, int] | None:
    """The number that begins at a place of lower-case words, and the place behind it.

    `joined` reads "one hundred and five" as one number, else it ends before "and".
    """
    if at < len(words) and is_digits(words[at]):
        return _scaled(words, at)
    whole, end = _whole(words, at, joined)
    if end == at:
        return None
    if end + 1 < len(words) and words[end] == "point" and words[end + 1] in _SMALL:
        digits, end = "", end + 1
        while end < len(words) and _SMALL.get(words[end], 10) < 10:
            digits, end = digits + str(_SMALL[words[end]]), end + 1
        if digits:
            return float(f"{whole}.{digits}"), end
    return whole, end


def _scaled(words: Sequence[str], at: int) -> tuple[Number, int]:
    """Digits, with a scale behind them as in "3 million"."""
    text = words[at].replace(",", "")
    value: Number = int(text) if text.isdigit() else float(text)
    end = at + 1
    if end < len(words) and (words[end] in _SCALES or words[end] == "hundred"):
        value, end = value * _SCALES.get(words[end], 100), end + 1
        value = int(value) if isinstance(value, float) and value.is_integer() else value
    return value, end


def _whole(words: Sequence[str], at: int, joined: bool) -> tuple[int, int]:
    """A whole number in words: groups below a thousand, each with a smaller scale than the one before."""
    total, end, scale = 0, at, 10**12
    while True:
        group, after = _group(words, end, joined)
        if after == end:
            return total, end
        here = _SCALES.get(words[after], 1) if after < len(words) else 1
        if here >= scale:
            return total, end
        total, scale, end = total + group * here, here, after + (here > 1)
        if here == 1:
            return total, end
        if joined and end + 1 < len(words) and words[end] == "and" and _group(words, end + 1, False)[1] > end + 1:
            rest, after = _group(words, end + 1, False)
            # "one thousand and five"; "one thousand and five hundred" are two.
            bare = after >= len(words) or words[after] not in _SCALES
            return (total + rest, after) if rest < 100 and bare else (total, end)


def _group(words: Sequence[str], at: int, joined: bool) -> tuple[int, int]:
    """A number below a thousand ("a hundred" too), 0 and the same place where there is none."""
    value, end = _below_hundred(words, at)
    if end == at and at + 1 < len(words) and words[at] == "a" and words[at + 1] in ("hundred", *_SCALES):
        value, end = 1, at + 1
    if end == at or end >= len(words) or words[end] != "hundred" or not 0 < value < 100:
        return value, end
    value, end = value * 100, end + 1
    skip = end + 1 if joined and end < len(words) and words[end] == "and" else end
    rest, after = _below_hundred(words, skip)
    return (value + rest, after) if after > skip and rest else (value, end)


def _below_hundred(words: Sequence[str], at: int) -> tuple[int, int]:
    if at >= len(words):
        return 0, at
    if words[at] in _SMALL:
        return _SMALL[words[at]], at + 1
    if words[at] in _TENS:
        unit = _SMALL.get(words[at + 1], 0) if at + 1 < len(words) else 0
        return (_TENS[words[at]] + unit, at + 2) if 0 < unit < 10 else (_TENS[words[at]], at + 1)
    return 0, at
