"""The tools of an agent, by name."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from .._core.clock import SYSTEM, Clock
from .._core.event_types import EventType
from .._core.threads import in_thread
from .._core.timeouts import contain, log_abandoned_thread, with_time_limit
from .._core.validation import did_you_mean, must
from ..errors import InvalidArgument, ToolTimeout, UnknownTool, UnserialisableResult, brief
from .arguments import BadArguments, check_arguments, parsed_arguments, read_arguments
from .base import BaseTool
from .names import check_name
from .results import in_json
from .retries import delay_before_retry
from .schema import Binder
from .tool import Tool, require_handler

__all__ = ["ToolRegistry", "ToolTimeout", "UnknownTool", "unknown_tool"]


class CallsTool(Protocol):
    """A tool call of a model."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Any: ...


class Emits(Protocol):
    """The part of a context that tools use."""

    async def emit(self, event_type: EventType | str, payload: dict[str, Any]) -> None: ...


class ToolRegistry:
    """Tools by name, in the order of registration.

    tools = ToolRegistry()
    tools.register(get_weather)  # a function decorated with @tool

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import ToolRegistry, tool
        >>> @tool
        ... def add(a: int, b: int) -> int:
        ...     "Add two numbers."
        ...     return a + b
        >>> tools = ToolRegistry()
        >>> tools.register(add)
        >>> asyncio.run(tools.execute("add", {"a": 2, "b": 3}))
        5
    """

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._base_tools: dict[str, BaseTool] = {}
        self._binders: dict[str, Binder] = {}

    def register(self, tool: Tool | BaseTool) -> None:
        """Add a tool; it replaces a tool with the same name.

        Args:
            tool: The tool.

        Raises:
            InvalidArgument: It is neither a Tool nor a BaseTool object, or its name is invalid.
        """
        converted = tool.as_tool() if isinstance(tool, BaseTool) else tool
        if (
            isinstance(tool, type)
            or not hasattr(converted, "handler")
            or not isinstance(getattr(converted, "name", None), str)
        ):
            raise must("tool", "be a Tool or a BaseTool object", tool, "Create one with Tool.from_function(fn)")
        check_name(converted.name)
        self._tools[converted.name] = converted
        self._base_tools.pop(converted.name, None)
        if isinstance(tool, BaseTool):
            self._base_tools[converted.name] = tool

    def get(self, name: str) -> Tool | None:
        """Return the tool with that name, or None.

        Args:
            name: The name of the tool.

        Examples:
            >>> from agent_runtime_core import ToolRegistry
            >>> ToolRegistry().get("unknown") is None
            True
        """
        try:
            return self._tools.get(name)
        except TypeError:  # not hashable
            return None

    def get_tool(self, name: str) -> Tool | BaseTool:
        """Return the object that was registered under that name; a BaseTool is returned itself.

        Args:
            name: The name of the tool.

        Raises:
            InvalidArgument: No tool has that name (also a ValueError).
        """
        if self.get(name) is None:
            error = InvalidArgument(f"Tool not found: {name if isinstance(name, str) else brief(name)}")
            error.add_note(str(unknown_tool(name, self.list_tools())))
            raise error
        return self._base_tools.get(name, self._tools[name])

    @property
    def tools(self) -> Mapping[str, Tool | BaseTool]:
        """The objects that were registered, by name, as `get_tool` returns them. `register` adds an object."""
        registered: dict[str, Tool | BaseTool] = {**self._tools, **self._base_tools}
        return MappingProxyType(registered)

    def __iter__(self) -> Iterator[Tool]:
        """Yield the tools in the order of registration."""
        return iter(self.list_tools())

    def list_tools(self) -> list[Tool]:
        """Return all tools in the order of registration."""
        return list(self._tools.values())

    def to_openai_format(self) -> list[dict[str, Any]]:
        """Return the tools in the format of `LLMClient.generate(tools=)`."""
        return [tool.to_openai_format() for tool in self._tools.values()]

    get_tool_definitions = to_openai_format

    async def execute(self, name: str, arguments: Mapping[str, Any] | str | None, ctx: Any = None, **extra: Any) -> Any:
        """Run a tool and return its result. A plain function runs in a thread.

        Args:
            name: The name of the tool.
            arguments: A dict or its JSON text, which must match the tool's `parameters`.
            ctx: Passed to the handler's parameter that is annotated `RunContext`.
            **extra: Further arguments of the handler.

        Returns:
            What the handler returned.

        Raises:
            UnknownTool: No tool has that name (also a KeyError).
            BadArguments: The arguments are invalid; the message lists every problem.
            ToolTimeout: The last attempt took longer than the tool's `timeout`.
            Exception: Any error of the handler, in the last attempt.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import ToolRegistry, tool
            >>> @tool
            ... def double(n: int) -> int:
            ...     "Double a number."
            ...     return 2 * n
            >>> tools = ToolRegistry()
            >>> tools.register(double)
            >>> asyncio.run(tools.execute("double", '{"n": 21}'))
            42
        """
        return await self.execute_read(name, arguments, ctx, extra)

    async def execute_read(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None,
        ctx: Any = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
        *,
        once: bool = False,
    ) -> Any:
        """Like `execute`; with `once` the tool is not retried.

        Args:
            name: The name of the tool.
            arguments: As in `execute`.
            ctx: As in `execute`.
            extra: Further arguments of the handler.
            once: Whether the tool is not retried.

        Returns:
            What the handler returned.

        Raises:
            BadArguments: The arguments are invalid.
        """
        tool = self._require(name)
        try:
            checked = parsed_arguments(tool.parameters, read_arguments(arguments))
            check_arguments(tool.parameters, checked, extra)
        except InvalidArgument as error:
            raise BadArguments(str(error), name) from error
        run = self.run_once if once else self.run_checked
        return await run(tool, {**checked, **extra}, ctx)

    def run_checked(self, tool: Tool, arguments: Mapping[str, Any], ctx: Any = None) -> Awaitable[Any]:
        """Return an awaitable that runs a tool with its retries; the arguments must match its `parameters`.

        Args:
            tool: The tool.
            arguments: The arguments, which match the `parameters` of the tool.
            ctx: As in `execute`.
        """
        return (
            self._run_attempts(tool, arguments, ctx)
            if getattr(tool, "retries", 0)
            else self.run_once(tool, arguments, ctx)
        )

    async def _run_attempts(self, tool: Tool, arguments: Mapping[str, Any], ctx: Any) -> Any:
        clock: Clock = getattr(ctx, "clock", SYSTEM)
        attempt = 0
        while True:
            attempt += 1
            try:
                # A copy, because a failed attempt may have changed it.
                return await self.run_once(tool, copy.deepcopy(dict(arguments)), ctx)
            except Exception as error:
                delay = delay_before_retry(tool, error, attempt, clock.random)
                if delay is None:
                    raise
            await clock.sleep(delay)

    def run_once(self, tool: Tool, arguments: Mapping[str, Any], ctx: Any = None) -> Awaitable[Any]:
        """Return an awaitable that makes one attempt to run a tool; the arguments must match its `parameters`.

        Args:
            tool: The tool.
            arguments: The arguments, which match the `parameters` of the tool.
            ctx: As in `execute`.

        Raises:
            BadArguments: The handler cannot be called with these arguments.
        """
        name = tool.name
        require_handler(tool)
        binder = self._binder(tool)
        try:
            bound = binder.bind(arguments, ctx)
        except InvalidArgument as error:
            raise BadArguments(str(error), name) from error
        is_async = binder.is_async
        call = functools.partial(tool.handler, **bound)
        # In a task, a SystemExit would stop the event loop, and so all runs of this process.
        running = contain(call if is_async else functools.partial(_in_thread, name, call), f"tool {name!r}")
        if tool.timeout is None:
            return running
        more = ". It may have taken effect" if getattr(tool, "has_side_effects", False) else ""
        if not is_async:
            more = ". It continues in its thread and may still have effects"
        return with_time_limit(running, tool.timeout, f"tool {name!r}", ToolTimeout(name, tool.timeout, more))

    async def execute_with_events(self, tool_call: CallsTool, ctx: Emits, **kwargs: Any) -> Any:
        """Run a tool call of a model; publish TOOL_CALL before it and TOOL_RESULT after it.

        Args:
            tool_call: A call with `id`, `name` and `arguments`.
            ctx: The context of the run, which publishes the events.
            **kwargs: Further arguments of the handler.

        Returns:
            What the handler returned.
        """
        name, call_id = tool_call.name, tool_call.id
        arguments = read_arguments(tool_call.arguments)
        await ctx.emit(EventType.TOOL_CALL, {"tool_name": name, "tool_args": arguments, "tool_call_id": call_id})
        result = await self.execute(name, arguments, ctx, **kwargs)
        # The tool ran. An event that cannot be stored must not make its call a failure.
        event = {"tool_name": name, "tool_call_id": call_id, "result": _for_event(self._require(name), result)}
        await ctx.emit(EventType.TOOL_RESULT, event)
        return result

    def _binder(self, tool: Tool) -> Binder:
        known = self._binders.get(tool.name)
        # The tool or its handler may have been replaced.
        if known is None or known.fn is not tool.handler:
            known = self._binders[tool.name] = Binder(tool.handler)
        return known

    def _require(self, name: str) -> Tool:
        tool = self.get(name)
        if tool is None:
            raise unknown_tool(name, self.list_tools())
        return tool


def unknown_tool(name: str, tools: Iterable[Tool]) -> UnknownTool:
    """Return the error for an unknown tool name, with the most similar name or at most five known names."""
    names = [tool.name for tool in tools]
    if not names:
        return UnknownTool(f"unknown tool {brief(name)}: no tools are registered")
    # Some models add a namespace, as in functions.search.
    bare = name.rpartition(".")[2] if isinstance(name, str) else name
    hints = (did_you_mean(each, names) for each in (name, bare))
    hint = next((each for each in hints if each.endswith("?")), did_you_mean(name, names))
    return UnknownTool(f"unknown tool {brief(name)}. {hint}")


def _for_event(tool: Tool, result: Any) -> Any:
    try:
        return in_json(tool, result)[0]
    except UnserialisableResult as error:
        return f"a {type(result).__name__} that cannot be stored: {error}"


async def _in_thread(name: str, call: Callable[[], Any]) -> Any:
    result = await in_thread(call, left=lambda: log_abandoned_thread(f"tool {name!r}"))
    return await result if inspect.isawaitable(result) else result
