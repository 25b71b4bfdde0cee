"""Agents as tools of an MCP server: listing, calls, run ids, progress, questions, cancellation, and both transports."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import httpx2
from mcp import Client, MCPError
from mcp.client.context import ClientRequestContext
from mcp.server.streamable_http import EventMessage
from mcp_types import (
    ElicitationCapability,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    InputRequiredResult,
    JSONRPCResponse,
    TextContent,
    UrlElicitationCapability,
)

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
from agent_runtime_core.integrations._mcp_http import SessionEvents
from agent_runtime_core.integrations.mcp_server import AgentTool, create_mcp_server
from agent_runtime_core.registry import Registry
from agent_runtime_core.tools import tool_name
from tests.integrations.test_mcp_tasks import http_server, lines, over_http, over_stdio
from tests.support.processes import becomes
from tests.support.redis_servers import free_port

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
                return RunResult(final_output={"answer": await ctx.approve("plan", schema=ctx.params.get("schema"))})
            case "ask twice":
                answers = await asyncio.gather(ctx.approve("one"), ctx.approve("two"))
                return RunResult(final_output={"answer": answers})
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


MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


def answering(*responses: ElicitResult | ErrorData, asked: list[str] | None = None) -> Any:
    """A client that answers its forms with these, in this order."""
    left = [*responses]

    async def ask(ctx: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        if asked is not None:
            asked.append(params.message)
        return left.pop(0)

    return ask


ACCEPT = ElicitResult(action="accept", content={"answer": True})


@MODES
async def test_a_client_with_forms_is_asked(mode: str) -> None:
    asked: list[str] = []
    async with served(elicitation_callback=answering(ACCEPT, ACCEPT, asked=asked), mode=mode) as (_, client):
        for number, do in enumerate(("ask", "child")):
            result = await client.call_tool("agent", {"params": {"do": do}})
            assert result.structured_content == {"answer": True}
            assert len(asked) == number + 1
    assert "asks for 'plan'" in asked[0]


@MODES
async def test_several_questions_are_several_forms(mode: str) -> None:
    answers = answering(ACCEPT, ElicitResult(action="decline"))
    async with served(elicitation_callback=answers, mode=mode) as (_, client):
        result = await client.call_tool("agent", {"params": {"do": "ask twice"}})
        assert result.structured_content == {"answer": [True, False]}


async def test_a_changed_state_is_an_error() -> None:
    async with served(elicitation_callback=answering()) as (_, client):
        call = partial(client.session.call_tool, "agent", allow_input_required=True)
        first = await call({"params": {"do": "ask"}})
        assert isinstance(first, InputRequiredResult)
        assert first.request_state is not None
        run_id, question, check = first.request_state.split("/")
        for state in (run_id, first.request_state + "x", f"{run_id}/other/{check}", f"other/{question}/{check}"):
            with pytest.raises(MCPError, match="requestState"):
                await call({}, request_state=state)
        again = await call({}, request_state=first.request_state)
        assert again == first


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (ElicitResult(action="cancel"), ""),
        (ElicitResult(action="accept", content={"answer": "perhaps"}), "must be a boolean"),
        (ElicitResult(action="accept", content={}), "the form has no field 'answer'"),
        (ErrorData(code=-32601, message="no form today"), "no form today"),
    ],
)
async def test_a_form_of_2025_without_an_answer_leaves_the_question_open(response: Any, reason: str) -> None:
    async with served(elicitation_callback=answering(response), mode="legacy") as (runner, client):
        waits = await client.call_tool(
            "agent", {"params": {"do": "ask", "schema": {"type": "boolean"}}, "run_id": "one"}
        )
        assert not waits.is_error
        assert "only run_id='one'" in text_of(waits)
        assert reason in text_of(waits)
        await runner.approve("one", "plan", True)
        assert (await client.call_tool("agent", {"run_id": "one"})).structured_content == {"answer": True}


@MODES
async def test_a_client_with_forms_only_behind_urls_gets_a_text(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_urls = ElicitationCapability(url=UrlElicitationCapability())
    monkeypatch.setattr("mcp.client.session.types.ElicitationCapability", lambda **_: only_urls)
    async with served(elicitation_callback=answering(), mode=mode) as (_, client):
        result = await client.call_tool("agent", {"params": {"do": "ask"}, "run_id": "one"})
        assert "only run_id='one'" in text_of(result)


async def test_a_form_of_2025_disappears_if_its_question_is_answered_elsewhere() -> None:
    gone = asyncio.Event()

    async def ask(ctx: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        await runner.approve("one", "plan", False)
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    async with served(elicitation_callback=ask, mode="legacy") as (runner, client):
        result = await client.call_tool("agent", {"params": {"do": "ask"}, "run_id": "one"})
        assert result.structured_content == {"answer": False}
        await gone.wait()


async def test_a_cancelled_call_of_2025_closes_its_form_and_cancels_its_run() -> None:
    shown, gone = asyncio.Event(), asyncio.Event()

    async def ask(ctx: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        shown.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    async with served(elicitation_callback=ask, mode="legacy") as (runner, client):
        call = asyncio.create_task(client.call_tool("agent", {"params": {"do": "ask"}}))
        await shown.wait()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await gone.wait()
        (run,) = await runner.runs()
        assert (await runner.wait(run.run_id)).status is RunStatus.CANCELLED


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

        async def begins() -> bool:
            return "begin" in lines(log)

        await becomes(begins, "the run begins")
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        async with AgentRunner.open(str(store)) as runner:

            async def is_cancelled() -> bool:
                return [run.status.value for run in await runner.runs(agent="endless")] == ["cancelled"]

            # Its server is killed after that: before, the next server would call the hook again.
            await becomes(is_cancelled, "the run is cancelled")
            await runner.approve("one", "buy", True)
    async with transport(store, log, extensions=None) as client:
        assert text_of(await client.call_tool("order", {"run_id": "one"})) == "bought tea"
    assert [line for line in lines(log) if not line.isdigit()] == ["reserve tea", "begin", "cancelled", "buy tea"]


# -- streams that a client resumes


async def test_the_events_of_a_session_are_its_own_and_few() -> None:
    events = SessionEvents()
    got: list[tuple[str, Any]] = []

    async def send(event: EventMessage) -> None:
        got.append((event.event_id or "", event.message))

    def message(number: int) -> JSONRPCResponse:
        return JSONRPCResponse(jsonrpc="2.0", id=number, result={})

    begin = await events.store_event("a\nb", None)
    assert "\n" not in begin
    for number in range(150):
        await events.store_event("a\nb" if number % 2 else "c", message(number))
    assert await events.replay_events_after(begin, send) == "a\nb"
    assert [each.id for _, each in got] == [*range(51, 150, 2)]  # the last 100 of the session, of this stream
    last = got[-1][0]
    got.clear()
    assert await events.replay_events_after(last, send) == "a\nb"
    assert await events.replay_events_after("unknown", send) is None
    assert got == []


async def test_the_application_may_bring_its_own_event_store() -> None:
    mine = SessionEvents()
    async with AgentRunner.open("memory://", registry=Registry()) as runner:
        server = create_mcp_server(runner)
        server.streamable_http_app()
        stores = [server.session_manager.event_store for _ in range(2)]
        assert stores[0] is not stores[1]
        server.streamable_http_app(event_store=mine)
        assert server.session_manager.event_store is mine


class Session:
    """A session of the protocol 2025-11-25 over plain HTTP."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http
        self._headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}

    async def open(self) -> None:
        about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about}
        response = await self._http.post("/mcp", json=body, headers=self._headers)
        self._headers["Mcp-Session-Id"] = response.headers["mcp-session-id"]
        await self._http.post(
            "/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=self._headers
        )

    async def lost_call(self, **arguments: Any) -> dict[str, str]:
        """Call the tool `order`, and lose the connection after the first event, which is returned."""
        params = {"name": "order", "arguments": arguments}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        async with self._http.stream("POST", "/mcp", json=body, headers=self._headers) as response:
            return await anext(_events(response))

    async def resumed(self, last: str) -> list[dict[str, Any]]:
        """The messages after an event, up to the response."""
        found: list[dict[str, Any]] = []
        async with self._http.stream("GET", "/mcp", headers={**self._headers, "Last-Event-ID": last}) as response:
            async for event in _events(response):
                if event["data"]:
                    found.append(json.loads(event["data"]))
                if found and "id" in found[-1]:
                    break
        return found


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, str]]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
        else:
            yield fields
            fields = {}


async def test_a_client_gets_the_result_of_a_call_whose_connection_was_lost(tmp_path: Path) -> None:
    async with (
        http_server(tmp_path / "runs.db", tmp_path / "log", free_port()) as url,
        httpx2.AsyncClient(base_url=url.removesuffix("/mcp"), timeout=None) as http,
    ):
        sessions = [Session(http), Session(http)]
        for each in sessions:
            await each.open()
        names = ["one", "two"]
        primed = [await each.lost_call(message="tea", run_id=name) for each, name in zip(sessions, names, strict=True)]
        for event in primed:
            assert event["data"] == ""
            assert event["retry"] == "20"
        # The ids of their requests are the same, but each session gets what is its own.
        for each, name, event in zip(sessions, names, primed, strict=True):
            (response,) = await each.resumed(event["id"])
            assert f"only run_id='{name}'" in response["result"]["content"][0]["text"]
