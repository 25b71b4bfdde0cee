"""The agent that plans first: the plan is made once, its models are paid once, and what fails says why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, ProviderUnavailable
from agent_runtime_core.interfaces import LLMResponse, RunResult
from agent_runtime_core.planning import (
    BasePlanner,
    LLMPlanner,
    Plan,
    PlanningAgent,
    PlanStep,
    RuleBasedPlanner,
    built_in_tools,
)
from agent_runtime_core.planning.recorded_client import RecordedClient
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import create_test_context
from agent_runtime_core.tools import Tool, ToolRegistry
from tests.support.runs import Rig
from tests.support.scripted_model import Scripted


def asking(text: str, **params: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "params": params}


async def planned(rig: Rig, agent: PlanningAgent, text: str, run_id: str = "r", **params: Any) -> RunResult:
    return await rig.runner.execute(agent, run_id, asking(text, **params))


async def test_a_prompt_is_planned_and_carried_out() -> None:
    async with AgentRunner.open("memory://") as runner:
        text = "add 12 and 30, then remember the result as a to-do, list my to-dos"
        result = await runner.execute(PlanningAgent(), "r", asking(text))
    output = result.final_output
    assert [each["text"] for each in output["result"]] == ["Result: 42"]
    assert Plan.from_dict(output["plan"]).final_goal == text
    assert [(each["step_number"], each["tool_name"], each["attempt"]) for each in output["steps"]] == [
        (1, "calculator", 1),
        (2, "todo_store", 1),
        (3, "todo_store", 1),
    ]
    assert output["steps"][1]["tool_input"] == {"action": "add", "text": "Result: 42"}


async def test_it_runs_over_a_mock_too() -> None:
    result = await PlanningAgent().run(create_test_context("what is (3+4)*2?"))
    assert result.final_output["result"] == 14
    assert PlanningAgent().key == "planning"
    assert [tool.name for tool in built_in_tools().list_tools()] == ["calculator", "todo_store"]


async def test_a_prompt_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": "(3+4)*2?"}]
    async with AgentRunner.open("memory://") as runner:
        said = {"messages": [{"role": "user", "content": parts}]}
        assert (await runner.execute(PlanningAgent(), "r", said)).final_output["result"] == 14


@pytest.mark.sentence("003", "`BasePlanner.create_plan(prompt, available_tools) -> Plan`")
async def test_a_planner_that_gives_no_plan_is_named() -> None:
    class Wrong(BasePlanner):
        async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
            return {"steps": []}  # type: ignore[return-value]

    async with AgentRunner.open("memory://") as runner:
        result = await runner.execute(PlanningAgent(planner=Wrong()), "r", asking("x"))
    assert result.error is not None
    assert (result.error.type, result.error.retriable) == ("PlanningError", False)
    assert result.error.message == "Wrong.create_plan must return a Plan, got {'steps': []}."


async def test_the_plan_is_made_once() -> None:
    made: list[str] = []

    class Counting(RuleBasedPlanner):
        async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
            made.append(prompt)
            return await super().create_plan(prompt, available_tools)

    fails = [True]

    async def calculator(operation: str, a: float, b: float) -> float:
        if fails.pop():
            raise OSError("away")
        return a + b

    tools = ToolRegistry()
    tools.register(Tool.from_function(calculator))
    agent = PlanningAgent("counting", Counting(), tools, max_retries=1)
    async with Rig() as rig:
        failed = await planned(rig, agent, "add 1 and 2")
        assert failed.error is not None
        assert (failed.error.type, failed.error.retriable) == ("OSError", False)
        assert failed.error.details == {"step": "step_1", "attempts": 1}
        fails.append(False)
        assert (await planned(rig, agent, "add 1 and 2")).final_output["result"] == 3
    assert made == ["add 1 and 2"]


@pytest.mark.parametrize("attempts", [1, 3])
async def test_what_cannot_be_planned_fails_at_once_and_says_what_can(attempts: int) -> None:
    async with Rig(max_retries=attempts) as rig:
        result = await planned(rig, PlanningAgent(), "what is love?")
        assert len(await rig.told("run.started")) == 1
    assert result.error is not None
    assert result.error.type == "PlanningError"
    assert "This planner understands sums" in result.error.message
    assert "to-dos" in result.error.message


@pytest.mark.parametrize(
    ("own", "asked", "says"), [(1, None, "max_steps=1"), (5, 1, "max_steps=1"), (1, 5, "max_steps=1")]
)
async def test_a_plan_that_is_too_long_is_cut_or_refused(own: int, asked: int | None, says: str) -> None:
    params: dict[str, Any] = {} if asked is None else {"max_steps": asked}
    async with Rig() as rig:
        result = await planned(rig, PlanningAgent(max_steps=own), "add 1 and 2, then multiply by 3", **params)
    assert (result.status, result.final_output["result"]) == (RunStatus.SUCCEEDED, 3)
    assert [step["step_number"] for step in result.final_output["steps"]] == [1]
    assert len(result.final_output["plan"]["steps"]) == 2
    async with Rig(max_retries=3) as rig:
        agent = PlanningAgent(max_steps=own, on_long_plan="fail")
        result = await planned(rig, agent, "add 1 and 2, then multiply by 3", **params)
        assert await rig.told("tool") == []
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert says in result.error.message


@pytest.mark.parametrize("bad", [{"params": {"max_steps": 0}}, {"messages": []}, {"messages": [{"role": "user"}]}])
async def test_input_that_cannot_be_used_is_named(bad: dict[str, Any]) -> None:
    async with Rig() as rig:
        result = await rig.runner.execute(PlanningAgent(), "r", {**asking("add 1 and 2"), **bad})
    assert result.error is not None
    assert result.error.type == InvalidArgument.__name__


def answer(*steps: dict[str, Any]) -> str:
    return json.dumps({"final_goal": "g", "steps": list(steps)})


GOOD = answer({"step_number": 1, "kind": "tool_call", "tool_name": "calculator", "tool_input": {"expression": "6*7"}})


async def test_the_calls_of_a_planners_model_are_recorded_and_paid_once() -> None:
    client = Scripted("no JSON", ProviderUnavailable("away"), GOOD)
    agent = PlanningAgent("modelled", LLMPlanner(client, model="m-1"))
    async with Rig(max_retries=2) as rig:
        result = await planned(rig, agent, "six times seven")
        names = [record.name for record in await rig.records() if record.kind == "done"]
    assert result.final_output["result"] == 42
    assert len(client.asked) == 3, "the first answer is not asked for again"
    assert client.options[0] == {"model": "m-1"}
    assert (result.usage["turns"], result.usage["total_tokens"]) == (2, 240)
    assert names == ["model", "model", "plan", "step_1"]
    assert agent.planner.client is client  # type: ignore[attr-defined]


async def test_a_planners_client_may_tell_no_usage() -> None:
    silent = LLMResponse({"role": "assistant", "content": GOOD}, usage=None)  # type: ignore[arg-type]
    async with Rig() as rig:
        result = await planned(rig, PlanningAgent(planner=LLMPlanner(Scripted(silent))), "six times seven")
    assert result.final_output["result"] == 42
    assert result.usage == {"turns": 1, "tool_calls": 1}


async def test_a_recorded_answer_of_a_model_has_been_come_to_by_the_run() -> None:
    lives: list[str] = []

    async def body(ctx: Any) -> None:
        client = RecordedClient(ctx, Scripted("hello"), "plan", ctx.budget)
        lives.append((await client.generate([{"role": "user", "content": "hi"}])).message["content"])
        if len(lives) == 1:
            raise ConnectionError("down")
        await ctx.emit("word", {"said": lives[-1]})

    async with Rig(max_retries=2) as rig:
        await rig.value(body)
        assert lives == ["hello", "hello"]
        assert await rig.told("word") == [("word", {"said": "hello"})]


@pytest.mark.sentence("003", "`BasePlanner.create_plan(prompt, available_tools) -> Plan`")
async def test_a_plan_of_somebody_elses_planner_is_checked_too() -> None:
    class Wild(BasePlanner):
        async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
            return Plan([PlanStep(1, "rocket", {})])

    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1)) as runner:
        result = await runner.execute(PlanningAgent("wild", Wild()), "r", asking("fly"))
    assert result.error is not None
    assert result.error.details == {"problems": ["step 1: unknown tool 'rocket'. Known: calculator, todo_store."]}
