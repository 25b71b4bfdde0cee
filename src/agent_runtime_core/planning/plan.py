"""Plans: numbered steps with dependencies, validated before any of them runs; and the base class of planners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from .._core.codec.typed import Policy, to_plain
from .._core.validation import Shown, must, sentence, unknown
from ..errors import BadArguments, InvalidArgument, PlanningError, UnserialisableResult, brief
from ..tools.arguments import check_arguments, parsed_arguments, read_arguments
from ..tools.base import BaseTool
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .references import is_reference, malformed, references

Tools = ToolRegistry | Iterable[Tool | str]

MOST_STEPS = 100


class StepKind(str, Enum):  # noqa: UP042 (as the other public enums)
    """What a step does: call a model, call a tool, or read and write memory.

    Attributes:
        LLM_CALL: Call a model.
        TOOL_CALL: Call a tool.
        MEMORY_OP: Read or write memory.
    """

    LLM_CALL = "llm_call"
    TOOL_CALL = "tool_call"
    MEMORY_OP = "memory_op"


_KINDS = [each.value for each in StepKind]
_CHECKED: Final = Policy(strict={dict: (Mapping,), list: (list, tuple)})


@dataclass
class PlanStep:
    """One step of a plan.

    `tool_input` may refer to results of earlier steps, as in `{{step_1.result}}`; the step waits for them. For an
    LLM_CALL it contains a `prompt` or `messages`. `depends_on` lists the numbers of further steps to wait for.

    Attributes:
        step_number: The number of the step, unique in its plan.
        tool_name: The tool, or memory operation.
        tool_input: The input, which may refer to results of earlier steps.
        reasoning: Why the planner chose the step.
        kind: The kind of step.
        depends_on: The numbers of further steps to wait for.

    Raises:
        InvalidArgument: `kind` is unknown.

    Examples:
        >>> from agent_runtime_core.planning import PlanStep
        >>> PlanStep(2, "add", {"a": "{{step_1.result}}", "b": 1}).needs
        [1]
    """

    step_number: int
    tool_name: str = ""
    tool_input: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    kind: StepKind = field(default=StepKind.TOOL_CALL, kw_only=True)
    depends_on: list[int] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise must(f"step {self.step_number}: kind", f"be one of {', '.join(_KINDS)}", self.kind)
        self.kind = StepKind(self.kind)  # callers may pass the value

    @property
    def needs(self) -> list[int]:
        """The numbers of the steps that this step waits for, from `depends_on` and from references."""
        return sorted({*self.depends_on, *(each.step for each in references(self.tool_input))})

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain values."""
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
        """Return the step that `to_dict` wrote. Missing fields get their defaults.

        Args:
            data: What `to_dict` returned.

        Raises:
            InvalidArgument: Names the field that is invalid.
        """
        number = data.get("step_number")
        if isinstance(number, bool) or not isinstance(number, int):
            raise must("step_number", "be an integer", number)
        kind = data.get("kind", StepKind.TOOL_CALL)
        names = ("tool_name", "tool_input", "reasoning", "depends_on")
        step = cls(number, **{name: data[name] for name in names if data.get(name)}, kind=kind)
        try:
            to_plain(step, cls, _CHECKED)
        except UnserialisableResult as error:
            raise InvalidArgument(f"step {number}: {error.path.removeprefix('$.')} {sentence(error.reason)}") from None
        step.tool_input, step.depends_on = dict(step.tool_input), list(step.depends_on)
        return step


@dataclass
class Plan:
    """Steps and their goal.

    Attributes:
        steps: The steps.
        final_goal: What the plan is for.

    Examples:
        >>> from agent_runtime_core.planning import Plan, PlanStep
        >>> plan = Plan([PlanStep(2, "add", {"a": "{{step_1.result}}"}), PlanStep(1, "read")])
        >>> [step.step_number for step in plan.order()]
        [1, 2]
    """

    steps: list[PlanStep] = field(default_factory=list)
    final_goal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can represent."""
        return {"final_goal": self.final_goal, "steps": [step.to_dict() for step in self.steps]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_dict` wrote.

        Args:
            data: What `to_dict` returned.

        Raises:
            InvalidArgument: Names the field that is invalid.
        """
        steps = data.get("steps")
        if not isinstance(steps, Sequence) or not all(isinstance(step, Mapping) for step in steps):
            raise must("the steps of a plan", "be a list of objects", steps)
        return cls([PlanStep.from_dict(step) for step in steps], str(data.get("final_goal") or ""))

    def order(self) -> list[PlanStep]:
        """Return the steps, each after those it needs, otherwise in the order of the plan.

        Raises:
            PlanningError: Steps wait for each other, or for a step that is not in the plan.
        """
        done: set[int] = set()
        order: list[PlanStep] = []
        left = [(step, step.needs) for step in self.steps]
        while left:
            ready = next((each for each in left if done.issuperset(each[1])), None)
            if ready is None:
                cycle = Shown(_cycle([step for step, _ in left]))
                raise PlanningError(str(must("steps", "not wait for each other", cycle, "Remove one dependency")))
            left.remove(ready)
            order.append(ready[0])
            done.add(ready[0].step_number)
        return order

    def validate(self, tools: Tools, memory: Tools = ()) -> Plan:
        """Return this plan if it is valid.

        Args:
            tools: The available tools, or their names. Inputs are checked only for tools that are not just names.
            memory: The available memory operations, likewise.

        Raises:
            PlanningError: The plan is invalid; lists all problems.

        Examples:
            >>> from agent_runtime_core import PlanningError
            >>> from agent_runtime_core.planning import Plan, PlanStep
            >>> try:
            ...     Plan([PlanStep(1, "subtract")]).validate(["add"])
            ... except PlanningError as error:
            ...     print(len(error.problems))
            1
        """
        found = self.problems(tools, memory)
        if found:
            raise PlanningError(f"the plan is invalid: {sentence('; '.join(found))}", found)
        return self

    def problems(self, tools: Tools, memory: Tools = ()) -> list[str]:
        """Return the problems of the plan, each with its step. The arguments are the same as for `validate`.

        Args:
            tools: As in `validate`.
            memory: As in `validate`.
        """
        numbers = Counter(step.step_number for step in self.steps)
        found = [] if numbers else ["steps must have at least one step, got []"]
        if len(self.steps) > MOST_STEPS:
            return [f"steps must have at most {MOST_STEPS} steps, got {len(self.steps)}"]
        found += [
            f"step numbers must be unique, got {each} twice"
            for each in sorted(n for n, count in numbers.items() if count > 1)
        ]
        found += [f"step {number}: {each}" for number, each in problems_of_steps(self.steps, tools, memory)]
        if not found:
            try:
                self.order()
            except PlanningError as error:
                found.append(str(error).removesuffix("."))
        return found


def problems_of_steps(steps: Sequence[PlanStep], tools: Tools, memory: Tools = ()) -> Iterator[tuple[int, str]]:
    """Yield the problems of single steps, each with the number of the step."""
    known, remembered = _by_name(tools), _by_name(memory)
    numbers = {step.step_number for step in steps}
    for step in steps:
        named = remembered if step.kind is StepKind.MEMORY_OP else known
        for each in _input_problems(step) or [*_call_problems(step, named), *_reference_problems(step, numbers)]:
            yield step.step_number, each


def _by_name(tools: Tools) -> dict[str, Tool | None]:
    listed: Iterable[Tool | str] = tools.list_tools() if isinstance(tools, ToolRegistry) else tools
    return {each if isinstance(each, str) else each.name: None if isinstance(each, str) else each for each in listed}


def _input_problems(step: PlanStep) -> list[str]:
    """Return why an input cannot be checked further: it contains itself, or values that JSON lacks."""
    try:
        read_arguments(step.tool_input)
    except BadArguments as error:
        return [f"tool_input is invalid: {error}"]
    return []


def _call_problems(step: PlanStep, known: Mapping[str, Tool | None]) -> list[str]:
    """Return the problems of a step's tool and of the arguments for it."""
    if step.kind is StepKind.LLM_CALL:
        return _prompt_problems(step.tool_input.get("prompt"), step.tool_input.get("messages"))
    what = "memory operation" if step.kind is StepKind.MEMORY_OP else "tool"
    if step.tool_name not in known:
        return [unknown(what, step.tool_name, known)]
    tool = known[step.tool_name]
    if tool is None:
        return []
    try:
        parameters, given = _without_references(tool.parameters, step.tool_input)
        check_arguments(parameters, parsed_arguments(parameters, given))
    except BadArguments as error:
        return [f"the input of {step.tool_name} is invalid: {error}"]
    return []


def _prompt_problems(prompt: Any, messages: Any) -> list[str]:
    """Return the problems of the prompt or messages of a model call. References may become values of any type."""
    found = [] if prompt or messages else ["the tool_input of an llm_call must have a prompt or messages, got neither"]
    if prompt is not None and not isinstance(prompt, str):
        found.append(f"the prompt of an llm_call must be a string, got {brief(prompt)}")
    is_list = messages is None or is_reference(messages) or isinstance(messages, (list, tuple))
    if not is_list or any(not isinstance(each, Mapping) and not is_reference(each) for each in messages or ()):
        found.append(f"the messages of an llm_call must be a list of objects, got {brief(messages)}")
    return found


def _without_references(parameters: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return schema and input, with any value allowed for arguments that have references to later results."""
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


def _reference_problems(step: PlanStep, numbers: Set[int]) -> list[str]:
    """Return the problems of a step's references and of its `depends_on`."""
    found = [f"a reference must look like {{{{step_1.result}}}}, got {text}" for text in malformed(step.tool_input)]
    for each in references(step.tool_input):
        if each.step not in numbers:
            found.append(f"{each.text} must refer to a step of the plan, got step {each.step}")
        elif each.step >= step.step_number:
            found.append(f"{each.text} must refer to an earlier step, got step {each.step}")
    return found + [
        f"depends_on must name steps of the plan, got {each}" for each in step.depends_on if each not in numbers
    ]


def _cycle(stuck: Sequence[PlanStep]) -> str:
    """Return step numbers along the dependencies, from a step back to itself."""
    by_number = {step.step_number: step for step in stuck}
    path = [min(by_number)]
    while path[-1] not in path[:-1]:
        # A step that waits only for steps outside the plan repeats itself, which ends the loop.
        path.append(next((each for each in by_number[path[-1]].needs if each in by_number), path[-1]))
    return " -> ".join(map(str, path[path.index(path[-1]) :]))


class BasePlanner(ABC):
    """Makes plans from prompts."""

    @abstractmethod
    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        """Return a valid plan for the prompt that uses only these tools.

        Args:
            prompt: What to do.
            available_tools: The tools that the plan may use.

        Raises:
            PlanningError: No plan can be made.
        """


def checked_planner(planner: BasePlanner) -> BasePlanner:
    """Return the planner. Raise InvalidArgument if it lacks `create_plan` or is a class instead of an instance."""
    if isinstance(planner, type) or not callable(getattr(planner, "create_plan", None)):
        fix = f"Pass {planner.__name__}()" if isinstance(planner, type) else ""
        raise must("a planner", "be an instance with create_plan", planner, fix)
    return planner


async def plan_of(planner: BasePlanner, prompt: str, tools: ToolRegistry) -> Plan:
    """Return the planner's plan. Raise PlanningError if it returns something else."""
    plan: object = await planner.create_plan(prompt, tools)
    if not isinstance(plan, Plan):
        raise PlanningError(str(must(f"{type(planner).__name__}.create_plan", "return a Plan", plan)))
    return plan


def registry_of(tools: ToolRegistry | Iterable[Tool | BaseTool]) -> ToolRegistry:
    """Return the registry, or a new registry with these tools."""
    if isinstance(tools, ToolRegistry):
        return tools
    if not isinstance(tools, Iterable):
        raise must("tools", "be a ToolRegistry or a list of tools", tools)
    registry = ToolRegistry()
    for tool in tools:
        registry.register(tool)
    return registry


def as_list(tools: ToolRegistry | Iterable[Tool]) -> list[Tool]:
    """Return the tools of a registry or of an iterable as a list."""
    return tools.list_tools() if isinstance(tools, ToolRegistry) else list(tools)
