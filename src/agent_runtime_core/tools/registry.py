"""The tools of an agent, by name."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import InvalidArgument, UnknownTool
from ..event_types import EventType
from ..portal import in_thread
from .schema import arguments_for
from .tool import Tool

__all__ = ["ToolRegistry", "UnknownTool"]


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

    def register(self, tool: Tool) -> None:
        """Add a tool; it replaces one of the same name."""
        self._tools[tool.name] = tool

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def list_tools(self) -> list[Tool]:
        return list(self._tools.values())

    def to_openai_format(self) -> list[dict[str, Any]]:
        """The tools as `LLMClient.generate(tools=)` takes them."""
        return [tool.to_openai_format() for tool in self._tools.values()]

    get_tool_definitions = to_openai_format

    async def execute(self, name: str, arguments: Mapping[str, Any] | str | None, ctx: Any = None, **extra: Any) -> Any:
        """Run a tool and return its result; a plain function runs in a thread.

        `arguments` are a dict or its JSON text; `extra` goes to the handler beside them, and `ctx` to
        its parameter annotated `RunContext`. Raises UnknownTool (a KeyError) for a name nobody
        registered, InvalidArgument for arguments that do not fit, and what the handler raises.
        """
        tool = self._require(name)
        try:
            given = arguments_for(tool.handler, {**_parsed(arguments), **extra}, ctx)
        except InvalidArgument as error:
            raise InvalidArgument(f"tool {name!r}: {error}") from error
        call = functools.partial(tool.handler, **given)
        result = call() if _is_async(tool.handler) else await in_thread(call)
        return await result if inspect.isawaitable(result) else result

    async def execute_with_events(self, tool_call: CallsTool, ctx: Emits, **kwargs: Any) -> Any:
        """Run the tool a model asks for, with a TOOL_CALL event before and a TOOL_RESULT event after."""
        name, call_id = tool_call.name, tool_call.id
        arguments = _parsed(tool_call.arguments)
        await ctx.emit(EventType.TOOL_CALL, {"tool_name": name, "tool_args": arguments, "tool_call_id": call_id})
        result = await self.execute(name, arguments, ctx, **kwargs)
        await ctx.emit(EventType.TOOL_RESULT, {"tool_name": name, "tool_call_id": call_id, "result": result})
        return result

    def _require(self, name: str) -> Tool:
        tool = self._tools.get(name)
        if tool is not None:
            return tool
        near = difflib.get_close_matches(str(name), self._tools, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {sorted(self._tools)}"
        raise UnknownTool(f"no tool {name!r}: {hint}")


def _parsed(arguments: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(arguments, Mapping):
        return dict(arguments)
    # Models send no text at all for a tool without parameters.
    if arguments is None or not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the arguments are no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"the arguments are a JSON {type(value).__name__}, not an object: {arguments[:80]!r}")
    return value


def _is_async(handler: Any) -> bool:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
