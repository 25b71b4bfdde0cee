"""Tools of MCP servers in agents: discovery, annotations, content, errors, connections and kills."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)

from agent_runtime_core import (
    AgentRunner,
    InvalidArgument,
    MockLLMClient,
    RunContext,
    RunResult,
    RunStatus,
    ToolFailed,
    ToolRegistry,
    ToolTimeout,
    open_run,
    tool,
)
from agent_runtime_core.integrations.mcp import MCPAgent, MCPTools, ServerUnreachable
from tests.integrations.test_mcp_tasks import http_server
from tests.support.framework_kills import check_kills
from tests.support.processes import ROOT, becomes
from tests.support.redis_servers import free_port

PNG = base64.b64encode(b"\x89PNG").decode()


def server_of(*functions: Callable[..., Any], **hints: Any) -> MCPServer:
    server = MCPServer("test", log_level="ERROR")
    for each in functions:
        server.tool(annotations=ToolAnnotations(**hints) if hints else None)(each)
    return server


def over_stdio(log: Path) -> StdioServerParameters:
    arguments = ["-m", "tests.integrations.mcp_tools_server", str(log)]
    return StdioServerParameters(command=sys.executable, args=arguments, cwd=ROOT, env=dict(os.environ))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Crash(Exception):
    """Ends a block before its run has finished, as a crash does."""


# -- discovery


async def test_the_tools_of_a_server_are_in_a_registry() -> None:
    async with MCPTools(server_of(add), prefix="calc.") as mcp:
        (found,) = (await mcp.registry()).list_tools()
        assert found.name.startswith("calc_add_")  # "calc.add", in characters that each provider accepts
        assert found.description == "Add two numbers."
        assert found.parameters["required"] == ["a", "b"]
        assert await (await mcp.registry()).execute(found.name, {"a": 1, "b": 2}) == "3"


async def test_a_run_records_its_list_of_tools(tmp_path: Path) -> None:
    def later() -> str:
        return ""

    async def names(mcp: MCPTools, *, crash: bool) -> list[str]:
        found: list[str] = []
        try:
            async with mcp, open_run(str(tmp_path / "runs.db"), run_id="one") as ctx:
                found = [each.name for each in (await mcp.registry(ctx)).list_tools()]
                if crash:
                    raise Crash
        except Crash:
            pass
        return found

    assert await names(MCPTools(server_of(add)), crash=True) == ["add"]
    assert await names(MCPTools(server_of(add, later)), crash=True) == ["add"]
    # A resumed run needs no server for what is recorded.
    assert await names(MCPTools(f"http://127.0.0.1:{free_port()}/mcp"), crash=False) == ["add"]


@pytest.mark.parametrize(
    ("hints", "side_effects", "confirmation"),
    [
        ({}, True, True),
        ({"read_only_hint": True}, False, False),
        ({"read_only_hint": True, "destructive_hint": True}, False, False),
        ({"read_only_hint": False}, True, True),
        ({"destructive_hint": False}, True, False),
        ({"destructive_hint": True}, True, True),
        ({"title": "Adds"}, True, True),
    ],
)
async def test_annotations_decide_about_side_effects_and_confirmation(
    hints: dict[str, Any], side_effects: bool, confirmation: bool
) -> None:
    async with MCPTools(server_of(add, **hints)) as mcp:
        (found,) = (await mcp.registry()).list_tools()
        assert (found.has_side_effects, found.requires_confirmation) == (side_effects, confirmation)


async def test_the_application_decides_about_confirmation() -> None:
    for confirm, expected in ((True, True), (False, False), (lambda about: about.name == "add", True)):
        async with MCPTools(server_of(add, read_only_hint=True), confirm=confirm) as mcp:
            (found,) = (await mcp.registry()).list_tools()
            assert found.requires_confirmation is expected


async def test_only_the_included_tools_are_registered() -> None:
    def other() -> str:
        return ""

    async with MCPTools(server_of(add, other), include=["other"]) as mcp:
        assert [each.name for each in (await mcp.registry()).list_tools()] == ["other"]


async def test_a_tool_with_an_invalid_schema_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}}

    class Listed(MCPTools):
        async def _listed(self) -> list[dict[str, Any]]:
            return [{"name": "broken", "inputSchema": broken}, *await super()._listed()]

    async with Listed(server_of(add)) as mcp:
        assert [each.name for each in (await mcp.registry()).list_tools()] == ["add"]
    assert "tool 'broken' of the MCP server 'mcp' is left out" in caplog.text
    assert "Missing" in caplog.text


async def test_two_tools_of_one_name_need_a_prefix() -> None:
    async with MCPTools(server_of(add), name="first") as first, MCPTools(server_of(add), name="second") as second:
        registry = await first.registry()
        with pytest.raises(InvalidArgument, match="Give MCP server 'second' a prefix"):
            await second.registry(into=registry)


def test_a_server_needs_a_name() -> None:
    with pytest.raises(InvalidArgument, match="name must be a non-empty string"):
        MCPTools("http://127.0.0.1/mcp", name="")


# -- results


async def result_of(result: Any) -> Any:
    def make() -> CallToolResult:
        return result if isinstance(result, CallToolResult) else CallToolResult(content=result)

    async with MCPTools(server_of(make)) as mcp:
        return await (await mcp.registry()).execute("make", {})


async def test_text_and_structured_results() -> None:
    assert await result_of([TextContent(text="a"), TextContent(text="b")]) == "a\nb"
    assert await result_of(CallToolResult(content=[], structured_content={"a": [None]})) == {"a": [None]}
    assert await result_of([]) == ""


async def test_images_and_documents_are_content_parts() -> None:
    pdf = BlobResourceContents(uri="file:///a/report.pdf", mime_type="application/pdf", blob=PNG)
    picture = BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob=PNG)
    found = await result_of(
        [
            TextContent(text="look"),
            ImageContent(data=PNG, mime_type="image/png"),
            EmbeddedResource(resource=pdf),
            EmbeddedResource(resource=picture),
        ]
    )
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    file = {"filename": "report.pdf", "file_data": f"data:application/pdf;base64,{PNG}"}
    assert found == [{"type": "text", "text": "look"}, image, {"type": "file", "file": file}, image]


async def test_other_content_is_described_in_text() -> None:
    found = await result_of(
        [
            ResourceLink(name="readme", uri="file:///readme.md", description="about"),
            EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="inside")),
            EmbeddedResource(resource=BlobResourceContents(uri="file:///a.bin", blob=PNG)),
            AudioContent(data=PNG, mime_type="audio/wav"),
        ]
    )
    assert found.splitlines() == [
        "readme: file:///readme.md (about)",
        "inside",
        "[file:///a.bin: application/octet-stream, 4 bytes]",
        "[audio/wav, 4 bytes: this model client sends no audio]",
    ]


async def test_errors_of_a_tool_and_of_the_protocol_are_failed_calls() -> None:
    def fails() -> str:
        raise ToolError("no luck")  # the SDK hides the message of any other error

    async with MCPTools(server_of(fails)) as mcp:
        registry = await mcp.registry()
        with pytest.raises(ToolFailed, match="no luck"):
            await registry.execute("fails", {})
    async with MCPTools(server_of(add)) as other:
        found = registry.get("fails")
        assert found is not None
        with pytest.raises(ToolFailed, match=r"(?i)unknown tool"):
            await other._call("fails", {}, None)


async def test_a_call_has_a_time_limit() -> None:
    async def slow() -> str:
        await asyncio.Event().wait()
        return ""

    async with MCPTools(server_of(slow), timeout=0.01) as mcp:
        with pytest.raises(ToolTimeout):
            await (await mcp.registry()).execute("slow", {})


# -- connections


async def test_a_server_that_cannot_be_reached_is_an_error_that_names_it() -> None:
    for server in (f"http://127.0.0.1:{free_port()}/mcp", StdioServerParameters(command="/no/such/command")):
        with pytest.raises(ServerUnreachable, match="the MCP server 'files' cannot be reached"):
            await MCPTools(server, name="files").registry()


async def test_connecting_is_retried() -> None:
    made = 0

    def client() -> Client:
        nonlocal made
        made += 1
        return Client("http://127.0.0.1:1/mcp" if made < 3 else server_of(add))

    async with MCPTools(client, retries=2, retry_delay=0) as mcp, open_run("memory://", run_id="one") as ctx:
        assert len((await mcp.registry(ctx)).list_tools()) == 1
    assert made == 3


async def test_concurrent_calls_share_one_connection_and_closing_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    mcp = MCPTools(over_stdio(log))
    registry = await mcp.registry()
    pids = await asyncio.gather(*(registry.execute("pid", {}) for _ in range(5)))
    assert len(set(pids)) == 1
    await mcp.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids[0]), 0)
    await mcp.close()  # a second time
    assert await registry.execute("pid", {}) not in pids  # and a call after it connects again
    await mcp.close()
    assert log.read_text().splitlines() == ["started", "started"]


async def test_a_call_after_a_lost_connection_makes_a_new_one(tmp_path: Path) -> None:
    async with MCPTools(over_stdio(tmp_path / "log")) as mcp:
        registry = await mcp.registry()
        first = await registry.execute("pid", {})
        with pytest.raises(ToolFailed):
            await registry.execute("die", {})
        assert await registry.execute("pid", {}) != first


@pytest.mark.slow
async def test_a_server_with_streamable_http_may_restart(tmp_path: Path) -> None:
    store, log, port = tmp_path / "runs.db", tmp_path / "log", free_port()
    call = {"message": "tea", "run_id": "one"}
    async with MCPTools(f"http://127.0.0.1:{port}/mcp", retries=0) as mcp:
        async with http_server(store, log, port):
            registry = await mcp.registry()
            assert [each.name for each in registry.list_tools()] == ["order", "endless"]
            first = await registry.execute("order", call)
            assert "waits for a person" in first
        with pytest.raises((ToolFailed, ServerUnreachable)):
            await registry.execute("order", call)
        async with http_server(store, log, port):
            assert await registry.execute("order", call) == first


# -- agents


def calling(*calls: tuple[str, str]) -> MockLLMClient:
    turns = [
        {"role": "assistant", "tool_calls": [{"id": f"c{number}", "function": {"name": name, "arguments": arguments}}]}
        for number, (name, arguments) in enumerate(calls)
    ]
    return MockLLMClient([*turns, "done"])


class Assistant(MCPAgent):
    key = "assistant"
    system_prompt = "You help."

    def __init__(self, model: MockLLMClient, *servers: MCPTools) -> None:
        self.model_client, self.mcp_servers = model, servers

    def get_llm_client(self) -> MockLLMClient:
        return self.model_client


async def executed(agent: MCPAgent, run_id: str = "one", store: str = "memory://") -> RunResult:
    async with AgentRunner.open(store) as runner:
        try:
            message = {"role": "user", "content": "go"}
            return await runner.execute(agent, run_id=run_id, input_data={"messages": [message]})
        finally:
            await agent.close()


def answers(result: RunResult) -> list[Any]:
    return [each["content"] for each in result.final_messages if each["role"] == "tool"]


async def test_an_agent_calls_tools_of_servers_and_its_own() -> None:
    @tool
    def shout(text: str) -> str:
        return text.upper()

    class Loud(Assistant):
        tools = ToolRegistry()

    Loud.tools.register(shout)
    agent = Loud(
        calling(("add", '{"a": 1, "b": 2}'), ("shout", '{"text": "hi"}')), MCPTools(server_of(add, read_only_hint=True))
    )
    result = await executed(agent)
    assert answers(result) == ["3", "HI"]
    assert [each.name for each in Loud.tools.list_tools()] == ["shout"]  # the tools of the server are those of the run


async def test_an_image_reaches_the_model_as_a_part_and_is_recorded_once(tmp_path: Path) -> None:
    def picture() -> CallToolResult:
        return CallToolResult(content=[TextContent(text="here"), ImageContent(data=PNG, mime_type="image/png")])

    parts = [
        {"type": "text", "text": "here"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    ]
    model = calling(("picture", "{}"))
    agent = Assistant(model, MCPTools(server_of(picture, read_only_hint=True)))
    result = await executed(agent, store=str(tmp_path / "runs.db"))
    assert answers(result) == [parts]
    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        records = await runner.state_store.records(str(result.run_id))
    assert sum(str(record).count(PNG) for record in records if record.name == "tool") == 1


async def test_a_destructive_tool_waits_for_approval() -> None:
    agent = Assistant(calling(("add", '{"a": 1, "b": 2}')), MCPTools(server_of(add)))
    async with AgentRunner.open("memory://") as runner:
        message = {"role": "user", "content": "go"}
        running = asyncio.create_task(runner.execute(agent, run_id="one", input_data={"messages": [message]}))

        async def asks() -> bool:
            return [each.name for each in await runner.approvals()] == ["tool:add"]

        await becomes(asks, "the run asks")
        await runner.approve("one", "tool:add", False)
        assert answers(await running) == ["Error: a person refused this call: denied"]
    await agent.close()


async def test_each_call_has_an_idempotency_key(tmp_path: Path) -> None:
    agent = Assistant(calling(("key", "{}"), ("key", "{}")), MCPTools(over_stdio(tmp_path / "log"), confirm=False))
    first, second = answers(await executed(agent))
    assert first != second
    assert "None" not in (first, second)


async def test_a_cancelled_run_cancels_the_call_at_the_server() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    agent = Assistant(calling(("slow", "{}")), MCPTools(server_of(slow, read_only_hint=True)))
    async with AgentRunner.open("memory://") as runner:
        message = {"role": "user", "content": "go"}
        running = asyncio.create_task(runner.execute(agent, run_id="one", input_data={"messages": [message]}))
        await begun.wait()
        await runner.cancel("one")
        assert (await running).status is RunStatus.CANCELLED
        await ended.wait()
    await agent.close()


async def test_a_server_that_is_away_is_a_failed_call_for_the_model() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, and nobody answers
        taken.bind(("127.0.0.1", 0))
        made = [Client(server_of(add, read_only_hint=True)), Client(f"http://127.0.0.1:{taken.getsockname()[1]}/mcp")]
        mcp = MCPTools(lambda: made.pop(0), name="calc", retries=0)

        class Leaving(Assistant):
            async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> None:
                await mcp.close()

        (answer,) = answers(await executed(Leaving(calling(("add", '{"a": 1, "b": 2}')), mcp)))
    assert "the MCP server 'calc' cannot be reached" in answer


# -- kills


@pytest.mark.slow
def test_no_recorded_call_is_repeated_after_a_kill(tmp_path: Path) -> None:
    calls = check_kills("tests.integrations.mcp_program", "{folder}/runs.db", tmp_path)
    assert calls == ["list of tools", "model 0", "add 1 2", "model 1", "double 3", "model 2", "note 6", "model 3"]
