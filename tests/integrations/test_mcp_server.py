"""Agents as tools of an MCP server: listing, calls, run ids, progress, questions, cancellation, and both transports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client, MCPError
from mcp.client.context import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult, TextContent

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    ErrorInfo,
    InvalidArgument,
    RunContext,
    RunResult,
    RunStatus,
    UnknownAgent,
)
from agent_runtime_core.integrations import mcp_server
from agent_runtime_core.integrations.mcp_server import AgentTool, create_mcp_server
from agent_runtime_core.registry import Registry
from agent_runtime_core.tools import tool_name
from tests.integrations.test_mcp_tasks import lines, over_http, over_stdio
from tests.support.processes import becomes

OTHER = tool_name("other.agent")


class Agent(AgentRuntime):
    """Does what its input says.

    This line is for developers.
    """

    key = "agent"
    runs = 0

    async def run(self, ctx: RunContext) -> RunResult:
        Agent.runs += 1
        match ctx.params.get("do"):
            case "ask":
                return RunResult(final_output={"answer": await ctx.approve("plan")})
            case "child":
                return await ctx.call("agent", {"params": {"do": "ask"}})
            case "fail":
                return RunResult(error=ErrorInfo("Broken", "no luck", retriable=False))
            case "wait":
                await ctx.emit("began", {})
                await ctx.wait_for_signal("go")
            case "step":
                await ctx.step("look", lambda: 1)
            case "lie":
                for kind in ("run.succeeded", "run.heartbeat"):
                    await ctx.emit(kind, {"name": "a lie"})
        said = ctx.input_messages[-1]["content"] if ctx.input_messages else "nothing"
        return RunResult(final_output={"response": f"you said {said}"})


class Other(AgentRuntime):
    key = "other.agent"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult(final_output={"params": dict(ctx.params)})


@pytest.fixture(autouse=True)
def _without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    Agent.runs = 0
    monkeypatch.setattr(mcp_server, "_LOOK_AGAIN", 0.01)


@contextlib.asynccontextmanager
async def served(agents: Any = None, **options: Any) -> AsyncIterator[tuple[AgentRunner, Client]]:
    registry = Registry()
    for each in (Agent(), Other()):
        registry.register(each)
    async with (
        AgentRunner.open("memory://", registry=registry) as runner,
        Client(create_mcp_server(runner, agents), **options) as connected,
    ):
        yield runner, connected


def text_of(result: Any) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


# -- tools


async def test_agents_are_tools() -> None:
    async with served() as (_, client):
        tools = {each.name: each for each in (await client.list_tools()).tools}
        assert [*tools] == ["agent", OTHER]
        assert tools["agent"].description == "Does what its input says."
        assert tools[OTHER].description == "Runs the agent other.agent."
        assert [*tools["agent"].input_schema["properties"]] == ["message", "params", "run_id"]


async def test_the_application_chooses_and_describes_the_tools() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = AgentTool("other.agent", "weather", "Tells the weather.", schema)
    async with served([tool]) as (_, client):
        (listed,) = (await client.list_tools()).tools
        assert (listed.name, listed.description) == ("weather", "Tells the weather.")
        assert [*listed.input_schema["properties"]] == ["city", "run_id"]
        result = await client.call_tool("weather", {"city": "Rome"})
        assert result.structured_content == {"params": {"city": "Rome"}}
        assert "missing required argument 'city'" in text_of(await client.call_tool("weather", {"town": "Rome"}))
        with pytest.raises(MCPError, match="unknown tool 'agent'"):
            await client.call_tool("agent", {})


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        (["agent", Agent()], "tool name must be unique"),
        ([AgentTool("agent", parameters={"type": "array"})], "parameters must be the JSON Schema of an object"),
        (
            [AgentTool("agent", parameters={"type": "object", "properties": {"run_id": {}}})],
            "parameters must have no property run_id",
        ),
    ],
)
async def test_invalid_tools_are_errors(agents: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        async with served(agents):
            pass


async def test_an_unknown_agent_is_an_error() -> None:
    with pytest.raises(UnknownAgent):
        async with served(["nobody"]):
            pass


# -- calls


async def test_a_call_is_a_run() -> None:
    async with served() as (runner, client):
        result = await client.call_tool("agent", {"message": "hi"})
        assert text_of(result) == "you said hi"
        assert result.structured_content == {"response": "you said hi"}
        assert result.meta is not None
        run = await runner.get_run(result.meta["agent-runtime-core/run-id"])
        assert (run.agent_key, run.status) == ("agent", RunStatus.SUCCEEDED)


async def test_the_same_run_id_is_the_same_run() -> None:
    async with served() as (_, client):
        first, again = [await client.call_tool("agent", {"message": "hi", "run_id": "one"}) for _ in range(2)]
        assert first == again
        assert await client.call_tool("agent", {"run_id": "one"}) == first
        assert Agent.runs == 1
        other = await client.call_tool("agent", {"message": "bye", "run_id": "one"})
        assert other.is_error
        assert "one" in text_of(other)
        unknown = await client.call_tool("agent", {"run_id": "two"})
        assert unknown.is_error
        assert "two" in text_of(unknown)
        of_other_agent = await client.call_tool(OTHER, {"run_id": "one"})
        assert of_other_agent.is_error
        assert Agent.runs == 1


async def test_a_failed_run_is_an_error_for_the_model() -> None:
    async with served() as (_, client):
        result = await client.call_tool("agent", {"params": {"do": "fail"}, "run_id": "one"})
        assert result.is_error
        assert text_of(result) == "run one failed: Broken: no luck"


async def test_invalid_arguments_are_an_error_for_the_model() -> None:
    async with served() as (_, client):
        result = await client.call_tool("agent", {"message": 1, "more": True})
        assert result.is_error
        assert "message must be a string, got 1" in text_of(result)
        assert "more" in text_of(result)
        assert Agent.runs == 0


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_is_notified_of_progress(mode: str) -> None:
    seen: list[tuple[float, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message))

    async with served(mode=mode) as (_, client):
        await client.call_tool("agent", {"params": {"do": "step"}}, progress_callback=on_progress)
    assert [number for number, _ in seen] == sorted({number for number, _ in seen})
    assert {"step.started: look", "step.completed: look"} <= {message for _, message in seen}


async def test_a_call_does_not_end_with_what_its_agent_emits() -> None:
    seen: list[str | None] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(message)

    async with served() as (_, client):
        result = await client.call_tool("agent", {"params": {"do": "lie"}}, progress_callback=on_progress)
        assert text_of(result) == "you said nothing"
    assert {"agent.run.succeeded: a lie", "agent.run.heartbeat: a lie"} <= set(seen)


# -- questions


async def test_a_client_with_forms_is_asked() -> None:
    asked: list[str] = []

    async def ask(ctx: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"answer": True})

    async with served(elicitation_callback=ask) as (_, client):
        for number, do in enumerate(("ask", "child")):
            result = await client.call_tool("agent", {"params": {"do": do}})
            assert result.structured_content == {"answer": True}
            assert len(asked) == number + 1
    assert "asks for 'plan'" in asked[0]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_without_forms_learns_how_to_come_back(mode: str) -> None:
    async with served(mode=mode) as (runner, client):
        for do, name in (("ask", "one"), ("child", "two")):
            waits = await client.call_tool("agent", {"params": {"do": do}, "run_id": name})
            assert not waits.is_error
            assert f"only run_id='{name}'" in text_of(waits)
            (question,) = await runner.approvals()
            await runner.approve(question.run_id, "plan", False)
            result = await client.call_tool("agent", {"run_id": name})
            assert result.structured_content == {"answer": False}


# -- cancellation


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("named", [False, True])
async def test_a_cancelled_call_cancels_a_run_that_nobody_can_name(mode: str, named: bool) -> None:
    async with served(mode=mode) as (runner, client):
        arguments = {"params": {"do": "wait"}} | ({"run_id": "one"} if named else {})
        call = asyncio.create_task(client.call_tool("agent", arguments))

        async def began() -> bool:
            runs = await runner.runs()
            return bool(runs) and "began" in [
                each.event_type for each in await runner.event_bus.get_events(runs[0].run_id)
            ]

        await becomes(began, "the run begins")
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        (run,) = await runner.runs()
        if named:
            await runner.signal("one", "go")
        assert (await runner.wait(run.run_id)).status is (RunStatus.SUCCEEDED if named else RunStatus.CANCELLED)


# -- the worker


async def test_connections_share_a_worker_and_the_last_one_ends_it() -> None:
    registry = Registry()
    registry.register(Agent())
    async with AgentRunner.open("memory://", registry=registry) as runner:
        server = create_mcp_server(runner)
        async with Client(server) as first:
            async with Client(server) as second:
                await second.call_tool("agent", {})
            await first.call_tool("agent", {})
        async with Client(server) as third:  # and the next one starts it again
            await third.call_tool("agent", {})
        assert Agent.runs == 3
        run_id = await runner.submit("agent")
        with pytest.raises(TimeoutError):
            await runner.wait(run_id, timeout=0)


async def test_other_workers_may_do_the_work() -> None:
    registry = Registry()
    registry.register(Agent())
    async with (
        AgentRunner.open("memory://", registry=registry) as runner,
        Client(create_mcp_server(runner, work=False)) as client,
    ):
        call = asyncio.create_task(client.call_tool("agent", {"message": "hi"}))
        await becomes(runner.run_once, "the run is stored")
        assert text_of(await call) == "you said hi"


# -- transports


@pytest.mark.slow
@pytest.mark.parametrize("transport", [over_stdio, over_http])
async def test_a_server_in_a_process_of_its_own(transport: Any, tmp_path: Path) -> None:
    store, log = tmp_path / "runs.db", tmp_path / "log"
    async with transport(store, log, extensions=None) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["order", "endless"]
        waits = await client.call_tool("order", {"message": "tea", "run_id": "one"})
        assert "run_id='one'" in text_of(waits)
        call = asyncio.create_task(client.call_tool("endless", {"message": "go"}))

        async def has(line: str) -> bool:
            return line in lines(log)

        await becomes(lambda: has("begin"), "the run begins")
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await becomes(lambda: has("cancelled"), "the run is cancelled")
    async with AgentRunner.open(str(store)) as runner:
        await runner.approve("one", "buy", True)
    async with transport(store, log, extensions=None) as client:
        assert text_of(await client.call_tool("order", {"run_id": "one"})) == "bought tea"
    assert [line for line in lines(log) if not line.isdigit()] == ["reserve tea", "begin", "cancelled", "buy tea"]
