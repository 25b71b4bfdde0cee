"""Find words in JavaScript code that are no part of a string, a template's text, a regular expression or a comment."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, NamedTuple

_SKIPPED: Final = re.compile(r"\s+|//[^\n]*|/\*[\s\S]*?\*/")
_STRING: Final = re.compile(r'"(?:[^"\\\n]|\\[\s\S])*"|' + r"'(?:[^'\\\n]|\\[\s\S])*'")
_WORD: Final = re.compile(r"[\w$]+")
_REGEX: Final = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
_TEMPLATE: Final = re.compile(r"(?:[^`\\$]|\\[\s\S]|\$(?!\{))*(`|\$\{)")
#: After these words comes an expression, so a slash begins a regular expression.
_BEFORE_EXPRESSION: Final = (
    "return", "typeof", "case", "in", "of", "delete", "void", "throw", "new", "else", "do", "await", "yield",
    "instanceof",
)  # fmt: skip
_OPENING, _CLOSING = "([{", ")]}"
_HOLE: Final = "${"


class Word(NamedTuple):
    """A word in code, with its position and how many brackets are open around it."""

    text: str
    position: int
    depth: int


class UnreadableScript(ValueError):
    """The text is no JavaScript that this module can read. `position` is where it stopped."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def words_in(text: str, wanted: Collection[str]) -> list[Word]:
    """Return the places of the words `wanted` in code. A property, as in `meta.import`, is left out.

    Raises:
        UnreadableScript: A string, template, comment or bracket has no end. A regular expression after `)` is read as a
            division, which ends in this error or has no effect on the words.
    """
    found: list[Word] = []
    open_brackets: list[str] = []
    position, before = 0, ""
    while position < len(text):
        if skipped := _SKIPPED.match(text, position):
            position = skipped.end()
            continue
        start, each = position, text[position]
        if word := _WORD.match(text, position):
            each, position = word[0], word.end()
            if each in wanted and before != ".":
                found.append(Word(each, start, len(open_brackets)))
        elif each in "\"'":
            position = _end(_STRING, text, position)
        elif each == "/" and _begins_regex(before):
            position = _end(_REGEX, text, position)
            each = ")"  # ends a value, as a bracket does
        elif each == "`" or (each == "}" and open_brackets[-1:] == [_HOLE]):
            if each == "}":
                open_brackets.pop()
            position = _end(_TEMPLATE, text, position + 1)
            is_hole = text[position - 1] == "{"
            if is_hole:
                open_brackets.append(_HOLE)
            each = "(" if is_hole else ")"
        else:
            position += 1
            if each in _OPENING:
                open_brackets.append(each)
            elif each in _CLOSING and (not open_brackets or open_brackets.pop() != _OPENING[_CLOSING.index(each)]):
                raise UnreadableScript(start)
        before = each
    if open_brackets:
        raise UnreadableScript(len(text))
    return found


def _begins_regex(before: str) -> bool:
    if before[-1:].isalnum() or before[-1:] in ("_", "$"):
        return before in _BEFORE_EXPRESSION
    return before not in (")", "]", '"', "'")


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    if found is None:
        raise UnreadableScript(position)
    return found.end()
