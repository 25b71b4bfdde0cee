"""To-dos as people ask for them, as input of the to-do tool.

Its `action` is add, list, get, complete or delete; the one that is meant is named by `todo_id` where an id was
given, else by its `text`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from .references import reference

_NOUN: Final = r"(?:to-?dos?|to do|tasks?|reminders?)(?: items?)?"
_LIST: Final = (
    r"(?:(?:my|the|our) )?(?:(?:to-?do|to do|tasks?|shopping|grocery|groceries|reminders?) )?list|(?:my |the |our )?"
    + _NOUN
)
_RESULT: Final = re.compile(
    r"(?:it|that|this|(?:(?:the|that|this) )?(?:(?:final|last|previous) )?"
    r"(?:result|answer|outcome|sum|total|product|difference|quotient))",
    re.IGNORECASE,
)
_ID: Final = re.compile(
    rf"(?:the )?(?:(?:{_NOUN}|items?)(?: with)?(?: the)? ?(?:#|no\.? ?|number |id )?|#|number |id )"
    r"([0-9]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[a-z]+[-_][0-9a-z]*[0-9])",
    re.IGNORECASE,
)
#: An id and nothing else: no text, which may be part of another to-do's.
_BARE: Final = re.compile(r"(?:[0-9]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)
_MARKED: Final = re.compile(rf"(?:the |my )?(?:{_NOUN}|item)(?: called| named| to)?:? (.+)", re.IGNORECASE)
_BEHIND: Final = re.compile(rf"(.+?) (?:to-?do|task|reminder|item)(?: (?:on|from|in) (?:{_LIST}))?", re.IGNORECASE)
_VAGUE: Final = re.compile(
    rf"(?:all|every|everything|(?:all )?(?:my |the )?(?:{_LIST})|items?|(?:the )?(?:first|second|third|last|next)\b.*)",
    re.IGNORECASE,
)
#: What is left of a request without its text, and what means more than a to-do can hold.
_NOTHING: Final = re.compile(
    rf"(?:as|to|about|of|that|off|a|an|the|them|both|these|those|(?:(?:the|both|all)(?: the)? )?"
    rf"(?:results|answers|sums|totals|numbers)|(?:to|on|onto|in|into) (?:{_LIST}))",
    re.IGNORECASE,
)
_PAIRS: Final = ('""', "''", "“”", "‘’", "«»")  # noqa: RUF001


def _rule(pattern: str, read: Callable[[re.Match[str], str | None], dict[str, Any] | None]) -> tuple[Any, Any]:
    return re.compile(pattern, re.IGNORECASE | re.DOTALL), read


def read_todo(text: str, last: int | None, known: str | None, *, weak: bool) -> dict[str, Any] | None:
    """The to-do tool's input for a text that asks for one, else None.

    `last` is the step with the last result of a sum, `known` the to-do named last ("mark it as done"); `weak` lets
    "add milk" be one, which says nothing of a list.
    """
    text = text.strip(" \t\r\n,;:").rstrip(".!?").strip()
    for pattern, read in _RULES if weak else _RULES[:-1]:
        found = pattern.fullmatch(text)
        if found is not None:
            given = read(found, known)
            if given is not None:
                return _with_result(given, last)
    return None


def _with_result(given: dict[str, Any], last: int | None) -> dict[str, Any] | None:
    """What is to be remembered may be a result, as a text: a reference alone would stay a number."""
    if given.get("action") == "add" and _RESULT.fullmatch(given["text"]):
        return None if last is None else {**given, "text": f"Result: {reference(last)}"}
    return given


def _text_of(text: str) -> str:
    text = text.strip(" \t\r\n,;:")
    for pair in _PAIRS:
        if len(text) > 2 and text[0] == pair[0] and text[-1] == pair[1] and pair[0] not in text[1:-1]:
            return text[1:-1].strip()
    return text


def _add(found: re.Match[str], known: str | None) -> dict[str, Any] | None:
    text = _text_of(found["text"])
    return {"action": "add", "text": text} if text and not _NOTHING.fullmatch(text) else None


def _list(found: re.Match[str], known: str | None) -> dict[str, Any]:
    return {"action": "list"}


def _named(action: str, *, marked: bool = False) -> Callable[[re.Match[str], str | None], dict[str, Any] | None]:
    """Input for one to-do; `marked` wants it to be called a to-do, or given by its id or in quotes."""

    def read(found: re.Match[str], known: str | None) -> dict[str, Any] | None:
        text = found["text"].strip()
        if (one := _ID.fullmatch(text)) is not None:
            return {"action": action, "todo_id": one[1]}
        if not marked and _BARE.fullmatch(text) is not None:
            return {"action": action, "todo_id": text}
        if text.lower() in ("it", "that", "this"):
            return None if known is None else {"action": action, "text": known}
        if _VAGUE.fullmatch(text) or _NOTHING.fullmatch(text):
            return None
        called = _MARKED.fullmatch(text)
        inside = called or _BEHIND.fullmatch(text)
        plain = _text_of(text)
        if inside is None and marked and plain == text:
            return None
        name = _text_of(inside[1]) if inside is not None else plain
        if called is None and (inside is not None or name == text):  # "the milk", "the milk to-do"
            name = _text_of(re.sub(r"^(?:the|my) (?=\S)", "", name, flags=re.IGNORECASE))
        return {"action": action, "text": name} if name else None

    return read


_DONE: Final = r"(?:as |to )?(?:being |be )?(?:done|complete|completed|finished)"
_FROM: Final = rf"(?: (?:from|off|off of|on|in) (?:{_LIST}))?"
_WRITE: Final = (
    r"(?:add|put|create|make|write down|write|note down|note|jot down|save|enter|append|place|store|keep|record)"
)
_MAKE: Final = r"(?:add|create|make|new|set|set up|save|remember|give me|i need)"
_SHOW: Final = r"(?:list|show|display|view|print|read|see|give|get|tell)(?: me)?"
_RULES: Final = [
    _rule(
        rf"{_SHOW}(?: all)?(?: of)?(?: (?:everything|what is|what's)(?: on| in))? (?:{_LIST})",
        _list,
    ),
    _rule(rf"what(?:'s| is| are)(?: all)?(?: (?:on|in))? (?:{_LIST})", _list),
    _rule(rf"what do i (?:still )?have(?: left)? (?:on|in) (?:{_LIST})", _list),
    _rule(rf"(?:what|which) (?:{_NOUN}) (?:do i have|are there|are (?:open|left))", _list),
    _rule(rf"(?:do i have|are there) any (?:{_NOUN})(?: left)?", _list),
    _rule(r"what do i have to do|what (?:is|are) (?:still )?(?:to be done|left to do)", _list),
    _rule(r"remind me (?:to |about |of |that )?(?P<text>.+)", _add),
    _rule(r"(?:do not|don't|never) (?:let me )?forget (?:to |about |that )?(?P<text>.+)", _add),
    _rule(rf"(?:{_WRITE}|remember)(?: down)? (?P<text>.+?) as (?:a |an )?(?:new )?(?:{_NOUN})", _add),
    _rule(rf"{_WRITE}(?: down)? (?P<text>.+?) (?:to|on|onto|in|into) (?:{_LIST})", _add),
    _rule(rf"{_WRITE}(?: down)? (?:to|on|onto|in|into) (?:{_LIST})(?:\s*:\s*| )(?P<text>.+)", _add),
    _rule(
        rf"(?:{_MAKE}(?: me)? )?(?:a |an |the |another )?(?:new )?(?:{_NOUN})"
        r"(?:\s*[:-]\s*| (?:to|called|named|titled|saying|that says|for|about) )(?P<text>.+)",
        _add,
    ),
    _rule(
        rf"(?:{_MAKE}(?: me)? )?(?:a |an |the |another )?(?:new )?(?:{_NOUN}) (?:with|from|of|containing) "
        rf"(?P<text>{_RESULT.pattern})",
        _add,
    ),
    _rule(r"(?:add|create|make|new)(?: me)? (?:a |an |the )?(?:new )?(?:to-?do|task|reminder) (?P<text>.+)", _add),
    _rule(r"(?:remember|note)(?: to| that|:)? (?P<text>.+)", _add),
    _rule(rf"(?:mark|set|check|tick|flag) (?:off )?(?P<text>.+?) {_DONE}", _named("complete")),
    _rule(rf"(?:mark|set) {_DONE}:? (?P<text>.+)", _named("complete")),
    _rule(rf"(?:complete|finish|check off|tick off|cross off)(?: off)? (?P<text>.+?){_FROM}", _named("complete")),
    _rule(rf"(?:check|tick|cross) (?P<text>.+?) off(?: (?:{_LIST}))?", _named("complete")),
    _rule(r"i(?:'ve| have)?(?: already)? (?:done|finished|completed) (?P<text>.+)", _named("complete")),
    _rule(rf"(?:delete|remove|erase)(?: off)? (?P<text>.+?){_FROM}", _named("delete")),
    _rule(rf"take (?P<text>.+?) off (?:{_LIST})", _named("delete")),
    _rule(r"(?:drop|cancel|get rid of|throw away) (?P<text>.+)", _named("delete", marked=True)),
    _rule(
        r"(?:get|fetch|look up|find|show|open|read|view|display|give|what is|what's)(?: me)? (?P<text>.+)",
        _named("get", marked=True),
    ),
    # Last and weak: nothing says that it is meant for the list.
    _rule(r"(?:add|put) (?P<text>(?:[\W_]|(?![0-9])\d)*+[^\W\d_][^0-9]*+)", _add),
]
