"""Agents as tools of an MCP server: a call submits a run, and the same `run_id` is the same run.

Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .._core.lazy_import import load

if not TYPE_CHECKING:
    load("mcp", needed_by=__name__)  # its error names the extra

import anyio
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ElicitResult,
    InputRequests,
    InputRequiredResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)
from mcp_types import Tool as MCPTool
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from .._core.arguments import checked_seconds
from .._core.context_vars import start_helper
from .._core.json_schema import misfits
from .._core.validation import Shown, must
from ..errors import AgentRuntimeError
from ..events.event import Event, shown_type
from ..interfaces import AgentRuntime
from ..queue.records import RunRow
from ..registry import key_of
from ..runner.approvals import ApprovalRequest
from ..runner.runner import AgentRunner
from ..tools.names import tool_name
from ._mcp_http import ResumableServer
from ._mcp_tasks import RUN_ID, RunTasks, answer, answer_all, elicitation, failure, form_of, questions_of, tool_result

__all__ = ["AgentTool", "create_mcp_server", "serve_stdio"]

_Context = ServerRequestContext[Any, Any]
_RUN_ID: Final = {
    "type": "string",
    "description": "Names the run. A call with the run_id of an earlier call returns the result of the same run.",
}
_INPUT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "message": {"type": "string", "description": "The message of the user to the agent."},
        "params": {"type": "object", "description": "Parameters of the run, for an agent that reads them."},
    },
    "additionalProperties": False,
}
#: Events that a client needs no progress notification for: there are too many of them.
_SILENT: Final = ("assistant.delta", "run.heartbeat", "state.checkpoint")
_LOOK_AGAIN: Final = 1.0  # seconds between two looks for questions of child runs, whose events are not in the run
_CANCEL_SECONDS: Final = 5


@dataclass(frozen=True)
class AgentTool:
    """An agent as a tool of an MCP server.

    Args:
        agent: The agent, or the key of a registered agent.
        name: The name of the tool, by default the agent's key.
        description: What the tool does, by default the first line of the docstring of the agent's class.
        parameters: JSON Schema of an object, which the agent reads as `ctx.params`. By default the tool takes the
            arguments `message`, which becomes the message of the user, and `params`.
    """

    agent: AgentRuntime | str
    name: str | None = None
    description: str | None = None
    parameters: Mapping[str, Any] | None = None


def create_mcp_server(
    runner: AgentRunner,
    agents: Iterable[AgentTool | AgentRuntime | str] | None = None,
    *,
    name: str = "agent-runtime",
    instructions: str | None = None,
    tasks: bool = True,
    work: bool = True,
    concurrency: int = 10,
    poll_interval: float = 1.0,
) -> Server[Any]:
    """Create an MCP server whose tools are agents.

        server = create_mcp_server(AgentRunner.open("agents.db"))
        app = server.streamable_http_app()  # an ASGI app with the path /mcp

    The server knows no users: each client can read, answer and cancel each run whose id it knows. Protect the app as
    the SDK describes.

    Args:
        runner: The runner of the runs. The server does not close it.
        agents: The agents. None means all agents in the runner's registry when a client lists the tools.
        name: The name of the server.
        instructions: A text about the server for the model of a client.
        tasks: Whether a call of a client with the extension `io.modelcontextprotocol/tasks` returns a task.
        work: Whether the server executes runs while it serves. False leaves them to other workers.
        concurrency: How many runs it executes at the same time.
        poll_interval: Seconds after which a client asks for its task again, or for a stream whose connection was lost.

    Raises:
        InvalidArgument: An agent or a schema is invalid, or two tools have the same name.
    """
    checked_seconds("poll_interval", poll_interval)
    calls = _Calls(runner, agents)
    run_tasks = RunTasks(runner, calls.serves, poll_interval) if tasks else None
    calls.tasks = run_tasks
    server = ResumableServer(
        name, version=str(load("agent_runtime_core:__version__")), instructions=instructions,
        lifespan=_Work(runner, concurrency).lifespan if work else _nothing,
        on_list_tools=calls.listed, on_call_tool=calls.called,
    )  # fmt: skip
    server.get_tool_input_schema = calls.schema  # an argument of the constructor in MCP 2.3 and later
    server.retry_ms = max(1, round(poll_interval * 1000))
    if run_tasks is not None:
        run_tasks.register(server)
    return server


async def serve_stdio(server: Server[Any]) -> None:
    """Serve one client on standard input and output until it closes them."""
    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


@contextlib.asynccontextmanager
async def _nothing(_: Server[Any]) -> AsyncIterator[dict[str, Any]]:
    yield {}


class _Work:
    """The worker of a server. Connections within one process enter the lifespan of the server several times."""

    def __init__(self, runner: AgentRunner, concurrency: int) -> None:
        self._runner = runner
        self._concurrency = concurrency
        self._entered = 0
        self._loop: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Server[Any]) -> AsyncIterator[dict[str, Any]]:
        self._entered += 1
        if self._loop is None:
            self._loop = start_helper(self._runner.run_loop(concurrency=self._concurrency, handle_signals=False))
        try:
            yield {}
        finally:
            self._entered -= 1
            loop = self._loop
            if not self._entered and loop is not None:
                self._loop = None
                self._runner.stop()
                await loop


class _Ended(Exception):
    """The run is finished."""


class _Calls:
    """The tools of a server, and their calls."""

    def __init__(self, runner: AgentRunner, agents: Iterable[AgentTool | AgentRuntime | str] | None) -> None:
        self._runner = runner
        self._given = None if agents is None else self._by_name(agents)
        self.tasks: RunTasks | None = None
        self._served = {self._key(each) for each in (self._given or {}).values()}

    def serves(self, key: str) -> bool:
        """Return whether the agent with that key is a tool."""
        return key in self._served if self._given is not None else self._runner.registry.get(key) is not None

    def schema(self, name: str) -> Mapping[str, Any] | None:
        """Return the input schema of a tool, or None."""
        tool = self._tools().get(name)
        return None if tool is None else _schema_of(tool)

    async def listed(self, ctx: _Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        """Return the tools."""
        return ListToolsResult(
            tools=[
                MCPTool(name=name, description=self._description(each), input_schema=_schema_of(each))
                for name, each in self._tools().items()
            ]
        )

    async def called(self, ctx: _Context, params: CallToolRequestParams) -> Any:
        """Submit the run of a call, and return its result, its task, or the questions that it asks."""
        tool = self._tools().get(params.name)
        if tool is None:
            raise MCPError(INVALID_PARAMS, f"unknown tool {params.name!r}")
        try:
            row, named = await self._run_of(tool, params)
        except AgentRuntimeError as error:
            return failure(str(error))
        if self.tasks is not None and self.tasks.requested(ctx):
            return await self.tasks.created(row)
        if params.input_responses:
            await answer_all(self._runner, row, params.input_responses)
        try:
            return await self._outcome(ctx, row)
        except asyncio.CancelledError:
            if not named:  # the client cannot come back to it
                with anyio.move_on_after(_CANCEL_SECONDS, shield=True):
                    await self._runner.cancel(row.run_id)
            raise

    async def _run_of(self, tool: AgentTool, params: CallToolRequestParams) -> tuple[RunRow, bool]:
        """Return the stored run of a call, and whether its caller can name it in another call."""
        key, arguments = self._key(tool), dict(params.arguments or {})
        if problems := list(misfits(arguments, _schema_of(tool), "")):
            got = Shown("; ".join(problems[:3]))
            raise must("arguments", "match the input schema of the tool", got)
        run_id = arguments.pop("run_id", None)
        if params.request_state is not None:  # the call is repeated with answers to the questions of its run
            return await self._stored(key, _run_of_state(params.request_state)), True
        if run_id is not None and not arguments:
            return await self._stored(key, run_id), True
        row, _ = await self._runner.insert_run(self._runner.new_run(key, _input_of(tool, arguments), run_id=run_id))
        return row, run_id is not None

    async def _stored(self, key: str, run_id: str) -> RunRow:
        row = await self._runner.queue.require(run_id)
        if row.agent != key:
            raise self._runner.queue.unknown_run(run_id)
        return row

    async def _outcome(self, ctx: _Context, row: RunRow) -> CallToolResult | InputRequiredResult:
        """Wait until a run ends or asks a question, and notify the client of its progress."""
        number = 0
        events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        # A separate task follows the run. The SDK interrupts each `await` of a cancelled call, even at its end.
        following = start_helper(self._follow(row.run_id, events))
        try:
            while True:
                event: Event | Exception | None = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN):
                        event = await events.get()
                if isinstance(event, _Ended):
                    return tool_result(await self._runner.wait(row.run_id))
                if isinstance(event, Exception):
                    raise event
                if event is not None and shown_type(event) not in _SILENT:
                    number += 1
                    await ctx.session.report_progress(number, message=_about(event))
                if event is None or event.event_type in ("approval.requested", "step.in_doubt"):
                    asked = await questions_of(self._runner, await self._runner.queue.require(row.run_id))
                    if asked and (result := await self._ask(ctx, row, asked)) is not None:
                        return result
        finally:
            following.cancel()

    async def _ask(
        self, ctx: _Context, row: RunRow, asked: Mapping[str, ApprovalRequest]
    ) -> CallToolResult | InputRequiredResult | None:
        """Ask the questions of a run, as forms if the client shows forms, or else in a text as the result of the call.

        The protocol of 2026 returns forms as a result. The protocol of 2025 sends them within the call, which continues
        then.
        """
        declared = ctx.session.client_capabilities
        elicits = declared.elicitation if declared else None
        if elicits is None or (elicits.form is None and elicits.url is not None):
            return _waits(row, asked)
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            requests: InputRequests = {key: elicitation(each) for key, each in asked.items()}
            return InputRequiredResult(input_requests=requests, request_state=_state_of(row.run_id, min(asked)))
        for key, each in asked.items():
            form = form_of(each)
            # A separate task, for the same reason as the task that follows the run.
            shown = start_helper(ctx.session.elicit_form(form.message, form.requested_schema, ctx.request_id))
            try:
                if not await self._is_answered(row.run_id, key, shown):
                    continue
                response = shown.result()
                await answer(self._runner, each, response)
            except (MCPError, ValueError) as error:  # of the client, of its answer, or because nothing leads to it
                return _waits(row, asked, f"The form of {each.name!r} was not answered: {error}. ")
            finally:
                shown.cancel()
            if response.action == "cancel":
                return _waits(row, asked)
        return None

    async def _is_answered(self, run_id: str, key: str, shown: asyncio.Task[ElicitResult]) -> bool:
        """Wait until a form is answered, and return whether it is. Its question may be answered elsewhere before."""
        while not shown.done():
            await asyncio.wait([shown], timeout=_LOOK_AGAIN)
            if not shown.done() and key not in await questions_of(
                self._runner, await self._runner.queue.require(run_id)
            ):
                return False
        return True

    async def _follow(self, run_id: str, events: asyncio.Queue[Event | Exception]) -> None:
        """Put the events of a run into a queue, and an error after the last event."""
        try:
            async with contextlib.aclosing(self._runner.stream(run_id)) as stream:
                async for event in stream:
                    events.put_nowait(event)
        except Exception as error:  # noqa: BLE001 - the call raises it
            events.put_nowait(error)
        else:
            events.put_nowait(_Ended())

    def _tools(self) -> dict[str, AgentTool]:
        return self._by_name(self._runner.registry.keys()) if self._given is None else self._given

    def _by_name(self, agents: Iterable[AgentTool | AgentRuntime | str]) -> dict[str, AgentTool]:
        found: dict[str, AgentTool] = {}
        for each in agents:
            tool = each if isinstance(each, AgentTool) else AgentTool(each)
            self._runner.agent(tool.agent)  # raises for an agent that is not registered
            _schema_of(tool)
            name = tool_name(tool.name or self._key(tool))
            if name in found:
                raise must("tool name", "be unique", name, "Pass AgentTool(agent, name)")
            found[name] = tool
        return found

    @staticmethod
    def _key(tool: AgentTool) -> str:
        return tool.agent if isinstance(tool.agent, str) else key_of(tool.agent)

    def _description(self, tool: AgentTool) -> str:
        documented = vars(type(self._runner.agent(tool.agent))).get("__doc__") or ""
        return tool.description or documented.strip().partition("\n")[0] or f"Runs the agent {self._key(tool)}."


def _schema_of(tool: AgentTool) -> dict[str, Any]:
    schema = dict(_INPUT if tool.parameters is None else tool.parameters)
    properties = schema.get("properties", {})
    if schema.get("type") != "object" or not isinstance(properties, Mapping):
        raise must("parameters", "be the JSON Schema of an object", schema)
    if "run_id" in properties:
        raise must("parameters", "have no property run_id", Shown("one"), "The tool has this argument already")
    return {**schema, "properties": {**properties, "run_id": _RUN_ID}}


def _input_of(tool: AgentTool, arguments: dict[str, Any]) -> dict[str, Any]:
    if tool.parameters is not None:
        return {"params": arguments}
    messages = {"messages": [{"role": "user", "content": arguments["message"]}]} if "message" in arguments else {}
    return {"params": arguments.get("params", {}), **messages}


def _about(event: Event) -> str:
    name = next((event.payload[key] for key in ("step_name", "tool_name", "name") if key in event.payload), None)
    kind = shown_type(event)
    return kind if name is None else f"{kind}: {name}"


def _state_of(run_id: str, question: str) -> str:
    """Return the state of a call, other for other questions. A checksum shows a state that a client changed."""
    state = f"{run_id}/{question}"
    return f"{state}/{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def _run_of_state(state: str) -> str:
    run_id, *question = state.split("/")
    if len(question) != 2 or _state_of(run_id, question[0]) != state:
        raise MCPError(INVALID_PARAMS, f"requestState must be the state of an earlier result, got {state!r}")
    return run_id


def _waits(row: RunRow, asked: Mapping[str, ApprovalRequest], problem: str = "") -> CallToolResult:
    """Return the result of a call whose run asks something: a text that says how to come back."""
    names = ", ".join(repr(each.name) for each in asked.values())
    text = (
        f"{problem}Run {row.run_key or row.run_id} waits for a person to answer {names}. When this is done, call this "
        f"tool with only run_id={row.run_key or row.run_id!r} to get the result."
    )
    return CallToolResult(content=[TextContent(text=text)], _meta={RUN_ID: row.run_id})
