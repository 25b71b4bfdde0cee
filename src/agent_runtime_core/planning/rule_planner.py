"""A planner without a model: it reads arithmetic and to-do requests, and requests that match your own rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .._core.validation import Shown, must, unknown
from ..errors import PlanningError, brief
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .plan import BasePlanner, Plan, PlanStep, as_list
from .references import reference

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


_SAME: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "’": "'", "‘": "'"})  # noqa: RUF001
_QUESTION_WORDS: Final = re.compile(
    r"(?:(?:what(?:'s| is| are| would be| do (?:i|you|we) get (?:if|when) (?:i|you|we))|how much (?:is|are)|calculate|"
    r"compute|work out|evaluate|solve|figure out|find out|find|tell me|give me|get|do|say)\b[\s:]*)+"
)
# A point before a digit belongs to the number.
_BEFORE: Final = re.compile(r"(?:[\s!?:;,]|\.(?![0-9]))+")
_AFTER: Final = ("=", "equals", "equal", "together", "too", "as well", "for me", "please", "now")
_RESULT_NAME: Final = "result"
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
]
_WORD: Final = re.compile(
    r"(?<!\s)\s*+(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9.])|[0-9]+(?:\.[0-9]+)?(?![0-9.])"
    r"|\.[0-9]+)|(?P<word>\*\*|//|[-+*/%(),]|[a-z]+))"
)
_MAX_DIGITS: Final = 300  # of a number; a float contains at most 309 before the point
_SIGNS: Final = frozenset({"+", "-", "*", "/", "//", "%", "**"})
_OPERATIONS: Final = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
_OPERAND: Final = r"(?:-*+\()*+-*+(?:result|[0-9][0-9.e+-]*+)\)*+"
_EXPRESSION: Final = re.compile(rf"{_OPERAND}(?: (?:\*\*|//|[-+*/%]) {_OPERAND})*+")


class _Operation(NamedTuple):
    names: tuple[str, ...]
    sign: str
    separators: frozenset[str]
    second: str | None = None  # the second operand, of a verb that takes only one operand


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
_KNOWN: Final = {_RESULT_NAME, "away"}.union(*(verb.names for verb in _VERBS), *(verb.separators for verb in _VERBS))


def read_arithmetic(text: str, last: int | None, *, apart: bool = True) -> dict[str, Any] | None:
    """Return the calculator's input for a text that asks for arithmetic, else None.

    Args:
        text: One request.
        last: The step with the last result of the calculator, which "the result" names.
        apart: Whether more than a comma or "and" separates the request from the request before. If not, a plus or a
            minus at its start is the sign of a number: "add 5 and minus 3".
    """
    words = _words(text)
    if not words:
        return None
    verb = next((each for each in _VERBS if tuple(words[: len(each.names)]) == each.names), None)
    if verb is not None:
        return _input(_by_verb(verb, words[len(verb.names) :], last), last)
    if last is not None and words[0] in (_SIGNS if apart else _SIGNS - {"+", "-"}):
        words = [_RESULT_NAME, *words]
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
    """Return where a match at the start of the text ends, or 0 without a match."""
    found = pattern.match(text)
    return found.end() if found is not None else 0


def without_tail(text: str, signs: str, end: int) -> int:
    """Return where `text[:end]` ends without the white space and the signs at its end."""
    while end and (text[end - 1] in signs or text[end - 1].isspace()):
        end -= 1
    return end


def without_endings(text: str, words: Sequence[str], signs: str, end: int) -> int:
    """Return where `text[:end]` ends without the listed words at its end, in any case.

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
        parts[0] = [_RESULT_NAME]
    operands = [_expression(part) for part in parts]
    if verb.second is not None:
        operands.append([verb.second])
    elif len(operands) == 1:
        only = operands[0]
        if only is not None and len(only) > 1:  # "add 2 + 3"
            return only if not backwards else None
        operands.insert(backwards, [_RESULT_NAME])  # "add 5", "subtract 5" from the result
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
    if items is None or len(items) < 3 or (last is None and any(item.endswith(_RESULT_NAME) for item in items)):
        return None
    if len(items) == 3 and items[1] in _OPERATIONS:
        a, b = _value(items[0], last), _value(items[2], last)
        if a is not None and b is not None:
            return {"operation": _OPERATIONS[items[1]], "a": a, "b": b}
    return {"expression": _text(items).replace(_RESULT_NAME, f"({reference(last or 0)})")}


def _value(item: str, last: int | None) -> int | float | str | None:
    """Return a number, or the reference to the result; None for an operand with more than one leading sign."""
    if item == _RESULT_NAME and last is not None:
        return reference(last)
    if item.startswith("--") or not item[-1].isdigit():
        return None
    return int(item) if item.lstrip("-").isdigit() else float(item)


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
    """Return the to-do tool's input for a text that asks for a to-do, else None.

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
    """Return the `todo_id` or the `text` of one to-do; neither if `target` does not name a to-do.

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
    *_rules("get", r"(?:get|fetch|look up|find|show|open|read|view|display|give|what is|what's)(?: me)? (?P<text>.+)"),
    # Last and weak: no word of it names the list.
    *_rules("add", r"(?:add|put) (?P<text>(?:[\W_]|(?![0-9])\d)*+[^\W\d_][^0-9]*+)"),
]


#: Returns (tool name, input), a PlanStep (its number is ignored), or None if the request does not match after all.
RuleFunction = Callable[[re.Match[str]], "tuple[str, dict[str, Any]] | PlanStep | None"]

_MAX_CHARACTERS: Final = 2000  # characters of a prompt
_MAX_PARTS: Final = 80

#: Where one request may end and the next start; the text after it decides. Runs of white space must be collapsed
#: before: a pattern that skips them takes cubic time on a prompt that consists of white space.
_BREAK: Final = re.compile(
    r"(?P<strong>\s?(?:[;\n]+|(?<![.!?])[.!?]++(?=\s|$)|,?\s?\b(?:and\s)?(?:then|after that|afterwards|and also)\b)"
    r"[\s,:]*(?:(?:and\s)?then\b[\s,]*)?)"
    r"|(?P<weak>\s?,(?!(?<=[0-9],)[0-9]{3}(?![0-9]))\s?(?:and\s)?|\sand\s)",
    re.IGNORECASE,
)
_POLITE: Final = re.compile(
    r"(?:(?:please|kindly|(?:can|could|would|will) you|i want you to|i(?:'d| would) like (?:you )?to|i need you to|"
    r"i want to|let's|let us|now|next|also|and|then|first|firstly|secondly|finally|lastly|afterwards|so|ok|okay|hey|hi|"
    r"hello|well|just|go ahead and)\b(?:[\s,:!]|\.(?![0-9]))*)+",
    re.IGNORECASE,
)
_SPACE: Final = re.compile(r"\s+")
_THANKS: Final = ("please", "thanks", "thank you")

SUPPORTED_REQUESTS: Final = (
    'sums ("add 2 and 3, then multiply by 4", "what is (3+4)*2?") and to-dos ("remind me to call Bob", '
    '"list my to-dos", "mark buy milk as done", "delete to-do 3")'
)


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    make: RuleFunction
    example: str


class RuleBasedPlanner(BasePlanner):
    """Plans arithmetic, to-dos and requests that `rule` adds, several in one prompt ("…, then …", "… and …").

    A text is arithmetic only if every word of it can be: "add 2 and 3" is, "add a to-do to call 2 people" is not. A
    request may use the result of an earlier request ("then multiply by 4", "remember the result").

    Args:
        calculator: The name of the tool for arithmetic.
        todos: The name of the tool for to-dos.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core.planning import RuleBasedPlanner, built_in_tools
        >>> plan = asyncio.run(RuleBasedPlanner().create_plan("add 3 and 4", built_in_tools().list_tools()))
        >>> plan.steps[0].tool_name
        'calculator'
    """

    def __init__(self, *, calculator: str = "calculator", todos: str = "todo_store") -> None:
        self.calculator = calculator
        self.todos = todos
        self._rules: list[_Rule] = []

    def rule(self, pattern: str | re.Pattern[str], make: RuleFunction, *, example: str = "") -> None:
        """Add a rule. Rules are tried in the order they were added, before arithmetic and to-dos.

        Args:
            pattern: Must match the whole request. A string ignores case.
            make: Called with the match. Returns (tool name, input), a PlanStep, or None to try the next rule.
            example: A request for error messages; by default the pattern.

        Raises:
            InvalidArgument: The pattern is not a regular expression, or `make` is not callable.
        """
        try:
            compiled = re.compile(pattern, re.IGNORECASE) if isinstance(pattern, str) else pattern
        except re.error as error:
            raise must("pattern", "be a regular expression", Shown(f"{brief(pattern)}: {error}")) from None
        if not callable(make):
            raise must("make", "be a function of the match", make)
        self._rules.append(_Rule(compiled, make, example or compiled.pattern))

    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        if not isinstance(prompt, str) or not prompt.strip():
            raise PlanningError(str(must("the prompt", "not be empty", prompt, self._supported_requests())))
        if len(prompt) > _MAX_CHARACTERS:
            raise PlanningError(f"the prompt must have at most {_MAX_CHARACTERS:,} characters, got {len(prompt):,}.")
        tools = as_list(available_tools)
        steps = _Parser(self, prompt).steps()
        names = {tool.name for tool in tools}
        for step in steps:
            if step.tool_name and step.tool_name not in names:
                raise PlanningError(f"{step.reasoning}: {unknown('tool', step.tool_name, names, 'Register it')}")
        return Plan(steps, prompt.strip()).validate(tools, [step.tool_name for step in steps])

    def _supported_requests(self) -> str:
        more = "".join(f', "{rule.example}"' for rule in self._rules)
        return f"This planner understands {SUPPORTED_REQUESTS}{more}, joined by 'then', 'and' or a full stop."

    def read(
        self, text: str, before: list[PlanStep], *, weak: bool, sums: bool = True
    ) -> tuple[str, dict[str, Any]] | PlanStep | None:
        """Return the tool call or step for one request, None if it is not understood.

        Args:
            text: The request.
            before: The steps of earlier requests.
            weak: Whether the request is clearly separated, so that weak rules may match.
            sums: False if the request is known not to be arithmetic.
        """
        request = text.strip()
        text = _without_polite_words(request)
        for rule in self._rules:
            # A rule may need words that are only polite elsewhere: "hello Bob", "next page".
            for each in dict.fromkeys((text, text.rstrip(" .!?"), request, request.rstrip(" .!?"))):
                found = rule.pattern.fullmatch(each)
                made = rule.make(found) if found is not None else None
                if made is not None:
                    return made
        last = next((step.step_number for step in reversed(before) if step.tool_name == self.calculator), None)
        if sums and (given := read_arithmetic(text, last, apart=weak)) is not None:
            return self.calculator, given
        if (given := read_todo(text, last, weak=weak)) is not None:
            return self.todos, given
        return None


class _Parser:
    """Splits one prompt into as many requests as can be understood."""

    def __init__(self, planner: RuleBasedPlanner, prompt: str) -> None:
        self._planner = planner
        self._prompt = _SPACE.sub(lambda run: "\n" if "\n" in run[0] else " ", prompt.strip())
        breaks = [found for found in _BREAK.finditer(self._prompt) if found.start() and found.end() < len(self._prompt)]
        if len(breaks) >= _MAX_PARTS:
            raise PlanningError(
                f"the prompt must have at most {_MAX_PARTS} parts, got {len(breaks) + 1}. Split it into several."
            )
        self._starts = [0, *(found.end() for found in breaks)]
        self._ends = [*(found.start() for found in breaks), len(self._prompt)]
        self._strong = [True, *(found["strong"] is not None or "," in found[0] for found in breaks)]
        self._hard = [False, *(found["strong"] is not None for found in breaks)]
        #: For each part, the index of the first part from there on that cannot be in arithmetic.
        self._sums_end = [len(self._ends)] * (len(self._ends) + 1)
        for at, (start, end) in reversed(list(enumerate(zip(self._starts, self._ends, strict=True)))):
            part = self._prompt[start:end].strip()
            # Checked as the first and as a later part of a request, where different words are only polite.
            fits = may_be_arithmetic(_without_polite_words(part)) or may_be_arithmetic(
                _without_polite_words(f"0 {part}")
            )
            self._sums_end[at] = self._sums_end[at + 1] if fits else at
        self._strong_breaks_inside = False
        self._hopeless: set[tuple[int, bool]] = set()
        self._last_reached = 0

    def steps(self) -> list[PlanStep]:
        found = self._steps_from(0, [])
        if found is None:  # the text of a to-do may contain a full stop or "then"
            self._strong_breaks_inside = True
            self._hopeless.clear()
            found = self._steps_from(0, [])
        if found is None:
            part = self._prompt[self._starts[self._last_reached] :]
            raise PlanningError(f"no plan for {brief(part)}. {self._planner._supported_requests()}")
        return found

    def _steps_from(self, at: int, before: list[PlanStep]) -> list[PlanStep] | None:
        """Return the steps from the part at an index on, None if not all of it is understood.

        Tries the shortest request first.
        """
        if at == len(self._starts):
            return before
        known = (at, any(step.tool_name == self._planner.calculator for step in before))
        if known in self._hopeless:
            return None
        self._last_reached = max(self._last_reached, at)
        for end in range(at, len(self._starts)):
            if end > at and self._hard[end] and not self._strong_breaks_inside:
                break
            text = self._prompt[self._starts[at] : self._ends[end]]
            # "add milk to my list, then dance" must not become a to-do of that text.
            weak = self._strong[at] and not self._strong_breaks_inside
            made = self._planner.read(text, before, weak=weak, sums=end < self._sums_end[at])
            if made is None:
                continue
            found = self._steps_from(end + 1, [*before, _step(made, len(before) + 1, text, before)])
            if found is not None:
                return found
        self._hopeless.add(known)
        return None


def _without_polite_words(request: str) -> str:
    """Remove polite words from the start and the end of a request."""
    text = _POLITE.sub("", request, count=1) if _POLITE.match(request) else request
    end = without_tail(text, ".!?", len(text))
    return text[: without_endings(text, _THANKS, ",", end)] + text[end:]


def _step(made: tuple[str, dict[str, Any]] | PlanStep, number: int, text: str, before: list[PlanStep]) -> PlanStep:
    reasoning = f'"{" ".join(text.split())[:200]}"'
    if isinstance(made, PlanStep):
        return PlanStep(
            number, made.tool_name, made.tool_input, made.reasoning or reasoning, kind=made.kind,
            depends_on=list(made.depends_on),
        )  # fmt: skip
    name, given = made
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise must("a rule", "return (tool name, input), a PlanStep or None", made)
    step = PlanStep(number, name, dict(given), reasoning)
    # Concurrent calls of the to-do tool could change the same list in another order.
    step.depends_on = [each.step_number for each in before if each.tool_name == name and "action" in given][-1:]
    return step
