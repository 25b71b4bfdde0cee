"""Make the tools and models of an agent of OpenAI Agents durable."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agents import Agent, FunctionTool, Handoff
from agents.models.interface import Model
from agents.tool import ApplyPatchTool, ComputerTool, CustomTool, LocalShellTool, ShellTool, Tool, invoke_function_tool
from agents.tool_context import ToolContext
from pydantic import BaseModel, TypeAdapter

from .._core.validation import Shown, must
from ..interfaces import RunContext
from ._openai_scope import current_run, inside, scope_of, unwrapped

_LOCAL = (ApplyPatchTool, ComputerTool, CustomTool, LocalShellTool)
_DONE = "_agent_runtime_core_durable"
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def make_durable(agent: Agent[Any], wrap: Callable[[Model], Model], on_in_doubt: str | Mapping[str, str]) -> None:
    """Change an agent, and each agent that it can reach. See `durable`."""
    seen: set[int] = set()
    agents = [agent]
    while agents:
        each = agents.pop()
        if id(each) not in seen:
            seen.add(id(each))
            agents += _change(each, wrap, on_in_doubt)


def _change(
    agent: Agent[Any], wrap: Callable[[Model], Model], on_in_doubt: str | Mapping[str, str]
) -> list[Agent[Any]]:
    """Change one agent, and return those that it can reach."""
    following: list[Agent[Any]] = []
    if isinstance(agent.model, Model):
        agent.model = wrap(agent.model)
    for tool in agent.tools:
        _change_tool(agent, tool, on_in_doubt)
        if isinstance(inner := getattr(tool, "_agent_instance", None), Agent):
            following.append(inner)
    if agent.mcp_servers and not hasattr(agent.get_mcp_tools, _DONE):
        # Their tools are made for each model call.
        vars(agent)["get_mcp_tools"] = _durable_mcp_tools(agent, on_in_doubt)
    for guardrail in (*agent.input_guardrails, *agent.output_guardrails):
        change_guardrail(guardrail)
    for handoff in agent.handoffs:
        if isinstance(handoff, Agent):
            following.append(handoff)
        elif isinstance(handoff, Handoff) and not hasattr(handoff.on_invoke_handoff, _DONE):
            handoff.on_invoke_handoff = _durable_handoff(handoff.on_invoke_handoff, wrap, on_in_doubt)
    return following


def _change_tool(agent: Agent[Any], tool: Tool, on_in_doubt: str | Mapping[str, str]) -> None:
    if isinstance(tool, FunctionTool):
        if not hasattr(tool.on_invoke_tool, _DONE):
            policy = on_in_doubt if isinstance(on_in_doubt, str) else on_in_doubt.get(tool.name, "retry")
            tool.on_invoke_tool = _durable_call(copy.copy(tool), policy)
            tool.timeout_seconds = None  # the copy has it, so that an answer after a timeout is recorded
    elif isinstance(tool, _LOCAL) or (isinstance(tool, ShellTool) and tool.executor is not None):
        fix = "Its effects cannot be recorded. Make it a function tool"
        shown = Shown(f"{tool.name!r}, a {type(tool).__name__}")
        raise must(f"a local tool of agent {agent.name!r}", "be a function tool", shown, fix)


def _durable_call(tool: FunctionTool, on_in_doubt: str) -> Any:
    """Return the function that calls a tool as a step; another agent as a tool is no step, but its calls are."""
    is_agent = isinstance(getattr(tool, "_agent_instance", None), Agent)

    async def invoke(context: ToolContext[Any], arguments: str) -> Any:
        ctx = current_run()
        call = functools.partial(invoke_function_tool, function_tool=tool, context=context, arguments=arguments)
        if ctx is None:
            return await call()
        key = scope_of(ctx).key(context.tool_call_id)
        if is_agent:
            with inside(ctx, key):
                return await call()
        return await _step(ctx, tool, call, arguments, key, on_in_doubt)

    inner = tool.on_invoke_tool
    setattr(invoke, _DONE, True)
    return _like(inner, invoke)


async def _step(
    ctx: RunContext, tool: FunctionTool, call: Callable[[], Awaitable[Any]], arguments: str, key: str, on_in_doubt: str
) -> Any:
    has_type = tool.output_json_schema is not None

    async def counted(arguments: str) -> Any:
        ctx.charge(turns=0, tool_calls=1)
        return _storable(await call(), has_type)

    return await unwrapped(
        ctx.step(f"tool:{tool.name}", counted, arguments, key=key, on_in_doubt=on_in_doubt, on_changed_input="raise")
    )


def _like(inner: Any, invoke: Any) -> Any:
    """Return a callable that is `invoke`, and has the other methods of the SDK's own callable.

    The SDK asks its own callables to inspect the arguments before it asks `needs_approval`.
    """
    if not callable(getattr(inner, "prepare_arguments", None)):
        return invoke
    kind: Any = type(inner)

    class Invoker(kind):  # type: ignore[misc]  # known at run time only
        async def __call__(self, context: ToolContext[Any], arguments: str) -> Any:
            return await invoke(context, arguments)

        def __agents_bind_function_tool__(self, function_tool: FunctionTool) -> Any:
            return self  # a copy of the tool is called as the tool is

    made = object.__new__(Invoker)
    made.__dict__.update(inner.__dict__)
    setattr(made, _DONE, True)
    return made


def _durable_mcp_tools(agent: Agent[Any], on_in_doubt: str | Mapping[str, str]) -> Any:
    listed = agent.get_mcp_tools

    async def get_mcp_tools(run_context: Any) -> list[Tool]:
        tools = await listed(run_context)
        for tool in tools:
            _change_tool(agent, tool, on_in_doubt)
        return tools

    setattr(get_mcp_tools, _DONE, True)
    return get_mcp_tools


def _durable_handoff(inner: Any, wrap: Callable[[Model], Model], on_in_doubt: str | Mapping[str, str]) -> Any:
    @functools.wraps(inner)
    async def invoke(*args: Any) -> Any:
        agent = await inner(*args)
        make_durable(agent, wrap, on_in_doubt)
        return agent

    setattr(invoke, _DONE, True)
    return invoke


def change_guardrail(guardrail: Any) -> None:
    """Give a guardrail, which runs at the same time as its agent, its own scope."""
    inner = guardrail.guardrail_function
    if hasattr(inner, _DONE):
        return
    name = guardrail.get_name()

    @functools.wraps(inner)
    async def checked(*args: Any) -> Any:
        ctx = current_run()
        if ctx is None:
            result = inner(*args)
            return await result if inspect.isawaitable(result) else result
        with inside(ctx, f"guardrail:{name}"):
            result = inner(*args)
            return await result if inspect.isawaitable(result) else result

    setattr(checked, _DONE, True)
    guardrail.guardrail_function = checked


def _storable(value: Any, has_type: bool) -> Any:
    """Return the result of a tool as JSON.

    The SDK validates a result whose tool has an output type, and accepts its JSON. It makes a string of any other value
    that is not JSON, so that is stored.
    """
    if isinstance(value, BaseModel) and type(value).__module__ == "agents.tool":  # text, image, file
        return value.model_dump(mode="json")
    if isinstance(value, list) and all(isinstance(each, BaseModel) for each in value):
        return [_storable(each, has_type) for each in value]
    if _is_json(value):
        return value
    return _ANY.dump_python(value, mode="json", by_alias=True) if has_type else str(value)


def _is_json(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(key) is str and _is_json(each) for key, each in value.items())
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)
