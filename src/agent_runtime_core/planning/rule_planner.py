"""A planner without a model: it reads arithmetic and to-do requests, and requests that match your own rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from .._core.validation import Shown, must, unknown
from ..errors import PlanningError, brief
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .arithmetic_requests import may_be_arithmetic, read_arithmetic, without_endings, without_tail
from .base import BasePlanner, as_list
from .plan import Plan, PlanStep
from .todo_requests import read_todo

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
    request may use the result of an earlier one ("then multiply by 4", "remember the result").

    Args:
        calculator: The name of the tool for arithmetic.
        todos: The name of the tool for to-dos.
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
