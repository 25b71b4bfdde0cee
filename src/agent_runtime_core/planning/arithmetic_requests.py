"""Read requests for arithmetic, in words and signs, as input of the calculator.

A text is read as arithmetic only if every word of it belongs there: "add 2 and 3" is, "add 2 eggs to my list" is not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .number_words import with_digits
from .references import reference

_SAME: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "’": "'", "‘": "'"})  # noqa: RUF001
_QUESTION_WORDS: Final = re.compile(
    r"(?:(?:what(?:'s| is| are| would be| do (?:i|you|we) get (?:if|when) (?:i|you|we))|how much (?:is|are)|calculate|"
    r"compute|work out|evaluate|solve|figure out|find out|find|tell me|give me|get|do|say)\b[\s:]*)+"
)
# A point before a digit belongs to the number.
_BEFORE: Final = re.compile(r"(?:[\s!?:;,]|\.(?![0-9]))+")
_AFTER: Final = ("=", "equals", "equal", "together", "too", "as well", "for me", "please", "now")
_RESULT: Final = "result"
_PHRASES: Final = [
    # At most three words: without a limit, "the the the …" is scanned again from each of its words.
    (re.compile(r"\b(?:(?:the|these|those|following|two|three|four|2|3|4) ){0,3}numbers\b:?"), " "),
    (re.compile(r"\b(?:(?:that|this|the) )?(?:(?:previous|last|final) )?(?:result|answer|outcome)\b"), " result "),
    (re.compile(r"\b(?:that|this|the) (?:sum|total|product|difference|quotient)\b(?! (?:of|between)\b)"), " result "),
    (re.compile(r"\bmultiplied (?:by|with)\b|\btimes\b"), " * "),
    (re.compile(r"\bdivided by\b|\bover\b"), " / "),
    (re.compile(r"\bplus\b|\badded to\b|\bincreased by\b"), " + "),
    (re.compile(r"\bminus\b|\bdecreased by\b|\breduced by\b|\bless\b|\bnegative\b"), " - "),
    (re.compile(r"\b(?:raised )?to the power of\b|\^"), " ** "),
    (re.compile(r"\bsquared\b"), " ** 2 "),
    (re.compile(r"\bcubed\b"), " ** 3 "),
    (re.compile(r"\bmod(?:ulo)?\b"), " % "),
    (re.compile(r"(?:%|\bpercent\b)\s*of\b"), " / 100 * "),
    (re.compile(r"\bthe\b"), " "),
]  # fmt: skip
_WORD: Final = re.compile(
    r"(?<!\s)\s*+(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9.])|[0-9]+(?:\.[0-9]+)?(?![0-9.])"
    r"|\.[0-9]+)|(?P<word>\*\*|//|[-+*/%(),]|[a-z]+))"
)
_MAX_DIGITS: Final = 300  # of a number; a float has at most 309 before the point
_SIGNS: Final = frozenset({"+", "-", "*", "/", "//", "%", "**"})
_OPERATIONS: Final = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
_OPERAND: Final = r"(?:-*+\()*+-*+(?:result|[0-9][0-9.e+-]*+)\)*+"
_EXPRESSION: Final = re.compile(rf"{_OPERAND}(?: (?:\*\*|//|[-+*/%]) {_OPERAND})*+")


class _Operation(NamedTuple):
    names: tuple[str, ...]
    sign: str
    separators: frozenset[str]
    second: str | None = None  # the second operand, of a verb that takes only one


def _verb(names: str, sign: str, separators: str, second: str | None = None) -> list[_Operation]:
    return [_Operation((*each.split(),), sign, frozenset(separators.split()), second) for each in names.split("|")]


_VERBS: Final = [
    *_verb("add up|add together|add|sum up|sum of|sum|total of|total", "+", "and , to with"),
    *_verb("take away|take|subtract|deduct", "-", "from"),
    *_verb("difference between|difference of", "-", "and"),
    *_verb("multiply|product of", "*", "and , by with"),
    *_verb("divide", "/", "by"),
    *_verb("quotient of", "/", "and by"),
    *_verb("increase|raise", "+", "by"),
    *_verb("decrease|reduce", "-", "by"),
    *_verb("double", "*", "", "2"),
    *_verb("triple", "*", "", "3"),
    *_verb("square", "**", "", "2"),
    *_verb("cube", "**", "", "3"),
]
_KNOWN: Final = {_RESULT, "away"}.union(*(verb.names for verb in _VERBS), *(verb.separators for verb in _VERBS))


def read_arithmetic(text: str, last: int | None, *, apart: bool = True) -> dict[str, Any] | None:
    """Return the calculator's input for a text that asks for arithmetic, else None.

    Args:
        text: One request.
        last: The step with the last result of the calculator, which "the result" names.
        apart: Whether more than a comma or "and" separates the request from the one before. If not, a plus or a minus
            at its start is the sign of a number: "add 5 and minus 3".
    """
    words = _words(text)
    if not words:
        return None
    verb = next((each for each in _VERBS if tuple(words[: len(each.names)]) == each.names), None)
    if verb is not None:
        return _input(_by_verb(verb, words[len(verb.names) :], last), last)
    if last is not None and words[0] in (_SIGNS if apart else _SIGNS - {"+", "-"}):
        words = [_RESULT, *words]
    return _input(_expression(words), last)


def may_be_arithmetic(text: str) -> bool:
    """Return whether a text may be part of a request for arithmetic: all its words occur in such requests."""
    return _words(text) is not None


def _words(text: str) -> list[str] | None:
    """Return numbers, signs and lower-case words; None if there is anything else."""
    text = text.lower().translate(_SAME)
    text = text[_end_of(_BEFORE, text) : without_tail(text, ".!?:;,", len(text))]
    text = text[_end_of(_QUESTION_WORDS, text) :]
    text = with_digits(text[: without_endings(text, _AFTER, "", len(text))])
    for pattern, sign in _PHRASES:
        text = pattern.sub(sign, text)
    words, at = list[str](), 0
    while found := _WORD.match(text, at):
        word, at = found["word"], found.end()
        if word is None:
            digits = found["number"].replace(",", "")
            if len(digits) > _MAX_DIGITS:
                return None
            word = repr(int(digits) if digits.isdigit() else float(digits))
        elif word == "x":
            word = "*"
        elif word.isalpha() and word not in _KNOWN:
            return None
        words.append(word)
    return words if not text[at:].strip() else None


def _end_of(pattern: re.Pattern[str], text: str) -> int:
    """Return where a match at the start of the text ends, 0 without one."""
    found = pattern.match(text)
    return found.end() if found is not None else 0


def without_tail(text: str, signs: str, end: int) -> int:
    """Return where `text[:end]` ends without the white space and the signs at its end."""
    while end and (text[end - 1] in signs or text[end - 1].isspace()):
        end -= 1
    return end


def without_endings(text: str, words: Sequence[str], signs: str, end: int) -> int:
    """Return where `text[:end]` ends without those of the words that are at its end, in any case.

    White space and `signs` separate words. A pattern would scan them again from each of them, in quadratic time.
    """
    while word := next((each for each in words if _has_ending(text, each, signs, end)), None):
        end = without_tail(text, signs, end - len(word))
    return end


def _has_ending(text: str, word: str, signs: str, end: int) -> bool:
    at = end - len(word)
    apart = at > 0 and (text[at - 1] in signs or text[at - 1].isspace())
    return at >= 0 and text[at:end].lower() == word and (apart or not word[0].isalpha())


def _by_verb(verb: _Operation, words: Sequence[str], last: int | None) -> list[str] | None:
    parts: list[list[str]] = [[]]
    backwards = verb.separators == {"from"}  # "subtract 5 from 20", "take 5 away from 20"
    for before, word in zip(["", *words], words, strict=False):
        if word in verb.separators:
            if (before, word) != (",", "and"):
                parts.append([])
        elif not (backwards and word == "away"):
            parts[-1].append(word)
    if not parts[0] and last is not None:  # "multiply by 4"
        parts[0] = [_RESULT]
    operands = [_expression(part) for part in parts]
    if verb.second is not None:
        operands.append([verb.second])
    elif len(operands) == 1:
        only = operands[0]
        if only is not None and len(only) > 1:  # "add 2 + 3"
            return only if not backwards else None
        operands.insert(backwards, [_RESULT])  # "add 5", "subtract 5" from the result
    if len(operands) > 2 and verb.sign not in ("+", "*"):
        return None
    items: list[str] = []
    for operand in reversed(operands) if backwards else operands:
        if operand is None:
            return None
        # A sign binds less than a power.
        bare = len(operand) == 1 and not (verb.sign == "**" and operand[0].startswith("-"))
        items += [*([verb.sign] if items else []), *(operand if bare else ["(", *operand, ")"])]
    return items


def _expression(words: Sequence[str]) -> list[str] | None:
    """Return operands, signs and parentheses, each leading sign in one item with what follows; None if invalid."""
    items: list[str] = []
    leading = ""
    for word in words:
        if word in ("+", "-") and (not items or items[-1] in _SIGNS or items[-1].endswith("(")):
            leading += word.strip("+")
        else:
            items.append(leading + word)
            leading = ""
    depth = 0
    for item in items:
        depth += item.endswith("(") - (item == ")")
        if depth < 0:
            return None
    return items if depth == 0 and not leading and _EXPRESSION.fullmatch(_text(items)) else None


def _text(items: Sequence[str]) -> str:
    return " ".join(items).replace("( ", "(").replace(" )", ")")


def _input(items: Sequence[str] | None, last: int | None) -> dict[str, Any] | None:
    if items is None or len(items) < 3 or (last is None and any(item.endswith(_RESULT) for item in items)):
        return None
    if len(items) == 3 and items[1] in _OPERATIONS:
        a, b = _value(items[0], last), _value(items[2], last)
        if a is not None and b is not None:
            return {"operation": _OPERATIONS[items[1]], "a": a, "b": b}
    return {"expression": _text(items).replace(_RESULT, f"({reference(last or 0)})")}


def _value(item: str, last: int | None) -> int | float | str | None:
    """Return a number, or the reference to the result; None for an operand with more than one leading sign."""
    if item == _RESULT and last is not None:
        return reference(last)
    if item.startswith("--") or not item[-1].isdigit():
        return None
    return int(item) if item.lstrip("-").isdigit() else float(item)
