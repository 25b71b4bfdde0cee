"""Agents of Pydantic AI that ask people and wait for events, and the limits of their runs."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent
from pydantic_ai.capabilities import RequestInput
from pydantic_ai.exceptions import CallDeferred
from pydantic_ai.tools import DeferredToolRequests
from pydantic_ai.tools import RunContext as AgentRunContext

from agent_runtime_core import AgentRunner, AgentRuntime, RunLimits, RunnerConfig, RunResult, SyncRunContext
from agent_runtime_core.integrations.pydantic_ai import Durable
from tests.support.pydantic_ai_models import Turns, once
from tests.support.runs import Script


async def begun(runner: AgentRunner, agent: AgentRuntime) -> asyncio.Task[RunResult]:
    """The task that executes the agent, once the run is stored."""
    await runner.submit(agent, {}, run_id="r")
    return asyncio.ensure_future(runner.execute(agent, "r", raise_on_error=True))


async def asked(runner: AgentRunner, count: int) -> list[dict[str, Any]]:
    """The first questions of the run, once there are so many."""
    found: list[dict[str, Any]] = []
    async for event in runner.stream("r"):
        if event.event_type == "approval.requested":
            found.append(event.payload)
            if len(found) == count:
                break
    return found


class Payments:
    """An agent whose two payments need approval."""

    def __init__(self, **options: Any) -> None:
        self.turns = Turns([("pay", {"amount": 5}), ("pay", {"amount": 6})], ["done"])
        self.agent = Agent(self.turns.model, name="pays", capabilities=[Durable(**options)])
        self.paid: list[int] = []
        self.agent.tool_plain(requires_approval=True)(self.pay)

    def pay(self, amount: int) -> str:
        self.paid.append(amount)
        return f"paid {amount}"

    async def run(self, ctx: Any) -> list[Any]:
        messages = (await self.agent.run("pay")).all_messages()
        return [part.content for message in messages for part in message.parts if part.part_kind == "tool-return"]


@pytest.mark.parametrize(
    ("answers", "contents", "paid"),
    [
        ((True, True), ["paid 5", "paid 6"], [5, 6]),
        ((True, False), ["paid 5", "A person denied this tool call."], [5]),
        (({"approved": True, "arguments": {"amount": 1}}, {"approved": False, "reason": "no"}), ["paid 1", "no"], [1]),
    ],
)
async def test_tools_that_need_approval_ask_a_person(answers: Any, contents: list[str], paid: list[int]) -> None:
    payments = Payments()
    async with AgentRunner.open("memory://") as runner:
        running = await begun(runner, Script(payments.run))
        questions = await asked(runner, 2)
        assert [each["details"]["tool_args"] for each in questions] == [{"amount": 5}, {"amount": 6}]
        assert payments.paid == []
        for question, answer in zip(questions, answers, strict=True):
            await runner.approve("r", "tool:pay", answer, request_id=question["request_id"])
        assert (await running).final_output == {"value": contents}
    assert (sorted(payments.paid), payments.turns.calls) == (paid, [1, 2])


async def test_an_answer_that_comes_after_a_restart_is_used(tmp_path: Path) -> None:
    payments = Payments()
    place = tmp_path / "runs.db"
    async with AgentRunner.open(place) as runner:
        running = await begun(runner, Script(payments.run))
        await asked(runner, 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with AgentRunner.open(place) as runner:
        for question in await asked(runner, 2):
            await runner.approve("r", "tool:pay", True, request_id=question["request_id"])
        result = await runner.execute(Script(payments.run), "r", raise_on_error=True)
    assert result.final_output == {"value": ["paid 5", "paid 6"]}
    assert (sorted(payments.paid), payments.turns.calls) == ([5, 6], [1, 2])


async def test_run_sync_in_a_plain_run_asks_too() -> None:
    payments = Payments()

    class Plain(AgentRuntime):
        key = "plain"

        def run(self, ctx: SyncRunContext) -> RunResult:
            return RunResult({"value": payments.agent.run_sync("pay").output})

    async with AgentRunner.open("memory://") as runner:
        running = await begun(runner, Plain())
        for question in await asked(runner, 2):
            await runner.approve("r", "tool:pay", True, request_id=question["request_id"])
        assert (await running).final_output == {"value": "done"}
    assert sorted(payments.paid) == [5, 6]


async def test_without_approve_the_requests_are_the_output() -> None:
    turns = Turns([("pay", {})])
    agent = Agent(
        turns.model, name="defers", output_type=[str, DeferredToolRequests], capabilities=[Durable(approve=False)]
    )

    @agent.tool_plain(requires_approval=True)
    def pay() -> str:
        return "paid"

    async def body(ctx: Any) -> Any:
        output = (await agent.run("pay")).output
        assert isinstance(output, DeferredToolRequests)
        return [call.tool_name for call in output.approvals]

    assert (await once(body)).final_output == {"value": ["pay"]}


async def test_a_call_that_is_answered_from_outside_waits_for_a_signal() -> None:
    turns = Turns([("look", {})], ["done"])
    tokens: list[str] = []
    handed_out = asyncio.Event()

    async def ask(ctx: AgentRunContext[Any], requests: DeferredToolRequests, token: str) -> None:
        tokens.append(token)
        handed_out.set()

    agent = Agent(turns.model, name="waits", capabilities=[Durable(), RequestInput(ask, name="lookup")])

    @agent.tool_plain
    def look() -> str:
        raise CallDeferred

    async def body(ctx: Any) -> Any:
        messages = (await agent.run("go")).all_messages()
        return [part.content for message in messages for part in message.parts if part.part_kind == "tool-return"]

    async with AgentRunner.open("memory://") as runner:
        running = await begun(runner, Script(body))
        await handed_out.wait()
        await runner.signal("r", tokens[0], {"calls": {"call-1-0": "found"}})
        assert (await running).final_output == {"value": ["found"]}
    assert (len(tokens), turns.calls) == (1, [1, 2])


async def test_a_call_that_nobody_answers_in_time_fails() -> None:
    turns = Turns([("look", {})], ["done"])
    request = RequestInput(lambda ctx, requests, token: None, name="lookup", timeout=timedelta(milliseconds=1))
    agent = Agent(turns.model, name="waits", capabilities=[Durable(), request])

    @agent.tool_plain
    def look() -> str:
        raise CallDeferred

    assert (await once(Script(lambda ctx: _output(agent)))).final_output == {"value": "done"}


@pytest.mark.parametrize(
    ("limits", "limit", "calls"),
    [
        ({"max_turns": 1}, "max_turns", [1]),
        ({"max_tokens": 20}, "max_tokens", [1]),
        ({"max_tokens": 1000}, None, [1, 2]),
    ],
)
async def test_limits_of_the_run_end_the_agent(limits: dict[str, Any], limit: str | None, calls: list[int]) -> None:
    turns = Turns([("hello", {})], ["bye"])
    agent = Agent(turns.model, name="limited", capabilities=[Durable()])

    @agent.tool_plain
    def hello() -> str:
        return "hello"

    config = RunnerConfig(max_retries=1, limits=RunLimits(**limits))
    async with AgentRunner.open("memory://", config=config) as runner:
        script = Script(lambda ctx: _output(agent))
        result = await runner.execute(script, "r")
        assert (result.error.type if result.error else None) == ("LimitExceeded" if limit else None)
        assert limit is None or (result.error is not None and limit in result.error.message)
        assert turns.calls == calls
        again = await runner.execute(script, "r")
        assert turns.calls == calls, "a resumed run stops in the same place"
        assert again.usage["total_tokens"] == 20 * len(calls)
        if limit:
            await runner.resume("r", limits={limit: None})
            result = await runner.execute(script, "r", raise_on_error=True)
            assert (turns.calls, result.usage["total_tokens"]) == ([1, 2], 40)


async def test_tool_calls_count_against_the_limits_of_the_run() -> None:
    turns = Turns([("hello", {}), ("hello", {}), ("hello", {})], ["bye"])
    agent = Agent(turns.model, name="limited", capabilities=[Durable()])
    made: list[int] = []

    @agent.tool_plain(sequential=True)
    def hello() -> None:
        made.append(1)

    config = RunnerConfig(max_retries=1, limits=RunLimits(max_tool_calls=2))
    async with AgentRunner.open("memory://", config=config) as runner:
        result = await runner.execute(Script(lambda ctx: _output(agent)), "r")
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert len(made) == 2


async def _output(agent: Agent[Any, Any]) -> Any:
    return (await agent.run("go")).output


@pytest.mark.parametrize("metadata", [None, {"agent_runtime": False}])
async def test_an_agent_that_is_a_tool_asks_too_and_its_answer_survives_a_restart(
    metadata: dict[str, Any] | None, tmp_path: Path
) -> None:
    payments = Payments()
    turns = Turns([("delegate", {})], ["delegated"])
    outer = Agent(turns.model, name="outer", capabilities=[Durable()])

    @outer.tool_plain(metadata=metadata)
    async def delegate() -> str:
        return (await payments.agent.run("pay")).output

    place = tmp_path / "runs.db"
    script = Script(lambda ctx: _output(outer))
    async with AgentRunner.open(place) as runner:
        running = await begun(runner, script)
        questions = await asked(runner, 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with AgentRunner.open(place) as runner:
        for question in questions:
            await runner.approve("r", "tool:pay", True, request_id=question["request_id"])
        result = await runner.execute(script, "r", raise_on_error=True)
    assert result.final_output == {"value": "delegated"}
    assert (sorted(payments.paid), payments.turns.calls, turns.calls) == ([5, 6], [1, 2], [1, 2])
