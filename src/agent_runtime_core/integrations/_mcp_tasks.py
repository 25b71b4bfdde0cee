"""Runs as tasks of the MCP extension `io.modelcontextprotocol/tasks` (SEP-2663, 2026-07-28)."""

from __future__ import annotations

import datetime as _dt
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal

from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import require_client_extension
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    EmptyResult,
    RequestParams,
    Result,
    TextContent,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from .._core.codec.json import encode
from .._core.json_schema import misfit
from ..errors import AgentRuntimeError, IllegalTransition, InvalidArgument, UnserialisableResult
from ..interfaces import RunResult
from ..queue.records import LIVE, RunRow
from ..runner.approvals import ApprovalRequest, open_requests_of
from ..runner.runner import AgentRunner
from ..status import RunStatus, status_words
from ..tools.results import as_plain, text_of_result

#: The key in the `_meta` of a result under which the id of the run is.
RUN_ID: Final = "agent-runtime-core/run-id"


def tool_result(run: RunResult) -> CallToolResult:
    """Return the output of a run that succeeded, or why it did not."""
    meta: dict[str, Any] = {RUN_ID: str(run.run_id)}
    if run.status is not RunStatus.SUCCEEDED:
        reason = f": {run.error.type}: {run.error.message}" if run.error else ""
        return failure(f"run {run.run_key or run.run_id} {status_words(str(run.status))}{reason}", meta)
    try:
        output = as_plain(run.final_output)
        text = text_of_result(output.get("response", output))
    except UnserialisableResult as problem:
        return failure(f"run {run.run_key or run.run_id} succeeded, but its output is not JSON: {problem}", meta)
    return CallToolResult(content=[TextContent(text=text)], structured_content=output, _meta=meta)


def failure(text: str, meta: dict[str, Any] | None = None) -> CallToolResult:
    """Return a result that tells the model of the client why the call failed."""
    return CallToolResult(content=[TextContent(text=text)], is_error=True, _meta=meta)


_PRIMITIVE: Final = ("string", "number", "integer", "boolean")
_ANSWER: Final = "answer"
_APPROVED: Final = {"type": "boolean", "title": "Approve"}


async def questions_of(runner: AgentRunner, row: RunRow) -> dict[str, ApprovalRequest]:
    """Return the open questions of a run and of its child runs, by request id."""
    if row.status not in LIVE:
        return {}
    found = {each.request_id: each for each in await open_requests_of(runner.queue, row)}
    for child in await runner.queue.children(row.run_id):
        found |= await questions_of(runner, child)
    return found


def elicitation(asked: ApprovalRequest) -> ElicitRequest:
    """Return a question as the request for a form."""
    return ElicitRequest(params=form_of(asked))


def form_of(asked: ApprovalRequest) -> ElicitRequestFormParams:
    """Return a question as a form for a person."""
    form = _form_of(asked.schema)
    text = f"Run {asked.run_key or asked.run_id} of agent {asked.agent_key} asks for {asked.name!r}."
    if asked.details is not None:
        text += f"\n{asked.details if isinstance(asked.details, str) else encode(asked.details)}"
    return ElicitRequestFormParams(message=text, requested_schema=form)


async def answer_all(runner: AgentRunner, row: RunRow, responses: Mapping[str, Any]) -> None:
    """Answer the questions of a run.

    A key without an open question is ignored: it was answered before, perhaps by another client.

    Raises:
        MCPError: An answer does not match the schema of its question.
    """
    asked = await questions_of(runner, row)
    for key in responses.keys() & asked.keys():
        try:
            response = ElicitResult.model_validate(responses[key])
        except ValidationError as error:
            raise MCPError(INVALID_PARAMS, f"answer to {asked[key].name!r}: {error}") from error
        await answer(runner, asked[key], response)


async def answer(runner: AgentRunner, asked: ApprovalRequest, response: ElicitResult) -> None:
    """Answer a question with what a person entered in its form. A dismissed form leaves the question open.

    Raises:
        MCPError: The answer does not match the schema of the question, or the question is closed.
    """
    if response.action == "cancel":
        return
    try:
        given = _answer_of(asked.schema, response)
        await runner.approve(asked.run_id, asked.name, given, request_id=asked.request_id)
    except (IllegalTransition, InvalidArgument, UnserialisableResult, ValueError) as error:
        raise MCPError(INVALID_PARAMS, f"answer to {asked.name!r}: {error}") from error


def _form_of(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a flat schema with primitive properties and selections: MCP allows no others in a form."""
    if schema is not None and _is_flat(schema):
        return dict(schema)
    if schema is None or _takes_yes_or_no(schema):
        field: dict[str, Any] = dict(_APPROVED)
    elif schema.get("type") in _PRIMITIVE:
        field = dict(schema)
    else:
        field = {"type": "string", "title": "Answer as JSON", "description": f"JSON that matches {encode(schema)}"}
    return {"type": "object", "properties": {_ANSWER: field}, "required": [_ANSWER]}


def _takes_yes_or_no(schema: Mapping[str, Any]) -> bool:
    """Return whether true and false are answers that an approval of a call takes."""
    return {"type": "boolean"} in schema.get("anyOf", ())


def _is_flat(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties")
    return (
        schema.get("type") == "object" and isinstance(properties, Mapping) and all(map(_is_field, properties.values()))
    )


def _is_field(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    items = schema.get("items")
    # A selection of several values from a list.
    several = schema.get("type") == "array" and isinstance(items, Mapping) and ("enum" in items or "anyOf" in items)
    return several or schema.get("type") in _PRIMITIVE


def _answer_of(schema: Mapping[str, Any] | None, response: ElicitResult) -> Any:
    if response.action == "decline":
        if schema is None or misfit(False, schema) is None:
            return False
        raise ValueError("it cannot be declined, because its schema does not allow false. Accept it, or cancel the run")
    content: Any = response.content or {}
    if schema is not None and _is_flat(schema):
        return content
    if _ANSWER not in content:
        raise ValueError(f"the form has no field {_ANSWER!r}")
    if schema is None or _takes_yes_or_no(schema) or schema.get("type") in _PRIMITIVE:
        return content[_ANSWER]
    return json.loads(content[_ANSWER])


EXTENSION: Final = "io.modelcontextprotocol/tasks"
_Context = ServerRequestContext[Any, Any]


class TaskParams(RequestParams):
    """The parameters of `tasks/get` and `tasks/cancel`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    task_id: str


class UpdateTaskParams(TaskParams):
    """The parameters of `tasks/update`."""

    input_responses: dict[str, Any]


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
        serves: Whether this server offers the agent with that key as a tool.
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
        await answer_all(self._runner, row, params.input_responses)
        return EmptyResult()

    async def _cancel(self, ctx: _Context, params: TaskParams) -> EmptyResult:
        row = await self._row(ctx, params)
        await self._runner.cancel(row.run_id)
        return EmptyResult()

    async def _row(self, ctx: _Context, params: TaskParams) -> RunRow:
        require_client_extension(ctx, EXTENSION)
        named = decode_header_value(getattr(ctx.request, "headers", {}).get(MCP_NAME_HEADER))
        if named not in (None, params.task_id):
            raise MCPError(HEADER_MISMATCH, f"header {MCP_NAME_HEADER} must be the task id, got {named!r}")
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
