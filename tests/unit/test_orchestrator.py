"""The orchestrator: runs of prompts, what is told of them, and that they outlive it where the backends do."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunLimits, UnknownRun
from agent_runtime_core.config import configure
from agent_runtime_core.errors import InvalidArgument, RunNotFound
from agent_runtime_core.orchestrator import Orchestrator, RunCreate, RunResponse, RunStatus
from agent_runtime_core.planning import BasePlanner, Plan, PlanStep, RuleBasedPlanner
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig
from agent_runtime_core.tools import CalculatorTool, Tool, ToolDefinition, ToolRegistry
from tests.support.fault_runs import eventually
from tests.support.runs import Rig, Script


class Gate:
    """A tool that waits until it is let through, with a planner that knows it."""

    def __init__(self, **about: Any) -> None:
        self.inside, self.open = asyncio.Event(), asyncio.Event()
        self.tools = ToolRegistry()
        self.tools.register(CalculatorTool())
        self.tools.register(Tool.from_function(self.wait, name="wait", **about))
        self.planner = RuleBasedPlanner()
        self.planner.rule("wait", lambda found: ("wait", {}))
        self.calls = 0

    async def wait(self) -> str:
        """Waits."""
        self.calls += 1
        self.inside.set()
        await self.open.wait()
        return "through"


async def ended(orchestrator: Orchestrator, prompt: str, **more: Any) -> RunResponse:
    created = await orchestrator.create_run(prompt=prompt, **more)
    return await orchestrator.wait(created.run_id, timeout=10)


@pytest.mark.sentence("003", "`create_run` creates and starts an execution run")
async def test_a_prompt_becomes_a_run_in_the_background() -> None:
    async with Orchestrator(planner=RuleBasedPlanner()) as orchestrator:
        created = await orchestrator.create_run(
            RunCreate("add 12 and 30, then remember the result as a to-do, list my to-dos", max_steps=3)
        )
        assert (created.status, created.steps, created.result) == (RunStatus.PENDING, [], None)
        assert isinstance(created.run_id, str)
        done = await orchestrator.wait(created.run_id, timeout=10)
    assert (done.status, done.error) == (RunStatus.COMPLETED, None)
    assert done.created_at == created.created_at <= done.updated_at
    assert done.steps[0] == {
        "step_number": 1, "tool_name": "calculator", "tool_input": {"operation": "add", "a": 12, "b": 30},
        "result": {"success": True, "output": 42, "error": None}, "attempt": 1,
    }  # fmt: skip
    assert [each["tool_input"] for each in done.steps[1:]] == [
        {"action": "add", "text": "Result: 42"},
        {"action": "list"},
    ]
    assert [each["text"] for each in done.result] == ["Result: 42"]
    assert json.loads(json.dumps(done.to_dict()))["status"] == "completed"


async def test_without_work_another_worker_executes_the_runs() -> None:
    registry = Registry()
    runner = AgentRunner.open("memory://", registry=registry)
    orchestrator = Orchestrator(runner=runner, work=False)
    async with orchestrator:
        run = await orchestrator.create_run(prompt="add 3 and 4")
        assert not await runner.run_once()  # it does not know the agent
        registry.register(orchestrator.agent)
        assert await runner.run_once()
        assert (await orchestrator.get_run(run.run_id)).result == 7
    await runner.close()


async def test_steps_appear_as_they_complete() -> None:
    gate = Gate()
    async with Orchestrator(gate.planner, gate.tools) as orchestrator:
        created = await orchestrator.create_run(prompt="add 1 and 2, then wait, then add 3 and 4")
        await gate.inside.wait()
        await eventually(lambda: _has_steps(orchestrator, created.run_id, 2))
        there = await orchestrator.get_run(created.run_id)
        assert there.status is RunStatus.RUNNING
        assert [each["step_number"] for each in there.steps] == [1, 3]
        gate.open.set()
        done = await orchestrator.wait(created.run_id, timeout=10)
    assert [each["step_number"] for each in done.steps] == [1, 2, 3]
    assert done.result == [3, "through", 7]


async def _has_steps(orchestrator: Orchestrator, run_id: str, count: int) -> bool:
    return len((await orchestrator.get_run(run_id)).steps) == count


@pytest.mark.sentence("003", "Integration: multiple tool usage, error recovery, concurrent runs")
async def test_many_runs_at_once() -> None:
    async with Orchestrator() as orchestrator:
        created = await asyncio.gather(*(orchestrator.create_run(prompt=f"add {i} and 1") for i in range(20)))
        assert len({each.run_id for each in created}) == 20
        told = [await orchestrator.wait(each.run_id, timeout=10) for each in created]
        assert [each.result for each in told] == list(range(1, 21))


@pytest.mark.sentence("003", "A step entry has `step_number`, `tool_name`, `tool_input`, `result`, `attempt`")
async def test_every_try_of_a_step_is_told_and_after_the_last_the_run_fails() -> None:
    async with Orchestrator(settings={"max_retries": 2, "backoff_base": 0.0}) as orchestrator:
        failed = await ended(orchestrator, "add 1 and 2, then divide 1 by 0")
    assert failed.status is RunStatus.FAILED
    why = (
        "step 'step_2' failed after 2 attempts: tool 'calculator' did not succeed: "
        "division by zero: the divisor must be other than 0, got 0."
    )
    assert failed.error == f"ToolFailed: {why}"
    assert [(each["step_number"], each["attempt"], each["result"]["success"]) for each in failed.steps] == [
        (1, 1, True),
        (2, 1, False),
        (2, 2, False),
    ]
    assert (
        failed.steps[1]["result"]["error"]
        == "tool 'calculator' did not succeed: division by zero: the divisor must be other than 0, got 0."
    )
    assert failed.result is None


@pytest.mark.sentence("003", "Each step is tried up to 3 times with exponential backoff")
async def test_steps_are_tried_three_times_by_default_a_second_apart_at_first() -> None:
    async with Orchestrator() as orchestrator:
        created = await orchestrator.create_run(prompt="divide 1 by 0")
        async for event in orchestrator.runner.stream(created.run_id):
            if event.event_type == "step.retrying":
                break
        assert (event.payload["max_attempts"], event.payload["retry_delay"]) == (3, 1.0)
        there = await orchestrator.get_run(created.run_id)
        assert (there.status, [each["attempt"] for each in there.steps]) == (RunStatus.RUNNING, [1])
        await orchestrator.runner.cancel(created.run_id)


@pytest.mark.sentence("003", "`plan.steps[:max_steps]`: a longer plan is cut")
async def test_a_plan_that_is_too_long_is_cut_and_completes() -> None:
    async with Orchestrator() as orchestrator:
        done = await ended(orchestrator, "add 1 and 2, then multiply by 3", max_steps=1)
    assert (done.status, done.result, done.error) == (RunStatus.COMPLETED, 3, None)
    assert [step["step_number"] for step in done.steps] == [1]


async def test_a_plan_that_is_too_long_may_fail() -> None:
    async with Orchestrator(settings={"on_long_plan": "fail"}) as orchestrator:
        failed = await ended(orchestrator, "add 1 and 2, then multiply by 3", max_steps=1)
        assert (failed.status, failed.steps) == (RunStatus.FAILED, [])
        assert (
            failed.error
            == "LimitExceeded: limit reached: max_steps=1, used 2 (the plan has more steps, and none was started)"
        )


async def test_tools_may_be_a_list() -> None:
    async with Orchestrator(tool_registry=[CalculatorTool()]) as orchestrator:
        assert (await ended(orchestrator, "add 1 and 2")).result == 3


async def test_results_that_are_more_than_json_are_told_as_text() -> None:
    when = dt.datetime(2026, 11, 22, 12, 0, tzinfo=dt.UTC)

    async def now() -> dict[str, Any]:
        return {"at": when, "cost": Decimal("1.50"), "raw": b"abc", "names": {"b", "a"}}

    planner = RuleBasedPlanner()
    planner.rule("now", lambda found: ("now", {}))
    async with Orchestrator(planner, [Tool.from_function(now)]) as orchestrator:
        done = await ended(orchestrator, "now")
    assert done.result["at"] == when
    told = json.loads(json.dumps(done.to_dict()))
    assert told["result"] == {"at": when.isoformat(), "cost": "1.50", "raw": "YWJj", "names": ["a", "b"]}
    assert told["steps"][0]["result"]["output"] == told["result"]
    assert told["created_at"] == done.created_at.isoformat()


def test_work_that_began_on_a_loop_that_is_gone_goes_on_where_it_is_waited_for() -> None:
    orchestrator = Orchestrator(settings={"concurrent_runs": 1})

    async def two() -> RunResponse:
        await orchestrator.create_run(prompt="add 1 and 2")
        return await orchestrator.create_run(prompt="add 3 and 4")

    async def waited() -> RunResponse:
        try:
            return await orchestrator.wait(second.run_id, timeout=10)
        finally:
            await orchestrator.close()

    second = asyncio.run(two())
    assert asyncio.run(waited()).result == 7


@pytest.mark.sentence("003", "If planning or a step fails, the run is `failed` with an error")
async def test_what_cannot_be_planned_says_what_can() -> None:
    async with Orchestrator() as orchestrator:
        for prompt in ("what is love?", ""):
            failed = await ended(orchestrator, prompt)
            assert failed.status is RunStatus.FAILED
            assert "understands sums" in (failed.error or "")


@pytest.mark.sentence("003", "`RunCreate`: `prompt`, `max_steps` (default 10, from 1 to 100)")
@pytest.mark.parametrize("most", [0, 101, -1, True, 2.0, "10", None])
async def test_max_steps_is_from_1_to_100(most: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_steps must be an integer from 1 to 100"):
        RunCreate("add 1 and 2", most)
    async with Orchestrator() as orchestrator:
        with pytest.raises(ValueError, match="max_steps"):
            await orchestrator.create_run(prompt="add 1 and 2", max_steps=most)
        assert await orchestrator.runner.runs() == []


async def test_arguments_and_settings_that_fit_nowhere() -> None:
    async with Orchestrator() as orchestrator:
        with pytest.raises(InvalidArgument, match="request must be a RunCreate, got None"):
            await orchestrator.create_run()
        with pytest.raises(
            InvalidArgument, match=r"request must be a RunCreate, got RunCreate\(prompt='a', max_steps=10\)"
        ):
            await orchestrator.create_run(RunCreate("a"), prompt="b")
        wrong: Any = "add 1 and 2"
        with pytest.raises(InvalidArgument, match="request must be a RunCreate, got 'add 1 and 2'"):
            await orchestrator.create_run(wrong)
        with pytest.raises(
            InvalidArgument, match=r"max_steps must equal the 5 of the RunCreate, got 3\. Set it there only"
        ):
            await orchestrator.create_run(RunCreate("add 1 and 2", 5), max_steps=3)
    for planner in ("rules", RuleBasedPlanner):
        unusable: Any = planner
        with pytest.raises(InvalidArgument, match="a planner must be an instance with create_plan"):
            Orchestrator(unusable)
    with pytest.raises(InvalidArgument, match="a ToolRegistry or a list of tools, got 5"):
        Orchestrator(tool_registry=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="prompt must be a string, got 5"):
        RunCreate(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="Did you mean 'max_retries'"):
        Orchestrator(settings={"max_retrys": 1})
    with pytest.raises(InvalidArgument, match="settings must be OrchestratorSettings"):
        Orchestrator(settings=3)  # type: ignore[arg-type]
    for bad in ({"max_retries": 0}, {"backoff_base": -1}, {"concurrent_runs": 1.5}, {"max_concurrency": True}):
        with pytest.raises(InvalidArgument, match=next(iter(bad))):
            Orchestrator(settings=bad)


@pytest.mark.sentence("003", "`get_run`: a run that does not exist is a `ValueError`")
async def test_a_run_that_is_not_there() -> None:
    async with Rig() as rig:
        orchestrator = Orchestrator(runner=rig.runner)

        async def body(ctx: Any) -> None:
            return None

        await rig.runner.execute(Script(body), "another-agents")
        for run_id in ("nope", "another-agents"):
            with pytest.raises(RunNotFound) as caught:
                await orchestrator.get_run(run_id)
            assert str(caught.value) == f"Run not found: {run_id}"
            assert "runner.get_run(run_id)" in caught.value.__notes__[0]
            assert isinstance(caught.value, ValueError)
            assert isinstance(caught.value, KeyError)
            assert isinstance(caught.value, UnknownRun)


@pytest.mark.parametrize(
    ("how", "says"), [("cancel", "cancelled"), ("timeout", "timed_out: the attempt took more than")]
)
async def test_other_endings_are_failures_that_name_themselves(how: str, says: str) -> None:
    gate = Gate()
    config = RunnerConfig(run_timeout_seconds=0.05 if how == "timeout" else 60, grace_seconds=0.1)
    async with AgentRunner.open("memory://", config=config) as runner:
        async with Orchestrator(gate.planner, gate.tools, runner=runner) as orchestrator:
            created = await orchestrator.create_run(prompt="wait")
            await gate.inside.wait()
            if how == "cancel":
                await runner.cancel(created.run_id)
            done = await orchestrator.wait(created.run_id, timeout=10)
        assert done.status is RunStatus.FAILED
        assert (done.error or "").startswith(says)


async def test_a_run_that_waits_for_a_person_is_running() -> None:
    gate = Gate(requires_confirmation=True)
    gate.open.set()
    config = RunnerConfig(park_after=0)
    async with (
        AgentRunner.open("memory://", config=config) as runner,
        Orchestrator(gate.planner, gate.tools, runner=runner) as orchestrator,
    ):
        created = await orchestrator.create_run(prompt="wait")

        async def parked() -> bool:
            return (await runner.get_run(created.run_id)).status.value == "waiting"

        await eventually(parked)
        assert (await orchestrator.get_run(created.run_id)).status is RunStatus.RUNNING
        await runner.approve(created.run_id, "tool:wait", True)
        done = await orchestrator.wait(created.run_id, timeout=10)
        assert (done.status, done.result) == (RunStatus.COMPLETED, "through")


async def test_a_step_that_a_person_took_all_arguments_from_is_told_without_them() -> None:
    async def greet(name: str = "world") -> str:
        return f"hello {name}"

    class Greeting(BasePlanner):
        async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
            return Plan([PlanStep(1, "greet", {"name": "Bob"})])

    tools = [Tool.from_function(greet, requires_confirmation=True)]
    async with Orchestrator(Greeting(), tools) as orchestrator:
        created = await orchestrator.create_run(prompt="greet")
        await orchestrator.runner.approve(created.run_id, "tool:greet", {"approved": True, "arguments": {}})
        done = await orchestrator.wait(created.run_id, timeout=10)
        assert done.result == "hello world"
        assert [each["tool_input"] for each in done.steps] == [{}]


async def test_one_key_is_one_run() -> None:
    async with Orchestrator() as orchestrator:
        one = await orchestrator.create_run(prompt="add 1 and 2", idempotency_key="k")
        await orchestrator.wait(one.run_id, timeout=10)
        same = await orchestrator.create_run(prompt="add 1 and 2", idempotency_key="k")
        assert (same.run_id, same.status, same.result) == (one.run_id, RunStatus.COMPLETED, 3)


async def test_closed_it_has_done_what_was_asked_of_it_in_memory() -> None:
    orchestrator = Orchestrator(settings={"concurrent_runs": 1})
    created = [await orchestrator.create_run(prompt=f"add {i} and 1") for i in range(5)]
    runner = orchestrator.runner
    seen: list[Any] = []
    close = runner.close

    async def closing() -> None:
        seen.extend([(await runner.get_run(each.run_id)).status.value for each in created])
        await close()

    vars(runner)["close"] = closing
    await orchestrator.close()
    assert seen == ["succeeded"] * 5


async def test_a_given_runner_stays_open_and_its_own_agents_are_left_alone(tmp_path: Path) -> None:
    async def body(ctx: Any) -> str:
        return "mine"

    agents = Registry()
    agents.register(Script(body))
    async with AgentRunner.open(tmp_path / "r.db", registry=agents) as runner:
        await runner.submit("script", {}, run_id="mine")
        async with Orchestrator(runner=runner) as orchestrator:
            assert (await ended(orchestrator, "add 1 and 2")).result == 3
        assert (await runner.get_run("mine")).status.value == "pending"
        assert await runner.run_once()
        assert (await runner.wait("mine")).final_output == {"value": "mine"}


@pytest.mark.sentence("003", "Integration: multiple tool usage, error recovery, concurrent runs")
async def test_another_process_tells_of_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    gate, later = Gate(), Gate()
    later.open.set()
    config = RunnerConfig(grace_seconds=0.05, retry_backoff_base=0)
    async with AgentRunner.open(tmp_path / "r.db", config=config) as runner:
        orchestrator = Orchestrator(gate.planner, gate.tools, runner=runner)
        created = await orchestrator.create_run(prompt="add 1 and 2, then wait, then add 3 and 4")
        await eventually(lambda: _has_steps(orchestrator, created.run_id, 2))
        async with AgentRunner.open(tmp_path / "r.db", config=config) as other:
            second = Orchestrator(later.planner, later.tools, runner=other)
            assert [each["step_number"] for each in (await second.get_run(created.run_id)).steps] == [1, 3]
            await orchestrator.close()  # hands it back
            async with second:
                done = await second.wait(created.run_id, timeout=10)
    assert done.result == [3, "through", 7]
    assert (gate.calls, later.calls) == (1, 1)


async def test_to_dos_are_kept_where_the_runs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configure(backend_url=f"sqlite:///{tmp_path / 'kept.db'}")
    async with Orchestrator() as orchestrator:
        assert (await ended(orchestrator, "remind me to call Bob")).result["number"] == 1
    async with Orchestrator() as orchestrator:
        assert [each["text"] for each in (await ended(orchestrator, "list my to-dos")).result] == ["call Bob"]
    assert not (tmp_path / ".agent_runtime").exists()


async def test_in_memory_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        async with Orchestrator() as orchestrator:
            assert (await ended(orchestrator, "remind me to call Bob, list my to-dos")).result[0]["number"] == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.redis
async def test_runs_and_to_dos_are_kept_on_a_server(redis_url: str) -> None:
    async with AgentRunner.open(redis_url) as runner, Orchestrator(runner=runner) as orchestrator:
        done = await ended(orchestrator, "remind me to call Bob")
    async with AgentRunner.open(redis_url) as runner, Orchestrator(runner=runner) as orchestrator:
        assert await orchestrator.get_run(done.run_id) == done
        assert (await ended(orchestrator, "list my to-dos")).result == [done.result]


async def test_limits_of_the_runner_hold() -> None:
    config = RunnerConfig(limits=RunLimits(max_tool_calls=1))
    async with AgentRunner.open("memory://", config=config) as runner, Orchestrator(runner=runner) as orchestrator:
        failed = await ended(orchestrator, "add 1 and 2, then multiply by 3")
    assert "max_tool_calls=1" in (failed.error or "")


def test_it_works_in_one_loop_after_another(tmp_path: Path) -> None:
    orchestrator = Orchestrator()

    async def once() -> Any:
        return (await ended(orchestrator, "add 1 and 2")).result

    assert asyncio.run(once()) == 3
    assert asyncio.run(once()) == 3

    async def last() -> None:
        await orchestrator.close()

    asyncio.run(last())


@pytest.mark.sentence("003", "`Orchestrator.runs` has the responses")
async def test_the_runs_that_were_returned_are_kept() -> None:
    async with Orchestrator() as orchestrator:
        run = await orchestrator.create_run(prompt="add 1 and 2")
        assert orchestrator.runs == {run.run_id: run}
        done = await orchestrator.wait(run.run_id)
        assert orchestrator.runs == {run.run_id: done}
        assert done.model_dump()["status"] is RunStatus.COMPLETED
        assert done.model_dump()["created_at"] is done.created_at
        assert {**done.model_dump(), "steps": done.steps} == vars(done)
        assert done.to_dict()["created_at"] == done.created_at.isoformat()


async def test_a_plan_of_a_definition_without_a_handler_fails() -> None:
    class Planner(BasePlanner):
        async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
            assert [each.name for each in available_tools] == ["look"]
            return Plan([PlanStep(1, "look", {}, "")], "look")

    async with Orchestrator(Planner(), [ToolDefinition("look", "Looks.", {"type": "object"})]) as orchestrator:
        failed = await ended(orchestrator, "look")
    assert failed.status is RunStatus.FAILED
    assert "tool 'look' has no handler" in (failed.error or "")
