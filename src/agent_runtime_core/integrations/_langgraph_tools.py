"""Tools of LangChain whose calls are steps of the run."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from langchain_core.messages import ToolMessage, message_to_dict, messages_from_dict
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as tool_of
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from .. import portal
from .._core.validation import must
from ..interfaces import RunContext, current_run
from ._steps import number_of_use, unwrapped_step

_SERDE = JsonPlusSerializer()
#: The durable tool whose step the code is part of. LangChain calls the `invoke` of plain functions in `ainvoke`.
_CALLED: ContextVar[BaseTool | None] = ContextVar("agent_runtime_tool", default=None)


def durable_tool(tool: BaseTool | Callable[..., Any], *, on_in_doubt: str = "retry") -> BaseTool:
    """Return a tool whose calls are steps of the run: a node that runs again gets their saved results.

        ToolNode([durable_tool(search)])
        create_agent(DurableChatModel(model=model), [durable_tool(search)])

    A call also counts against `max_tool_calls` of the run. An error of the tool is raised as the tool raised it.
    Outside of runs the tool is called as it is.

    Args:
        tool: The tool, or a function from which LangChain makes a tool.
        on_in_doubt: What happens to a call that a crash interrupted: "retry", "fail" or "review".

    Returns:
        A copy of the tool, of a subclass of its class.
    """
    if not isinstance(tool, BaseTool):
        tool = tool_of(tool)
    if on_in_doubt not in ("retry", "fail", "review"):
        raise must("on_in_doubt", "be 'retry', 'fail' or 'review'", on_in_doubt)
    made = tool.model_copy()
    object.__setattr__(made, "__class__", _durable(type(tool), on_in_doubt))
    return made


def _durable(kind: Any, on_in_doubt: str) -> type[BaseTool]:
    class DurableTool(kind):  # type: ignore[misc]  # known at run time only
        async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
            call = partial(super().ainvoke, input, config, **kwargs)
            ctx = current_run()
            return await (call() if ctx is None else _step(ctx, self, input, call, on_in_doubt))

        def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
            call = partial(super().invoke, input, config, **kwargs)
            ctx = current_run()
            if ctx is None or _CALLED.get() is self:
                return call()

            async def in_thread() -> Any:
                return await portal.in_thread(call)

            return portal.from_thread(_step, ctx, self, input, in_thread, on_in_doubt)

    return DurableTool


async def _step(
    ctx: RunContext, tool: BaseTool, given: Any, call: Callable[[], Awaitable[Any]], on_in_doubt: str
) -> Any:
    name, key = f"tool:{tool.name}", None
    if isinstance(given, dict) and given.get("type") == "tool_call":
        # Calls of one answer run at the same time, and some servers repeat the ids of their calls.
        key = str(given["id"])
        if number := number_of_use(ctx, name, key):
            key = f"{key}.{number}"

    async def counted() -> dict[str, Any]:
        ctx.charge(turns=0, tool_calls=1)
        token = _CALLED.set(tool)
        try:
            return _stored(await call())
        finally:
            _CALLED.reset(token)

    return _loaded(await unwrapped_step(counted, lambda noted: ctx.step(name, noted, key=key, on_in_doubt=on_in_doubt)))


def _stored(result: Any) -> dict[str, Any]:
    """Return what a tool returned as JSON: a message, or what LangGraph's serializer makes of another object."""
    if isinstance(result, ToolMessage):
        return {"message": message_to_dict(result)}
    if isinstance(result, str):
        return {"text": result}
    kind, data = _SERDE.dumps_typed(result)
    return {"typed": [kind, b64encode(data).decode()]}


def _loaded(stored: dict[str, Any]) -> Any:
    if "message" in stored:
        return messages_from_dict([stored["message"]])[0]
    if "text" in stored:
        return stored["text"]
    kind, data = stored["typed"]
    return _SERDE.loads_typed((kind, b64decode(data)))
