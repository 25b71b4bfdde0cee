"""Plans by rules: sums and to-dos as people write them, and rules of your own. No model is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from ..errors import InvalidArgument, PlanningError, brief
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .arithmetic_requests import may_be_arithmetic, read_arithmetic, without_endings, without_tail
from .base import BasePlanner, listed
from .plan import Plan, PlanStep
from .todo_requests import read_todo

#: Gives (tool name, its input), or a PlanStep whose number does not count, or None if it is not meant after all.
RuleFunction = Callable[[re.Match[str]], "tuple[str, dict[str, Any]] | PlanStep | None"]

_LONGEST: Final = 2000  # characters of a prompt
_MOST_PARTS: Final = 80

#: Where one request may end and the next begin; whether it does is up to what stands behind it. For a text without runs
#: of white space: a pattern that skips such runs takes cubic time on a prompt that consists of them.
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

UNDERSTOOD: Final = (
    'sums ("add 2 and 3, then multiply by 4", "what is (3+4)*2?") and to-dos ("remind me to call Bob", '
    '"list my to-dos", "mark buy milk as done", "delete to-do 3")'
)


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    make: RuleFunction
    example: str


class RuleBasedPlanner(BasePlanner):
    """Reads sums, to-dos, what `rule` adds, and any number of them in one prompt ("…, then …", "… and …").

    A text is a sum only if every word of it belongs to one, so "add 2 and 3" is, and "add a to-do to call 2 people" is
    not. One that is joined to the one before goes on with its result ("then multiply by 4", "remember the result").
    """

    def __init__(self, *, calculator: str = "calculator", todos: str = "todo_store") -> None:
        self.calculator = calculator
        self.todos = todos
        self._rules: list[_Rule] = []

    def rule(self, pattern: str | re.Pattern[str], make: RuleFunction, *, example: str = "") -> None:
        """Read requests that match all of `pattern`, in any case, before others do; `example` is for error messages.

        `make(match)` gives (tool name, input), a PlanStep, or None to leave the request to other rules.
        """
        try:
            compiled = re.compile(pattern, re.IGNORECASE) if isinstance(pattern, str) else pattern
        except re.error as error:
            raise InvalidArgument(f"{brief(pattern)} is no regular expression: {error}") from None
        if not callable(make):
            raise InvalidArgument(f"a rule is made by a function of the match, not {brief(make)}")
        self._rules.append(_Rule(compiled, make, example or compiled.pattern))

    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        if not isinstance(prompt, str) or not prompt.strip():
            raise PlanningError(f"there is nothing to plan in {brief(prompt)}: {self._understood()}")
        if len(prompt) > _LONGEST:
            raise PlanningError(f"the prompt has {len(prompt)} characters, {_LONGEST} are the most")
        tools = listed(available_tools)
        steps = _Reading(self, prompt).steps()
        names = {tool.name for tool in tools}
        for step in steps:
            if step.tool_name and step.tool_name not in names:
                raise PlanningError(
                    f"{step.reasoning} needs the tool {brief(step.tool_name)}, which is not available: "
                    f"there is {', '.join(sorted(names)) or 'none'}"
                )
        return Plan(steps, prompt.strip()).validate(tools, [step.tool_name for step in steps])

    def _understood(self) -> str:
        more = "".join(f', "{rule.example}"' for rule in self._rules)
        return f"this planner understands {UNDERSTOOD}{more}, joined by 'then', 'and' or a full stop"

    def read(
        self, text: str, before: list[PlanStep], *, weak: bool, sums: bool = True
    ) -> tuple[str, dict[str, Any]] | PlanStep | None:
        """What one request asks for, behind the steps before it; None where it is not understood. Without `sums` it is
        known to be none."""
        said = text.strip()
        text = _plainly(said)
        for rule in self._rules:
            # What is only polite elsewhere may be what a rule is about: "hello Bob", "next page".
            for each in dict.fromkeys((text, text.rstrip(" .!?"), said, said.rstrip(" .!?"))):
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


class _Reading:
    """One prompt, taken apart into requests that are understood, as many as there can be."""

    def __init__(self, planner: RuleBasedPlanner, prompt: str) -> None:
        self._planner = planner
        self._prompt = _SPACE.sub(lambda run: "\n" if "\n" in run[0] else " ", prompt.strip())
        breaks = [found for found in _BREAK.finditer(self._prompt) if found.start() and found.end() < len(self._prompt)]
        if len(breaks) >= _MOST_PARTS:
            raise PlanningError(
                f"the prompt has {len(breaks) + 1} parts, {_MOST_PARTS} are the most: ask for less at once"
            )
        self._starts = [0, *(found.end() for found in breaks)]
        self._ends = [*(found.start() for found in breaks), len(self._prompt)]
        self._strong = [True, *(found["strong"] is not None or "," in found[0] for found in breaks)]
        self._hard = [False, *(found["strong"] is not None for found in breaks)]
        #: Where the first part at or behind a place is that no sum has in it.
        self._sums_end = [len(self._ends)] * (len(self._ends) + 1)
        for at, (start, end) in reversed(list(enumerate(zip(self._starts, self._ends, strict=True)))):
            part = self._prompt[start:end].strip()
            # As the first part of a request, and as its last, where other words are only polite.
            fits = may_be_arithmetic(_plainly(part)) or may_be_arithmetic(_plainly(f"0 {part}"))
            self._sums_end[at] = self._sums_end[at + 1] if fits else at
        self._across = False
        self._hopeless: set[tuple[int, bool]] = set()
        self._furthest = 0

    def steps(self) -> list[PlanStep]:
        found = self._from(0, [])
        if found is None:  # a full stop or a "then" may be part of a to-do
            self._across = True
            self._hopeless.clear()
            found = self._from(0, [])
        if found is None:
            part = self._prompt[self._starts[self._furthest] :]
            raise PlanningError(f"no plan for {brief(part)}: {self._planner._understood()}")
        return found

    def _from(self, at: int, before: list[PlanStep]) -> list[PlanStep] | None:
        """The steps of what stands behind a place, the shortest request first; None if not all can be understood."""
        if at == len(self._starts):
            return before
        known = (at, any(step.tool_name == self._planner.calculator for step in before))
        if known in self._hopeless:
            return None
        self._furthest = max(self._furthest, at)
        for end in range(at, len(self._starts)):
            if end > at and self._hard[end] and not self._across:
                break
            text = self._prompt[self._starts[at] : self._ends[end]]
            # "add milk to my list, then dance" must not become a to-do of that text.
            weak = self._strong[at] and not self._across
            made = self._planner.read(text, before, weak=weak, sums=end < self._sums_end[at])
            if made is None:
                continue
            found = self._from(end + 1, [*before, _step(made, len(before) + 1, text, before)])
            if found is not None:
                return found
        self._hopeless.add(known)
        return None


def _plainly(said: str) -> str:
    """Remove polite words from the start and the end of a request."""
    text = _POLITE.sub("", said, count=1) if _POLITE.match(said) else said
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
        raise InvalidArgument(f"a rule gives (tool name, input), a PlanStep or None, not {brief(made)}")
    step = PlanStep(number, name, dict(given), reasoning)
    # What writes or reads the same list keeps its order.
    step.depends_on = [each.step_number for each in before if each.tool_name == name and "action" in given][-1:]
    return step
