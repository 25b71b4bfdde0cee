"""Plans by rules: what prompts mean, what is refused, and rules of one's own."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, PlanningError
from agent_runtime_core.planning import Plan, PlanStep, RuleBasedPlanner, StepKind, resolve, rule_planner
from agent_runtime_core.planning.rule_planner import read_arithmetic
from agent_runtime_core.tools import CalculatorTool, Tool, ToolRegistry
from tests.support.cases import for_each
from tests.support.prompts import CALC, REFUSED, TABLE, TODO, Grammar, Wanted, op, todo

TODOS = Tool(
    TODO,
    "To-dos.",
    {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["add", "list", "get", "complete", "delete"]},
            "todo_id": {"type": "string"},
            "text": {"type": "string"},
        },
        "required": ["action"],
        "additionalProperties": False,
    },
    lambda **given: given,
)
TOOLS = [CalculatorTool().as_tool(), TODOS]


async def made(prompt: str) -> Wanted:
    plan = await RuleBasedPlanner().create_plan(prompt, TOOLS)
    assert [step.step_number for step in plan.steps] == list(range(1, len(plan.steps) + 1))
    assert plan.problems(TOOLS) == []
    return [(step.tool_name, step.tool_input) for step in plan.steps]


@pytest.mark.sentence("001", "PlanExecutor: generate a Plan DAG (few-shot planner or rules engine) and linearise it")
@pytest.mark.sentence(
    "003", "`RuleBasedPlanner`: pattern matching for calculator and to-do operations, combination handling"
)
@pytest.mark.parametrize(("prompt", "wanted"), TABLE, ids=[prompt for prompt, _ in TABLE])
async def test_a_prompt_has_its_plan(prompt: str, wanted: Wanted) -> None:
    found = await made(prompt)
    assert found == wanted
    assert [type(value) for _, given in found for value in given.values()] == [
        type(value) for _, given in wanted for value in given.values()
    ]


def test_the_table_is_long_enough() -> None:
    assert len({prompt for prompt, _ in TABLE}) >= 60


@pytest.mark.sentence(
    "003", "`RuleBasedPlanner`: pattern matching for calculator and to-do operations, combination handling"
)
async def test_two_thousand_prompts_of_a_grammar_have_the_plans_it_knows() -> None:
    grammar = Grammar(2026)
    wrong = []
    for _ in range(2000):
        prompt, wanted = grammar.prompt()
        try:
            found: Any = await made(prompt)
        except PlanningError as error:
            found = error
        if found != wanted:
            wrong.append((prompt, wanted, found))
    assert not wrong, f"{len(wrong)} of 2000, the first: {wrong[:3]}"


async def test_random_prompts_give_a_plan_or_a_planning_error_and_take_no_time() -> None:
    chance = Random(5000)
    said = (
        "add subtract 5 from 20 and then , . ; ! ? the result it my list to-do todo as done mark delete remind me to "
        "( ) * / + - ** % 3.5 -2 one hundred thousand point x by with buy milk show what is 1,000 ' {{step_1.result}}"
    )
    odd = ["\n", '"', "\u0663", "\U0001d7d0", "\x00", "\ud800", "ß", "\u0130", "9" * 50, "{{", "}}"]
    vocabulary = [*said.split(), *odd]
    plans = 0
    planner = RuleBasedPlanner()
    for number in range(5000):
        if number % 5:
            prompt = " ".join(chance.choices(vocabulary, k=chance.randint(1, 25)))
        else:
            prompt = "".join(chr(chance.choice((chance.randint(1, 127), chance.randint(1, 0x2FFF)))) for _ in range(40))
        plan: Plan | None = None
        with contextlib.suppress(PlanningError):
            plan = await planner.create_plan(prompt, TOOLS)
        if plan is not None:
            plans += 1
            assert plan.problems(TOOLS) == []
    assert plans > 50


@pytest.mark.parametrize(
    "prompt", ["and " * 500, "add 1, " * 60, "add " * 490, "(" * 1999, "1 and " * 79 + "1", "remind me to " * 70]
)
async def test_a_prompt_that_leads_nowhere_is_given_up_soon(prompt: str) -> None:
    with contextlib.suppress(PlanningError):
        await RuleBasedPlanner().create_plan(prompt, TOOLS)


@pytest.mark.parametrize(("prompt", "asked"), [("add milk and " * 40, 0), ("add 1, add milk and " * 20 + "x", 20)])
async def test_what_is_no_sum_for_one_of_its_words_is_not_read_as_one(
    prompt: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def read(text: str, last: int | None, *, apart: bool = True) -> dict[str, Any] | None:
        texts.append(text)
        return read_arithmetic(text, last, apart=apart)

    monkeypatch.setattr(rule_planner, "read_arithmetic", read)
    with contextlib.suppress(PlanningError):
        await RuleBasedPlanner().create_plan(prompt, TOOLS)
    assert len(texts) <= asked


@for_each(("prompt", "part"), REFUSED)
async def test_what_nothing_matches_is_told_with_what_would(prompt: str, part: str) -> None:
    with pytest.raises(PlanningError) as refused:
        await made(prompt)
    said = str(refused.value)
    assert said.startswith(f"no plan for '{part}")
    assert "add 2 and 3, then multiply by 4" in said
    assert "remind me to call Bob" in said


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt must not be empty, got ''"),
        (" \n", "prompt must not be empty"),
        (3, "prompt must not be empty, got 3"),
        ("x" * 2001, "at most 2,000 characters, got 2,001"),
    ],
)
async def test_what_is_no_prompt_is_told(prompt: Any, message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        await RuleBasedPlanner().create_plan(prompt, TOOLS)


async def test_a_tool_that_is_not_there_is_told() -> None:
    with pytest.raises(PlanningError, match=r"unknown tool 'todo_store'\. Known: calculator\. Register it"):
        await RuleBasedPlanner().create_plan("add 2 and 3, then list my to-dos", TOOLS[:1])
    with pytest.raises(PlanningError, match=r"unknown tool 'calculator'\. None exist\. Register it"):
        await RuleBasedPlanner().create_plan("add 2 and 3", [])


async def test_the_steps_of_one_list_keep_their_order_and_others_need_not_wait() -> None:
    prompt = "remind me to buy milk, then add 2 and 3, then list my to-dos, then remember the result as a to-do"
    plan = await RuleBasedPlanner().create_plan(prompt, TOOLS)
    assert [(step.depends_on, step.needs) for step in plan.steps] == [([], []), ([], []), ([1], [1]), ([3], [2, 3])]
    assert plan.final_goal == prompt
    assert plan.steps[1].reasoning == '"add 2 and 3"'


async def test_a_plan_can_be_carried_out() -> None:
    calculator, results = CalculatorTool(), dict[int, Any]()
    plan = await RuleBasedPlanner().create_plan("add 2 and 3, then multiply by -4, then square the result", TOOLS)
    for step in plan.order():
        results[step.step_number] = (await calculator.execute(**resolve(step.tool_input, results))).output
    assert results == {1: 5, 2: -20, 3: 400}


async def test_other_names_of_the_tools() -> None:
    registry = ToolRegistry()
    registry.register(Tool("sums", "", {"type": "object"}, dict))
    registry.register(Tool("notes", "", {"type": "object"}, dict))
    plan = await RuleBasedPlanner(calculator="sums", todos="notes").create_plan("add 2 and 3, list my to-dos", registry)
    assert [step.tool_name for step in plan.steps] == ["sums", "notes"]


async def test_rules_of_ones_own_come_first_and_join_the_others() -> None:
    weather = Tool("weather", "", {"type": "object", "required": ["city"]}, dict)
    planner = RuleBasedPlanner()
    planner.rule(r"(?:what is )?the weather in (?P<city>\w+)", lambda found: ("weather", {"city": found["city"]}))
    planner.rule(
        "greet (.+)",
        lambda found: PlanStep(0, "", {"prompt": f"Greet {found[1]}."}, kind=StepKind.LLM_CALL),
        example="greet Ada",
    )
    planner.rule("add 2 and 3", lambda found: None)
    tools = [*TOOLS, weather]
    plan = await planner.create_plan("What is the weather in Bern? Then greet Ada, then add 2 and 3.", tools)
    assert [(step.kind.value, step.tool_name, step.tool_input) for step in plan.steps] == [
        ("tool_call", "weather", {"city": "Bern"}),
        ("llm_call", "", {"prompt": "Greet Ada."}),
        ("tool_call", *op("add", 2, 3)),
    ]
    with pytest.raises(PlanningError, match='"greet Ada"'):
        await planner.create_plan("sing", tools)


@pytest.mark.parametrize(("pattern", "make"), [("(", dict), ("x", 3)])
def test_a_bad_rule_is_named(pattern: str, make: Any) -> None:
    with pytest.raises(InvalidArgument):
        RuleBasedPlanner().rule(pattern, make)


async def test_a_rule_may_be_about_what_is_only_polite_elsewhere() -> None:
    planner = RuleBasedPlanner()
    planner.rule(r"hello (?P<name>\w+)", lambda found: ("greet", {"name": found["name"]}))
    planner.rule("now", lambda found: ("clock", {}))
    tools = [Tool("greet", "", {"type": "object"}, dict), Tool("clock", "", {"type": "object"}, dict)]
    plan = await planner.create_plan("Hello Bob! Now.", tools)
    assert [(step.tool_name, step.tool_input) for step in plan.steps] == [("greet", {"name": "Bob"}), ("clock", {})]


async def test_a_rule_that_gives_something_else_is_named() -> None:
    planner = RuleBasedPlanner()
    planner.rule("x", lambda found: ("tool", "not a dict"))  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidArgument, match="a rule must return"):
        await planner.create_plan("x", TOOLS)


def test_the_names_of_the_prompts_are_those_of_the_planner() -> None:
    planner = RuleBasedPlanner()
    assert (planner.calculator, planner.todos) == (CALC, TODO)
    assert Plan([PlanStep(1, *todo("list"))]).problems(TOOLS) == []
