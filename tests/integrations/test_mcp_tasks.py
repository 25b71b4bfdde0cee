"""Runs as MCP tasks, asked for with the client of the SDK, over each transport and across restarts of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("mcp")

from mcp import Client, MCPError, StdioServerParameters
from mcp_types import HEADER_MISMATCH, INVALID_PARAMS, MISSING_REQUIRED_CLIENT_CAPABILITY

from agent_runtime_core import AgentRunner, AgentRuntime, ErrorInfo, RunContext, RunResult
from agent_runtime_core.integrations.mcp_server import create_mcp_server
from agent_runtime_core.registry import Registry
from tests.support.mcp_clients import EXTENSION, Anything, Params, TaskRequest, WithTasks, ask, create, until_status
from tests.support.processes import ROOT, becomes
from tests.support.redis_servers import free_port

ACCEPT = {"action": "accept", "content": {"answer": True}}


class Agent(AgentRuntime):
    """Does what its input says."""

    key = "agent"

    async def run(self, ctx: RunContext) -> RunResult:
        match ctx.params.get("do"):
            case "ask":
                answer = await ctx.approve("plan", ctx.params.get("details"), schema=ctx.params.get("schema"))
                return RunResult(final_output={"answer": answer})
            case "child":
                return await ctx.call("agent", {"params": {"do": "ask"}})
            case "fail":
                return RunResult(error=ErrorInfo("Broken", "no luck", retriable=False))
            case "wait":
                await ctx.wait_for_signal("go")
        return RunResult(final_output={"response": "done"})


@contextlib.asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[AgentRunner, Client]]:
    """A server in this process, and a client with tasks."""
    registry = Registry()
    registry.register(Agent())
    async with AgentRunner.open("memory://", registry=registry) as runner:
        server = create_mcp_server(runner, poll_interval=0.25, **options)
        async with Client(server, extensions=[WithTasks()]) as client:
            yield runner, client


async def started(client: Client, **params: Any) -> str:
    task = await create(client, "agent", {"params": params})
    return str(task["taskId"])


async def test_a_call_becomes_a_task_with_the_result_of_the_run() -> None:
    async with served() as (runner, client):
        assert client.server_capabilities.extensions == {EXTENSION: {}}
        task = await create(client, "agent", {})
        assert {"resultType": "task", "status": "working", "ttlMs": None, "pollIntervalMs": 250}.items() <= task.items()
        assert task["createdAt"].endswith("Z")
        assert task["lastUpdatedAt"].endswith("Z")
        done = await until_status(client, task["taskId"], "completed")
        assert done["resultType"] == "complete"
        assert done["result"]["structuredContent"] == {"response": "done"}
        assert done["result"]["content"] == [{"type": "text", "text": "done"}]
        assert (await runner.get_run(task["taskId"])).status == "succeeded"


async def test_the_same_run_id_is_the_same_task() -> None:
    async with served() as (runner, client):
        tasks = [await create(client, "agent", {"message": "hi", "run_id": "one"}) for _ in range(2)]
        assert tasks[0]["taskId"] == tasks[1]["taskId"] == str((await runner.get_run("one")).run_id)


async def test_a_failed_run_is_a_completed_task_with_an_error() -> None:
    async with served() as (_, client):
        done = await until_status(client, await started(client, do="fail"), "completed")
        assert done["result"]["isError"] is True
        assert "Broken: no luck" in done["result"]["content"][0]["text"]


async def test_a_cancelled_task_is_a_cancelled_run() -> None:
    async with served() as (runner, client):
        task = await started(client, do="wait")
        await ask(client, "tasks/cancel", task)
        await until_status(client, task, "cancelled")
        assert (await runner.get_run(task)).status == "cancelled"


@pytest.mark.parametrize(
    ("schema", "form", "content", "expected"),
    [
        (None, {"answer": {"type": "boolean", "title": "Approve"}}, {"answer": True}, True),
        ({"type": "integer", "minimum": 2}, {"answer": {"type": "integer", "minimum": 2}}, {"answer": 3}, 3),
        (
            {"type": "object", "properties": {"size": {"type": "string"}}, "required": ["size"]},
            {"size": {"type": "string"}},
            {"size": "L"},
            {"size": "L"},
        ),
        (
            {
                "type": "object",
                "properties": {"of": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}},
            },
            {"of": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}},
            {"of": ["a"]},
            {"of": ["a"]},
        ),
        ({"type": "array", "items": {"type": "integer"}}, None, {"answer": "[1, 2]"}, [1, 2]),
    ],
)
async def test_an_approval_is_a_form(schema: Any, form: Any, content: dict[str, Any], expected: Any) -> None:
    async with served() as (_, client):
        task_id = await started(client, do="ask", schema=schema, details={"steps": 2})
        task = await until_status(client, task_id, "input_required")
        ((key, request),) = task["inputRequests"].items()
        assert request["method"] == "elicitation/create"
        assert '{"steps":2}' in request["params"]["message"]
        asked = request["params"]["requestedSchema"]
        assert asked["type"] == "object"
        assert form is None or asked["properties"] == form
        await ask(client, "tasks/update", task_id, inputResponses={key: {"action": "accept", "content": content}})
        done = await until_status(client, task_id, "completed")
        assert done["result"]["structuredContent"] == {"answer": expected}


async def test_a_declined_approval_is_false_and_a_dismissed_one_stays_open() -> None:
    async with served() as (_, client):
        task_id = await started(client, do="ask")
        (key,) = (await until_status(client, task_id, "input_required"))["inputRequests"]
        await ask(client, "tasks/update", task_id, inputResponses={key: {"action": "cancel"}})
        assert (await ask(client, "tasks/get", task_id))["status"] == "input_required"
        await ask(client, "tasks/update", task_id, inputResponses={"unknown": {"no": 1}, key: {"action": "decline"}})
        done = await until_status(client, task_id, "completed")
        assert done["result"]["structuredContent"] == {"answer": False}
        await ask(client, "tasks/update", task_id, inputResponses={key: ACCEPT})  # answered before, so it is ignored


@pytest.mark.parametrize(
    "response",
    [
        {"action": "accept", "content": {"answer": 1}},
        {"action": "accept", "content": {}},
        {"action": "decline"},
        {"action": "perhaps"},
    ],
)
async def test_an_answer_that_does_not_match_is_an_error_and_leaves_the_question_open(response: dict[str, Any]) -> None:
    async with served() as (_, client):
        task_id = await started(client, do="ask", schema={"type": "integer", "minimum": 2})
        (key,) = (await until_status(client, task_id, "input_required"))["inputRequests"]
        with pytest.raises(MCPError) as caught:
            await ask(client, "tasks/update", task_id, inputResponses={key: response})
        assert caught.value.code == INVALID_PARAMS
        assert "answer to 'plan'" in str(caught.value)
        assert (await ask(client, "tasks/get", task_id))["status"] == "input_required"
        await ask(client, "tasks/cancel", task_id)  # otherwise the worker waits for it when the server closes


async def test_the_question_of_a_child_run_belongs_to_the_task() -> None:
    async with served() as (_, client):
        task_id = await started(client, do="child")
        (key,) = (await until_status(client, task_id, "input_required"))["inputRequests"]
        await ask(client, "tasks/update", task_id, inputResponses={key: ACCEPT})
        done = await until_status(client, task_id, "completed")
        assert done["result"]["structuredContent"] == {"answer": True}


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
@pytest.mark.parametrize("task_id", ["a5c6cd6b-4c53-44e1-a0b6-6d8da7a2f9f1", "no id", "", "\x00"])
async def test_an_unknown_task_is_an_error(method: str, task_id: str) -> None:
    async with served() as (_, client):
        with pytest.raises(MCPError) as caught:
            await ask(client, method, task_id, **({"inputResponses": {}} if method == "tasks/update" else {}))
        assert caught.value.code == INVALID_PARAMS


async def test_a_run_of_an_agent_that_is_no_tool_is_no_task() -> None:
    class Other(AgentRuntime):
        key = "other"

        async def run(self, ctx: RunContext) -> RunResult:
            return RunResult()

    async with served(agents=[Agent()]) as (runner, client):
        runner.registry.register(Other())
        hidden = await runner.submit("other")
        with pytest.raises(MCPError) as caught:
            await ask(client, "tasks/get", str(hidden))
        assert caught.value.code == INVALID_PARAMS


async def test_clients_without_the_extension_get_results_and_no_tasks() -> None:
    async with served() as (runner, _), Client(create_mcp_server(runner, work=False)) as client:
        result = await client.call_tool("agent", {"run_id": "one", "message": "hi"})
        assert result.structured_content == {"response": "done"}
        with pytest.raises(MCPError) as caught:
            await ask(client, "tasks/get", str((await runner.get_run("one")).run_id))
        assert caught.value.code == MISSING_REQUIRED_CLIENT_CAPABILITY


async def test_a_server_without_tasks_returns_results() -> None:
    async with served(tasks=False) as (_, client):
        assert client.server_capabilities.extensions is None
        assert (await client.call_tool("agent", {})).structured_content == {"response": "done"}


# -- a server in a process of its own


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@contextlib.asynccontextmanager
async def over_stdio(store: Path, log: Path, **options: Any) -> AsyncIterator[Client]:
    command = ["-m", "tests.integrations.mcp_agents", str(store), str(log)]
    parameters = StdioServerParameters(command=sys.executable, args=command, cwd=ROOT, env=dict(os.environ))
    async with Client(parameters, **{"extensions": [WithTasks()], **options}) as client:
        yield client


@contextlib.asynccontextmanager
async def process_on(port: int, module: str, *args: object) -> AsyncIterator[str]:
    """The URL of a server process, which is killed at the end."""
    process = subprocess.Popen([sys.executable, "-m", module, *map(str, args), str(port)], cwd=ROOT)
    try:

        async def listens() -> bool:
            assert process.poll() is None
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        await becomes(listens, "the server listens")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def http_server(store: Path, log: Path, port: int) -> AbstractAsyncContextManager[str]:
    return process_on(port, "tests.integrations.mcp_agents", store, log)


@contextlib.asynccontextmanager
async def over_http(store: Path, log: Path, **options: Any) -> AsyncIterator[Client]:
    async with (
        http_server(store, log, free_port()) as url,
        Client(url, **{"extensions": [WithTasks()], **options}) as client,
    ):
        yield client


@pytest.mark.parametrize("transport", [over_stdio, pytest.param(over_http, marks=pytest.mark.slow)])
async def test_a_task_survives_restarts_of_the_server(transport: Any, tmp_path: Path) -> None:
    store, log = tmp_path / "runs.db", tmp_path / "log"
    task_id = ""
    # The SDK reports a lost connection with an error of the transport as well.
    with contextlib.suppress(Exception):
        async with transport(store, log) as client:
            task_id = (await create(client, "order", {"message": "tea"}))["taskId"]
            os.kill(int(lines(log)[0]), signal.SIGKILL)
    async with transport(store, log) as client:
        task = await until_status(client, task_id, "input_required")
        ((key, request),) = task["inputRequests"].items()
        assert "'buy'" in request["params"]["message"]
    async with transport(store, log) as client:
        await ask(client, "tasks/update", task_id, inputResponses={key: ACCEPT})
        done = await until_status(client, task_id, "completed")
    async with transport(store, log) as client:
        assert await ask(client, "tasks/get", task_id) == done
    assert done["result"]["content"] == [{"type": "text", "text": "bought tea"}]
    done_once = [line for line in lines(log) if not line.isdigit()]
    assert done_once in (["reserve tea", "buy tea"], ["reserve tea", "reserve tea", "buy tea"])  # killed in that step


class Misnamed(TaskRequest):
    name_param: ClassVar[str | None] = "other"


async def test_the_header_of_a_request_for_a_task_must_name_the_task(tmp_path: Path) -> None:
    async with over_http(tmp_path / "runs.db", tmp_path / "log") as client:
        task_id = (await create(client, "order", {"message": "tea"}))["taskId"]
        assert (await ask(client, "tasks/get", task_id))["taskId"] == task_id
        params = Params(taskId=task_id, other="another task")  # type: ignore[call-arg]
        with pytest.raises(MCPError, match="header mcp-name must be the task id, got 'another task'") as caught:
            await client.session.send_request(Misnamed(method="tasks/get", params=params), Anything)
        assert caught.value.code == HEADER_MISMATCH
