"""A plan: numbered steps that wait for each other's results, checked before any of them runs."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from .._core.codec.typed import Policy, to_plain
from ..errors import BadArguments, InvalidArgument, PlanningError, UnserialisableResult, brief
from ..tools.arguments import check_arguments, read_arguments
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .references import is_reference, malformed, references

Tools = ToolRegistry | Iterable[Tool | str]

MOST_STEPS = 100


class StepKind(str, Enum):  # noqa: UP042 (as the other enums of the public face)
    """What a step does: ask a model, call a tool, or read and write memory."""

    LLM_CALL = "llm_call"
    TOOL_CALL = "tool_call"
    MEMORY_OP = "memory_op"


_KINDS = [each.value for each in StepKind]
_CHECKED: Final = Policy(strict={dict: (Mapping,), list: (list, tuple)})


@dataclass
class PlanStep:
    """One step. `tool_input` may refer to results of earlier steps, as in `{{step_1.result}}`, which it then waits for;
    `depends_on` names further steps by their numbers. For an LLM_CALL it has a `prompt`, or `messages`."""

    step_number: int
    tool_name: str = ""
    tool_input: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    kind: StepKind = field(default=StepKind.TOOL_CALL, kw_only=True)
    depends_on: list[int] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidArgument(f"step {self.step_number}: kind is one of {_KINDS}, not {brief(self.kind)}")
        self.kind = StepKind(self.kind)  # it may be given by its value

    @property
    def needs(self) -> list[int]:
        """The numbers of the steps it waits for, those it refers to included."""
        return sorted({*self.depends_on, *(each.step for each in references(self.tool_input))})

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_number": self.step_number,
            "kind": self.kind.value,
            "tool_name": self.tool_name,
            "tool_input": self.tool_input,
            "depends_on": list(self.depends_on),
            "reasoning": self.reasoning,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlanStep:
        """The step that `to_dict` wrote; what is missing takes its default. InvalidArgument names what does not fit."""
        number = data.get("step_number")
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidArgument(f"a step's step_number is an integer, not {brief(number)}")
        kind = data.get("kind", StepKind.TOOL_CALL)
        names = ("tool_name", "tool_input", "reasoning", "depends_on")
        step = cls(number, **{name: data[name] for name in names if data.get(name)}, kind=kind)
        try:
            to_plain(step, cls, _CHECKED)
        except UnserialisableResult as error:
            raise InvalidArgument(f"step {number}: {error.path.removeprefix('$.')} {error.reason}") from None
        step.tool_input, step.depends_on = dict(step.tool_input), list(step.depends_on)
        return step


@dataclass
class Plan:
    """Steps towards a goal."""

    steps: list[PlanStep] = field(default_factory=list)
    final_goal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {"final_goal": self.final_goal, "steps": [step.to_dict() for step in self.steps]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote; InvalidArgument names what does not fit."""
        steps = data.get("steps")
        if not isinstance(steps, Sequence) or not all(isinstance(step, Mapping) for step in steps):
            raise InvalidArgument(f"a plan's steps are a list of objects, not {brief(steps)}")
        return cls([PlanStep.from_dict(step) for step in steps], str(data.get("final_goal") or ""))

    def order(self) -> list[PlanStep]:
        """The steps, each behind those it waits for; of those that could be next, the first in the plan."""
        done: set[int] = set()
        order: list[PlanStep] = []
        left = [(step, step.needs) for step in self.steps]
        while left:
            ready = next((each for each in left if done.issuperset(each[1])), None)
            if ready is None:
                raise PlanningError(f"steps wait for each other: {_circle([step for step, _ in left])}")
            left.remove(ready)
            order.append(ready[0])
            done.add(ready[0].step_number)
        return order

    def validate(self, tools: Tools, memory: Tools = ()) -> Plan:
        """This plan, if all of it can be carried out with these tools and memory operations, given as tools or by
        name; else PlanningError with every problem."""
        found = self.problems(tools, memory)
        if found:
            raise PlanningError(f"the plan cannot be carried out: {'; '.join(found)}", found)
        return self

    def problems(self, tools: Tools, memory: Tools = ()) -> list[str]:
        """What is wrong with the plan, each with the step it is in."""
        numbers = Counter(step.step_number for step in self.steps)
        found = [] if numbers else ["it has no steps"]
        if len(self.steps) > MOST_STEPS:
            return [f"it has {len(self.steps)} steps, {MOST_STEPS} are the most"]
        found += [f"step number {each} occurs twice" for each in sorted(n for n, count in numbers.items() if count > 1)]
        found += [f"step {number}: {each}" for number, each in problems_of_steps(self.steps, tools, memory)]
        if not found:
            try:
                self.order()
            except PlanningError as error:
                found.append(str(error))
        return found


def problems_of_steps(steps: Sequence[PlanStep], tools: Tools, memory: Tools = ()) -> Iterator[tuple[int, str]]:
    """What is wrong with single steps of a plan, each with the number of the step."""
    known, remembered = _by_name(tools), _by_name(memory)
    numbers = {step.step_number for step in steps}
    for step in steps:
        named = remembered if step.kind is StepKind.MEMORY_OP else known
        for each in _unusable(step) or [*_called(step, named), *_referred(step, numbers)]:
            yield step.step_number, each


def _by_name(tools: Tools) -> dict[str, Tool | None]:
    listed: Iterable[Tool | str] = tools.list_tools() if isinstance(tools, ToolRegistry) else tools
    return {each if isinstance(each, str) else each.name: None if isinstance(each, str) else each for each in listed}


def _unusable(step: PlanStep) -> list[str]:
    """Why nothing else can be said of its input: it is nested without end, or has what JSON has not."""
    try:
        read_arguments(step.tool_input)
    except BadArguments as error:
        return [f"its tool_input cannot be used: {error}"]
    return []


def _called(step: PlanStep, known: Mapping[str, Tool | None]) -> list[str]:
    """What is wrong with what a step calls, and with what it gives to it."""
    if step.kind is StepKind.LLM_CALL:
        return _unaskable(step.tool_input.get("prompt"), step.tool_input.get("messages"))
    what = "memory operation" if step.kind is StepKind.MEMORY_OP else "tool"
    if step.tool_name not in known:
        near = difflib.get_close_matches(step.tool_name[:100], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(sorted(known)) or 'none'}"
        return [f"unknown {what} {brief(step.tool_name)}: {hint}"]
    tool = known[step.tool_name]
    if tool is None:
        return []
    try:
        check_arguments(*_without_references(tool.parameters, step.tool_input))
    except BadArguments as error:
        return [f"the input of {step.tool_name} does not fit: {error}"]
    return []


def _unaskable(prompt: Any, messages: Any) -> list[str]:
    """What is wrong with what a model is to be asked; a reference in it may become anything."""
    found = [] if prompt or messages else ["an llm_call has a 'prompt', or 'messages', in its tool_input"]
    if prompt is not None and not isinstance(prompt, str):
        found.append(f"the prompt of an llm_call is a text, not {brief(prompt)}")
    many = messages is None or is_reference(messages) or isinstance(messages, (list, tuple))
    if not many or any(not isinstance(each, Mapping) and not is_reference(each) for each in messages or ()):
        found.append(f"the messages of an llm_call are a list of objects, not {brief(messages)}")
    return found


def _without_references(parameters: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Schema and input without the properties that are not known before the plan runs; their names are."""
    open_ = {name for name, value in given.items() if is_reference(value) or _contains_whole(value)}
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not open_ or not isinstance(properties, Mapping):
        return parameters, dict(given)
    loose = {name: {} if name in open_ else schema for name, schema in properties.items()}
    return {**parameters, "properties": loose}, dict(given)


def _contains_whole(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(is_reference(each) or _contains_whole(each) for each in value)


def _referred(step: PlanStep, there: Set[int]) -> list[str]:
    found = [f"{text} is no reference: write it as {{{{step_1.result}}}}" for text in malformed(step.tool_input)]
    for each in references(step.tool_input):
        if each.step not in there:
            found.append(f"{each.text} refers to step {each.step}, which is not in the plan")
        elif each.step >= step.step_number:
            found.append(f"{each.text} refers to step {each.step}, which is not before it")
    return found + [
        f"it depends on step {each}, which is not in the plan" for each in step.depends_on if each not in there
    ]


def _circle(stuck: Sequence[PlanStep]) -> str:
    """Numbers along the dependencies, from a step back to itself."""
    by_number = {step.step_number: step for step in stuck}
    path = [min(by_number)]
    while path[-1] not in path[:-1]:
        # One that waits for a step which is not there at all ends here.
        path.append(next((each for each in by_number[path[-1]].needs if each in by_number), path[-1]))
    return " -> ".join(map(str, path[path.index(path[-1]) :]))
