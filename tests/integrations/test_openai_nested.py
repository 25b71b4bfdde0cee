"""Agents of OpenAI Agents inside others: errors that end the run, and policies of tools that agents share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import Agent, function_tool, set_tracing_disabled
from agents.testing import assistant_message, function_call

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunLimits, RunnerConfig, RunResult, open_run
from agent_runtime_core.integrations.openai_agents import durable, run_agent
from tests.support.openai_models import FakeModel, results

set_tracing_disabled(True)


def asking(tool: str, times: int, **arguments: Any) -> FakeModel:
    """A model that calls a tool so often, and then says the results."""

    def answer(items: list[dict[str, Any]]) -> list[Any]:
        found = results(items)
        if len(found) < times:
            return [function_call(tool, arguments, call_id=f"{tool}_{len(found)}")]
        return [assistant_message(" ".join(map(str, found)))]

    return FakeModel(answer)


class Nested(AgentRuntime):
    """Asks an agent that asks an agent that pays, each as a tool of the other."""

    key = "nested"

    def __init__(self) -> None:
        self.paid: list[int] = []

    async def run(self, ctx: RunContext) -> RunResult:
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            return "paid"

        payer = Agent(name="payer", model=asking("pay", 2, amount=7), tools=[function_tool(pay)])
        clerk = Agent(name="clerk", model=asking("ask_payer", 1, input="Pay!"), tools=[payer.as_tool("ask_payer", "")])
        chief = Agent(name="chief", model=asking("ask_clerk", 1, input="Pay!"), tools=[clerk.as_tool("ask_clerk", "")])
        result = await run_agent(durable(chief, on_in_doubt={"pay": "fail"}), "Pay!")
        return RunResult(final_output={"said": result.final_output})


async def test_a_limit_reached_in_an_inner_agent_ends_the_run(tmp_path: Path) -> None:
    agent = Nested()
    config = RunnerConfig(limits=RunLimits(max_tool_calls=1))
    async with AgentRunner.open(str(tmp_path / "runs.db"), config=config) as runner:
        for _ in range(2):  # a resumed run stops in the same place
            result = await runner.execute(agent, run_id="one")
            assert result.error is not None, result.final_output
            assert (result.error.type, agent.paid) == ("LimitExceeded", [7])


async def test_a_fork_does_not_repeat_a_guarded_call_of_an_inner_agent(tmp_path: Path) -> None:
    agent = Nested()
    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        first = await runner.execute(agent, run_id="one", raise_on_error=True)
        assert first.final_output == {"said": "paid paid"}
        fork = await runner.fork("one", ("openai:model", "chief.0/1:ask_clerk_0/1:ask_payer_0/1"), new_run_id="two")
        result = await runner.execute(agent, fork)
    assert result.error is not None, result.final_output
    assert (result.error.type, agent.paid) == ("EffectAlreadyDone", [7, 7])


@pytest.mark.parametrize("on_in_doubt", ["fail", {"pay": "fail"}])
async def test_a_tool_of_two_agents_has_the_policy_that_was_set_last(tmp_path: Path, on_in_doubt: Any) -> None:
    paid: list[int] = []

    async def pay(amount: int) -> str:
        paid.append(amount)
        return "paid"

    tool = function_tool(pay)
    other = Agent(name="other", model=asking("pay", 1, amount=1), tools=[tool])
    payer = Agent(name="payer", model=asking("pay", 1, amount=7), tools=[tool])
    durable(other)
    durable(payer, on_in_doubt=on_in_doubt)
    durable(payer, on_in_doubt={"another tool": "retry"})

    class Payer(AgentRuntime):
        key = "payer"

        async def run(self, ctx: RunContext) -> RunResult:
            return RunResult(final_output={"said": (await run_agent(payer, "Pay!")).final_output})

    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        await runner.execute(Payer(), run_id="one", raise_on_error=True)
        fork = await runner.fork("one", ("openai:model", "payer.0/1"))
        result = await runner.execute(Payer(), fork)
    assert result.error is not None, result.final_output
    assert (result.error.type, paid) == ("EffectAlreadyDone", [7])


async def test_an_agent_that_was_added_before_another_one_leaves_it_its_saved_answers(tmp_path: Path) -> None:
    asked: list[str] = []

    def agent(name: str) -> Agent[Any]:
        def answer(items: list[dict[str, Any]]) -> list[Any]:
            asked.append(name)
            return [assistant_message(f"{name} {len(asked)}")]

        return Agent(name=name, model=FakeModel(answer))

    added, payer = agent("added"), agent("payer")

    async def answers(*agents: Agent[Any], crash: bool = False) -> list[str]:
        async with open_run(str(tmp_path / "runs.db"), run_id="one"):
            said = [str((await run_agent(each, "Pay!")).final_output) for each in agents]
            if crash:
                raise KeyboardInterrupt
            return said

    with pytest.raises(KeyboardInterrupt):
        await answers(payer, payer, crash=True)
    assert await answers(added, payer, payer) == ["added 3", "payer 1", "payer 2"]
    assert asked == ["payer", "payer", "added"]


async def test_an_agent_in_a_step_that_is_attempted_again_finds_its_saved_answers(tmp_path: Path) -> None:
    model = asking("pay", 1, amount=7)
    paid: list[int] = []

    async def pay(amount: int) -> str:
        paid.append(amount)
        return "paid"

    async def work() -> str:
        result = await run_agent(Agent(name="payer", model=model, tools=[function_tool(pay)]), "Pay!")
        attempts.append(str(result.final_output))
        if len(attempts) == 1:
            raise ConnectionError("the network is down")
        return attempts[-1]

    attempts: list[str] = []
    async with open_run(str(tmp_path / "runs.db"), run_id="one") as ctx:
        assert await ctx.step("work", work, retries=1, retry_delay=0.0) == "paid"
    assert (len(attempts), paid, len(model.asked)) == (2, [7], 2)
