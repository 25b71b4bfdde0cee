"""Read requests for to-dos as input of the to-do tool.

Its `action` is add, list, get, complete or delete. `todo_id` names the to-do if the request has an id, else `text`.
"""

from __future__ import annotations

import re
from typing import Any, Final

from .references import reference

_NOUN: Final = r"(?:to-?dos?|to do|tasks?|reminders?)(?: items?)?"
_LIST: Final = (
    r"(?:(?:my|the|our) )?(?:(?:to-?do|to do|tasks?|shopping|grocery|groceries|reminders?) )?list|(?:my |the |our )?"
    + _NOUN
)
_RESULT: Final = re.compile(
    r"(?:(?:the|that|this) )?(?:(?:final|last|previous) )?"
    r"(?:result|answer|outcome|sum|total|product|difference|quotient)",
    re.IGNORECASE,
)
_ID: Final = re.compile(
    rf"(?:the )?(?:(?:{_NOUN}|items?)(?: with)?(?: the)? ?(?:#|no\.? ?|number |id )?|#|number |id )"
    r"([0-9]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[a-z]+[-_][0-9a-z]*[0-9])",
    re.IGNORECASE,
)
# The whole request is an id. As a text it might be part of another to-do's text.
_BARE: Final = re.compile(r"(?:[0-9]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)
_NOUN_BEFORE_NAME: Final = re.compile(rf"(?:the |my )?(?:{_NOUN}|item)(?: called| named| to)?:? (.+)", re.IGNORECASE)
_NAME_BEFORE_NOUN: Final = re.compile(
    rf"(.+?) (?:to-?do|task|reminder|item)(?: (?:on|from|in) (?:{_LIST}))?", re.IGNORECASE
)
_VAGUE: Final = re.compile(
    rf"(?:all|every|everything|(?:all )?(?:my |the )?(?:{_LIST})|items?|(?:the )?(?:first|second|third|last|next)\b.*)",
    re.IGNORECASE,
)
# Words that name no to-do, or several results.
_NOTHING: Final = re.compile(
    rf"(?:as|to|about|of|that|off|a|an|the|them|both|these|those|(?:(?:the|both|all)(?: the)? )?"
    rf"(?:results|answers|sums|totals|numbers)|(?:to|on|onto|in|into) (?:{_LIST}))",
    re.IGNORECASE,
)
_PAIRS: Final = ('""', "''", "“”", "‘’", "«»")  # noqa: RUF001


def read_todo(text: str, last: int | None, *, weak: bool) -> dict[str, Any] | None:
    """Return the to-do tool's input for a text that asks for one, else None.

    Args:
        text: One request.
        last: The step with the last result of the calculator, which "the result" names.
        weak: Whether "add milk" is a request, which does not name the list.
    """
    text = text.strip(" \t\r\n,;:").rstrip(".!?").strip()
    for action, pattern in _RULES if weak else _RULES[:-1]:
        found = pattern.fullmatch(text)
        if found is None:
            continue
        if action == "list":
            return {"action": "list"}
        target = found["text"].strip()
        if target.lower() in ("it", "that", "this"):
            return None
        if action == "add":
            if _RESULT.fullmatch(target):
                # A reference alone would stay a number, and the text of a to-do is a string.
                return None if last is None else {"action": "add", "text": f"Result: {reference(last)}"}
            named = {"text": _unquoted(target)}
        else:
            named = _named(target, only_marked=action == "get")
        if any(named.values()) and not _NOTHING.fullmatch(target):
            return {"action": action, **named}
    return None


def _unquoted(text: str) -> str:
    text = text.strip(" \t\r\n,;:")
    for pair in _PAIRS:
        if len(text) > 2 and text[0] == pair[0] and text[-1] == pair[1] and pair[0] not in text[1:-1]:
            return text[1:-1].strip()
    return text


def _named(target: str, *, only_marked: bool) -> dict[str, str]:
    """Return the `todo_id` or the `text` of one to-do; neither if `target` does not name one.

    `only_marked` requires the word "to-do", an id, or quotes.
    """
    one = _ID.fullmatch(target)
    if one is not None or (_BARE.fullmatch(target) and not only_marked):
        return {"todo_id": target if one is None else one[1]}
    if _VAGUE.fullmatch(target):
        return {}
    called = _NOUN_BEFORE_NAME.fullmatch(target)
    inside = called or _NAME_BEFORE_NOUN.fullmatch(target)
    plain = _unquoted(target)
    if inside is None and only_marked and plain == target:
        return {}
    name = plain if inside is None else _unquoted(inside[1])
    if called is None and (inside is not None or name == target):  # "the milk", "the milk to-do"
        name = _unquoted(re.sub(r"^(?:the|my) (?=\S)", "", name, flags=re.IGNORECASE))
    return {"text": name}


_DONE: Final = r"(?:as |to )?(?:being |be )?(?:done|complete|completed|finished)"
_FROM: Final = rf"(?: (?:from|off|off of|on|in) (?:{_LIST}))?"
_WRITE: Final = (
    r"(?:add|put|create|make|write down|write|note down|note|jot down|save|enter|append|place|store|keep|record)"
)
_MAKE: Final = r"(?:add|create|make|new|set|set up|save|remember|give me|i need)"
_SHOW: Final = r"(?:list|show|display|view|print|read|see|give|get|tell)(?: me)?"


def _rules(action: str, *patterns: str) -> list[tuple[str, re.Pattern[str]]]:
    return [(action, re.compile(pattern, re.IGNORECASE | re.DOTALL)) for pattern in patterns]


_RULES: Final = [
    *_rules(
        "list",
        rf"{_SHOW}(?: all)?(?: of)?(?: (?:everything|what is|what's)(?: on| in))? (?:{_LIST})",
        rf"what(?:'s| is| are)(?: all)?(?: (?:on|in))? (?:{_LIST})",
        rf"what do i (?:still )?have(?: left)? (?:on|in) (?:{_LIST})",
        rf"(?:what|which) (?:{_NOUN}) (?:do i have|are there|are (?:open|left))",
        rf"(?:do i have|are there) any (?:{_NOUN})(?: left)?",
        r"what do i have to do|what (?:is|are) (?:still )?(?:to be done|left to do)",
    ),
    *_rules(
        "add",
        r"remind me (?:to |about |of |that )?(?P<text>.+)",
        r"(?:do not|don't|never) (?:let me )?forget (?:to |about |that )?(?P<text>.+)",
        rf"(?:{_WRITE}|remember)(?: down)? (?P<text>.+?) as (?:a |an )?(?:new )?(?:{_NOUN})",
        rf"{_WRITE}(?: down)? (?P<text>.+?) (?:to|on|onto|in|into) (?:{_LIST})",
        rf"{_WRITE}(?: down)? (?:to|on|onto|in|into) (?:{_LIST})(?:\s*:\s*| )(?P<text>.+)",
        rf"(?:{_MAKE}(?: me)? )?(?:a |an |the |another )?(?:new )?(?:{_NOUN})"
        r"(?:\s*[:-]\s*| (?:to|called|named|titled|saying|that says|for|about) )(?P<text>.+)",
        rf"(?:{_MAKE}(?: me)? )?(?:a |an |the |another )?(?:new )?(?:{_NOUN}) (?:with|from|of|containing) "
        rf"(?P<text>{_RESULT.pattern})",
        r"(?:add|create|make|new)(?: me)? (?:a |an |the )?(?:new )?(?:to-?do|task|reminder) (?P<text>.+)",
        r"(?:remember|note)(?: to| that|:)? (?P<text>.+)",
    ),
    *_rules(
        "complete",
        rf"(?:mark|set|check|tick|flag) (?:off )?(?P<text>.+?) {_DONE}",
        rf"(?:mark|set) {_DONE}:? (?P<text>.+)",
        rf"(?:complete|finish|check off|tick off|cross off)(?: off)? (?P<text>.+?){_FROM}",
        rf"(?:check|tick|cross) (?P<text>.+?) off(?: (?:{_LIST}))?",
        r"i(?:'ve| have)?(?: already)? (?:done|finished|completed) (?P<text>.+)",
    ),
    *_rules(
        "delete", rf"(?:delete|remove|erase)(?: off)? (?P<text>.+?){_FROM}", rf"take (?P<text>.+?) off (?:{_LIST})"
    ),
    *_rules(
        "get",
        r"(?:get|fetch|look up|find|show|open|read|view|display|give|what is|what's)(?: me)? (?P<text>.+)",
    ),
    # Last and weak: no word of it names the list.
    *_rules("add", r"(?:add|put) (?P<text>(?:[\W_]|(?![0-9])\d)*+[^\W\d_][^0-9]*+)"),
]
