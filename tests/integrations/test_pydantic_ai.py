"""Agents of Pydantic AI in runs: steps, streaming, nested agents, output types, errors and options."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.exceptions import ModelHTTPError, UserError
from pydantic_ai.messages import BinaryContent, ModelResponse, ToolReturnPart
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.tools import RunContext as AgentRunContext
from pydantic_ai.toolsets import FunctionToolset

from agent_runtime_core import AgentRunner, AgentRuntime, InvalidArgument, RunnerConfig, RunResult, SyncRunContext
from agent_runtime_core.integrations.pydantic_ai import Durable, StepOptions, publish_text
from tests.support.pydantic_ai_models import Resumed, Turns, once, twice
from tests.support.runs import Script


class Order(BaseModel):
    item: str
    count: int


async def test_a_resumed_run_repeats_no_model_call_and_no_tool_call() -> None:
    turns = Turns([("add", {"a": 1, "b": 2})], ["3"])
    agent = Agent(turns.model, name="sums", capabilities=[Durable()])
    added: list[int] = []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        added.append(a + b)
        return a + b

    async def body(ctx: Any) -> list[Any]:
        result = await agent.run("1 + 2?")
        return [result.output, result.usage.total_tokens, result.run_id == result.all_messages()[-1].run_id]

    assert await twice(body) == ["3", 40, True]
    assert (turns.calls, added) == ([1, 2], [3])


async def test_an_agent_outside_of_runs_works_as_without_the_capability() -> None:
    turns = Turns([("hello", {})], ["bye"])
    agent = Agent(turns.model, name="plain", capabilities=[Durable()])

    @agent.tool_plain
    def hello() -> str:
        return "hello"

    assert (await agent.run("hi")).output == "bye"
    assert turns.calls == [1, 2]


async def test_tool_calls_at_the_same_time_get_their_own_results_when_a_run_is_resumed() -> None:
    turns = Turns([("wait", {"name": name}) for name in ("a", "b", "c")], ["done"])
    agent = Agent(turns.model, name="parallel", capabilities=[Durable()])
    ran: list[str] = []
    released = {"a": asyncio.Event(), "b": asyncio.Event(), "c": asyncio.Event()}
    released["c"].set()

    @agent.tool_plain
    async def wait(name: str) -> str:
        await released[name].wait()
        ran.append(name)
        if name in "cb":  # the calls end in the opposite order
            released[chr(ord(name) - 1)].set()
        return name.upper()

    async def body(ctx: Any) -> list[Any]:
        return [[part.tool_call_id, part.content] for part in await _returned(agent)]

    assert await twice(body) == [["call-1-0", "A"], ["call-1-1", "B"], ["call-1-2", "C"]]
    assert ran == ["c", "b", "a"]


async def test_agents_at_the_same_time_get_their_own_answers_when_a_run_is_resumed() -> None:
    one, two = Turns(["one"]), Turns(["two"])
    agents = [Agent(each.model, name="twin", capabilities=[Durable()]) for each in (one, two)]

    async def body(ctx: Any) -> list[str]:
        return [result.output for result in await asyncio.gather(*(agent.run("hi") for agent in agents))]

    assert await twice(body) == ["one", "two"]
    assert (one.calls, two.calls) == ([1], [1])


async def test_a_server_that_repeats_the_ids_of_tool_calls_gets_each_call_made() -> None:
    turns = Turns([("count", {"n": 1})], [("count", {"n": 2})], ["done"])
    turns.same_ids = True
    agent = Agent(turns.model, name="repeats", capabilities=[Durable()])
    ran: list[int] = []

    @agent.tool_plain
    def count(n: int) -> int:
        ran.append(n)
        return n

    async def body(ctx: Any) -> list[Any]:
        return [part.content for part in await _returned(agent)]

    assert await twice(body) == [1, 2]
    assert ran == [1, 2]


async def test_a_streamed_answer_is_recorded_and_streamed_again() -> None:
    turns = Turns(["one two three"])
    agent = Agent(turns.model, name="streams", capabilities=[Durable()])

    async def body(ctx: Any) -> list[str]:
        async with agent.run_stream("count") as result:
            return [text async for text in result.stream_text(debounce_by=None)]

    assert (await twice(body))[-1] == "one two three "
    assert turns.calls == [1]


async def test_text_is_published_as_events_of_the_run_once() -> None:
    turns = Turns([("look", {})], ["one two"])
    agent = Agent(turns.model, name="tells", capabilities=[Durable(event_stream_handler=publish_text)])

    @agent.tool_plain
    def look() -> str:
        return "seen"

    resumed = Resumed(lambda ctx: _output(agent))
    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1)) as runner:
        await runner.execute(resumed.agent, "r")
        await runner.execute(resumed.agent, "r", raise_on_error=True)
        events = [event async for event in runner.stream("r")]
    assert [event.payload["delta"] for event in events if event.event_type == "assistant.delta"] == ["one ", "two "]
    assert turns.calls == [1, 2]


async def test_an_event_handler_gets_each_event_of_a_run_once() -> None:
    turns = Turns([("look", {})], ["done"])
    seen: list[str] = []

    async def handler(ctx: AgentRunContext[Any], events: Any) -> None:
        async for event in events:
            seen.append(event.event_kind)

    agent = Agent(turns.model, name="events", capabilities=[Durable(event_stream_handler=handler)])

    @agent.tool_plain
    def look() -> str:
        return "seen"

    await twice(lambda ctx: _output(agent))
    assert seen.count("function_tool_call") == 1
    assert seen.count("function_tool_result") == 1


async def test_run_sync_in_a_plain_run_is_durable() -> None:
    turns = Turns([("add", {"a": 1}), ("add", {"a": 2})], ["done"])
    agent = Agent(turns.model, name="sync", capabilities=[Durable()])
    added: list[int] = []
    executions: list[int] = []

    @agent.tool_plain
    async def add(a: int) -> int:
        await asyncio.sleep(0)
        added.append(a)
        return a

    class Plain(AgentRuntime):
        key = "plain"

        def run(self, ctx: SyncRunContext) -> RunResult:
            output = agent.run_sync("go").output
            executions.append(1)
            if len(executions) == 1:
                raise ValueError("stop")
            return RunResult({"value": output})

    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1)) as runner:
        assert (await runner.execute(Plain(), "r")).error is not None
        result = await runner.execute(Plain(), "r", raise_on_error=True)
    assert result.final_output == {"value": "done"}
    assert (turns.calls, sorted(added)) == ([1, 2], [1, 2])


async def test_an_agent_as_a_tool_of_another_agent_repeats_nothing() -> None:
    inner_turns, outer_turns = Turns(["inner"]), Turns([("ask", {}), ("ask", {})], ["outer"])
    inner = Agent(inner_turns.model, name="inner", capabilities=[Durable()])
    outer = Agent(outer_turns.model, name="outer", capabilities=[Durable()])
    failing = [True]

    @outer.tool_plain
    async def ask() -> str:
        answer = (await inner.run("hi")).output
        if failing:
            failing.clear()
            raise ValueError("after the inner agent")
        return answer

    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1)) as runner:
        script = Script(lambda ctx: _output(outer))
        first = await runner.execute(script, "r")
        assert first.error is not None
        assert first.error.message == "after the inner agent"
        result = await runner.execute(script, "r", raise_on_error=True)
    assert result.final_output == {"value": "outer"}
    assert outer_turns.calls == [1, 2]
    assert len(inner_turns.calls) == 2, "the model call inside the failed tool call was recorded"


async def test_a_retried_tool_step_repeats_no_model_call_inside_it() -> None:
    inner_turns, outer_turns = Turns(["inner"]), Turns([("ask", {})], ["outer"])
    inner = Agent(inner_turns.model, name="inner", capabilities=[Durable()])
    outer = Agent(outer_turns.model, name="outer", capabilities=[Durable(tool_step={"retries": 2, "retry_delay": 0.0})])
    attempts: list[int] = []

    @outer.tool_plain
    async def ask() -> str:
        answer = (await inner.run("hi")).output
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError("again")
        return answer

    assert await twice(lambda ctx: _output(outer)) == "outer"
    assert (len(attempts), inner_turns.calls) == (3, [1])


async def test_a_typed_output_is_the_same_when_a_run_is_resumed() -> None:
    turns = Turns([("final_result", {"item": "tea", "count": 2})])
    agent = Agent(turns.model, name="typed", output_type=Order, capabilities=[Durable()])

    async def body(ctx: Any) -> list[Any]:
        output = (await agent.run("order")).output
        return [type(output).__name__, output.item, output.count]

    assert await twice(body) == ["Order", "tea", 2]
    assert turns.calls == [1]


async def test_results_of_tools_keep_models_and_files() -> None:
    turns = Turns([("order", {}), ("image", {})], ["done"])
    agent = Agent(turns.model, name="values", capabilities=[Durable()])

    @agent.tool_plain
    def order() -> Order:
        return Order(item="tea", count=1)

    @agent.tool_plain
    def image() -> BinaryContent:
        return BinaryContent(b"\x89PNG\xff", media_type="image/png")

    async def body(ctx: Any) -> list[Any]:
        order, image = await _returned(agent)
        assert isinstance(image.content, BinaryContent)
        return [order.model_response_str(), image.content.data == b"\x89PNG\xff", image.content.media_type]

    assert await twice(body) == ['{"item":"tea","count":1}', True, "image/png"]


async def test_a_retry_of_the_model_is_recorded() -> None:
    turns = Turns([("half", {"n": 3})], [("half", {"n": 4})], ["done"])
    agent = Agent(turns.model, name="retries", capabilities=[Durable()])
    ran: list[int] = []

    @agent.tool_plain
    def half(n: int) -> int:
        ran.append(n)
        if n % 2:
            raise ModelRetry("Pass an even number.")
        return n // 2

    assert await twice(lambda ctx: _output(agent)) == "done"
    assert (turns.calls, ran) == ([1, 2, 3], [3, 4])


async def test_errors_of_a_model_are_the_same_in_both_executions() -> None:
    turns = Turns(ModelHTTPError(503, "scripted", {"reason": "busy"}))
    agent = Agent(turns.model, name="fails", capabilities=[Durable()])

    async def body(ctx: Any) -> list[Any]:
        try:
            await agent.run("hi")
        except ModelHTTPError as error:
            await ctx.now()  # the code continues after the error, and does so again
            return [error.status_code, error.model_name, error.body]
        raise AssertionError

    assert await twice(body) == [503, "scripted", {"reason": "busy"}]
    assert turns.calls == [1]


async def test_errors_of_a_tool_are_the_same_in_both_executions() -> None:
    turns = Turns([("fail", {})])
    agent = Agent(turns.model, name="fails", capabilities=[Durable()])
    ran: list[int] = []

    @agent.tool_plain
    def fail() -> None:
        ran.append(1)
        raise FileNotFoundError(2, "no such file", "x.txt")

    async def body(ctx: Any) -> list[Any]:
        with pytest.raises(FileNotFoundError) as raised:
            await agent.run("hi")
        await ctx.now()  # the code continues after the error, and does so again
        return [raised.value.errno, raised.value.filename]

    assert await twice(body) == [2, "x.txt"]
    assert ran == [1]


async def test_a_fallback_model_is_used_and_recorded() -> None:
    broken, working = Turns(ModelHTTPError(500, "broken")), Turns(["works"])
    agent = Agent(FallbackModel(broken.model, working.model), name="falls", capabilities=[Durable()])
    assert await twice(lambda ctx: _output(agent)) == "works"
    assert (broken.calls, working.calls) == ([1], [1])


async def test_model_steps_are_retried_as_their_options_say() -> None:
    failing, working = Turns(ModelHTTPError(503, "scripted")), Turns(["works"])
    answers = iter([failing.answer, failing.answer, working.answer])

    def answer(messages: Any, info: Any) -> ModelResponse:
        return next(answers)(messages, info)

    options: StepOptions = {"retries": 2, "retry_delay": 0.0, "retry_on": ModelHTTPError}
    agent = Agent(FunctionModel(answer), name="retried", capabilities=[Durable(model_step=options)])
    assert (await once(lambda ctx: _output(agent))).final_output == {"value": "works"}
    assert (failing.calls, working.calls) == ([1, 1], [1])


async def test_metadata_of_a_tool_sets_the_options_of_its_steps() -> None:
    turns = Turns([("flaky", {}), ("free", {})], ["done"])
    agent = Agent(turns.model, name="options", capabilities=[Durable()])
    ran: list[str] = []

    @agent.tool_plain(metadata={"agent_runtime": {"retries": 1, "retry_delay": 0.0}})
    def flaky() -> str:
        ran.append("flaky")
        if len(ran) == 1:
            raise ValueError("once")
        return "ok"

    @agent.tool_plain(metadata={"agent_runtime": False}, sequential=True)
    def free() -> str:
        ran.append("free")
        return "ok"

    assert await twice(lambda ctx: _output(agent)) == "done"
    assert ran == ["flaky", "flaky", "free", "free"], "a tool without steps runs again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retry": 1}, "unknown step option in model_step 'retry'. Did you mean"),
        ({"retries": -1}, "retries must be an integer of at least 0"),
        ("twice", "model_step must be a dict of step options"),
    ],
)
def test_wrong_options_are_errors(options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Durable(model_step=options)


async def test_toolsets_with_an_id_are_durable_and_toolsets_of_a_call_are_refused() -> None:
    turns = Turns([("add", {"a": 1})], ["done"])
    ran: list[int] = []

    def add(a: int) -> int:
        ran.append(a)
        return a

    tools = FunctionToolset([add], id="sums")
    agent = Agent(turns.model, name="toolsets", toolsets=[tools], capabilities=[Durable()])
    assert await twice(lambda ctx: _output(agent)) == "done"
    assert ran == [1]

    async def with_toolset(ctx: Any) -> str:
        return (await agent.run("go", toolsets=[FunctionToolset([add], id="late")])).output

    result = await once(with_toolset)
    assert result.error is not None
    assert result.error.type == UserError.__name__


async def test_a_cancelled_run_cancels_the_model_call() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(messages: Any, info: Any) -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    agent = Agent(FunctionModel(answer), name="stops", capabilities=[Durable()])
    async with AgentRunner.open("memory://") as runner:
        running = asyncio.ensure_future(runner.execute(Script(lambda ctx: _output(agent)), "r"))
        await started.wait()
        await runner.cancel("r")
        result = await running
    assert result.status == "cancelled"
    assert cancelled.is_set()


async def _output(agent: Agent[Any, Any]) -> Any:
    return (await agent.run("go")).output


async def _returned(agent: Agent[Any, Any]) -> list[ToolReturnPart]:
    messages = (await agent.run("go")).all_messages()
    return [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]


async def test_tools_of_an_mcp_server_and_their_list_are_recorded() -> None:
    pytest.importorskip("fastmcp")
    from mcp.server import MCPServer
    from pydantic_ai.mcp import MCPToolset

    asked: list[str] = []
    server = MCPServer("sums", instructions="Add numbers.")

    @server.tool()
    def add(a: int, b: int) -> int:
        asked.append(f"{a} + {b}")
        return a + b

    turns = Turns([("add", {"a": 1, "b": 2})], [("add", {"a": 3, "b": 4})], ["done"])
    agent = Agent(turns.model, name="mcp", toolsets=[MCPToolset(server, id="sums")], capabilities=[Durable()])

    async def body(ctx: Any) -> list[Any]:
        return [part.content for part in await _returned(agent)]

    assert await twice(body) == [3, 7]
    assert (turns.calls, asked) == ([1, 2, 3], ["1 + 2", "3 + 4"])


async def test_a_fork_of_a_run_finds_the_saved_results() -> None:
    turns = Turns([("look", {})], ["done"])
    agent = Agent(turns.model, name="forked", capabilities=[Durable()])
    looked: list[int] = []

    @agent.tool_plain
    def look() -> None:
        looked.append(1)

    script = Script(lambda ctx: _output(agent))
    async with AgentRunner.open("memory://") as runner:
        await runner.execute(script, "r", raise_on_error=True)
        fork = await runner.fork("r", "forked__function_toolset__<agent>.call_tool:look")
        result = await runner.execute(script, fork, raise_on_error=True)
    assert result.final_output == {"value": "done"}
    assert (turns.calls, looked) == ([1, 2, 2], [1]), "only the model call after that step is made"
