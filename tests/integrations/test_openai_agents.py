"""Agents of OpenAI Agents in runs: steps, streaming, approvals, handoffs, limits, cancellation and errors."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

import pydantic
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    ModelRetrySettings,
    ModelSettings,
    RunConfig,
    RunHooks,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.exceptions import ModelBehaviorError, UserError
from agents.items import ModelResponse
from agents.models.interface import Model, ModelProvider
from agents.testing import assistant_message, function_call
from agents.tool import ComputerTool, ToolOutputImage
from agents.tool_context import ToolContext
from openai.types.responses import ResponseFailedEvent, ResponseIncompleteEvent

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    InvalidArgument,
    JournalMismatch,
    RunContext,
    RunLimits,
    RunnerConfig,
    RunResult,
    RunStatus,
    clear_registry,
    current_run,
    open_run,
    register_runtime,
)
from agent_runtime_core.integrations.openai_agents import (
    DurableModel,
    DurableModelProvider,
    durable,
    durable_config,
    run_agent,
)
from agent_runtime_core.portal import from_thread
from tests.support.openai_models import FakeModel, results

set_tracing_disabled(True)


class Calls(list[str]):
    """The labels of the tool calls that really ran."""

    def tool(self, name: str = "double", **options: Any) -> Any:
        async def double(number: int) -> int:
            self.append(f"{name} {number}")
            return 2 * number

        return function_tool(double, name_override=name, **options)


def doubling(times: int, name: str = "double") -> FakeModel:
    """A model that doubles the last result so often, and then says it."""

    def answer(items: list[dict[str, Any]]) -> list[Any]:
        found = results(items)
        if len(found) < times:
            number = int(found[-1]) if found else 1
            return [function_call(name, {"number": number}, call_id=f"call_{len(found)}")]
        return [assistant_message(f"It is {found[-1]}.")]

    return FakeModel(answer)


def saying(text: str) -> FakeModel:
    return FakeModel(lambda items: [assistant_message(text)])


def as_items(result: Any) -> list[dict[str, Any]]:
    return [dict(item) for item in result.to_input_list()]


class Stop(Exception):
    """Ends a block before its run has finished, as a crash does."""


async def in_run(store: Path, work: Callable[[], Awaitable[Any]], *, crash: bool = False) -> Any:
    """Run `work` in the run "one". With `crash`, the run is interrupted after it."""
    result = None
    try:
        async with open_run(str(store), run_id="one"):
            result = await work()
            if crash:
                raise Stop
    except Stop:
        pass
    return result


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


async def questions(runner: AgentRunner, number: int) -> list[Any]:
    """The open questions of all runs, once there are so many."""
    while len(asked := await runner.approvals()) < number:  # noqa: ASYNC110 - another runner asks
        await asyncio.sleep(0.01)
    return asked


async def step_names(store: Path) -> list[str]:
    async with AgentRunner.open(str(store)) as runner:
        events = await runner.event_bus.get_events("one")
    return [event.payload["step_name"] for event in events if event.event_type == "step.completed"]


# -- steps


async def test_a_resumed_run_repeats_no_call(store: Path) -> None:
    calls = Calls()
    model = doubling(3)

    async def work() -> str:
        agent = Agent(name="doubler", model=model, tools=[calls.tool()])
        result = await run_agent(agent, "Double 1 three times.")
        return str(result.final_output)

    first = await in_run(store, work, crash=True)
    again = await in_run(store, work)
    assert first == again == "It is 8."
    assert len(model.asked) == 4
    assert calls == ["double 1", "double 2", "double 4"]
    assert await step_names(store) == ["openai:model", "tool:double"] * 3 + ["openai:model"]


async def test_outside_of_a_run_an_agent_works_as_before() -> None:
    calls = Calls()
    agent = durable(Agent(name="doubler", model=doubling(2), tools=[calls.tool()]))
    assert (await Runner.run(agent, "Double!")).final_output == "It is 4."
    assert (await run_agent(agent, "Double!")).final_output == "It is 4."
    assert calls == ["double 1", "double 2"] * 2


async def test_the_runner_of_the_sdk_records_too(store: Path) -> None:
    calls, model = Calls(), doubling(1)
    agent = durable(Agent(name="doubler", model=model, tools=[calls.tool()]))

    async def work() -> str:
        return str((await Runner.run(agent, "Double!")).final_output)

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "It is 2."
    assert len(model.asked) == 2
    assert calls == ["double 1"]


async def test_models_by_name_come_from_the_provider_of_the_configuration(store: Path) -> None:
    class Provider(ModelProvider):
        def __init__(self) -> None:
            self.models: dict[str | None, FakeModel] = {}

        def get_model(self, model_name: str | None) -> Model:
            return self.models.setdefault(model_name, saying(f"I am {model_name}."))

    provider = Provider()

    async def work() -> str:
        agent = Agent(name="named", model="small")
        return str((await run_agent(agent, "Who?", run_config=RunConfig(model_provider=provider))).final_output)

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "I am small."
    assert len(provider.models["small"].asked) == 1


async def test_a_configuration_is_copied_once() -> None:
    given = RunConfig(model=saying("Hi."), workflow_name="mine")
    config = durable_config(durable_config(given))
    assert isinstance(given.model, FakeModel)
    assert isinstance(config.model, DurableModel)
    assert isinstance(config.model._model, FakeModel)
    assert isinstance(config.model_provider, DurableModelProvider)
    assert config.workflow_name == "mine"


async def test_servers_that_repeat_call_ids_get_results_of_their_own_calls(store: Path) -> None:
    """Some servers number the tool calls of each answer from 0."""
    calls = Calls()

    async def work() -> list[str]:
        agent = Agent(name="doubler", model=doubling(1), tools=[calls.tool()])
        return [str((await run_agent(agent, "Double!")).final_output) for _ in range(2)]

    assert await in_run(store, work, crash=True) == await in_run(store, work) == ["It is 2.", "It is 2."]
    assert calls == ["double 1", "double 1"]


async def test_concurrent_agents_have_keys(store: Path) -> None:
    models = {name: doubling(2) for name in "abc"}
    delays = {"a": 3, "b": 0, "c": 1}

    async def one(name: str) -> str:
        @function_tool(name_override="double")
        async def double(number: int) -> int:
            for _ in range(delays[name]):
                await asyncio.sleep(0)
            return 2 * number + ord(name)

        agent = Agent(name=name, model=models[name], tools=[double])
        return str((await run_agent(agent, "Double!", key=name)).final_output)

    async def work() -> list[str]:
        return await asyncio.gather(*map(one, "abc"))

    first = await in_run(store, work, crash=True)
    delays.update(a=0, b=2, c=0)
    assert await in_run(store, work) == first
    assert len(set(first)) == 3
    assert [len(model.asked) for model in models.values()] == [3, 3, 3]


async def test_results_of_tools_are_the_same_when_they_are_recorded(store: Path) -> None:
    class Odd:
        def __str__(self) -> str:
            return "an odd value"

    values: list[Any] = [
        {"a": None, "b": [1, 2.5, True]},
        Odd(),
        (1, 2),
        float("nan"),
        None,
        ToolOutputImage(image_url="https://example.org/a.png"),
        [ToolOutputImage(image_url="https://example.org/b.png")],
    ]

    def answer(items: list[dict[str, Any]]) -> list[Any]:
        found = results(items)
        if len(found) < len(values):
            return [function_call("make", {"index": len(found)}, call_id=f"call_{len(found)}")]
        return [assistant_message("done")]

    @function_tool
    def make(index: int) -> Any:
        return values[index]

    model = FakeModel(answer)

    async def work() -> Any:
        result = await run_agent(Agent(name="maker", model=model, tools=[make]), "Make them.")
        return as_items(result)

    first = await in_run(store, work, crash=True)
    assert await in_run(store, work) == first
    outputs = results(first)
    assert [str(each) for each in outputs[:5]] == [
        "{'a': None, 'b': [1, 2.5, True]}",
        "an odd value",
        "(1, 2)",
        "nan",
        "None",
    ]
    assert [each[0]["type"] for each in outputs[5:]] == ["input_image", "input_image"]
    plain = await Runner.run(Agent(name="maker", model=FakeModel(answer), tools=[make]), "Make them.")
    assert results(as_items(plain)) == outputs


class Price(pydantic.BaseModel):
    amount: Decimal = pydantic.Field(alias="Amount")


@dataclasses.dataclass
class Offer:
    price: Price
    until: dt.date


async def test_a_result_of_a_tool_with_an_output_type_is_json(store: Path) -> None:
    @function_tool(output_type=Offer)
    def offer(index: int) -> Offer:
        return Offer(Price(Amount=Decimal("1.50")), dt.date(2026, 1, 2))

    def answer(items: list[dict[str, Any]]) -> list[Any]:
        return [assistant_message("done")] if results(items) else [function_call("offer", {"index": 1}, call_id="a")]

    async def work() -> Any:
        return as_items(await run_agent(Agent(name="seller", model=FakeModel(answer), tools=[offer]), "Offer."))

    first = await in_run(store, work, crash=True)
    assert await in_run(store, work) == first
    assert results(first) == ['{"price":{"Amount":"1.50"},"until":"2026-01-02"}']
    plain = await Runner.run(Agent(name="seller", model=FakeModel(answer), tools=[offer]), "Offer.")
    assert results(as_items(plain)) == results(first)


async def test_a_timeout_of_a_tool_is_recorded(store: Path) -> None:
    ran = []

    @function_tool(timeout=0.001)
    async def double(number: int) -> int:
        ran.append(number)
        await asyncio.sleep(3600)
        return 0

    async def work() -> Any:
        def answer(items: list[dict[str, Any]]) -> list[Any]:
            if found := results(items):
                return [assistant_message(found[0])]
            return [function_call("double", {"number": 1}, call_id="c")]

        return (await run_agent(Agent(name="slow", model=FakeModel(answer), tools=[double]), "Double!")).final_output

    first = await in_run(store, work, crash=True)
    assert "timed out" in first
    assert await in_run(store, work) == first
    assert ran == [1]


async def test_local_tools_that_cannot_be_recorded_are_refused() -> None:
    agent = Agent(name="clicker", tools=[ComputerTool(computer=lambda *_: None)])
    with pytest.raises(InvalidArgument, match=r"'clicker' must be a function tool, got .*ComputerTool"):
        durable(Agent(name="start", handoffs=[agent]))


async def test_tools_get_the_context_of_their_call(store: Path) -> None:
    seen: list[Any] = []

    @function_tool
    def double(context: ToolContext[str], number: int) -> int:
        run = current_run()
        assert run is not None
        seen.append((context.context, context.tool_call_id, context.tool_arguments, run.run_key))
        return 2 * number

    async def work() -> Any:
        agent = Agent(name="doubler", model=doubling(1), tools=[double])
        return (await run_agent(agent, "Double!", context="mine")).final_output

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "It is 2."
    assert seen == [("mine", "call_0", '{"number":1}', "one")]


async def test_tools_of_mcp_servers_are_steps(store: Path) -> None:
    mcp = pytest.importorskip("agents.mcp")
    from mcp.types import CallToolResult, TextContent, Tool

    called: list[Any] = []

    class Server(mcp.MCPServer):  # type: ignore[misc, name-defined]
        name = "server"

        async def connect(self) -> None: ...

        async def cleanup(self) -> None: ...

        async def list_prompts(self) -> Any: ...

        async def get_prompt(self, name: str, arguments: Any = None) -> Any: ...

        async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Tool]:
            schema = {"type": "object", "properties": {"number": {"type": "integer"}}}
            return [Tool(name="double", description="Doubles.", input_schema=schema)]

        async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> CallToolResult:
            called.append(arguments)
            return CallToolResult(content=[TextContent(type="text", text=str(2 * arguments["number"]))])

    model = FakeModel(
        lambda items: (
            [assistant_message(str(found[0]))]
            if (found := results(items))
            else [function_call("double", {"number": 4}, call_id="c")]
        )
    )

    async def work() -> Any:
        agent = Agent(name="doubler", model=model, mcp_servers=[Server()])
        return (await run_agent(agent, "Double!")).final_output

    first = await in_run(store, work, crash=True)
    assert "8" in first
    assert await in_run(store, work) == first
    assert called == [{"number": 4}]
    assert await step_names(store) == ["openai:model", "tool:double", "openai:model"]


async def test_a_function_decides_which_calls_need_approval(store: Path) -> None:
    seen: list[Any] = []

    async def is_large(context: Any, arguments: dict[str, Any], call_id: str) -> bool:
        seen.append(arguments)
        return bool(arguments["number"] > 1)

    calls = Calls()

    async def work() -> Any:
        agent = Agent(name="doubler", model=doubling(2), tools=[calls.tool(needs_approval=is_large)])
        return (await run_agent(agent, "Double!")).final_output

    async with AgentRunner.open(str(store)) as runner:
        task = asyncio.ensure_future(in_run(store, work))
        [question] = await questions(runner, 1)
        await runner.approve("one", question.name, True, request_id=question.request_id)
        assert await task == "It is 4."
    assert seen == [{"number": 1}, {"number": 2}]
    assert calls == ["double 1", "double 2"]


async def test_a_plain_run_uses_the_portal(store: Path) -> None:
    calls, model = Calls(), doubling(1)

    class Plain(AgentRuntime):
        key = "plain"

        def run(self, ctx: Any) -> RunResult:
            agent = Agent(name="doubler", model=model, tools=[calls.tool()])
            result = from_thread(run_agent, agent, "Double!")
            return RunResult(final_output={"said": result.final_output})

    async with AgentRunner.open(str(store)) as runner:
        result = await runner.execute(Plain(), run_id="one")
    assert result.final_output == {"said": "It is 2."}
    assert await step_names(store) == ["openai:model", "tool:double", "openai:model"]


# -- agents that use agents


async def test_handoffs_are_followed(store: Path) -> None:
    calls = Calls()
    last = Agent(name="last", model=doubling(1), tools=[calls.tool()])
    handed: list[str] = []

    async def work() -> tuple[Any, str]:
        def middle(items: list[dict[str, Any]]) -> list[Any]:
            return [function_call("transfer_to_last", {}, call_id="h2")]

        def start(items: list[dict[str, Any]]) -> list[Any]:
            return [function_call("transfer_to_middle", {}, call_id="h1")]

        second = Agent(name="middle", model=FakeModel(middle), handoffs=[last])
        first = Agent(name="start", model=FakeModel(start), handoffs=[handoff(second, on_handoff=lambda _: None)])
        second.handoffs.append(first)
        result = await run_agent(first, "Go!")
        handed.append(result.last_agent.name)
        return result.final_output, result.last_agent.name

    def counting(items: list[dict[str, Any]]) -> list[Any]:
        done = [each for each in results(items) if each.isdigit()]
        return [assistant_message("done")] if done else [function_call("double", {"number": 1}, call_id="c")]

    last.model = model = FakeModel(counting)
    assert await in_run(store, work, crash=True) == await in_run(store, work) == ("done", "last")
    assert calls == ["double 1"]
    assert len(model.asked) == 2


async def test_an_agent_as_a_tool_has_steps_of_its_own(store: Path) -> None:
    calls, inner_model = Calls(), doubling(2)
    inner = Agent(name="inner", model=inner_model, tools=[calls.tool()])

    def answer(items: list[dict[str, Any]]) -> list[Any]:
        if found := results(items):
            return [assistant_message(" ".join(found))]
        return [function_call("ask_inner", {"input": "Double!"}, call_id=f"call_{n}") for n in range(2)]

    outer_model = FakeModel(answer)

    async def work() -> Any:
        outer = Agent(name="outer", model=outer_model, tools=[inner.as_tool("ask_inner", "Doubles.")])
        return (await run_agent(outer, "Ask twice.")).final_output

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "It is 4. It is 4."
    assert sorted(calls) == ["double 1", "double 1", "double 2", "double 2"]
    assert len(inner_model.asked) == 6
    assert len(outer_model.asked) == 2


async def test_a_guardrail_that_asks_a_model_beside_the_agent(store: Path) -> None:
    checker, model = saying("fine"), doubling(1)

    async def check(context: Any, agent: Any, input: Any) -> GuardrailFunctionOutput:
        result = await run_agent(Agent(name="checker", model=checker), input)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=result.final_output != "fine")

    async def work() -> Any:
        agent = Agent(
            name="guarded",
            model=model,
            tools=[Calls().tool()],
            input_guardrails=[InputGuardrail(guardrail_function=check)],
        )
        return (await run_agent(agent, "Double!")).final_output

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "It is 2."
    assert len(checker.asked) == 1
    assert len(model.asked) == 2


async def test_a_guardrail_of_the_configuration(store: Path) -> None:
    checker, model = doubling(1), doubling(1)

    async def check(context: Any, agent: Any, input: Any) -> GuardrailFunctionOutput:
        await run_agent(Agent(name="checker", model=checker, tools=[Calls().tool()]), "Check!")
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    async def work() -> Any:
        config = RunConfig(input_guardrails=[InputGuardrail(guardrail_function=check)])
        agent = Agent(name="guarded", model=model, tools=[Calls().tool()])
        return (await run_agent(agent, "Double!", run_config=config)).final_output

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "It is 2."
    assert (len(checker.asked), len(model.asked)) == (2, 2)


async def test_a_guardrail_that_trips_again_when_the_run_resumes(store: Path) -> None:
    checker = saying("bad")

    async def check(context: Any, agent: Any, input: Any) -> GuardrailFunctionOutput:
        result = await run_agent(Agent(name="checker", model=checker), input)
        return GuardrailFunctionOutput(output_info="bad words", tripwire_triggered=result.final_output == "bad")

    async def work() -> Any:
        guardrail = InputGuardrail(guardrail_function=check, name="words", run_in_parallel=False)
        agent = Agent(name="guarded", model=saying("Never."), input_guardrails=[guardrail])
        with pytest.raises(InputGuardrailTripwireTriggered) as raised:
            await run_agent(agent, "Bad words!")
        return raised.value.guardrail_result.output.output_info

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "bad words"
    assert len(checker.asked) == 1


async def test_hooks_are_called_again_when_the_run_resumes(store: Path) -> None:
    seen: list[str] = []

    class Hooks(RunHooks[Any]):
        async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
            seen.append(f"start {tool.name}")

        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
            seen.append(f"end {result}")

    async def work() -> Any:
        agent = Agent(name="doubler", model=doubling(1), tools=[Calls().tool()])
        return (await run_agent(agent, "Double!", hooks=Hooks())).final_output

    await in_run(store, work, crash=True)
    await in_run(store, work)
    assert seen == ["start double", "end 2"] * 2


# -- streaming


async def streamed(agent: Agent[Any], input: str) -> tuple[str, list[str], Any]:
    """The answer of an agent, the parts of its text, and its items."""
    parts: list[str] = []

    async def on_event(event: Any) -> None:
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            parts.append(event.data.delta)

    result = await run_agent(agent, input, on_event=on_event)
    return str(result.final_output), parts, result.to_input_list()


async def test_a_recorded_stream_is_the_same_answer_in_one_part(store: Path) -> None:
    calls, model = Calls(), doubling(2)

    async def work() -> Any:
        return await streamed(Agent(name="doubler", model=model, tools=[calls.tool()]), "Double!")

    text, _, items = await in_run(store, work, crash=True)
    assert await in_run(store, work) == (text, ["It is 4."], items)
    assert len(model.asked) == 3
    assert calls == ["double 1", "double 2"]


async def test_a_run_that_streamed_resumes_without_a_stream_and_the_reverse(store: Path) -> None:
    model = doubling(1)
    streams = True

    async def work() -> Any:
        agent = Agent(name="doubler", model=model, tools=[Calls().tool()])
        if streams:
            return await streamed(agent, "Double!")
        result = await run_agent(agent, "Double!")
        return str(result.final_output), [], result.to_input_list()

    first = await in_run(store, work, crash=True)
    streams = False
    second = await in_run(store, work, crash=True)
    streams = True
    third = await in_run(store, work)
    assert first[0] == second[0] == third[0] == "It is 2."
    assert first[2] == second[2] == third[2]
    assert len(model.asked) == 2


async def test_usage_of_a_recorded_stream(store: Path) -> None:
    model = doubling(1)

    async def work() -> Any:
        async def on_event(event: Any) -> None:
            pass

        agent = Agent(name="doubler", model=model, tools=[Calls().tool()])
        usage = (await run_agent(agent, "Double!", on_event=on_event)).context_wrapper.usage
        return usage.requests, usage.input_tokens, usage.output_tokens, usage.total_tokens

    assert await in_run(store, work, crash=True) == await in_run(store, work) == (2, 10, 10, 20)


async def test_the_text_of_a_stream_is_published(store: Path) -> None:
    async def work() -> Any:
        return await streamed(Agent(name="doubler", model=saying("Hello, world.")), "Hi!")

    await in_run(store, work, crash=True)
    await in_run(store, work)
    async with AgentRunner.open(str(store)) as runner:
        events = await runner.event_bus.get_events("one")
    deltas = [event.payload["delta"] for event in events if event.event_type == "assistant.delta"]
    assert "".join(deltas) == "Hello, world."


async def test_the_last_event_of_a_stream_comes_after_its_record(store: Path) -> None:
    """Code that sees the last event may act on the answer, so the answer must not be lost in a crash."""
    model = saying("Hello.")

    async def crashing() -> None:
        async def on_event(event: Any) -> None:
            if event.type == "raw_response_event" and event.data.type == "response.completed":
                raise Stop

        await run_agent(Agent(name="greeter", model=model), "Hi!", on_event=on_event)

    await in_run(store, crashing)

    async def work() -> Any:
        return (await run_agent(Agent(name="greeter", model=model), "Hi!")).final_output

    assert await in_run(store, work) == "Hello."
    assert len(model.asked) == 1


@pytest.mark.parametrize("kind", ["response.failed", "response.incomplete", None])
async def test_a_stream_without_an_answer_fails_alike_when_the_run_resumes(store: Path, kind: str | None) -> None:
    asked = []

    class Failing(FakeModel):
        async def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(kind)
            async for event in super().stream_response(*args, **kwargs):
                if event.type != "response.completed":
                    yield event
                elif kind is not None:
                    ended: Any = ResponseFailedEvent if kind == "response.failed" else ResponseIncompleteEvent
                    yield ended(type=kind, response=event.response, sequence_number=event.sequence_number)

    async def work() -> Any:
        async def on_event(event: Any) -> None:
            pass

        model = Failing(lambda items: [assistant_message("Half")])
        with pytest.raises(ModelBehaviorError) as raised:
            await run_agent(Agent(name="greeter", model=model), "Hi!", on_event=on_event)
        async with asyncio.timeout(60):
            # A later step shows that the code went on after the failure.
            ctx = current_run()
            assert ctx is not None
            await ctx.step("later", lambda: None)
        return raised.value.message

    first = await in_run(store, work, crash=True)
    assert await in_run(store, work) == first
    assert (kind or "final response") in first
    assert len(asked) == 1


# -- people


def refunding(items: list[dict[str, Any]]) -> list[Any]:
    """Asks for two refunds at once, and says their results."""
    if found := results(items):
        return [assistant_message(" | ".join(found))]
    return [function_call("refund", {"amount": amount}, call_id=f"call_{amount}") for amount in (5, 7)]


class Refunds(AgentRuntime):
    key = "refunds"

    def __init__(self) -> None:
        self.model = FakeModel(refunding)
        self.paid: list[int] = []

    def agent(self) -> Agent[Any]:
        @function_tool(needs_approval=True)
        def refund(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

        return Agent(name="refunder", model=self.model, tools=[refund])

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult(final_output={"said": (await run_agent(self.agent(), "Refund!")).final_output})


class NestedRefunds(Refunds):
    key = "nested-refunds"

    def agent(self) -> Agent[Any]:
        def answer(items: list[dict[str, Any]]) -> list[Any]:
            if found := results(items):
                return [assistant_message(found[0])]
            return [function_call("ask_refunder", {"input": "Refund!"}, call_id="call_1")]

        inner = super().agent().as_tool("ask_refunder", "Refunds.")
        return Agent(name="outer", model=FakeModel(answer), tools=[inner])


@pytest.mark.parametrize("agent", [Refunds(), NestedRefunds()], ids=["a tool", "a tool of an agent as a tool"])
async def test_approvals_of_a_parked_run(store: Path, agent: Refunds) -> None:
    register_runtime(agent)
    try:
        async with AgentRunner.open(str(store), config=RunnerConfig(park_after=0)) as runner:
            run = await runner.submit(agent.key, run_id="one")
            await runner.run_once()
            info = await runner.get_run(run)
            assert info.status is RunStatus.WAITING
            asked = await runner.approvals()
            assert [each.details["tool_args"] for each in asked] == [{"amount": 5}, {"amount": 7}]
            assert {each.name for each in asked} == {"tool:refund"}
            assert agent.paid == []
            answer = {"approved": True, "arguments": {"amount": 1}}
            with pytest.raises(InvalidArgument):
                await runner.approve(run, "tool:refund", answer, request_id=asked[0].request_id)
            await runner.approve(run, "tool:refund", True, request_id=asked[0].request_id)
            refused = {"approved": False, "reason": "too much"}
            await runner.approve(run, "tool:refund", refused, request_id=asked[1].request_id)
            await runner.run_once()
            result = await runner.wait(run)
    finally:
        clear_registry()
    assert result.final_output == {"said": "paid 5 | too much"}
    assert agent.paid == [5]
    assert len(agent.model.asked) == 2


async def test_without_a_run_the_caller_gets_the_interruptions() -> None:
    result = await run_agent(Refunds().agent(), "Refund!")
    assert [item.name for item in result.interruptions] == ["refund", "refund"]


async def test_approvals_while_the_answer_is_streamed(store: Path) -> None:
    agent = Refunds()

    async def work() -> Any:
        return (await streamed(agent.agent(), "Refund!"))[0]

    async with AgentRunner.open(str(store)) as runner:
        task = asyncio.ensure_future(in_run(store, work))
        for each in await questions(runner, 2):
            await runner.approve("one", each.name, True, request_id=each.request_id)
        assert await task == "paid 5 | paid 7"
    assert agent.paid == [5, 7]


# -- limits, cancellation, errors


@pytest.mark.parametrize(
    ("limits", "limit", "model_calls", "tool_calls"),
    [
        (RunLimits(max_turns=2), "max_turns", 2, 2),
        (RunLimits(max_tokens=25), "max_tokens", 3, 2),
        (RunLimits(max_tool_calls=1), "max_tool_calls", 2, 1),
    ],
    ids=["turns", "tokens", "tool calls"],
)
async def test_limits_of_the_run(store: Path, limits: RunLimits, limit: str, model_calls: int, tool_calls: int) -> None:
    calls, model = Calls(), doubling(9)

    class Doubler(AgentRuntime):
        key = "doubler"

        async def run(self, ctx: RunContext) -> RunResult:
            agent = Agent(name="doubler", model=model, tools=[calls.tool()])
            return RunResult(final_output={"said": (await run_agent(agent, "Double!")).final_output})

    async with AgentRunner.open(str(store), config=RunnerConfig(limits=limits, max_retries=1)) as runner:
        for _ in range(2):  # a resumed run stops in the same place
            result = await runner.execute(Doubler(), run_id="one")
            assert result.error is not None
            assert (result.error.type, limit in result.error.message) == ("LimitExceeded", True)
            assert len(model.asked) == model_calls
            assert len(calls) == tool_calls
            assert result.usage["total_tokens"] == 10 * model_calls
    raised = RunLimits(max_turns=20, max_tokens=1000, max_tool_calls=20)
    async with AgentRunner.open(str(store), config=RunnerConfig(limits=raised, max_retries=1)) as runner:
        result = await runner.execute(Doubler(), run_id="one")
    assert result.final_output == {"said": "It is 512."}
    assert len(model.asked) == 10
    assert len(calls) == 9
    assert result.usage["total_tokens"] == 100


async def test_a_cancelled_run_stops_its_agent(store: Path) -> None:
    started, stopped = asyncio.Event(), []

    @function_tool
    async def double(number: int) -> int:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.append(number)
        return 0

    model = doubling(2)

    class Doubler(AgentRuntime):
        key = "doubler"

        async def run(self, ctx: RunContext) -> RunResult:
            await run_agent(Agent(name="doubler", model=model, tools=[double]), "Double!")
            raise AssertionError("the agent went on")

    async with AgentRunner.open(str(store)) as runner:
        task = asyncio.ensure_future(runner.execute(Doubler(), run_id="one"))
        await started.wait()
        await runner.cancel("one")
        result = await task
    assert result.status is RunStatus.CANCELLED
    assert stopped == [1]
    assert len(model.asked) == 1


async def test_errors_of_tools_reach_the_model_or_the_caller(store: Path) -> None:
    calls: list[str] = []

    async def work() -> list[str]:
        def fail() -> str:
            calls.append("fail")
            raise ValueError("no such city")

        def answer(items: list[dict[str, Any]]) -> list[Any]:
            if found := results(items):
                return [assistant_message(found[0])]
            return [function_call("fail", {}, call_id="c")]

        told = Agent(name="told", model=FakeModel(answer), tools=[function_tool(fail)])
        first = (await run_agent(told, "Fail!", key="told")).final_output
        tool = function_tool(fail, failure_error_function=None)
        raising = Agent(name="raising", model=FakeModel(answer), tools=[tool])
        with pytest.raises(UserError) as raised:
            await run_agent(raising, "Fail!", key="raising")
        ctx = current_run()
        assert ctx is not None
        await ctx.step("later", lambda: None)
        return [first, str(raised.value)]

    first = await in_run(store, work, crash=True)
    assert await in_run(store, work) == first
    assert first[0].startswith("An error occurred")
    assert "no such city" in first[1]
    assert calls == ["fail", "fail"]


async def test_errors_of_the_model_are_the_same_when_the_run_resumes(store: Path) -> None:
    import httpx2
    import openai

    calls: list[str] = []

    class Failing(FakeModel):
        async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
            calls.append("model")
            response = httpx2.Response(429, request=httpx2.Request("POST", "https://example.org"))
            raise openai.RateLimitError("slow down", response=response, body={"code": "busy"})

    async def work() -> Any:
        agent = Agent(name="failing", model=Failing(lambda items: []))
        with pytest.raises(openai.RateLimitError) as raised:
            await run_agent(agent, "Hi!")
        ctx = current_run()
        assert ctx is not None
        await ctx.step("later", lambda: None)
        return type(raised.value), raised.value.message, raised.value.code, raised.value.status_code

    first = await in_run(store, work, crash=True)
    assert await in_run(store, work) == first
    assert first[1:] == ("slow down", "busy", 429)
    assert calls == ["model"]


async def test_retries_of_the_sdk_are_recorded_too(store: Path) -> None:
    model = doubling(1)
    failures = 1

    class Unstable(FakeModel):
        async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
            nonlocal failures
            if failures:
                failures -= 1
                raise ConnectionError("cut")
            return await model.get_response(*args, **kwargs)

    async def work() -> Any:
        retry = ModelRetrySettings(max_retries=2, policy=lambda _: True, backoff={"initial_delay": 0.0})
        agent = Agent(
            name="doubler",
            model=Unstable(lambda items: []),
            tools=[Calls().tool()],
            model_settings=ModelSettings(retry=retry),
        )
        return (await run_agent(agent, "Double!")).final_output

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "It is 2."
    assert failures == 0
    assert len(model.asked) == 2


async def test_a_failed_agent_does_not_get_the_answers_of_its_replacement(store: Path) -> None:
    """The first agent fails. When the run resumes, it succeeds."""
    fails = True

    def unstable(items: list[dict[str, Any]]) -> list[Any]:
        if fails:
            raise ConnectionError("cut")
        return doubling(1).answer(items)

    replacement = saying("I replace it.")

    async def work() -> Any:
        try:
            agent = Agent(name="first", model=FakeModel(unstable), tools=[Calls().tool()])
            return (await run_agent(agent, "Double!")).final_output
        except Exception:  # noqa: BLE001 - the class is tested elsewhere
            return (await run_agent(Agent(name="second", model=replacement), "Double!")).final_output

    assert await in_run(store, work, crash=True) == "I replace it."
    fails = False
    assert await in_run(store, work) in ("I replace it.", "It is 2.")
    assert len(replacement.asked) == 1


async def test_other_arguments_for_a_recorded_call_are_an_error(store: Path) -> None:
    """Such as those of a model that was called again because its record was removed."""
    number = 1

    class Plain(DurableModel):
        """Not recorded."""

        async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
            return await self._model.get_response(*args, **kwargs)

    def answer(items: list[dict[str, Any]]) -> list[Any]:
        if results(items):
            return [assistant_message("done")]
        return [function_call("double", {"number": number}, call_id="c")]

    async def work() -> Any:
        model = Plain(FakeModel(answer))
        return (await run_agent(Agent(name="doubler", model=model, tools=[Calls().tool()]), "Double!")).final_output

    await in_run(store, work, crash=True)
    number = 2
    with pytest.raises(JournalMismatch):
        await in_run(store, work)
