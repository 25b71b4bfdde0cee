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
from agents.tool import (
    _DEFAULT_FAILURE_HANDLED_ATTR,
    ApplyPatchTool,
    ComputerTool,
    CustomTool,
    LocalShellTool,
    ShellTool,
    Tool,
    _invoke_function_tool_with_metadata,
)
from agents.tool_context import ToolContext
from pydantic import BaseModel, TypeAdapter

from .._core.validation import Shown, must
from ..interfaces import RunContext
from ._openai_scope import current_run, inside, original, scope_of

_LOCAL = (ApplyPatchTool, ComputerTool, CustomTool, LocalShellTool)
_DONE = "_agent_runtime_core_durable"
_FAILED = "agent_runtime_core.failed"  # in the record of a call of a tool with an output type: a text about a failure
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


class _Policies:
    """What happens to interrupted tool calls, by the latest setting of `durable`.

    Agents share tools, and `run_agent` makes an agent durable again without saying anything about its tools.
    """

    def __init__(self, given: OnInDoubt) -> None:
        self._others: str | None = None
        self._named: dict[str, str] = {}
        self.set(given)

    def set(self, given: OnInDoubt) -> None:
        if isinstance(given, _Policies):
            self._others, given = given._others or self._others, given._named
        if isinstance(given, str):
            self._others, self._named = given, {}
        else:
            self._named |= given or {}

    def of(self, tool: str) -> str:
        return self._named.get(tool, self._others or "retry")


OnInDoubt = str | Mapping[str, str] | _Policies | None


def _policies(made: object, on_in_doubt: OnInDoubt) -> _Policies | None:
    """Set the policies of a callable that is durable already; None if it is not."""
    found: _Policies | None = getattr(made, _DONE, None)
    if found is not None:
        found.set(on_in_doubt)
    return found


def make_durable(agent: Agent[Any], wrap: Callable[[Model], Model], on_in_doubt: OnInDoubt) -> None:
    """Change an agent, and each agent that it can reach. See `durable`."""
    seen: set[int] = set()
    agents = [agent]
    while agents:
        each = agents.pop()
        if id(each) not in seen:
            seen.add(id(each))
            agents += _change(each, wrap, on_in_doubt)


def _change(agent: Agent[Any], wrap: Callable[[Model], Model], on_in_doubt: OnInDoubt) -> list[Agent[Any]]:
    """Change one agent, and return those that it can reach."""
    following: list[Agent[Any]] = []
    if isinstance(agent.model, Model):
        agent.model = wrap(agent.model)
    for tool in agent.tools:
        _change_tool(agent, tool, on_in_doubt)
        if isinstance(inner := getattr(tool, "_agent_instance", None), Agent):
            following.append(inner)
    if agent.mcp_servers and _policies(agent.get_mcp_tools, on_in_doubt) is None:
        # Their tools are made for each model call.
        vars(agent)["get_mcp_tools"] = _durable_mcp_tools(agent, on_in_doubt)
    for guardrail in (*agent.input_guardrails, *agent.output_guardrails):
        change_guardrail(guardrail)
    for handoff in agent.handoffs:
        if isinstance(handoff, Agent):
            following.append(handoff)
        elif isinstance(handoff, Handoff) and _policies(handoff.on_invoke_handoff, on_in_doubt) is None:
            handoff.on_invoke_handoff = _durable_handoff(handoff.on_invoke_handoff, wrap, on_in_doubt)
    return following


def _change_tool(agent: Agent[Any], tool: Tool, on_in_doubt: OnInDoubt) -> None:
    if isinstance(tool, FunctionTool):
        if _policies(tool.on_invoke_tool, on_in_doubt) is None:
            tool.on_invoke_tool = _durable_call(copy.copy(tool), on_in_doubt)
            tool.timeout_seconds = None  # the copy contains it, so that an answer after a timeout is recorded
    elif isinstance(tool, _LOCAL) or (isinstance(tool, ShellTool) and tool.executor is not None):
        fix = "Its effects cannot be recorded. Make it a function tool"
        shown = Shown(f"{tool.name!r}, a {type(tool).__name__}")
        raise must(f"a local tool of agent {agent.name!r}", "be a function tool", shown, fix)


def _durable_call(tool: FunctionTool, on_in_doubt: OnInDoubt) -> Any:
    """Return the function that calls a tool as a step; another agent as a tool is no step, but its calls are."""
    is_agent = isinstance(getattr(tool, "_agent_instance", None), Agent)
    policies = _Policies(on_in_doubt)

    async def invoke(context: ToolContext[Any], arguments: str) -> Any:
        ctx = current_run()
        if ctx is not None and not is_agent:
            return await _step(ctx, tool, context, arguments, policies.of(tool.name))
        call = _invoke_function_tool_with_metadata(function_tool=tool, context=context, arguments=arguments)
        result = await (call if ctx is None else _agent_call(ctx, call, context.tool_call_id))
        setattr(context, _DEFAULT_FAILURE_HANDLED_ATTR, result.is_sdk_generated_error)
        return result.output

    inner = tool.on_invoke_tool
    setattr(invoke, _DONE, policies)
    return _like(inner, invoke)


async def _agent_call(ctx: RunContext, call: Awaitable[Any], call_id: str) -> Any:
    """Call an agent as a tool. An error that ends the run is raised, even if the tool makes a text of each error."""
    outer = scope_of(ctx)
    with inside(ctx, outer.name(call_id)) as scope:
        try:
            result = await call
        except Exception:
            if scope.fatal is None:
                raise
    if scope.fatal is not None:
        outer.fatal = scope.fatal
        raise scope.fatal
    return result


async def _step(
    ctx: RunContext, tool: FunctionTool, context: ToolContext[Any], arguments: str, on_in_doubt: str
) -> Any:
    """Call a tool as a step. A text of the SDK about a failure passes the output type of the tool, now and later."""
    has_type, scope = tool.output_json_schema is not None, scope_of(ctx)

    async def counted(arguments: str) -> Any:
        ctx.charge(turns=0, tool_calls=1)
        result = await _invoke_function_tool_with_metadata(function_tool=tool, context=context, arguments=arguments)
        value = _storable(result.output, has_type)
        return {_FAILED: value} if has_type and result.is_sdk_generated_error else value

    options: dict[str, Any] = {
        "key": scope.key(context.tool_call_id),
        "on_in_doubt": on_in_doubt,
        "on_changed_input": "raise",
    }
    value = await original(scope, counted, lambda noted: ctx.step(f"tool:{tool.name}", noted, arguments, **options))
    if type(value) is dict and _FAILED in value:
        setattr(context, _DEFAULT_FAILURE_HANDLED_ATTR, True)
        return value[_FAILED]
    return value


def _like(inner: Any, invoke: Any) -> Any:
    """Return a callable that is `invoke`, with the other methods of the SDK's own callable.

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
    setattr(made, _DONE, getattr(invoke, _DONE))
    return made


def _durable_mcp_tools(agent: Agent[Any], on_in_doubt: OnInDoubt) -> Any:
    listed, policies = agent.get_mcp_tools, _Policies(on_in_doubt)

    async def get_mcp_tools(run_context: Any) -> list[Tool]:
        tools = await listed(run_context)
        for tool in tools:
            _change_tool(agent, tool, policies)
        return tools

    setattr(get_mcp_tools, _DONE, policies)
    return get_mcp_tools


def _durable_handoff(inner: Any, wrap: Callable[[Model], Model], on_in_doubt: OnInDoubt) -> Any:
    policies = _Policies(on_in_doubt)

    @functools.wraps(inner)
    async def invoke(*args: Any) -> Any:
        agent = await inner(*args)
        make_durable(agent, wrap, policies)
        return agent

    setattr(invoke, _DONE, policies)
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

    The SDK validates a result whose tool declares an output type, and accepts its JSON. It makes a string of any other
    value that is not JSON, so that is stored.
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
