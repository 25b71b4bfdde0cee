"""Tools of an MCP server for agents: discovered once for each run, and called as recorded steps.

Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from .._core.lazy_import import load

if not TYPE_CHECKING:
    load("mcp", needed_by=__name__)  # its error names the extra

import httpx2
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    METHOD_NOT_FOUND,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    PingRequest,
    RequestParamsMeta,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp_types import Tool as MCPTool

from .._core.context_vars import start_helper
from .._core.log import log
from .._core.per_loop import PerLoop
from .._core.validation import must
from ..agents import ToolCallingAgent
from ..errors import InvalidArgument, ToolFailed, deciding_error
from ..interfaces import RunContext, RunResult
from ..tools.names import tool_name
from ..tools.registry import ToolRegistry
from ..tools.results import ContentParts, text_of_parts
from ..tools.tool import Tool

__all__ = ["MCPAgent", "MCPTools", "ServerUnreachable"]


#: What an MCP server gets in the `_meta` of each call: the same value for each repetition of the call.
IDEMPOTENCY_KEY: Final = "agent-runtime-core/idempotency-key"
_T = TypeVar("_T")
_PING_SECONDS: Final = 5
_PAGES: Final = 100  # of a list of tools; a server with an endless list must not occupy a run forever


class ServerUnreachable(ConnectionError):
    """No connection to an MCP server could be made. The call was not sent, so repeating it is safe."""


class MCPTools:
    """The tools of an MCP server.

        mcp = MCPTools("http://127.0.0.1:8000/mcp")
        tools = await mcp.registry(ctx)

    The list of tools is requested once for each run, and recorded. A resumed run gets the recorded list. The server is
    connected when it is first needed, so a run whose calls are all recorded needs no server. If the connection is lost
    or the server dropped its session, the next call makes a new connection.

    Args:
        server: The URL of a server with streamable HTTP, the `StdioServerParameters` of a command, a server object of
            the SDK, or a function that returns a new `mcp.Client` for each connection.
        name: Names the server in the journal and in errors.
        prefix: Begins the name of each tool, such as "files_". Names that a model provider rejects are converted.
        include: Only the tools with these names of the server. None means all.
        confirm: Which tools need the approval of a person for each call: True for all, False for none, or a function
            that decides for an `mcp_types.Tool`. None follows the tool's annotations: all tools except those with
            `readOnlyHint: true` or `destructiveHint: false`.
        timeout: Time limit of one call in seconds, or None.
        retries: How often to try again if no connection to the server can be made.
        retry_delay: Seconds before each of these attempts.
        on_in_doubt: What to do about a call with side effects that a crash interrupted: "retry" sends it again with the
            same idempotency key, "fail" and "review" do not.

    Raises:
        InvalidArgument: The name is empty. `registry` raises it for a tool whose name is taken.
    """

    def __init__(
        self,
        server: str | StdioServerParameters | Server[Any] | MCPServer | Callable[[], Client],
        *,
        name: str = "mcp",
        prefix: str = "",
        include: Sequence[str] | None = None,
        confirm: bool | Callable[[MCPTool], bool] | None = None,
        timeout: float | None = None,
        retries: int = 2,
        retry_delay: float = 1.0,
        on_in_doubt: str | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise must("name", "be a non-empty string", name)
        self.name = name
        self.prefix = prefix
        self.include: frozenset[str] | None = None if include is None else frozenset(include)
        self.confirm = confirm
        self.timeout = timeout
        self.retries = retries
        self.retry_delay = retry_delay
        self.on_in_doubt = on_in_doubt
        make = server if callable(server) else lambda: Client(server)
        self._connections: PerLoop[_Connection] = PerLoop(lambda loop: _Connection(name, make))

    async def __aenter__(self) -> MCPTools:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection of this event loop. A later call makes a new connection."""
        await self._connections.here().close()

    async def registry(self, ctx: RunContext | None = None, into: ToolRegistry | None = None) -> ToolRegistry:
        """Return the server's tools in a registry.

        Args:
            ctx: The context of the run that records the list. None requests the list from the server.
            into: The registry to add the tools to. None makes a new registry.

        A tool whose schema is invalid is left out, with a warning in the log.

        Raises:
            ServerUnreachable: No connection to the server could be made.
        """
        registry = ToolRegistry() if into is None else into
        if ctx is None:
            found = await self._listed()
        else:
            found = await ctx.step(
                f"mcp:{self.name}", self._listed, key="tools", retries=self.retries, retry_delay=self.retry_delay,
                retry_on=ServerUnreachable, returns=list[dict[str, Any]],
            )  # fmt: skip
        for each in found:
            about = MCPTool.model_validate(each)
            try:
                tool = self._tool(about)
            except InvalidArgument as error:  # such as a reference that names nothing; the others can be used
                log.warning("tool %r of the MCP server %r is left out: %s", about.name, self.name, error)
                continue
            if registry.get(tool.name) is not None:
                raise must("tool name", "be unique", tool.name, f"Give MCP server {self.name!r} a prefix")
            registry.register(tool)
        return registry

    async def _listed(self) -> list[dict[str, Any]]:
        connection = self._connections.here()
        tools: list[MCPTool] = []
        cursor = None
        for _ in range(_PAGES):
            try:
                page = await connection.send(partial(Client.list_tools, cursor=cursor))
            except MCPError as error:
                if error.code != METHOD_NOT_FOUND:  # a server without tools need not have the method
                    raise
                break
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        wanted = [each for each in tools if self.include is None or each.name in self.include]
        return [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in wanted]

    def _tool(self, about: MCPTool) -> Tool:
        hints = about.annotations
        read_only = hints is not None and hints.read_only_hint is True
        # Without hints, a tool counts as destructive: that is the default of the protocol.
        destructive = not read_only and not (hints is not None and hints.destructive_hint is False)
        confirm = self.confirm(about) if callable(self.confirm) else self.confirm

        # No argument of a tool may have the name of this parameter.
        async def call(_run_context_: RunContext | None = None, **arguments: Any) -> Any:
            return await self._call(about.name, arguments, _run_context_)

        return Tool(
            name=tool_name(f"{self.prefix}{about.name}"),
            description=about.description or about.title or about.name,
            parameters=about.input_schema,
            handler=call,
            has_side_effects=not read_only,
            requires_confirmation=destructive if confirm is None else confirm,
            metadata={"mcp_server": self.name, "mcp_tool": about.name}
            | ({} if read_only or self.on_in_doubt is None else {"on_in_doubt": self.on_in_doubt}),
            timeout=self.timeout,
            retries=self.retries,
            retry_delay=self.retry_delay,
            retry_on=ServerUnreachable,
        )

    async def _call(self, name: str, arguments: dict[str, Any], ctx: RunContext | None) -> Any:
        key = None if ctx is None else ctx.idempotency_key
        meta = None if key is None else cast("RequestParamsMeta", {IDEMPOTENCY_KEY: key})
        call = partial(Client.call_tool, name=name, arguments=arguments, meta=meta)
        try:
            result = await self._connections.here().send(call)
        except MCPError as error:
            raise ToolFailed(name, f"the MCP server {self.name!r} reported: {error.message}") from error
        if result.is_error:
            raise ToolFailed(name, _text_of(result) or "no reason given")
        return _content_of(result)


class _Session:
    """A connection to a server. A separate task holds it, because the SDK closes it in the task that opened it."""

    def __init__(self, name: str, make: Callable[[], Client]) -> None:
        self._name = name
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._in_flight = 0
        self._unsent: BaseException | None = None  # why the last request was not sent
        self._checking = asyncio.Lock()
        self._rejection: MCPError | None = None  # with which the server answers each request
        self.retired = False
        self.holder = start_helper(self._hold(make), name=f"mcp:{name}")

    async def connected(self) -> None:
        """Wait until it is connected.

        Raises:
            ServerUnreachable: No connection could be made.
        """
        try:
            await asyncio.shield(self._client)
        except BaseException:
            self.retired = True
            self._closing.set()
            raise

    async def _hold(self, make: Callable[[], Client]) -> None:
        try:
            async with make() as client:
                if not self._client.done():
                    self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - whatever the SDK and its transports raise
            reason = deciding_error(error)
            if not self._client.done():
                self._client.set_exception(self._unreachable(reason))
                return
            log.warning("the connection to the MCP server %r ended: %r", self._name, reason)
            # Nothing says which of several requests could not connect; the others may have been sent.
            if self._in_flight == 1 and isinstance(reason, httpx2.ConnectError | httpx2.ConnectTimeout):
                self._unsent = reason

    def _unreachable(self, reason: BaseException) -> ServerUnreachable:
        unreachable = ServerUnreachable(
            f"the MCP server {self._name!r} cannot be reached: {type(reason).__name__}: {reason}. Start it, or correct "
            "its URL or command"
        )
        unreachable.__cause__ = reason
        return unreachable

    async def send(self, request: Callable[[Client], Awaitable[_T]]) -> _T:
        """Send a request.

        Raises:
            _Forgotten: The server did not execute the request, because it dropped the session.
            MCPError: The server reported an error, or the connection was lost.
            ServerUnreachable: The request was not sent.
        """
        self._in_flight += 1
        try:
            return await request(self._client.result())
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await self.close()
                if self._unsent is not None:
                    raise self._unreachable(self._unsent) from error
            elif await self._forgotten(error):
                raise _Forgotten(error) from error
            raise
        finally:
            self._in_flight -= 1
            if self.retired and not self._in_flight:
                self._closing.set()

    async def _forgotten(self, error: MCPError) -> bool:
        """Return whether the server rejected a request because it dropped the session.

        A server can say so in many ways, and the SDK hides the status of the response. A server that answers a ping
        with an error knows no such session. It did not execute the request if both errors are the same, unless this is
        the error of a proxy, which may have lost a response.
        """
        async with self._checking:
            if not self.retired:
                self._rejection = await self._ping()
                self.retired = self._rejection is not None
        found = self._rejection
        same = found is not None and (found.code, found.message) == (error.code, error.message)
        return same and error.code != INTERNAL_ERROR

    async def _ping(self) -> MCPError | None:
        """Return the error with which a server rejects each request, or None."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PING_SECONDS):
                try:
                    await self._client.result().session.send_request(PingRequest(), EmptyResult)
                except MCPError as error:
                    # The protocol of 2026 defines no ping, and no session either.
                    return None if error.code == METHOD_NOT_FOUND else error
        return None

    async def close(self) -> None:
        """Close the connection, and wait until it is closed."""
        self.retired = True
        self._closing.set()
        await asyncio.wait([self.holder])


class _Forgotten(Exception):
    """The server rejected a request because it dropped the session."""

    def __init__(self, error: MCPError) -> None:
        self.error = error


class _Connection:
    """The connection of one event loop. It makes a new session if the server lost the last session."""

    def __init__(self, name: str, make: Callable[[], Client]) -> None:
        self._name = name
        self._make = make
        self._lock = asyncio.Lock()
        self._sessions: list[_Session] = []  # the last session is used; the others finish what they sent

    async def send(self, request: Callable[[Client], Awaitable[_T]]) -> _T:
        """Send a request, a second time if the server rejected it because it dropped the session.

        Raises:
            MCPError: The server reported an error, or the connection was lost.
            ServerUnreachable: The request was not sent, because no connection could be made.
        """
        try:
            return await (await self._session()).send(request)
        except _Forgotten as rejected:
            try:
                return await (await self._session()).send(request)
            except _Forgotten:
                raise rejected.error from None

    async def _session(self) -> _Session:
        async with self._lock:
            self._sessions = [each for each in self._sessions if not each.holder.done()]
            if not self._sessions or self._sessions[-1].retired:
                session = _Session(self._name, self._make)
                self._sessions.append(session)
                await session.connected()
            return self._sessions[-1]

    async def close(self) -> None:
        """Close the connection and wait until it is closed."""
        sessions, self._sessions = self._sessions, []
        for each in sessions:
            await each.close()


class MCPAgent(ToolCallingAgent):
    """A `ToolCallingAgent` whose model may also call the tools of MCP servers.

        class Assistant(MCPAgent):
            key = "assistant"
            system_prompt = "You answer questions about files."
            mcp_servers = [MCPTools("http://127.0.0.1:8000/mcp")]

    Each run uses a separate registry with the tools of the class and of the servers.
    """

    #: Further tools, a ToolRegistry.
    tools: Any = ToolRegistry()
    #: The servers, a sequence of `MCPTools`.
    mcp_servers: Any = ()

    async def run(self, ctx: RunContext) -> RunResult:
        """Execute one run with the tools of the class and of the servers."""
        tools = ToolRegistry()
        for each in self.tools.list_tools():
            tools.register(each)
        for server in self.mcp_servers:
            await server.registry(ctx, tools)
        mine = copy.copy(self)
        mine.tools = tools
        return await ToolCallingAgent.run(mine, ctx)

    async def close(self) -> None:
        """Close the connections to the servers."""
        async with AsyncExitStack() as stack:
            for server in self.mcp_servers:
                stack.push_async_callback(server.close)


def _content_of(result: CallToolResult) -> Any:
    """Return the result of a tool: text, structured content, or content parts if it contains images or documents."""
    parts = [_part(each) for each in result.content]
    if any(part["type"] != "text" for part in parts):
        return ContentParts(parts)
    if not parts and result.structured_content is not None:
        return result.structured_content
    return "\n".join(part["text"] for part in parts)


def _text_of(result: CallToolResult) -> str:
    """Return the text of a result, with a note for each block that is no text."""
    return text_of_parts(map(_part, result.content))


def _part(block: ContentBlock) -> dict[str, Any]:
    match block:
        case TextContent():
            return _text(block.text)
        case ImageContent():
            return _image(block.mime_type, block.data)
        case AudioContent():
            return _text(f"[{block.mime_type}, {_size(block.data)} bytes: this model client sends no audio]")
        case ResourceLink():
            return _text(f"{block.name}: {block.uri}" + (f" ({block.description})" if block.description else ""))
        case EmbeddedResource():
            held = block.resource
            return _text(held.text) if isinstance(held, TextResourceContents) else _blob(held)


def _blob(blob: BlobResourceContents) -> dict[str, Any]:
    kind = blob.mime_type or "application/octet-stream"
    if kind.startswith("image/"):
        return _image(kind, blob.blob)
    if kind == "application/pdf":
        data = f"data:{kind};base64,{blob.blob}"
        return {"type": "file", "file": {"filename": blob.uri.rpartition("/")[2] or "file.pdf", "file_data": data}}
    return _text(f"[{blob.uri}: {kind}, {_size(blob.blob)} bytes]")


def _image(kind: str, data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _size(data: str) -> int:
    return len(base64.b64decode(data))
