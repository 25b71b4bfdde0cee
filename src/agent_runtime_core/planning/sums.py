"""Sums as people ask for them, in words and signs, as input of the calculator.

A text is taken for a sum only if every word of it belongs to one: "add 2 and 3" is, "add 2 eggs to my list" is not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .numerals import TENS, WORDS, Number, number_at
from .references import reference

Item = Number | str  # a number, a sign, "@" for the result of an earlier step, or a word

_SAME: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "’": "'", "‘": "'"})  # noqa: RUF001
_ASKED: Final = re.compile(
    r"(?:(?:what(?:'s| is| are| would be| do (?:i|you|we) get (?:if|when) (?:i|you|we))|how much (?:is|are)|calculate|"
    r"compute|work out|evaluate|solve|figure out|find out|find|tell me|give me|get|do|say)\b[\s:]*)+"
)
#: What stands around a sum; a point before a digit is its own.
_BEFORE: Final = re.compile(r"(?:[\s!?:;,]|\.(?![0-9]))+")
_AFTER: Final = ("=", "equals", "equal", "together", "too", "as well", "for me", "please", "now")
_PHRASES: Final = [
    (re.compile(rf"\b({'|'.join(sorted(TENS))})-(?=[a-z])"), r"\1 "),
    # At most three words: without a limit, "the the the …" is scanned again from each of its words.
    (re.compile(r"\b(?:(?:the|these|those|following|two|three|four) ){0,3}numbers\b:?"), " "),
    (re.compile(r"\b(?:(?:that|this|the|its|my) )?(?:(?:previous|last|final) )?(?:result|answer|outcome)\b"), " @ "),
    (re.compile(r"\b(?:that|this|the) (?:sum|total|product|difference|quotient)\b(?! (?:of|between)\b)"), " @ "),
    (re.compile(r"\b(?:it|that|this)\b"), " @ "),
    (re.compile(r"\bmultiplied (?:by|with)\b|\btimes\b"), " * "),
    (re.compile(r"\bdivided by\b|\bover\b"), " / "),
    (re.compile(r"\bplus\b|\badded to\b|\bincreased by\b"), " + "),
    (re.compile(r"\bminus\b|\bdecreased by\b|\breduced by\b|\bless\b|\bnegative\b"), " - "),
    (re.compile(r"\b(?:raised )?to the power of\b|\^"), " ** "),
    (re.compile(r"\bsquared\b"), " ** 2 "),
    (re.compile(r"\bcubed\b"), " ** 3 "),
    (re.compile(r"\bmod(?:ulo)?\b"), " % "),
    (re.compile(r"(?:%|\bpercent\b)\s*of\b"), " / 100 * "),
]  # fmt: skip
_WORD: Final = re.compile(
    r"(?<!\s)\s*+(\*\*|//|[-+*/%(),@]|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9.])|[0-9]+(?:\.[0-9]+)?(?![0-9.])"
    r"|\.[0-9]+|[a-z]+)"
)
_SIGNS: Final = frozenset({"+", "-", "*", "/", "//", "%", "**"})
_OPERATIONS: Final = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}


class _Term(NamedTuple):
    """What stands on one side of a sign: `value` is a number or a reference, None where it is put together."""

    text: str
    value: Any
    made: tuple[str, Any, Any] | None = None  # (sign, value, value) where it is nothing but that


class _Verb(NamedTuple):
    sign: str
    between: frozenset[str]
    turned: bool = False  # "subtract 5 from 20"
    fixed: int | None = None  # "double 5"


_ADD: Final = _Verb("+", frozenset({"and", ",", "to", "with"}))
_TAKE: Final = _Verb("-", frozenset({"from"}), turned=True)
_MULTIPLY: Final = _Verb("*", frozenset({"and", ",", "by", "with"}))
_VERBS: Final[dict[tuple[str, ...], _Verb]] = {
    ("add", "up"): _ADD, ("add", "together"): _ADD, ("add",): _ADD, ("sum", "up"): _ADD, ("sum", "of"): _ADD,
    ("sum",): _ADD, ("total", "of"): _ADD, ("total",): _ADD, ("take", "away"): _TAKE, ("take",): _TAKE,
    ("subtract",): _TAKE, ("deduct",): _TAKE,
    ("difference", "between"): _Verb("-", frozenset({"and"})), ("difference", "of"): _Verb("-", frozenset({"and"})),
    ("multiply",): _MULTIPLY, ("product", "of"): _MULTIPLY,
    ("divide",): _Verb("/", frozenset({"by"})), ("quotient", "of"): _Verb("/", frozenset({"and", "by"})),
    ("increase",): _Verb("+", frozenset({"by"})), ("raise",): _Verb("+", frozenset({"by"})),
    ("decrease",): _Verb("-", frozenset({"by"})), ("reduce",): _Verb("-", frozenset({"by"})),
    ("double",): _Verb("*", frozenset(), fixed=2), ("triple",): _Verb("*", frozenset(), fixed=3),
    ("halve",): _Verb("/", frozenset(), fixed=2), ("square",): _Verb("**", frozenset(), fixed=2),
    ("cube",): _Verb("**", frozenset(), fixed=3),
}  # fmt: skip
#: All words that are left of a sum: where there is another one, none of the rest needs to be looked at.
_KNOWN: Final = WORDS.union({"the", "away"}, *_VERBS, *(verb.between for verb in _VERBS.values()))


def read_sum(text: str, last: int | None, *, apart: bool = True) -> dict[str, Any] | None:
    """The calculator's input for a text that asks for a sum, else None.

    `last` is the step with the last result. One that is not set `apart` from what is before it does not begin with a
    plus or a minus: in "add 5 and minus 3" that is a number.
    """
    words = _words(text)
    if not words:
        return None
    for joined in (True, False):
        items = _items(words, joined)
        term = _asked_for(items, last, apart)
        if term is not None:
            return _input(term)
    return None


def may_be_in_sum(text: str) -> bool:
    """Whether a text that goes on behind "and" or a comma may be a sum: this one has no word that no sum has."""
    return _words(text) is not None


def _words(text: str) -> list[str] | None:
    """Lower-case words and signs of a sum; None where there is anything else."""
    text = text.lower().translate(_SAME)
    text = text[_end_of(_BEFORE, text) : without_tail(text, ".!?:;,", len(text))]
    text = text[_end_of(_ASKED, text) :]
    text = text[: without_endings(text, _AFTER, "", len(text))]
    for pattern, sign in _PHRASES:
        text = pattern.sub(sign, text)
    words, at = [], 0
    while found := _WORD.match(text, at):
        word = "*" if found[1] == "x" else found[1]
        if word.isalpha() and word not in _KNOWN:
            return None
        words.append(word)
        at = found.end()
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
    """Return where `text[:end]` ends without those of the words that stand at its end, in any case.

    White space and `signs` separate words. A pattern would scan them again from each of them, in quadratic time.
    """
    while word := next((each for each in words if _has_ending(text, each, signs, end)), None):
        end = without_tail(text, signs, end - len(word))
    return end


def _has_ending(text: str, word: str, signs: str, end: int) -> bool:
    at = end - len(word)
    apart = at > 0 and (text[at - 1] in signs or text[at - 1].isspace())
    return at >= 0 and text[at:end].lower() == word and (apart or not word[0].isalpha())


def _items(words: Sequence[str], joined: bool) -> list[Item]:
    items: list[Item] = []
    at = 0
    while at < len(words):
        found = number_at(words, at, joined=joined)
        if found is not None:
            items.append(found[0])
            at = found[1]
        else:
            if words[at] != "the":
                items.append(words[at])
            at += 1
    return items


def _asked_for(items: Sequence[Item], last: int | None, apart: bool) -> _Term | None:
    for words, verb in _VERBS.items():
        if tuple(items[: len(words)]) == words:
            rest = [item for item in items[len(words) :] if item != "away" or not verb.turned]
            return _by_verb(verb, rest, last)
    if last is not None and items and items[0] in (_SIGNS if apart else _SIGNS - {"+", "-"}):
        items = ["@", *items]
    term = _term(items, last)
    return term if term is not None and term.value is None else None


def _by_verb(verb: _Verb, items: Sequence[Item], last: int | None) -> _Term | None:
    parts = _parts(items, verb.between)
    if parts and not parts[0] and last is not None:  # "multiply by 4", "subtract from 20"
        parts[0] = ["@"]
    terms = [_term(part, last) for part in parts]
    if not terms or any(term is None for term in terms):
        return None
    known = [term for term in terms if term is not None]
    if verb.fixed is not None:
        known.append(_Term(str(verb.fixed), verb.fixed))
    if len(known) == 1 and known[0].value is None:  # "add 2 + 3"
        return known[0] if not verb.turned else None
    if len(known) == 1:
        return None if last is None else _joined(verb.sign, [_result(last), known[0]])
    if len(known) > 2 and verb.sign not in ("+", "*"):
        return None
    return _joined(verb.sign, known[::-1] if verb.turned else known)


def _parts(items: Sequence[Item], between: frozenset[str]) -> list[list[Item]]:
    parts: list[list[Item]] = [[]]
    depth, before = 0, ""
    for item in items:
        depth += (item == "(") - (item == ")")
        if depth == 0 and item in between:
            if not (item == "and" and before == ","):
                parts.append([])
        else:
            parts[-1].append(item)
        before = item if isinstance(item, str) else ""
    return parts


def _result(step: int) -> _Term:
    return _Term(f"({reference(step)})", reference(step))


def _joined(sign: str, terms: Sequence[_Term]) -> _Term:
    # A sign binds less than a power.
    bare = [term.value is not None and not (sign == "**" and term.text.startswith("-")) for term in terms]
    pieces = [term.text if plain else f"({term.text})" for term, plain in zip(terms, bare, strict=True)]
    made = (sign, terms[0].value, terms[1].value) if len(terms) == 2 else None
    return _Term(f" {sign} ".join(pieces), None, made)


def _term(items: Sequence[Item], last: int | None) -> _Term | None:
    """An expression, if the items are one: operands and signs in turn, parentheses in pairs."""
    text, depth, wanted = "", 0, True
    operands: list[Any] = []
    signs: list[str] = []
    negative, plain = False, True  # a sign before an operand; nothing but operands and signs so far
    for item in items:
        if wanted:
            if item in ("-", "+"):
                text += "-" if item == "-" else ""
                plain = plain and not negative and not text.endswith("--")
                negative = negative != (item == "-")
            elif item == "(":
                text, depth, plain = f"{text}(", depth + 1, False
                negative = False
            elif isinstance(item, str) and (item != "@" or last is None):
                return None
            else:
                made = _result(last) if item == "@" and last is not None else _number(item)
                plain = plain and not (negative and item == "@")
                operands.append(-made.value if negative and not isinstance(made.value, str) else made.value)
                text, wanted, negative = text + made.text, False, False
        elif item == ")" and depth:
            text, depth = f"{text})", depth - 1
        elif item in _SIGNS:
            signs.append(str(item))
            text, wanted = f"{text} {item} ", True
        else:
            return None
    if wanted or depth:
        return None
    if not signs and plain:
        return _Term(text, operands[0])
    simple = plain and len(signs) == 1 and signs[0] in _OPERATIONS
    return _Term(text, None, (signs[0], operands[0], operands[1]) if simple else None)


def _number(item: Any) -> _Term:
    return _Term(repr(item), item)


def _input(term: _Term) -> dict[str, Any]:
    if term.made is not None and term.made[0] in _OPERATIONS and None not in term.made[1:]:
        return {"operation": _OPERATIONS[term.made[0]], "a": term.made[1], "b": term.made[2]}
    return {"expression": term.text}
