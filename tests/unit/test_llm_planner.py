"""Plans by a model: what it is told, and what becomes of answers that are no plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, PlanningError, RateLimited
from agent_runtime_core.interfaces import LLMResponse
from agent_runtime_core.planning import LLMPlanner, Plan, PlanStep, StepKind
from agent_runtime_core.tools import CalculatorTool, Tool
from tests.support.runs import Rig
from tests.support.scripted_model import Scripted

TOOLS = [CalculatorTool().as_tool()]
MEMORY = [Tool("memory_set", "Keep a note.", {"type": "object", "required": ["key"]}, len)]


def step(number: int = 1, **changes: Any) -> dict[str, Any]:
    about = {"step_number": number, "kind": "tool_call", "tool_name": "calculator", "tool_input": {"expression": "1+2"}}
    return {**about, **changes}


def answer(*steps: dict[str, Any], goal: str = "a goal") -> str:
    return json.dumps({"final_goal": goal, "steps": list(steps)})


GOOD = answer(step(), step(2, tool_input={"expression": "{{step_1.result}} * 2"}, reasoning="double"))


@pytest.mark.sentence("001", "PlanExecutor: generate a Plan DAG (few-shot planner or rules engine) and linearise it")
@pytest.mark.sentence("003", "`LLMPlanner`: planning with a model")
async def test_a_good_answer_is_a_plan() -> None:
    client = Scripted(GOOD)
    plan = await LLMPlanner(client).create_plan("double the sum", TOOLS)
    assert plan == Plan(
        [
            PlanStep(1, "calculator", {"expression": "1+2"}),
            PlanStep(2, "calculator", {"expression": "{{step_1.result}} * 2"}, "double"),
        ],
        "a goal",
    )
    assert len(client.asked) == 1


async def test_the_model_is_told_of_tools_memory_the_schema_and_examples() -> None:
    client = Scripted(GOOD)
    example = Plan([PlanStep(1, "calculator", {"expression": "5"})], "five")
    planner = LLMPlanner(client, examples=[("say five", example)], memory=MEMORY, model="m-1", temperature=0.0)
    await planner.create_plan("do it", TOOLS)
    [messages] = client.asked
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    told = messages[0]["content"]
    for part in (
        '"name": "calculator"',
        "work out an expression",
        '"name": "memory_set"',
        '"step_number"',
        "step_1.result",
    ):
        assert part in told
    assert messages[1]["content"] == "say five"
    assert json.loads(messages[2]["content"]) == example.to_dict()
    assert messages[3]["content"] == "do it"
    assert client.options == [{"model": "m-1", "temperature": 0.0}]


async def test_the_examples_that_come_with_it_are_plans_it_would_accept() -> None:
    client = Scripted(GOOD)
    planner = LLMPlanner(client)
    await planner.create_plan("x", TOOLS)
    assert planner.examples
    for prompt, plan in planner.examples:
        assert prompt
        assert plan.problems(TOOLS) == []
        client.lines.append(json.dumps(plan.to_dict()))
        assert await planner.create_plan("x", TOOLS) == plan


@pytest.mark.sentence("003", "`LLMPlanner`: planning with a model")
@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("", "invalid JSON"),
        ("Sure! Here is the plan.", "invalid JSON"),
        (GOOD[:-1], "invalid JSON"),
        ('{"steps": NaN}', "NaN is not JSON"),
        ("[]", "$ must be an object, got an array"),
        ("{}", "$: missing required property 'final_goal' (string)"),
        (answer(), "$.steps must have at least 1 item, got 0"),
        (
            answer(step(kind="think")),
            "$.steps[0].kind must be one of 'llm_call', 'tool_call', 'memory_op', got 'think'",
        ),
        (answer(step(0)), "$.steps[0].step_number must be at least 1, got 0"),
        (answer(step(tool_input="1+2")), "$.steps[0].tool_input must be an object"),
        (answer(step(tool="calculator")), "Did you mean 'tool_name'? Answer again"),
        (answer(step(tool_name="calculater")), "step 1: unknown tool 'calculater'. Did you mean 'calculator'?"),
        (answer(step(tool_input={"expr": "1"})), "step 1: the input of calculator is invalid"),
        (answer(step(), step()), "step numbers must be unique, got 1 twice"),
        (
            answer(step(depends_on=[2]), step(2, depends_on=[1])),
            "steps must not wait for each other, got 1 -> 2 -> 1. Remove one",
        ),
        (
            answer(step(tool_input={"expression": "{{step_2.result}}"}), step(2)),
            "must refer to an earlier step, got step 2",
        ),
        (
            answer(step(tool_input={"x": 1})).replace('{"x": 1}', '{"x": ' * 200 + "1" + "}" * 200),
            "is nested deeper than",
        ),
        (answer(step(kind="memory_op")), "step 1: unknown memory operation 'calculator'"),
        (answer(step(kind="llm_call", tool_input={})), "an llm_call must have a prompt"),
    ],
)
async def test_a_bad_answer_goes_back_with_its_problem_and_is_mended(bad: str, problem: str) -> None:
    client = Scripted(bad, GOOD)
    plan = await LLMPlanner(client, memory=MEMORY).create_plan("x", TOOLS)
    assert len(plan.steps) == 2
    first, second = client.asked
    assert second[: len(first)] == first
    assert second[len(first)] == {"role": "assistant", "content": bad}
    said = second[len(first) + 1]
    assert said["role"] == "user"
    assert said["content"].startswith("Your answer cannot be used: ")
    assert problem in said["content"]


async def test_a_fence_around_the_json_is_no_mistake() -> None:
    client = Scripted(f"```json\n{GOOD}\n```")
    assert len((await LLMPlanner(client).create_plan("x", TOOLS)).steps) == 2


async def test_a_text_in_parts_is_read() -> None:
    client = Scripted(LLMResponse({"role": "assistant", "content": [{"type": "text", "text": GOOD}]}))
    assert len((await LLMPlanner(client).create_plan("x", TOOLS)).steps) == 2


@pytest.mark.parametrize("repairs", [0, 2])
async def test_repairs_are_bounded_and_the_last_answer_is_told(repairs: int) -> None:
    client = Scripted(*(f"no {n}" for n in range(9)))
    with pytest.raises(PlanningError, match=f"no valid plan after {repairs + 1} attempt") as failed:
        await LLMPlanner(client, max_repairs=repairs).create_plan("x", TOOLS)
    assert len(client.asked) == repairs + 1
    assert failed.value.answer == f"no {repairs}"
    assert failed.value.problems
    assert failed.value.problems[0].startswith("invalid JSON")


async def test_what_the_provider_raises_goes_on() -> None:
    with pytest.raises(RateLimited):
        await LLMPlanner(Scripted(RateLimited("slow down"))).create_plan("x", TOOLS)


@pytest.mark.parametrize("repairs", [-1, True, 1.5])
def test_a_bad_count_is_named(repairs: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_repairs must be"):
        LLMPlanner(Scripted(), max_repairs=repairs)


async def test_nothing_is_no_prompt() -> None:
    with pytest.raises(PlanningError, match="prompt must not be empty"):
        await LLMPlanner(Scripted()).create_plan("  ", TOOLS)


async def test_a_plan_made_in_a_step_is_made_once() -> None:
    client = Scripted(answer(step(kind="llm_call", tool_name="", tool_input={"prompt": "hi"})))
    lives = 0
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            nonlocal lives
            lives += 1
            plan = await ctx.step("plan", LLMPlanner(client).create_plan, "x", TOOLS)
            if lives == 1:
                raise ConnectionError
            return plan.steps[0].kind.value

        await rig.go(body)
        assert await rig.value(body) == StepKind.LLM_CALL.value
    assert len(client.asked) == 1


async def test_a_step_without_a_kind_calls_a_tool() -> None:
    steps = [
        {"step_number": n, "tool_name": "calculator", "tool_input": {"expression": "1+2"}, "reasoning": "add"}
        for n in (1, 2)
    ]
    plan = await LLMPlanner(Scripted(answer(*steps))).create_plan("x", TOOLS)
    assert [(each.step_number, each.kind, each.reasoning) for each in plan.steps] == [
        (1, StepKind.TOOL_CALL, "add"),
        (2, StepKind.TOOL_CALL, "add"),
    ]
