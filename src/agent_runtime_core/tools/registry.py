"""The tools of an agent, by name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from .._core.event_types import EventType
from .._core.threads import in_thread
from .._core.timeouts import log_abandoned_thread, with_time_limit
from ..errors import InvalidArgument, ToolTimeout, UnknownTool, brief, deciding_error
from .arguments import BadArguments, check_arguments, read_arguments
from .base import BaseTool
from .schema import Binder
from .tool import Tool

__all__ = ["ToolRegistry", "ToolTimeout", "UnknownTool", "unknown_tool"]


class CallsTool(Protocol):
    """A model's request to run a tool."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Any: ...


class Emits(Protocol):
    """The part of a context that tools need."""

    async def emit(self, event_type: EventType | str, payload: dict[str, Any]) -> None: ...


class ToolRegistry:
    """Tools by name, in the order of their registration."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._given: dict[str, BaseTool] = {}
        self._binders: dict[str, Binder] = {}

    def register(self, tool: Tool | BaseTool) -> None:
        """Add a tool; it replaces one of the same name."""
        made = tool.as_tool() if isinstance(tool, BaseTool) else tool
        if isinstance(tool, type) or not hasattr(made, "handler") or not isinstance(getattr(made, "name", None), str):
            raise InvalidArgument(
                f"register takes a Tool or a BaseTool object, not {brief(tool)}: make one with Tool.from_function(fn)"
            )
        self._tools[made.name] = made
        self._given.pop(made.name, None)
        if isinstance(tool, BaseTool):
            self._given[made.name] = tool

    def get(self, name: str) -> Tool | None:
        try:
            return self._tools.get(name)
        except TypeError:  # what has no hash is no name
            return None

    def get_tool(self, name: str) -> Tool | BaseTool:
        """What was registered under that name, a BaseTool as itself; a ValueError where nothing was."""
        if self.get(name) is None:
            error = InvalidArgument(f"Tool not found: {name if isinstance(name, str) else brief(name)}")
            error.add_note(str(unknown_tool(name, self.list_tools())))
            raise error
        return self._given.get(name, self._tools[name])

    def list_tools(self) -> list[Tool]:
        return list(self._tools.values())

    def to_openai_format(self) -> list[dict[str, Any]]:
        """The tools as `LLMClient.generate(tools=)` takes them."""
        return [tool.to_openai_format() for tool in self._tools.values()]

    get_tool_definitions = to_openai_format

    async def execute(self, name: str, arguments: Mapping[str, Any] | str | None, ctx: Any = None, **extra: Any) -> Any:
        """Run a tool and return its result; a plain function runs in a thread.

        `arguments` are a dict or its JSON text and fit the tool's `parameters`; `extra` goes to the
        handler beside them, and `ctx` to its parameter annotated `RunContext`. Raises UnknownTool (a
        KeyError) for a name nobody registered, BadArguments (an InvalidArgument) that names every wrong
        argument, ToolTimeout (a TimeoutError) after the tool's `timeout`, and what the handler raises.
        """
        tool = self._require(name)
        try:
            given = read_arguments(arguments)
            check_arguments(tool.parameters, given, extra)
        except InvalidArgument as error:
            raise BadArguments(str(error), name) from error
        return await self.run_checked(tool, {**given, **extra}, ctx)

    def run_checked(self, tool: Tool, arguments: Mapping[str, Any], ctx: Any = None) -> Awaitable[Any]:
        """Run a tool with arguments that are known to fit its `parameters`: what to await."""
        name = tool.name
        binder = self._binder(tool)
        try:
            given = binder.bind(arguments, ctx)
        except InvalidArgument as error:
            raise BadArguments(str(error), name) from error
        is_async = binder.is_async
        call = functools.partial(tool.handler, **given)
        running = _staying(call() if is_async else _in_thread(name, call))
        if tool.timeout is None:
            return running
        more = "" if is_async else "; it runs on in its thread and may still have effects"
        return with_time_limit(running, tool.timeout, f"tool {name!r}", ToolTimeout(name, tool.timeout, more))

    async def execute_with_events(self, tool_call: CallsTool, ctx: Emits, **kwargs: Any) -> Any:
        """Run the tool a model asks for, with a TOOL_CALL event before and a TOOL_RESULT event after."""
        name, call_id = tool_call.name, tool_call.id
        arguments = read_arguments(tool_call.arguments)
        await ctx.emit(EventType.TOOL_CALL, {"tool_name": name, "tool_args": arguments, "tool_call_id": call_id})
        result = await self.execute(name, arguments, ctx, **kwargs)
        await ctx.emit(EventType.TOOL_RESULT, {"tool_name": name, "tool_call_id": call_id, "result": result})
        return result

    def _binder(self, tool: Tool) -> Binder:
        known = self._binders.get(tool.name)
        # A tool can be replaced, and its handler too.
        if known is None or known.fn is not tool.handler:
            known = self._binders[tool.name] = Binder(tool.handler)
        return known

    def _require(self, name: str) -> Tool:
        tool = self.get(name)
        if tool is None:
            raise unknown_tool(name, self.list_tools())
        return tool


def unknown_tool(name: str, tools: Iterable[Tool]) -> UnknownTool:
    """The error for a name that none of the tools has; it names those that come near."""
    # Cut off: what is compared takes time in the square of its length.
    said, names = name[:100] if isinstance(name, str) else brief(name), sorted(tool.name for tool in tools)
    # Some models put the tool into a namespace, as in functions.search.
    near = difflib.get_close_matches(said, names, n=3) or difflib.get_close_matches(said.rpartition(".")[2], names)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {names}"
    return UnknownTool(f"no tool {said!r}: {hint}")


async def _in_thread(name: str, call: Callable[[], Any]) -> Any:
    result = await in_thread(call, left=lambda: log_abandoned_thread(f"tool {name!r}"))
    return await result if inspect.isawaitable(result) else result


async def _staying(running: Awaitable[Any]) -> Any:
    try:
        return await running
    except (SystemExit, BaseExceptionGroup) as error:
        # In a task it leaves the loop, and ends all runs of this process.
        if not isinstance(cause := deciding_error(error), SystemExit):
            raise
        raise RuntimeError(f"SystemExit: {cause}") from error
