"""A plan carried out on a run: order, results, retries, doubt, people, limits, and resuming."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from agent_runtime_core.errors import (
    BadArguments,
    InvalidArgument,
    LimitExceeded,
    NotConfigured,
    NotSupported,
    PlanningError,
    StepExecutionError,
    StorageBusy,
    ToolFailed,
    UnknownPrice,
)
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.planning import (
    Plan,
    PlanningAgent,
    PlanResult,
    PlanStep,
    StepKind,
    execute_plan,
    memory_operations,
)
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools import BaseTool, CalculatorTool, Tool, ToolRegistry, ToolResult
from tests.support.runs import Rig, Script
from tests.support.scripted_model import Scripted


class Flaky(BaseTool):
    """Fails so many times, in one of two ways."""

    def __init__(self, fails: int, *, raises: bool = False) -> None:
        self.fails, self.raises = fails, raises
        self.keys: list[str | None] = []

    def name(self) -> str:
        return "flaky"

    def description(self) -> str:
        return "Works in the end."

    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {}}

    async def execute(self, ctx: Any = None) -> ToolResult:
        self.fails -= 1
        if self.fails >= 0 and self.raises:
            raise OSError("not now")
        return ToolResult(self.fails < 0, "done", None if self.fails < 0 else "not now")


class Said:
    """A tool that notes what it was called with."""

    def __init__(self, **about: Any) -> None:
        self.calls: list[Any] = []
        self.tool = Tool.from_function(self.say, name="say", **about)

    async def say(self, value: Any) -> Any:
        """Says it."""
        self.calls.append(value)
        return value


def tools(*more: Tool | BaseTool) -> ToolRegistry:
    registry = ToolRegistry()
    for tool in (CalculatorTool(), *more):
        registry.register(tool)
    return registry


def calc(number: int, expression: str, **more: Any) -> PlanStep:
    return PlanStep(number, "calculator", {"expression": expression}, **more)


def say(number: int, value: Any, **more: Any) -> PlanStep:
    return PlanStep(number, "say", {"value": value}, **more)


async def carried(rig: Rig, plan: Plan, registry: ToolRegistry, **options: Any) -> PlanResult:
    found: list[PlanResult] = []

    async def body(ctx: Any) -> Any:
        found.append(await execute_plan(ctx, plan, registry, **options))

    (await rig.go(body)).raise_for_status()
    return found[0]


async def failure(rig: Rig, plan: Plan, registry: ToolRegistry, **options: Any) -> Exception:
    found: list[Exception] = []

    async def body(ctx: Any) -> Any:
        try:
            await execute_plan(ctx, plan, registry, **options)
        except Exception as error:
            found.append(error)
            raise

    await rig.go(body)
    return found[0]


async def test_results_go_where_they_are_referred_to() -> None:
    said = Said()
    plan = Plan([calc(1, "3 + 4"), calc(2, "{{step_1.result}} * 2"), say(3, "it is {{step_2.result}}")])
    async with Rig() as rig:
        done = await carried(rig, plan, tools(said.tool))
        assert [each[1]["tool_name"] for each in await rig.told("tool.call")] == ["calculator", "calculator", "say"]
        results = [each[1] for each in await rig.told("tool.result")]
    assert done.result == "it is 14"
    assert done.steps[1] == {
        "step_number": 2, "tool_name": "calculator", "tool_input": {"expression": "7 * 2"}, "result": 14, "attempt": 1,
    }  # fmt: skip
    assert done.usage["tool_calls"] == 3
    assert results[2] == {"tool_name": "say", "tool_call_id": "step_3", "result": "it is 14"}


async def test_a_result_becomes_text_where_a_tool_or_a_model_takes_nothing_else() -> None:
    calls: list[str] = []

    async def note(text: str) -> str:
        """Notes it."""
        calls.append(text)
        return text

    client = Scripted("well", "done")
    asks = PlanStep(3, "", {"messages": [{"role": "user", "content": "{{step_1.result}}"}]}, kind=StepKind.LLM_CALL)
    plan = Plan([
        calc(1, "6 * 7 - 42"), PlanStep(2, "note", {"text": "{{step_1.result}}"}), asks,
        PlanStep(4, "", {"prompt": "{{step_1.result}}"}, kind=StepKind.LLM_CALL, depends_on=[3]),
        PlanStep(5, "set", {"key": "{{step_1.result}}", "value": "{{step_1.result}}"}, kind=StepKind.MEMORY_OP),
    ])  # fmt: skip
    async with Rig() as rig:
        done = await carried(rig, plan, tools(Tool.from_function(note)), client=client)
    assert calls == ["0"]
    assert done.steps[1]["tool_input"] == {"text": "0"}
    assert [messages[-1]["content"] for messages in client.asked] == ["0", "0"]
    assert done.steps[4]["tool_input"] == {"key": "0", "value": 0}


async def test_a_result_becomes_text_where_a_tool_takes_text_or_nothing() -> None:
    def note(text: str | None = None, other: Annotated[str, "more"] | None = None, value: int | str = 0) -> list[Any]:
        """Notes it."""
        return [text, other, value]

    given = dict.fromkeys(("text", "other", "value"), "{{step_1.result}}")
    async with Rig() as rig:
        done = await carried(rig, Plan([calc(1, "6 * 7"), PlanStep(2, "note", given)]), tools(Tool.from_function(note)))
    assert done.result == ["42", "42", 42]


@dataclass
class Weather:
    city: str
    degrees: float


def weather(city: str) -> Weather:
    """How it is there."""
    return Weather(city, 3.5)


async def test_a_result_has_the_form_of_the_return_type_of_its_tool() -> None:
    plan = Plan([PlanStep(1, "weather", {"city": "Oslo"}), say(2, "{{step_1.result.degrees}}")])
    said, rig = Said(), Rig()
    await carried(rig, plan, tools(Tool.from_function(weather), said.tool))
    assert said.calls == [3.5]


async def test_several_last_steps_give_a_list() -> None:
    plan = Plan([calc(1, "1"), calc(2, "{{step_1.result}} + 1"), calc(3, "{{step_1.result}} + 2")])
    async with Rig() as rig:
        assert (await carried(rig, plan, tools())).result == [2, 3]


@pytest.mark.parametrize("most", [4, 2])
async def test_steps_that_need_not_wait_run_side_by_side(most: int) -> None:
    together, at_once = 0, [0]

    async def stay() -> None:
        """Stays until others are there too."""
        nonlocal together
        together += 1
        at_once[0] = max(at_once[0], together)
        for _ in range(50):
            await asyncio.sleep(0)
        together -= 1

    plan = Plan([PlanStep(number, "stay") for number in range(1, 5)])
    async with Rig() as rig:
        await carried(rig, plan, tools(Tool.from_function(stay)), max_concurrency=most)
    assert at_once == [most]


@pytest.mark.sentence("003", "Each step is tried up to 3 times with exponential backoff")
@pytest.mark.parametrize("raises", [True, False])
async def test_a_failure_is_tried_again_with_longer_and_longer_pauses(raises: bool) -> None:
    flaky = Flaky(2, raises=raises)
    async with Rig() as rig:
        done = await carried(rig, Plan([PlanStep(1, "flaky")]), tools(flaky))
        assert [each[1]["retry_delay"] for each in await rig.told("step.retrying")] == [1.0, 2.0]
        told = [each[1] for each in await rig.told("tool.result")]
    assert (done.result, done.steps[0]["attempt"]) == ("done", 3)
    assert [each.get("error") is None for each in told] == [False, False, True]
    assert "not now" in told[0]["error"]


async def test_after_the_last_try_it_fails_and_only_what_depends_on_it_is_left_out() -> None:
    said = Said()
    plan = Plan([PlanStep(1, "flaky"), say(2, "{{step_1.result}}"), say(3, "by itself")])
    async with Rig() as rig:
        error = await failure(rig, plan, tools(Flaky(9), said.tool), max_retries=2, backoff_base=0.5)
        assert [each[1]["retry_delay"] for each in await rig.told("step.retrying")] == [0.5]
    assert isinstance(error, StepExecutionError)
    assert isinstance(error.__cause__, ToolFailed)
    assert str(error) == "step 'step_1' failed after 2 attempts: tool 'flaky' did not succeed: not now"
    assert said.calls == ["by itself"]


@pytest.mark.parametrize("most", range(6))
@pytest.mark.sentence("003", "`plan.steps[:max_steps]`: a longer plan is cut")
async def test_a_long_plan_is_cut_where_its_dependencies_allow(most: int) -> None:
    # The third step of the list must come first.
    plan = Plan([say(1, 1), say(2, 2, depends_on=[4]), say(4, 4), say(5, 5)])
    said, numbers = Said(), [1, 4, 2, 5][:most]
    async with Rig() as rig:
        done = await carried(rig, plan, tools(said.tool), max_steps=most)
    assert sorted(each["step_number"] for each in done.steps) == sorted(said.calls) == sorted(numbers)
    last = [number for number in numbers if number != 4 or 2 not in numbers]
    assert done.result == (last[0] if len(last) == 1 else last)


@pytest.mark.parametrize("wrong", ["stop", None, True, ""])
async def test_a_long_plan_is_cut_or_fails(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="on_long_plan must be 'cut' or 'fail'"):
        PlanningAgent(on_long_plan=wrong)
    with pytest.raises(InvalidArgument, match="on_long_plan must be 'cut' or 'fail'"):
        Orchestrator(settings={"on_long_plan": wrong})
    async with Rig() as rig:
        assert isinstance(
            await failure(rig, Plan([say(1, 1)]), tools(Said().tool), on_long_plan=wrong), InvalidArgument
        )


async def test_nothing_is_begun_of_a_plan_that_is_too_long_or_cannot_be_carried_out() -> None:
    said = Said()
    plan = Plan([say(1, 1), say(2, 2)])
    async with Rig() as rig:
        error = await failure(rig, plan, tools(said.tool), max_steps=1, on_long_plan="fail")
        assert isinstance(error, LimitExceeded)
        assert (error.limit, error.allowed, error.used) == ("max_steps", 1, 2)
        unknown = await failure(rig, Plan([say(1, 1), PlanStep(2, "sya")]), tools(said.tool))
        assert isinstance(unknown, PlanningError)
        assert unknown.problems == ["step 2: unknown tool 'sya'. Did you mean 'say'?"]
        wrong = await failure(rig, plan, tools(said.tool), max_retries=0)
        assert isinstance(wrong, InvalidArgument)
        asks = Plan([say(1, 1), PlanStep(2, "", {"prompt": "hi"}, kind=StepKind.LLM_CALL)])
        assert isinstance(await failure(rig, asks, tools(said.tool)), (NotConfigured, ImportError))
    assert said.calls == []


async def test_arguments_that_do_not_fit_and_fields_that_are_not_there_are_not_tried_again() -> None:
    plan = Plan([calc(1, "1"), PlanStep(2, "calculator", {"operation": "add", "a": "{{step_1.result}}", "b": "x"})])
    loose = Plan([say(1, "text"), PlanStep(2, "calculator", {"operation": "add", "a": "{{step_1.result}}", "b": 1})])
    missing = Plan([calc(1, "1"), calc(2, "{{step_1.result.value}}")])
    async with Rig() as rig:
        assert isinstance(await failure(rig, plan, tools()), PlanningError)
        error = await failure(rig, loose, tools(Said().tool))
        assert isinstance(error, BadArguments)
        assert "a must be a number" in str(error)
        error = await failure(rig, missing, tools())
        assert "unknown field 'value'" in str(error)
        assert await rig.told("step.retrying") == []


async def test_a_resumed_run_carries_out_no_completed_step_again() -> None:
    said, inside, go_on = Said(), asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Waits."""
        inside.set()
        await go_on.wait()
        return "waited"

    registry = tools(said.tool, Tool.from_function(wait))
    plan = Plan(
        [say(1, "first"), PlanStep(2, "wait", {}, depends_on=[1]), say(3, "{{step_2.result}} {{step_1.result}}")]
    )

    async def body(ctx: Any) -> Any:
        done = await execute_plan(ctx, plan, registry)
        return [done.result, [each["attempt"] for each in done.steps]]

    async with Rig() as rig:
        await rig.cut(body, inside)
        go_on.set()
        assert await rig.value(body) == ["waited first", [1, 1, 1]]
        assert await rig.value(body) == ["waited first", [1, 1, 1]]
    assert said.calls == ["first", "waited first"]


async def test_a_call_with_side_effects_in_doubt_is_made_again_under_its_key_or_as_its_tool_says() -> None:
    keys: list[Any] = []
    inside = asyncio.Event()

    async def book(ctx: Any) -> str:
        keys.append(ctx.idempotency_key)
        inside.set()
        if len(keys) == 1:
            await asyncio.Event().wait()
        return "booked"

    about = {"type": "object", "properties": {}}

    async def handler(ctx: RunContext) -> str:
        return await book(ctx)

    again = Tool("book", "Books.", about, handler, has_side_effects=True)
    fails = Tool("book", "Books.", about, handler, has_side_effects=True, metadata={"on_in_doubt": "fail"})

    def body(tool: Tool) -> Any:
        async def run(ctx: Any) -> Any:
            return (await execute_plan(ctx, Plan([PlanStep(1, "book")]), tools(tool))).result

        return run

    async with Rig() as rig:
        await rig.cut(body(again), inside)
        assert await rig.value(body(again)) == "booked"
        assert len(keys) == 2
        assert keys[0] == keys[1] is not None
        assert [each[1].get("in_doubt") for each in await rig.told("step.started")] == [None, True]
        keys.clear()
        inside.clear()
        await rig.cut(body(fails), inside, "other")
        result = await rig.go(body(fails), "other")
        assert result.error is not None
        assert result.error.type == "StepInDoubt"


async def test_two_plans_of_one_run_are_kept_apart() -> None:
    said = Said()

    async def body(ctx: Any) -> Any:
        one = await execute_plan(ctx, Plan([say(1, "a")]), tools(said.tool))
        other = await execute_plan(ctx, Plan([say(1, "b")]), tools(said.tool))
        return [one.result, other.result]

    async with Rig() as rig:
        assert await rig.value(body) == ["a", "b"]


async def test_an_outage_of_the_store_is_no_failure_of_a_step() -> None:
    async def away() -> None:
        """Is away."""
        raise StorageBusy

    async with Rig() as rig:
        with pytest.raises(StorageBusy):
            await failure(rig, Plan([PlanStep(1, "away")]), tools(Tool.from_function(away)))
        assert await rig.told("step.failed") == []
        assert (await rig.runner.get_run("r")).attempt == 1


# -- people


async def asked_and_answered(answer: Any, plan: Plan, said: Said) -> Any:
    """Carried out by a worker, which gives the run back while nobody answers."""
    async with Rig(park_after=0) as rig:

        async def body(ctx: Any) -> Any:
            done = await execute_plan(ctx, plan, tools(said.tool))
            return [done.result, done.steps[-1]["tool_input"]]

        rig.register(body)
        await rig.runner.submit("script", {}, run_id="r")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).status.value == "waiting"
        [asked] = [each[1] for each in await rig.told("approval.requested")]
        assert asked["details"]["tool_call_id"] == "step_2"
        before = list(said.calls)
        await rig.runner.approve("r", "tool:say", answer)
        assert await rig.runner.run_once()
        result = await rig.runner.wait("r", timeout=5)
        return asked["details"]["tool_args"], before, result


CONFIRMED = Plan([calc(1, "6 * 7"), say(2, "{{step_1.result}}")])


async def test_a_tool_that_requires_confirmation_is_called_after_a_yes() -> None:
    said = Said(requires_confirmation=True)
    args, before, result = await asked_and_answered(True, CONFIRMED, said)
    assert (args, before) == ({"value": 42}, [])
    assert result.final_output["value"] == [42, {"value": 42}]
    assert said.calls == [42]


async def test_a_person_may_give_other_arguments() -> None:
    said = Said(requires_confirmation=True)
    _, _, result = await asked_and_answered({"approved": True, "arguments": {"value": 7}}, CONFIRMED, said)
    assert result.final_output["value"] == [7, {"value": 7}]


async def test_what_a_person_approved_of_is_called_as_it_stands() -> None:
    said, text = Said(requires_confirmation=True), "{{step_1.result}}"
    _, _, result = await asked_and_answered({"approved": True, "arguments": {"value": text}}, CONFIRMED, said)
    assert (said.calls, result.final_output["value"]) == ([text], [text, {"value": text}])


@pytest.mark.parametrize(
    ("answer", "says"), [(False, "denied"), ({"approved": False, "reason": "too late"}, "too late")]
)
async def test_after_a_no_the_run_fails_and_says_so(answer: Any, says: str) -> None:
    said = Said(requires_confirmation=True)
    _, _, result = await asked_and_answered(answer, CONFIRMED, said)
    assert said.calls == []
    assert result.error.message == f"tool 'say' did not succeed: a person rejected this call: {says}"


# -- models and memory


async def test_a_model_is_asked_once_and_counted_also_by_a_resumed_run() -> None:
    client = Scripted("quarante-deux", cost=0.5)
    inside = asyncio.Event()
    stay = True

    async def wait() -> str:
        """Waits."""
        inside.set()
        if stay:
            await asyncio.Event().wait()
        return "on"

    asks = PlanStep(2, "", {"prompt": "{{step_1.result}} in French", "model": "m-1"}, kind=StepKind.LLM_CALL)
    plan = Plan([calc(1, "6 * 7"), asks, PlanStep(3, "wait", {}, depends_on=[2])])

    async def body(ctx: Any) -> Any:
        done = await execute_plan(ctx, plan, tools(Tool.from_function(wait)), client=client)
        return [done.steps[1]["result"], done.steps[1]["tool_name"], done.usage, ctx.usage]

    async with Rig() as rig:
        await rig.cut(body, inside)
        stay = False
        text, name, usage, used = await rig.value(body)
    assert (text, name) == ("quarante-deux", "llm_call")
    assert client.asked == [[{"role": "user", "content": "42 in French"}]]
    assert client.options == [{"model": "m-1"}]
    assert usage == used
    assert (usage["turns"], usage["total_tokens"], usage["cost_usd"]) == (1, 120, 0.5)


async def test_limits_of_the_run_hold_for_plans() -> None:
    asks = [PlanStep(n, "", {"prompt": "hi"}, kind=StepKind.LLM_CALL, depends_on=[n - 1][: n - 1]) for n in (1, 2, 3)]
    client = Scripted("a", "b", "c")
    async with Rig(limits=RunLimits(max_tokens=200)) as rig:
        error = await failure(rig, Plan(asks), tools(), client=client)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "max_tokens"
        assert len(client.asked) == 2
    said = Said()
    async with Rig(limits=RunLimits(max_tool_calls=1)) as rig:
        error = await failure(rig, Plan([say(1, 1), say(2, 2)]), tools(said.tool))
        assert isinstance(error, LimitExceeded)
        assert said.calls == []


@pytest.mark.parametrize(
    ("limits", "asked"),
    [({"max_turns": 2}, 2), ({"max_tokens": 240}, 2), ({"max_cost_usd": 1.5, "max_tokens": 2_500}, 3)],
)
async def test_limits_hold_for_calls_of_a_model_side_by_side(limits: dict[str, Any], asked: int) -> None:
    plan = Plan([PlanStep(n, "", {"prompt": "hi"}, kind=StepKind.LLM_CALL) for n in range(1, 11)])
    client = Scripted(say=lambda _: "a", cost=0.5)
    async with Rig(limits=RunLimits(**limits)) as rig:
        error = await failure(rig, plan, tools(), client=client)
    assert isinstance(error, LimitExceeded)
    assert (error.limit, len(client.asked)) == (next(iter(limits)), asked)


ASKS_EIGHT = Plan(
    [PlanStep(n, "", {"prompt": "x" * 30, "max_tokens": 150}, kind=StepKind.LLM_CALL) for n in range(1, 9)]
)


async def test_calls_side_by_side_that_turn_out_to_leave_room_are_all_made() -> None:
    client = Scripted(say=lambda _: "a")
    async with Rig(limits=RunLimits(max_tokens=8 * 120, max_turns=8)) as rig:
        done = await carried(rig, ASKS_EIGHT, tools(), client=client)
    assert (done.usage["turns"], done.usage["total_tokens"]) == (8, 8 * 120)


async def test_calls_side_by_side_are_counted_once_each_by_a_resumed_run() -> None:
    inside, go_on, in_doubt = asyncio.Event(), asyncio.Event(), 0
    client = Scripted(say=lambda _: "a")
    answer = client.generate

    async def generate(messages: list[Any], **options: Any) -> Any:
        nonlocal in_doubt
        if len(client.asked) == 5 and not go_on.is_set():
            in_doubt += 1
            inside.set()
            await asyncio.Event().wait()
        return await answer(messages, **options)

    vars(client)["generate"] = generate

    async def body(ctx: Any) -> Any:
        return (await execute_plan(ctx, ASKS_EIGHT, tools(), client=client, max_concurrency=2)).usage

    async with Rig(limits=RunLimits(max_tokens=10_000)) as rig:
        await rig.cut(body, inside)
        go_on.set()
        usage = await rig.value(body)
    assert 1 <= in_doubt <= 2
    assert (usage["turns"], len(client.asked)) == (8, 8)
    assert usage["total_tokens"] == 8 * 120
    assert usage["estimated_tokens"] == in_doubt * (30 // 3 + 4 + 150)


async def test_a_limit_in_usd_needs_a_price() -> None:
    asks, client = Plan([PlanStep(1, "", {"prompt": "hi"}, kind=StepKind.LLM_CALL)]), Scripted("a")
    async with Rig(limits=RunLimits(max_cost_usd=1.0)) as rig:
        error = await failure(rig, asks, tools(), client=client)
    assert isinstance(error, UnknownPrice)
    assert "'scripted-1' has no price" in str(error)
    assert client.asked == []


async def test_the_estimate_of_a_call_in_doubt_is_kept_by_later_executions() -> None:
    inside, again = asyncio.Event(), asyncio.Event()
    client = Scripted("a", "b")
    answer = client.generate

    async def generate(messages: list[Any], **options: Any) -> Any:
        inside.set()
        if not again.is_set():
            await asyncio.Event().wait()
        return await answer(messages, **options)

    vars(client)["generate"] = generate
    hold, stay = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Waits."""
        hold.set()
        await stay.wait()
        return "on"

    asks = PlanStep(1, "", {"prompt": "x" * 300, "max_tokens": 50}, kind=StepKind.LLM_CALL)
    plan = Plan([asks, PlanStep(2, "wait", {}, depends_on=[1])])

    async def body(ctx: Any) -> Any:
        return (await execute_plan(ctx, plan, tools(Tool.from_function(wait)), client=client)).usage

    reserved = 300 // 3 + 4 + 50
    async with Rig(limits=RunLimits(max_tokens=10_000)) as rig:
        await rig.cut(body, inside)
        again.set()
        await rig.cut(body, hold)
        stay.set()
        usage = await rig.value(body)
    assert (usage["total_tokens"], usage["estimated_tokens"]) == (120, reserved)
    assert len(client.asked) == 1


async def test_another_agent_is_refused_before_anything_runs() -> None:
    said = Said()
    plan = Plan([say(1, "a"), PlanStep(2, "helper", {"task": "b"})])
    async with Rig() as rig:
        error = await failure(rig, plan, tools(said.tool, agent_tool("helper")))
    assert isinstance(error, NotSupported)
    assert "step 2: the tool of a plan must not be an agent, got 'helper'" in str(error)
    assert said.calls == []


@pytest.mark.sentence(
    "001", "StepProcessor: drive each Step (LLM/tool/memory) by invoking the appropriate adapter or service"
)
@pytest.mark.sentence("001", "`StepProcessor` may trigger `memory_*` steps")
async def test_memory_is_read_and_written() -> None:
    def op(number: int, name: str, **given: Any) -> PlanStep:
        return PlanStep(number, name, given, kind=StepKind.MEMORY_OP, depends_on=[number - 1][: number - 1])

    plan = Plan(
        [
            op(1, "set", key="city", value={"name": "Bern"}), op(2, "get", key="city"), op(3, "search", query="bern"),
            op(4, "delete", key="city"), op(5, "get", key="{{step_3.result.0.key}}"), op(6, "search", limit=1),
        ]
    )  # fmt: skip

    async def body(ctx: Any) -> Any:
        return [each["result"] for each in (await execute_plan(ctx, plan, tools())).steps]

    async with AgentRunner.open("memory://") as runner:
        result = await runner.execute(Script(body), "r", raise_on_error=True)
    bern = {"name": "Bern"}
    assert result.final_output["value"] == [bern, bern, [{"key": "city", "value": bern}], True, None, []]
    assert [each.name for each in memory_operations().list_tools()] == ["get", "set", "delete", "search"]


async def test_it_works_over_a_context_without_a_journal() -> None:
    said, ctx = Said(), MockRunContext()
    plan = Plan(
        [calc(1, "2 + 3"), say(2, "{{step_1.result}}"), PlanStep(3, "", {"prompt": "so?"}, kind=StepKind.LLM_CALL)]
    )
    done = await execute_plan(ctx, plan, tools(said.tool), client=Scripted("so"))
    assert done.result == [5, "so"]
    assert [each["attempt"] for each in done.steps] == [1, 1, 1]
    assert len(ctx.get_events("tool.call")) == 2


async def test_another_plan_over_a_context_without_a_journal_is_not_answered_by_the_first() -> None:
    said, ctx = Said(), MockRunContext()
    for plan, result in ((Plan([say(1, "a")]), "a"), (Plan([say(1, "b")]), "b"), (Plan([say(1, "a")]), "a")):
        assert (await execute_plan(ctx, plan, tools(said.tool))).result == result
    assert len(ctx.get_events("tool.call")) == 2  # the first plan again goes on where it was: it is done


async def test_a_mock_is_asked_for_confirmation_too() -> None:
    said, ctx = Said(requires_confirmation=True), MockRunContext()
    ctx.signal("tool:say", True)
    assert (await execute_plan(ctx, Plan([say(1, "x")]), tools(said.tool))).result == "x"
    ctx = MockRunContext()
    ctx.signal("tool:say", {"approved": False, "reason": "no"})
    with pytest.raises(ToolFailed, match="a person rejected this call: no"):
        await execute_plan(ctx, Plan([say(1, "x")]), tools(said.tool))
