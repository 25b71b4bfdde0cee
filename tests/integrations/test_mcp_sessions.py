"""Servers that have forgotten the session of `MCPTools`: after a restart, after its expiry, and behind a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("mcp")

from mcp import Client

from agent_runtime_core import AgentRunner, RunContext, RunStatus, ToolFailed
from agent_runtime_core.integrations.mcp import MCPTools
from tests.integrations.test_mcp import Assistant, answers, calling
from tests.integrations.test_mcp_tasks import lines, process_on
from tests.support.redis_servers import free_port

NOT_FOUND = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "Session not found"}})
NO_SESSION = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "No valid session ID"}})


class Sessions(BaseHTTPRequestHandler):
    """A server of the protocol 2025-06-18, which rejects unknown sessions as it is told."""

    protocol_version = "HTTP/1.1"
    rejection: ClassVar[tuple[int, str | None]]
    ping_rejection: ClassVar[tuple[int, str | None] | None]
    sessions: ClassVar[list[str]]
    calls: ClassVar[list[str]]
    valid: ClassVar[set[str]]

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: str | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, **({"Content-Type": "application/json"} if body else {})}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body or "")))
        self.end_headers()
        self.wfile.write((body or "").encode())

    def do_GET(self) -> None:
        self.answer(405)

    def do_DELETE(self) -> None:
        self.answer(200)

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, session, headers = message["method"], self.headers.get("Mcp-Session-Id"), {}
        result: dict[str, Any] = {}
        if method == "initialize":
            session = f"session {len(self.sessions)}"
            self.sessions.append(session)
            self.valid.add(session)
            headers = {"Mcp_Session_Id": session}
            result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
        elif session not in self.valid:
            status, body = (method == "ping" and self.ping_rejection) or self.rejection
            self.answer(status, body)
            return
        if "id" not in message:
            self.answer(202)
            return
        if method == "tools/list":
            result = {"tools": [{"name": each, "inputSchema": {"type": "object"}} for each in ("note", "unknown")]}
        elif method == "tools/call" and message["params"]["name"] == "unknown":
            error = {"code": -32602, "message": "no such tool"}
            self.answer(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}))
            return
        elif method == "tools/call":
            self.calls.append(session or "")
            result = {"content": [{"type": "text", "text": "noted"}]}
        self.answer(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), **headers)


@contextlib.contextmanager
def serving(
    rejection: tuple[int, str | None], ping_rejection: tuple[int, str | None] | None = None
) -> Iterator[tuple[str, type[Sessions]]]:
    class Handler(Sessions):
        pass

    Handler.rejection, Handler.ping_rejection = rejection, ping_rejection
    Handler.sessions, Handler.calls, Handler.valid = [], [], set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/mcp", Handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("rejection", [(404, None), (404, "gone"), (404, NOT_FOUND), (400, NOT_FOUND)])
async def test_a_call_that_a_forgotten_session_rejects_is_sent_in_a_new_one(rejection: tuple[int, str | None]) -> None:
    with serving(rejection) as (url, server):
        async with MCPTools(url, retries=0) as mcp:
            tools = await mcp.registry()
            server.valid.clear()
            assert await tools.execute("note", {}) == "noted"
            server.valid.clear()
            assert len((await mcp.registry()).list_tools()) == 2
            assert await tools.execute("note", {}) == "noted"
        assert server.calls == ["session 1", "session 2"]
        assert len(server.sessions) == 3


async def test_concurrent_calls_share_the_new_session() -> None:
    with serving((404, NOT_FOUND)) as (url, server):
        async with MCPTools(url, retries=0) as mcp:
            tools = await mcp.registry()
            server.valid.clear()
            assert await asyncio.gather(*(tools.execute("note", {}) for _ in range(10))) == ["noted"] * 10
        assert server.calls == ["session 1"] * 10


@pytest.mark.parametrize(
    ("rejection", "ping_rejection"),
    [((502, None), None), ((400, NO_SESSION), None), ((404, NOT_FOUND), (404, NO_SESSION))],
)
async def test_a_call_that_may_have_been_executed_is_not_repeated(
    rejection: tuple[int, str | None], ping_rejection: tuple[int, str | None] | None
) -> None:
    with serving(rejection, ping_rejection) as (url, server):
        async with MCPTools(url, retries=0) as mcp:
            tools = await mcp.registry()
            server.valid.clear()
            with pytest.raises(ToolFailed):
                await tools.execute("note", {})
            assert await tools.execute("note", {}) == "noted"  # the next one makes a new session
        assert server.calls == ["session 1"]


async def test_an_error_of_the_protocol_keeps_the_session() -> None:
    with serving((404, None)) as (url, server):
        async with MCPTools(url, retries=0) as mcp:
            tools = await mcp.registry()
            with pytest.raises(ToolFailed, match="no such tool"):
                await tools.execute("unknown", {})
            assert await tools.execute("note", {}) == "noted"
        assert len(server.sessions) == 1


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_server_is_restarted_under_a_run(mode: str, tmp_path: Path) -> None:
    """The run has the same results and the same keys of calls as without restarts, and each call is executed once."""
    port = free_port()

    async def executed(log: Path, *, restarts: bool) -> list[Any]:
        mcp = MCPTools(
            lambda: Client(f"http://127.0.0.1:{port}/mcp", mode=mode), confirm=False, retries=10_000, retry_delay=0.01
        )
        starting: list[asyncio.Task[None]] = []

        class Noting(Assistant):
            calls = 0

            async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> None:
                self.calls += 1
                if not restarts:
                    return
                if self.calls == 2:  # the server is new when the call comes
                    await servers.aclose()
                    await start()
                if self.calls == 3:  # the call comes while there is no server
                    await servers.aclose()
                    starting.append(asyncio.create_task(start()))

        async def start() -> None:
            await servers.enter_async_context(process_on(port, "tests.integrations.mcp_session_server", log))

        async with contextlib.AsyncExitStack() as servers, AgentRunner.open("memory://") as runner:
            await start()
            agent = Noting(calling(*(("note", json.dumps({"text": each})) for each in "abcd")), mcp)
            message = {"role": "user", "content": "go"}
            result = await runner.execute(agent, run_id="one", input_data={"messages": [message]})
            await asyncio.gather(*starting)
            await agent.close()
        assert result.status is RunStatus.SUCCEEDED
        return answers(result)

    smooth, restarted = tmp_path / "smooth", tmp_path / "restarted"
    expected = await executed(smooth, restarts=False)
    assert expected == [f"noted {each}" for each in "abcd"]
    assert await executed(restarted, restarts=True) == expected
    assert lines(restarted) == lines(smooth)
    assert len({line.split()[1] for line in lines(smooth)}) == 4
