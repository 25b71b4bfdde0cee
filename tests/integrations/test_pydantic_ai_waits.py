"""Agents of Pydantic AI that ask people and wait for events, and the limits of their runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import CallDeferred
from pydantic_ai.tools import DeferredToolRequests
from pydantic_ai.tools import RunContext as AgentRunContext

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    RunLimits,
    RunnerConfig,
    RunResult,
    SyncRunContext,
    current_run,
)
from agent_runtime_core._core.run_tasks import RunTasks
from agent_runtime_core._execution.parking import Parking
from agent_runtime_core.integrations.pydantic_ai import Durable, publish_text
from agent_runtime_core.registry import Registry
from tests.support.pydantic_ai_models import Turns, once
from tests.support.runs import Script, soon


def request_input(*args: Any, **options: Any) -> AbstractCapability[Any]:
    """Return a capability of Pydantic AI 2.68 and later."""
    pytest.importorskip("pydantic_ai.external_events")
    from pydantic_ai.capabilities import RequestInput

    return RequestInput(*args, **options)


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


class Plain(AgentRuntime):
    """A plain run of an agent."""

    key = "plain"

    def __init__(self, agent: Agent[Any, Any]) -> None:
        self._agent = agent

    def run(self, ctx: SyncRunContext) -> RunResult:
        return RunResult({"value": self._agent.run_sync("pay").output})


async def test_run_sync_in_a_plain_run_asks_too() -> None:
    payments = Payments()
    async with AgentRunner.open("memory://") as runner:
        running = await begun(runner, Plain(payments.agent))
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

    agent = Agent(turns.model, name="waits", capabilities=[Durable(), request_input(ask, name="lookup")])

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
    request = request_input(lambda ctx, requests, token: None, name="lookup", timeout=timedelta(milliseconds=1))
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


@asynccontextmanager
async def worker(agent: AgentRuntime) -> AsyncIterator[AgentRunner]:
    """A runner that parks each wait at once, and has the submitted run `r` of this agent."""
    registry = Registry()
    registry.register(agent)
    config = RunnerConfig(park_after=0, max_retries=1)
    async with asyncio.timeout(20), AgentRunner.open("memory://", config=config, registry=registry) as runner:
        await runner.submit(agent, {}, run_id="r")
        yield runner


async def parked(runner: AgentRunner) -> bool:
    """Whether the worker gives the run back as a waiting one."""
    assert await runner.run_once()
    return (await runner.get_run("r")).status.value == "waiting"


async def finished(runner: AgentRunner) -> Any:
    """What the run returns, once the worker has executed it again."""
    assert await runner.run_once()
    return (await runner.wait("r", timeout=0)).final_output["value"]


async def iterated(agent: Agent[Any, Any]) -> Any:
    async with agent.iter("go") as run:
        async for _ in run:
            pass
    assert run.result is not None
    return run.result.output


async def streamed(agent: Agent[Any, Any]) -> Any:
    async with agent.run_stream_events("go") as events:
        async for _ in events:
            pass
    assert events.result is not None
    return events.result.output


async def with_a_handler(agent: Agent[Any, Any]) -> Any:
    async def read(ctx: AgentRunContext[Any], events: Any) -> None:
        async for _ in events:
            pass

    return (await agent.run("go", event_stream_handler=read)).output


async def as_a_tool(agent: Agent[Any, Any]) -> Any:
    turns = Turns([("delegate", {})], ["done"])
    outer = Agent(turns.model, name="outer", capabilities=[Durable()])

    @outer.tool_plain(metadata={"agent_runtime": False})
    async def delegate() -> str:
        return str(await _output(agent))

    return await _output(outer)


@pytest.mark.parametrize("options", [{}, {"event_stream_handler": publish_text}], ids=["", "publish_text"])
@pytest.mark.parametrize("use", [_output, iterated, streamed, with_a_handler, as_a_tool, Plain])
async def test_a_run_whose_agent_asks_is_parked(use: Any, options: dict[str, Any]) -> None:
    payments = Payments(**options)
    script = Plain(payments.agent) if use is Plain else Script(lambda ctx: use(payments.agent))
    async with worker(script) as runner:
        assert await parked(runner)
        for question in await asked(runner, 2):
            await runner.approve("r", "tool:pay", True, request_id=question["request_id"])
        assert (await finished(runner)).strip() == "done"
    assert (sorted(payments.paid), payments.turns.calls) == ([5, 6], [1, 2])


async def test_a_run_with_two_agents_is_parked_when_both_ask() -> None:
    both = Payments(name="first"), Payments(name="second")

    async def body(ctx: Any) -> list[Any]:
        return list(await asyncio.gather(*(_output(each.agent) for each in both)))

    async with worker(Script(body)) as runner:
        assert await parked(runner)
        questions = await asked(runner, 4)
        for question in questions[:2]:
            await runner.approve("r", "tool:pay", True, request_id=question["request_id"])
        assert await parked(runner), "one of the agents still waits"
        for question in questions[2:]:
            await runner.approve("r", "tool:pay", True, request_id=question["request_id"])
        assert await finished(runner) == ["done", "done"]
    assert [(sorted(each.paid), each.turns.calls) for each in both] == [([5, 6], [1, 2])] * 2


async def test_a_run_whose_agent_waits_for_a_signal_is_parked() -> None:
    turns, tokens = Turns([("look", {})], ["done"]), list[str]()
    request = request_input(lambda ctx, requests, token: tokens.append(token), name="lookup")
    agent = Agent(turns.model, name="waits", capabilities=[Durable(), request])

    @agent.tool_plain
    def look() -> str:
        raise CallDeferred

    async with worker(Script(lambda ctx: _output(agent))) as runner:
        assert await parked(runner)
        await runner.signal("r", tokens[0], {"calls": {"call-1-0": "found"}})
        assert await finished(runner) == "done"
    assert (len(tokens), turns.calls) == (1, [1, 2])


class Asking:
    """An agent whose tools ask, and do some work, in one turn and outside of steps."""

    def __init__(self, *capabilities: AbstractCapability[Any]) -> None:
        self.works, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), 0
        turns = Turns([("ask", {}), ("work", {})], ["done"])
        self.agent = Agent(turns.model, name="asks", capabilities=[Durable(), *capabilities])
        self.agent.tool_plain(metadata={"agent_runtime": False})(self.ask)
        self.agent.tool_plain(metadata={"agent_runtime": False})(self.work)

    async def ask(self) -> bool:
        run = current_run()
        assert run is not None
        return bool(await run.approve("may I"))

    async def work(self) -> None:
        self.works.set()
        await self.may_end.wait()
        self.ended += 1


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[RunTasks]:
    """What the scans of the tasks of runs find."""
    found: list[RunTasks] = []
    check = Parking.check_tasks

    def noted(self: Parking, tasks: RunTasks) -> bool:
        found.append(tasks)
        return check(self, tasks)

    monkeypatch.setattr(Parking, "check_tasks", noted)
    return found


async def still_works(scans: list[RunTasks]) -> bool:
    """Whether the next scans find a task that works."""
    scans.clear()
    await soon(lambda: len(scans) >= 3)
    return all(each.working for each in scans)


async def test_a_run_is_not_parked_while_another_tool_of_its_agent_works(scans: list[RunTasks]) -> None:
    asking = Asking()
    async with worker(Script(lambda ctx: _output(asking.agent))) as runner:
        executing = asyncio.ensure_future(parked(runner))
        await asking.works.wait()
        await asked(runner, 1)
        assert await still_works(scans)
        assert not executing.done()
        asking.may_end.set()
        assert await executing
        assert asking.ended == 1
        await runner.approve("r", "may I", True)
        assert await finished(runner) == "done"


@pytest.mark.parametrize("hook", ["before_run", "after_run", "wrap_run"])
async def test_a_run_is_not_parked_while_a_hook_of_an_agent_works(hook: str, scans: list[RunTasks]) -> None:
    """A hook runs in the task that otherwise waits until the agent has ended."""
    works, may_end = asyncio.Event(), asyncio.Event()

    async def work(result: Any = None) -> Any:
        works.set()
        await may_end.wait()
        return result

    class Hooks(AbstractCapability[Any]):
        async def before_run(self, ctx: Any) -> None:
            if hook == "before_run":
                await work()

        async def after_run(self, ctx: Any, *, result: Any) -> Any:
            return await work(result) if hook == "after_run" else result

        async def wrap_run(self, ctx: Any, *, handler: Any) -> Any:
            return await work(await handler()) if hook == "wrap_run" else await handler()

    payments = Payments()
    turns = Turns(["done"])
    agent = Agent(turns.model, name="works", capabilities=[Durable(), Hooks()])

    async def body(ctx: Any) -> list[Any]:
        return list(await asyncio.gather(_output(payments.agent), _output(agent)))

    async with worker(Script(body)) as runner:
        executing = asyncio.ensure_future(parked(runner))
        await works.wait()
        await asked(runner, 2)
        assert await still_works(scans)
        assert not executing.done()
        may_end.set()
        assert await executing
        for question in await asked(runner, 2):
            await runner.approve("r", "tool:pay", True, request_id=question["request_id"])
        assert await finished(runner) == ["done", "done"]
