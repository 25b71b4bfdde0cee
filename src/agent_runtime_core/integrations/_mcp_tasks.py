"""Runs as tasks of the MCP extension `io.modelcontextprotocol/tasks` (SEP-2663, 2026-07-28)."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import require_client_extension
from mcp_types import INVALID_PARAMS, ElicitResult, EmptyResult, InputResponses, RequestParams, Result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from ..errors import AgentRuntimeError
from ..queue.records import LIVE, RunRow
from ..runner.runner import AgentRunner
from ..status import status_words
from ._mcp_questions import answer, elicitation, questions_of
from ._mcp_results import tool_result

EXTENSION: Final = "io.modelcontextprotocol/tasks"
_Context = ServerRequestContext[Any, Any]


class TaskParams(RequestParams):
    """The parameters of `tasks/get` and `tasks/cancel`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    task_id: str


class UpdateTaskParams(TaskParams):
    """The parameters of `tasks/update`."""

    input_responses: InputResponses


class TaskResult(Result):
    """A task, as `tools/call` and `tasks/get` return it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    result_type: Literal["complete", "task"] = "complete"
    task_id: str
    status: Literal["working", "input_required", "completed", "cancelled", "failed"]
    status_message: str | None = None
    created_at: str
    last_updated_at: str
    ttl_ms: int | None = None
    poll_interval_ms: int
    input_requests: dict[str, Any] | None = None
    result: dict[str, Any] | None = None

    def on_the_wire(self) -> dict[str, Any]:
        """Return the task as JSON. The protocol requires `ttlMs`, which is null: runs do not expire."""
        return {**self.model_dump(mode="json", by_alias=True, exclude_none=True), "ttlMs": self.ttl_ms}


class RunTasks:
    """Answers the requests of the extension.

    Args:
        runner: The runner of the runs.
        serves: Whether this server has the agent with that key as a tool.
        poll_interval: Seconds between two requests of a client for the same task.
    """

    def __init__(self, runner: AgentRunner, serves: Callable[[str], bool], poll_interval: float) -> None:
        self._runner = runner
        self._serves = serves
        self._poll_ms = max(1, round(poll_interval * 1000))

    def register(self, server: Server[Any]) -> None:
        """Add the methods of the extension to a server."""
        server.extensions[EXTENSION] = {}
        server.add_request_handler("tasks/get", TaskParams, self._get)
        server.add_request_handler("tasks/update", UpdateTaskParams, self._update)
        server.add_request_handler("tasks/cancel", TaskParams, self._cancel)

    @staticmethod
    def requested(ctx: _Context) -> bool:
        """Return whether the client of a request declared the extension. Older protocols cannot return a task."""
        capabilities = ctx.session.client_capabilities
        declared = capabilities.extensions if capabilities else None
        return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS and EXTENSION in (declared or {})

    async def created(self, row: RunRow) -> dict[str, Any]:
        """Return a stored run as the result of `tools/call`."""
        return self._task(row, "working").model_copy(update={"result_type": "task"}).on_the_wire()

    async def _get(self, ctx: _Context, params: TaskParams) -> dict[str, Any]:
        row = await self._row(ctx, params)
        if row.status in LIVE:
            asked = await questions_of(self._runner, row)
            if asked:
                task = self._task(row, "input_required", "waits for " + ", ".join(each.name for each in asked.values()))
                task.input_requests = {
                    key: elicitation(each).model_dump(mode="json", by_alias=True, exclude_none=True)
                    for key, each in asked.items()
                }
                return task.on_the_wire()
            return self._task(row, "working").on_the_wire()
        if row.status == "cancelled":
            return self._task(row, "cancelled").on_the_wire()
        # A run that failed is a result with `isError`: "failed" is only for errors of the protocol.
        task = self._task(row, "completed", f"run {status_words(row.status)}")
        result = tool_result(await self._runner.wait(row.run_id))
        task.result = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        return task.on_the_wire()

    async def _update(self, ctx: _Context, params: UpdateTaskParams) -> EmptyResult:
        row = await self._row(ctx, params)
        asked = await questions_of(self._runner, row)
        for key, response in params.input_responses.items():
            # A key without an open question was answered before, perhaps by another client.
            if key in asked and isinstance(response, ElicitResult):
                await answer(self._runner, asked[key], response)
        return EmptyResult()

    async def _cancel(self, ctx: _Context, params: TaskParams) -> EmptyResult:
        row = await self._row(ctx, params)
        await self._runner.cancel(row.run_id)
        return EmptyResult()

    async def _row(self, ctx: _Context, params: TaskParams) -> RunRow:
        require_client_extension(ctx, EXTENSION)
        try:
            row = await self._runner.queue.require(params.task_id)
        except AgentRuntimeError:
            row = None
        if row is None or not self._serves(row.agent):
            raise MCPError(INVALID_PARAMS, f"task not found: {params.task_id!r}")
        return row

    def _task(self, row: RunRow, status: Any, message: str | None = None) -> TaskResult:
        return TaskResult(
            task_id=row.run_id, status=status, status_message=message, created_at=_time(row.created_at),
            last_updated_at=_time(row.updated_at or row.created_at), poll_interval_ms=self._poll_ms,
        )  # fmt: skip


def _time(seconds: float) -> str:
    return _dt.datetime.fromtimestamp(seconds, _dt.UTC).isoformat().replace("+00:00", "Z")
