"""A client of the MCP tasks extension on top of the SDK's, which has the messages of a client but not the methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from mcp import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp_types import CallToolResult, EmptyResult, Request, RequestParams, Result

EXTENSION = "io.modelcontextprotocol/tasks"


class Created(Result):
    """The result of a call that became a task."""

    result_type: Literal["task"]
    model_config: ClassVar[Any] = {"extra": "allow"}


class Anything(Result):
    model_config: ClassVar[Any] = {"extra": "allow"}


class Params(RequestParams):
    model_config: ClassVar[Any] = {"extra": "allow"}


class TaskRequest(Request[Params, str]):
    name_param: ClassVar[str | None] = "taskId"

    method: str
    params: Params


class WithTasks(ClientExtension):
    """Declares the extension."""

    identifier = EXTENSION

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=Created, resolve=self._resolve)]

    async def _resolve(self, created: Created, ctx: ClaimContext) -> CallToolResult:
        raise AssertionError("the tests handle tasks themselves")


async def create(client: Client, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Call a tool, and return the task as the server sent it."""
    created = await client.session.call_tool(name, arguments, allow_claimed=True)
    assert isinstance(created, Created), created
    return created.model_dump(mode="json", by_alias=True)


async def ask(client: Client, method: str, task_id: str, **params: Any) -> dict[str, Any]:
    """Send a request of the extension."""
    request = TaskRequest(method=method, params=Params(taskId=task_id, **params))  # type: ignore[call-arg]
    result = await client.session.send_request(request, Anything if method == "tasks/get" else EmptyResult)
    return result.model_dump(mode="json", by_alias=True, exclude_none=True)


async def until_status(client: Client, task_id: str, status: str) -> dict[str, Any]:
    """Poll a task until it has that status. The time limit of the test ends a poll without an end."""
    while (task := await ask(client, "tasks/get", task_id))["status"] != status:
        assert task["status"] in ("working", "input_required"), task
    return task
