"""Durable agents of Pydantic AI: each model call and each tool call is a step of the current run.

agent = Agent("openai:gpt-5.6", name="clerk", capabilities=[Durable()])

class Clerk(AgentRuntime):
    key = "clerk"

    async def run(self, ctx: RunContext) -> RunResult:
        result = await agent.run(ctx.params["question"])
        return RunResult({"answer": result.output})
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from .._core.lazy_import import load

if not TYPE_CHECKING:
    load("pydantic_ai", needed_by=__name__)  # its error names the extra

from pydantic import JsonValue
from pydantic_ai.agent import EventStreamHandler
from pydantic_ai.capabilities import WrapRunHandler, WrapToolExecuteHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    DurabilityEngineSpec,
    DurableOperationId,
    conversation_id_from_run_id,
)
from pydantic_ai.messages import AgentStreamEvent, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta, ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import (
    AgentDepsT,
    DeferredToolRequests,
    DeferredToolResults,
    ToolApproved,
    ToolDefinition,
    ToolDenied,
)
from pydantic_ai.tools import RunContext as AgentRunContext

try:
    from pydantic_ai.external_events import ExternalEventError, ExternalEventWaiter, external_event_scope
except ModuleNotFoundError:  # before 2.68, whose agents cannot wait for external events
    if not TYPE_CHECKING:
        ExternalEventError, ExternalEventWaiter, external_event_scope = RuntimeError, object, nullcontext

from .._core.event_types import EventType
from .._core.run_tasks import EVENT_WAITERS
from .._core.validation import must, unknown
from .._execution.step import StepOptions as CheckedOptions
from ..errors import InvalidArgument, StepCancelledError, WaitTimeout
from ..interfaces import RunContext, current_run
from ._pydantic_ai_steps import (
    TOOL_CALL,
    StepBackend,
    StepOptions,
    as_step,
    awaited,
    next_key,
    on_loop_of,
    place_in,
    place_of,
)

__all__ = ["Durable", "StepOptions", "publish_text"]

#: The key of a tool's `metadata` for the options of its steps.
METADATA_KEY: Final = "agent_runtime"

#: The answers that `runner.approve` accepts for a tool call.
_ANSWER: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "boolean"},
        {
            "type": "object",
            "properties": {
                "approved": {"type": "boolean"},
                "reason": {"type": "string"},
                "arguments": {"type": "object"},
            },
            "required": ["approved"],
            "additionalProperties": False,
        },
    ]
}


class Durable(BaseDurabilityCapability[AgentDepsT]):
    """Makes an agent durable: its model calls and tool calls are steps of the run that calls the agent.

    A resumed run gets the saved results. The limits of the run apply, and its result contains the usage. A tool with
    `requires_approval=True` waits for `runner.approve(run_id, "tool:<its name>", answer)`. The answer is True, False,
    or a dict `{"approved": ..., "reason": ..., "arguments": ...}`. Outside of runs the agent works as without this.

    Args:
        name: The first part of the names of the steps. By default the name of the agent. Renaming it loses the saved
            results of unfinished runs.
        model_step: Options of the steps of model calls, such as `{"retries": 2}`.
        tool_step: Options of the steps of tool calls. The `metadata` of a tool may change them for that tool:
            `{"agent_runtime": {"on_in_doubt": "fail"}}`. With `{"agent_runtime": False}` its calls are no steps, and
            its code runs again when the run resumes.
        approve: Whether tools that need approval ask for it. False returns `DeferredToolRequests` as the output.
        models: Further models, by the names that `agent.run(model=...)` uses.
        event_stream_handler: Receives the events of the agent, model responses as they arrive. It is not called again
            for saved results. See `publish_text`.

    Raises:
        InvalidArgument: An option of the steps is unknown or invalid.
    """

    engine_spec: ClassVar[DurabilityEngineSpec] = DurabilityEngineSpec(
        engine_name="agent-runtime-core",
        durable_unit_noun="step",
        durable_container_noun="run",
        codec=JSON_CODEC,
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        tool_config_key=METADATA_KEY,
        cancellation_error_types=(StepCancelledError,),
    )

    def __init__(
        self,
        *,
        name: str | None = None,
        model_step: StepOptions | None = None,
        tool_step: StepOptions | None = None,
        approve: bool = True,
        models: Mapping[str, Model] | None = None,
        event_stream_handler: EventStreamHandler[AgentDepsT] | None = None,
    ) -> None:
        super().__init__(models=models, event_stream_handler=event_stream_handler, name=name)
        self._model_step = _checked("model_step", model_step)
        self._tool_step = _checked("tool_step", tool_step)
        self._approve = approve

    @property
    def in_durable_context(self) -> bool:
        """Whether the code is part of a run."""
        return current_run() is not None

    def get_durable_operation_backend(self) -> StepBackend:
        """Return what runs the operations of the agent as steps."""
        resolve = self._build_resolve_tool_config(self._tool_step)

        def resolve_tool(operation: DurableOperationId, tool: Any, tool_name: str) -> Any:
            return resolve(tool, tool_name)

        handle_events = self._event_stream_handler is not publish_text
        return StepBackend(self.name, self._model_step, self._tool_step, resolve_tool, handle_events=handle_events)

    def _toolset_base_config(self, kind: object) -> StepOptions:
        return self._tool_step

    def _normalize_unit_config(self, config: Any) -> StepOptions:
        return _checked(f"metadata[{METADATA_KEY!r}]", config)

    def get_default_run_id(self) -> str | None:
        """Return the same id for the agent run when the run is resumed."""
        run = current_run()
        return None if run is None else f"{run.run_id}:{place_of(run, self.name)}"

    def get_default_conversation_id(self, run_id: str) -> str | None:
        """Return the same id for the conversation when the run is resumed."""
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        """Return when the agent run first started."""
        run = current_run()
        if run is None:
            return None
        key = next_key(run, "start", run_id.removeprefix(f"{run.run_id}:"))
        return await on_loop_of(run, partial(run.now, key=key))

    async def wrap_run(self, ctx: AgentRunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        """Let the agent wait for external events as signals of the run."""
        run = current_run()
        if run is None:
            return await handler()
        with external_event_scope(_Signals(run, ctx)):
            return await super().wrap_run(ctx, handler=handler)

    async def wrap_tool_execute(
        self,
        ctx: AgentRunContext[AgentDepsT],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: WrapToolExecuteHandler,
    ) -> Any:
        """Name the tool call to agents that the tool runs."""
        run = current_run()
        if run is None:
            return await handler(args)
        token = TOOL_CALL.set(place_in(run, ctx))
        try:
            return await handler(args)
        finally:
            TOOL_CALL.reset(token)

    async def handle_deferred_tool_calls(
        self, ctx: AgentRunContext[AgentDepsT], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Ask for the approval of all tool calls that need it, and wait for the answers."""
        run = current_run()
        if run is None or not self._approve or not requests.approvals:
            return None
        asked = [partial(_decision, run, ctx, call, requests) for call in requests.approvals]
        answers = await on_loop_of(run, partial(_all_of, asked))
        decided = {call.tool_call_id: answer for call, answer in zip(requests.approvals, answers, strict=True)}
        return requests.build_results(approvals=decided)


async def publish_text(ctx: AgentRunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
    """Publish the text of model responses as `assistant.delta` events of the run.

    Pass it as `Durable(event_stream_handler=publish_text)`.

    Args:
        ctx: The context of the agent.
        events: The events of the agent.
    """
    run = current_run()
    async for event in events:
        text = ""
        if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
            text = event.part.content
        elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
            text = event.delta.content_delta
        if text and run is not None:
            await on_loop_of(run, partial(run.emit, EventType.ASSISTANT_DELTA, {"delta": text}))


class _Signals(ExternalEventWaiter):
    """Waits for signals of the run, whose names are the tokens."""

    def __init__(self, run: RunContext, context: AgentRunContext[Any]) -> None:
        self._run, self._place = run, place_in(run, context)

    async def wait(
        self, name: str, *, ask: Callable[[str], Awaitable[JsonValue]], timeout: timedelta | None
    ) -> JsonValue:
        """Return the answer of `ask(token)`, or else the payload of the signal with that name."""
        run = self._run
        key = next_key(run, name, self._place)
        token = f"{name}:{key}"

        def step(body: Callable[[], Awaitable[JsonValue]]) -> Awaitable[JsonValue]:
            return run.step(f"ask:{name}", body, key=key)

        answer = await as_step(run, step, partial(ask, token))
        if answer is not None:
            return answer
        seconds = None if timeout is None else timeout.total_seconds()
        try:
            payload: JsonValue = await on_loop_of(run, partial(run.wait_for_signal, token, timeout=seconds, key=key))
        except WaitTimeout as error:
            raise ExternalEventError(str(error)) from error
        return payload


async def _decision(
    run: RunContext, context: AgentRunContext[Any], call: ToolCallPart, requests: DeferredToolRequests
) -> ToolApproved | ToolDenied:
    name, call_id = f"tool:{call.tool_name}", call.tool_call_id
    details: dict[str, Any] = {"tool_name": call.tool_name, "tool_args": call.args_as_dict(), "tool_call_id": call_id}
    if call_id in requests.metadata:
        details["metadata"] = requests.metadata[call_id]
    key = next_key(run, name, f"{place_in(run, context)}:{call_id}")
    answer = await run.approve(name, details, schema=_ANSWER, key=key)
    decision: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {"approved": answer}
    if decision["approved"] is True:
        return ToolApproved(override_args=decision.get("arguments"))
    return ToolDenied(decision.get("reason") or "A person denied this tool call.")


async def _all_of(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Await all calls concurrently; if a call fails, cancel the others."""
    if len(calls) == 1:
        return [await calls[0]()]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(awaited(call)) for call in calls]
    return [task.result() for task in tasks]


def _checked(name: str, options: Any) -> StepOptions:
    """Return options of steps, or raise InvalidArgument."""
    if options is None:
        return StepOptions()
    if not isinstance(options, Mapping):
        raise must(name, "be a dict of step options, such as {'retries': 2}", options)
    known = StepOptions.__annotations__
    for each in options:
        if each not in known:
            raise InvalidArgument(unknown(f"step option in {name}", each, known))
    CheckedOptions(**options)
    return cast("StepOptions", dict(options))


# Without these a run that waits inside an agent is never parked. Not the function that sends the events of
# `run_stream_events`: what reads them may be no task of the run.
EVENT_WAITERS.update(
    {
        "pydantic_ai.agent:_run_lifecycle_hooks.<locals>._do_run",  # until the end of the agent
        "pydantic_ai.agent.abstract:AgentRunEvents.__anext__",  # until the task of the agent sends an event
        "pydantic_ai._tool_execution:_iter_completed_or_buffered",  # until a tool ends or emits an event
        "pydantic_graph.graph_builder:_GraphIterator.iter_graph",  # until a task of the graph sends its result
    }
)
