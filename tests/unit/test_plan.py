"""Plans: what they are as JSON, what of them is refused, and their references."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from agent_runtime_core._core.codec.typed import codec_for
from agent_runtime_core.errors import InvalidArgument, PlanningError
from agent_runtime_core.planning import Plan, PlanStep, StepKind, resolve
from agent_runtime_core.planning.references import reference
from agent_runtime_core.tools import CalculatorTool, Tool, ToolRegistry
from tests.support.cases import for_each


def search(query: str, most: int = 5, filters: dict[str, str] | None = None) -> list[str]:
    """Search."""
    return [query] * most


TOOLS = [CalculatorTool().as_tool(), Tool.from_function(search)]
MEMORY = [Tool("memory_get", "Read a note.", {"type": "object", "required": ["key"]}, len)]


def call(number: int, name: str = "search", depends_on: list[int] | None = None, /, **given: Any) -> PlanStep:
    return PlanStep(number, name, given or {"query": "x"}, depends_on=depends_on or [])


def test_kinds_are_as_the_seeds_name_them() -> None:
    assert {kind.name: kind.value for kind in StepKind} == {
        "LLM_CALL": "llm_call",
        "TOOL_CALL": "tool_call",
        "MEMORY_OP": "memory_op",
    }


def test_a_kind_may_be_given_by_its_value() -> None:
    kind: Any = "llm_call"
    step = PlanStep(1, tool_input={"prompt": "hello"}, kind=kind)
    assert step.kind is StepKind.LLM_CALL
    assert Plan([step]).problems([]) == []
    with pytest.raises(InvalidArgument, match=r"step 1: kind must be one of llm_call, tool_call, memory_op, got 'llm'"):
        PlanStep(1, kind="llm")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": 5}, "the prompt of an llm_call must be a string, got 5"),
        ({"messages": "hello"}, "the messages of an llm_call must be a list of objects, got 'hello'"),
        ({"messages": [5]}, "the messages of an llm_call must be a list of objects, got [5]"),
    ],
)
def test_what_no_model_can_be_asked_is_no_plan(given: dict[str, Any], says: str) -> None:
    assert Plan([PlanStep(1, "", given, kind=StepKind.LLM_CALL)]).problems([]) == [f"step 1: {says}"]


def test_a_plan_is_the_same_after_json_and_after_the_journal() -> None:
    plan = Plan(
        [
            call(1, expression="1 + 2"),
            PlanStep(2, "memory_get", {"key": "k"}, "why", kind=StepKind.MEMORY_OP),
            PlanStep(5, "", {"prompt": "{{step_1.result}}"}, kind=StepKind.LLM_CALL, depends_on=[2]),
        ],
        "a goal",
    )
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    to_text, from_text = codec_for(Plan)
    assert from_text(to_text(plan)) == plan
    assert plan.to_dict()["steps"][2] == {
        "step_number": 5, "kind": "llm_call", "tool_name": "", "tool_input": {"prompt": "{{step_1.result}}"},
        "depends_on": [2], "reasoning": "",
    }  # fmt: skip
    assert plan.steps[2].needs == [1, 2]


def test_what_is_left_out_takes_its_default() -> None:
    [step] = Plan.from_dict({"steps": [{"step_number": 1, "tool_name": "search"}]}).steps
    assert step == PlanStep(1, "search", {}, "", kind=StepKind.TOOL_CALL, depends_on=[])


@for_each(
    ("data", "message"),
    [
        ({}, "the steps of a plan must be a list of objects, got None"),
        ({"steps": [1]}, "a list of objects"),
        ({"steps": [{}]}, "step_number must be an integer, got None"),
        ({"steps": [{"step_number": True}]}, "step_number must be an integer, got True"),
        ({"steps": [{"step_number": 1, "kind": "think"}]}, "step 1: kind must be one of .*, got 'think'"),
        ({"steps": [{"step_number": 1, "kind": ["x"]}]}, "step 1: kind must be one of"),
        ({"steps": [{"step_number": 1, "depends_on": 3}]}, "step 1: depends_on must be list or tuple, got 3"),
        ({"steps": [{"step_number": 1, "depends_on": ["a"]}]}, r"step 1: depends_on\[0\] must be int, got 'a'"),
        ({"steps": [{"step_number": 1, "depends_on": "12"}]}, "step 1: depends_on must be list or tuple, got '12'"),
        ({"steps": [{"step_number": 1, "tool_input": "x"}]}, "step 1: tool_input must be Mapping, got 'x'"),
        ({"steps": [{"step_number": 1, "tool_name": 3}]}, "step 1: tool_name must be str, got 3"),
    ],
)
def test_what_is_no_plan_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Plan.from_dict(data)


def test_a_good_plan_is_valid_by_tools_names_or_a_registry() -> None:
    plan = Plan(
        [
            call(1, "calculator", expression="1 + 2"),
            call(2, query="{{step_1.result}} apples", most="{{ step_1.result }}"),
            call(3, query="x", filters={"a": "{{step_2.result.0}}"}),
            PlanStep(4, "memory_get", {"key": "k"}, kind=StepKind.MEMORY_OP, depends_on=[3]),
            PlanStep(5, "", {"prompt": "say it"}, kind=StepKind.LLM_CALL, depends_on=[4]),
        ]
    )
    registry = ToolRegistry()
    for tool in TOOLS:
        registry.register(tool)
    assert plan.validate(TOOLS, MEMORY) is plan
    assert plan.validate(registry, ["memory_get"]) is plan
    assert plan.validate(["search", "calculator"], MEMORY) is plan
    assert [step.step_number for step in plan.order()] == [1, 2, 3, 4, 5]


@for_each(
    ("steps", "problems"),
    [
        ([], ["steps must have at least one step, got []"]),
        ([call(1, "serach")], ["step 1: unknown tool 'serach'. Did you mean 'search'?"]),
        ([call(1, "zzz")], ["step 1: unknown tool 'zzz'. Known: calculator, search."]),
        ([call(1, "memory_get")], ["step 1: unknown tool 'memory_get'. Known: calculator, search."]),
        (
            [PlanStep(1, "search", {"query": "x"}, kind=StepKind.MEMORY_OP)],
            ["step 1: unknown memory operation 'search'. Known: memory_get."],
        ),
        (
            [PlanStep(1, "", {}, kind=StepKind.LLM_CALL)],
            ["step 1: the tool_input of an llm_call must have a prompt or messages, got neither"],
        ),
        ([call(1), call(2), call(1)], ["step numbers must be unique, got 1 twice"]),
        (
            [call(1, "search", [2]), call(2, "search", [1])],
            ["steps must not wait for each other, got 1 -> 2 -> 1. Remove one dependency"],
        ),
        ([call(1), call(2, "search", [2])], ["steps must not wait for each other, got 2 -> 2. Remove one dependency"]),
        (
            [
                call(1, "search", [3]),
                call(2, "search", [1]),
                call(3, query="{{step_2.result}}"),
                call(4, "search", [3]),
            ],
            ["steps must not wait for each other, got 1 -> 3 -> 2 -> 1. Remove one dependency"],
        ),
        ([call(1, "search", [7])], ["step 1: depends_on must name steps of the plan, got 7"]),
        (
            [call(2, query="{{step_1.result}}")],
            ["step 2: {{step_1.result}} must refer to a step of the plan, got step 1"],
        ),
        (
            [call(1, query="a {{step_2.result.x}}"), call(2)],
            ["step 1: {{step_2.result.x}} must refer to an earlier step, got step 2"],
        ),
        ([call(1, query="{{step_1.result}}")], ["step 1: {{step_1.result}} must refer to an earlier step, got step 1"]),
        (
            [call(1), call(2, query={"deep": ["{{step1.result}}"]})],
            [
                "step 2: the input of search is invalid: query must be a string, got an object",
                "step 2: a reference must look like {{step_1.result}}, got {{step1.result}}",
            ],
        ),
        (
            [call(1), call(2, query="{{step_1}}")],
            ["step 2: a reference must look like {{step_1.result}}, got {{step_1}}"],
        ),
        ([call(1, qeury="x")], ["step 1: the input of search is invalid: missing required argument 'query' (string)"]),
        (
            [call(1), call(2, qeury="{{step_1.result}}")],
            ["step 2: the input of search is invalid: missing required argument 'query' (string)"],
        ),
        ([call(n) for n in range(1, 102)], ["steps must have at most 100 steps, got 101"]),
    ],
)
def test_what_is_wrong_with_a_plan_is_told(steps: list[PlanStep], problems: list[str]) -> None:
    found = Plan(steps).problems(TOOLS, MEMORY)
    assert [each for each in found if not any(each.startswith(wanted) for wanted in problems)] == []
    assert len(found) == len(problems)
    with pytest.raises(PlanningError, match="the plan is invalid") as refused:
        Plan(steps).validate(TOOLS, MEMORY)
    assert refused.value.problems == found


@pytest.mark.sentence("001", "PlanExecutor: generate a Plan DAG (few-shot planner or rules engine) and linearise it")
def test_steps_come_in_an_order_in_which_they_can_run() -> None:
    plan = Plan([call(3, "search", [1, 2]), call(1), call(2, "search", [1]), call(4)])
    assert [step.step_number for step in plan.order()] == [1, 2, 3, 4]
    with pytest.raises(PlanningError, match="1 -> 2 -> 1"):
        Plan([call(1, "search", [2]), call(2, "search", [1])]).order()


@dataclass
class Odd:
    x: int


RESULTS: dict[int, Any] = {1: 42, 2: {"items": [{"name": "a"}], "n": None}, 3: "text", 10: 1.5, 11: Odd(3)}


@for_each(
    ("given", "found"),
    [
        ("{{step_1.result}}", 42),
        (" {{ step_1.result }} ", 42),
        ("{{step_2.result}}", RESULTS[2]),
        ("{{step_2.result.items.0.name}}", "a"),
        ("{{step_2.result.items}}", [{"name": "a"}]),
        ("{{step_2.result.n}}", None),
        ("it is {{step_1.result}}", "it is 42"),
        ("{{step_1.result}}{{step_10.result}}", "421.5"),
        ("({{step_3.result}})", "(text)"),
        ("{{step_2.result.items}}!", '[{"name": "a"}]!'),
        ("{{step_2.result.n}}!", "null!"),
        ("{{step_11.result}}?", "Odd(x=3)?"),
        ("{{name}} stays", "{{name}} stays"),
        ({"a": ["{{step_1.result}}", {"b": "x{{step_3.result}}"}], "c": 5}, {"a": [42, {"b": "xtext"}], "c": 5}),
        (7, 7),
    ],
)
def test_references_are_resolved(given: Any, found: Any) -> None:
    assert resolve(given, RESULTS) == found


def test_what_is_resolved_is_a_copy() -> None:
    given = {"a": [1]}
    assert resolve(given, {}) == given
    assert resolve(given, {})["a"] is not given["a"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{{step_9.result}}", "must refer to a step with a result, got step 9"),
        ("x {{step_9.result}}", "must refer to a step with a result, got step 9"),
        ("{{step_2.result.nope}}", "unknown field 'nope'. Known: items, n."),
        ("{{step_2.result.items.1}}", "unknown field '1'. Known: 0."),
        ("{{step_1.result.x}}", "unknown field 'x'. None exist."),
    ],
)
def test_what_cannot_be_resolved_is_named(given: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        resolve(given, RESULTS)


def test_a_reference_is_written_as_it_is_read() -> None:
    assert reference(2, "items", 0) == "{{step_2.result.items.0}}"
    assert resolve(reference(2, "items", 0, "name"), RESULTS) == "a"
