"""Run the operations of a Pydantic AI agent as steps of the current run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

from pydantic_ai import durable_exec
from pydantic_ai.messages import ModelMessagesTypeAdapter
from pydantic_ai.tools import RunContext as AgentRunContext

from .._core.typed_steps import AttemptOptions
from ..errors import StepExecutionError
from ..interfaces import RunContext, current_run
from ..portal import from_thread, in_thread
from ._chat import chat_of_model_messages
from ._steps import ModelUsage, model_step, number_of_use, scope_id_of

T = TypeVar("T")


class StepOptions(AttemptOptions, total=False):
    """How the steps of an agent are attempted: arguments of `ctx.step` by their names."""


#: The tool call that the code is part of, as the ids of its agent run and of the call.
TOOL_CALL: ContextVar[str] = ContextVar("agent_runtime_pydantic_ai_tool_call", default="")


def place_of(run: RunContext, agent: str) -> str:
    """Return what identifies a run of an agent: its step, its tool call, and how often the agent ran there before.

    The id of the run is not part of it, so a fork of the run finds the saved results. Other agents are not counted, so
    if new code adds an agent, the others keep their results.
    """
    where = "/".join(filter(None, (scope_id_of(run), TOOL_CALL.get())))
    return "/".join(filter(None, (where, f"{agent}.{number_of_use(run, 'agent', where, agent)}")))


def place_in(run: RunContext, context: AgentRunContext[Any] | None) -> str:
    """Return what identifies the agent run of a context, and its tool call, in the run."""
    if context is None:
        return ""
    agent_run = (context.run_id or "").removeprefix(f"{run.run_id}:")
    return agent_run if context.tool_call_id is None else f"{agent_run}:{context.tool_call_id}"


def next_key(run: RunContext, name: str, place: str) -> str:
    """Return the step key of the next use of a name in this place."""
    return f"{place}:{number_of_use(run, name, place)}"


def on_other_loop(run: RunContext) -> bool:
    """Return whether this is not the event loop of the run, as inside `agent.run_sync` of a plain function."""
    task = getattr(getattr(run, "control", None), "task", None)
    return task is not None and task.get_loop() is not asyncio.get_running_loop()


async def on_loop_of(run: RunContext, call: Callable[[], Awaitable[T]]) -> T:
    """Await something that parks the run, on the loop of the run.

    Another loop of the agent stops meanwhile: only a call of the thread that the run waits for can park the run.
    """
    return from_thread(call) if on_other_loop(run) else await call()


async def as_step(run: RunContext, step: Callable[..., Awaitable[T]], body: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `step(body)`, with the body on this event loop; raise what the body raised.

    Args:
        run: The run.
        step: Runs its argument as a step. It is called on the event loop of the run.
        body: The work.
    """
    try:
        return await (_across_loops(step, body) if on_other_loop(run) else step(body))
    except StepExecutionError as error:
        failure = error.__cause__ or error
    # Outside of the `except` block, so that the error and its context do not refer to each other.
    raise failure


async def _across_loops(step: Callable[..., Awaitable[T]], body: Callable[[], Awaitable[T]]) -> T:
    here = asyncio.get_running_loop()
    bodies: list[concurrent.futures.Future[T]] = []

    async def across() -> T:
        # This task runs with the context variables of the step, and the agent added its own; the body gets them all.
        future = asyncio.run_coroutine_threadsafe(awaited(body), here)
        bodies.append(future)
        return await asyncio.wrap_future(future)

    context = contextvars.copy_context()  # of a thread that the run started, so `from_thread` finds the run's loop
    try:
        return await in_thread(cast("Callable[..., T]", partial(context.run, from_thread, step, across)))
    except asyncio.CancelledError:
        for future in bodies:
            future.cancel()
        raise


async def awaited(body: Callable[[], Awaitable[T]]) -> T:
    return await body()


class StepBackend(durable_exec.JournalCallableOperationBackend[StepOptions]):
    """Runs each operation of an agent as a step.

    Args:
        agent_name: The first part of the names of the steps.
        model: Options of model calls.
        tool: Options of tool calls and of the discovery of tools.
        resolve_tool: Returns the options of one tool, False to call it without a step.
        handle_events: Whether calls of the event handler are steps.
    """

    def __init__(
        self, agent_name: str, model: StepOptions, tool: StepOptions, resolve_tool: Any, *, handle_events: bool
    ) -> None:
        super().__init__(
            agent_name=agent_name,
            config=durable_exec.RoleBasedOperationConfig(
                model=model, event=StepOptions(), capability=StepOptions(), tool=tool, resolve_tool=resolve_tool
            ),
        )
        self._handle_events = handle_events

    async def execute(
        self,
        *,
        operation_id: durable_exec.DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: StepOptions,
    ) -> object:
        """Run an operation as a step of the current run, or return its saved result."""
        run = current_run()
        if run is None or (isinstance(operation_id, durable_exec.EventStreamHandlerId) and not self._handle_events):
            return await body()
        context = next((each for each in cache_key if isinstance(each, AgentRunContext)), None)
        key = next_key(run, name, place_in(run, context))
        if isinstance(operation_id, durable_exec.ModelRequestId | durable_exec.ModelCompactMessagesId):

            def step(call: Callable[[], Awaitable[object]]) -> Awaitable[object]:
                trace = partial(_trace, cache_key, context)
                return model_step(run, name, call, usage=_usage, trace=trace, key=key, **config)

        else:
            is_call = isinstance(operation_id, durable_exec.ToolsetCallToolId)

            def step(call: Callable[[], Awaitable[object]]) -> Awaitable[object]:
                return run.step(name, partial(_counted, run, call) if is_call else call, key=key, **config)

        return await as_step(run, step, body)


async def _counted(run: RunContext, call: Callable[[], Awaitable[object]]) -> object:
    """Count a tool call against the limits of the run, and make it."""
    run.charge(turns=0, tool_calls=1)
    return await call()


def _usage(payload: Any) -> ModelUsage:
    """Return the usage of an encoded `ModelResponse`, or of a recorded stream that contains a `ModelResponse`."""
    response = _response(payload)
    used: Mapping[str, Any] = response.get("usage") or {}
    return ModelUsage(
        str(response.get("model_name") or ""), int(used.get("input_tokens") or 0), int(used.get("output_tokens") or 0)
    )


def _response(payload: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", payload.get("response", payload))


def _trace(
    cache_key: tuple[object, ...], context: AgentRunContext[Any] | None, payload: Any, contents: bool
) -> dict[str, Any]:
    """Return the provider, the messages and the finish reason of a model call."""
    response = _response(payload)
    given = next((each for each in cache_key if contents and isinstance(each, list)), [])
    [answer] = chat_of_model_messages([response])
    return {
        "provider": response.get("provider_name") or (None if context is None else context.model.system),
        "input": chat_of_model_messages(ModelMessagesTypeAdapter.dump_python(given, mode="json")),
        "output": answer,
        "finish_reason": response.get("finish_reason"),
    }
