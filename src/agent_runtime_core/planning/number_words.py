"""Read number words from zero to one hundred."""

from __future__ import annotations

import re
from typing import Final

_SMALL: Final = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS: Final = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES: Final = {
    **{word: value for value, word in enumerate(_SMALL)},
    **{word: 10 * value for value, word in enumerate(_TENS, 2)},
}
# "one hundred and five" must not become the two numbers 100 and 5, so its "hundred" stays a word.
_NUMBER: Final = re.compile(
    rf"\b(?:(?P<hundred>(?:a|one) hundred)(?! and (?:{'|'.join(_VALUES)})\b)"
    rf"|(?P<tens>{'|'.join(_TENS)})(?:[- ](?P<ones>{'|'.join(_SMALL[1:10])}))?|(?P<small>{'|'.join(_SMALL)}))\b"
)
_DECIMAL: Final = re.compile(r"\b([0-9]++) point ([0-9](?![0-9.])(?: [0-9](?![0-9.]))*+)")


def with_digits(text: str) -> str:
    """Return a lower-case text with its number words as digits: "three point one four" becomes "3.14"."""
    text = _NUMBER.sub(_digits, text)
    return _DECIMAL.sub(lambda found: f"{found[1]}.{found[2].replace(' ', '')}", text)


def _digits(found: re.Match[str]) -> str:
    if found["hundred"]:
        return "100"
    return str(sum(_VALUES[word] for word in found.group("tens", "ones", "small") if word))
