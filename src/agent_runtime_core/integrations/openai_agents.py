"""Durable agents of the OpenAI Agents SDK: each model call and each tool call of a run is a step.

from agent_runtime_core.integrations.openai_agents import run_agent

result = await run_agent(agent, "What is the weather in Bern?")
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .._core.lazy_import import load

if not TYPE_CHECKING:
    load("agents", needed_by=__name__)  # its error names the extra

from agents import Agent, RunConfig, Runner, RunState
from agents.exceptions import UserError
from agents.items import ModelResponse, ToolApprovalItem, TResponseInputItem, TResponseStreamEvent
from agents.models.interface import Model, ModelProvider
from agents.models.multi_provider import MultiProvider
from agents.result import RunResult, RunResultStreaming
from agents.retry import ModelRetryAdvice, ModelRetryAdviceRequest
from agents.stream_events import StreamEvent
from openai import AsyncAzureOpenAI, AsyncOpenAI

from .._core.clock import SYSTEM
from .._core.event_types import EventType
from ..errors import AgentRuntimeError, StepExecutionError
from ..interfaces import RunContext
from ._chat import chat_of_items
from ._openai_durable import change_guardrail, make_durable
from ._openai_responses import NoAnswer, answered, closing, consumed, events_of, model_of, recorded
from ._openai_scope import current_run, inside_agent, original, scope_of
from ._openai_session import ConversationSession
from ._steps import ModelUsage, model_step

__all__ = ["ConversationSession", "DurableModel", "DurableModelProvider", "durable", "durable_config", "run_agent"]

T = TypeVar("T")

_MODEL = "openai:model"  # not "model": that is the name of the model calls of our own loop, whose records differ

#: The answers that `runner.approve` accepts for a tool call.
_ANSWER: dict[str, Any] = {
    "anyOf": [
        {"type": "boolean"},
        {
            "type": "object",
            "properties": {
                "approved": {"type": "boolean"},
                "reason": {"type": "string"},
                "always": {"type": "boolean"},
            },
            "required": ["approved"],
            "additionalProperties": False,
        },
    ]
}


class _LooksLike:
    """Shows the class and the attributes of the object that it wraps, which the SDK asks for.

    Args:
        wrapped: The object.
    """

    def __init__(self, wrapped: object) -> None:
        self._wrapped = wrapped

    @property  # type: ignore[misc]  # it cannot be assigned
    def __class__(self) -> type:  # `isinstance` accepts this class too
        return self._wrapped.__class__

    def __eq__(self, other: object) -> bool:  # the SDK compares agents, which may share a model
        return bool(self._wrapped == (other._wrapped if isinstance(other, _LooksLike) else other))

    def __hash__(self) -> int:
        return hash(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":  # in a copy that is not complete
            raise AttributeError(name)
        return getattr(self._wrapped, name)


class DurableModel(_LooksLike, Model):
    """A model whose calls are steps of the run that makes them.

    A resumed run gets the recorded answers. The limits of the run apply.
    Outside of a run, the model is called as usual. For `isinstance`, it is also a model of the wrapped model's class.

    Args:
        model: The model to call.
        name: The name of the model, for the usage and the price of calls. By default the model's own.
    """

    def __init__(self, model: Model, name: str | None = None) -> None:
        super().__init__(model)
        self._model = model
        self._name = name or str(getattr(model, "model", None) or "")

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """Return the recorded answer, or call the model and record its answer."""
        ctx = current_run()
        if ctx is None:
            return await self._model.get_response(*args, **kwargs)

        answers: list[ModelResponse] = []

        async def call() -> dict[str, Any]:
            answers[:] = [await self._model.get_response(*args, **kwargs)]
            return recorded(answers[0])

        saved = answered(await self._recorded(ctx, args, kwargs, call))
        return answers[0] if answers else saved

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[TResponseStreamEvent]:
        """Yield the events of the model's stream, or of the recorded answer.

        A recorded answer is streamed as one delta for each of its texts.
        """
        ctx = current_run()
        if ctx is None:
            async with closing(self._model.stream_response(*args, **kwargs)) as stream:
                async for passed in stream:
                    yield passed
            return
        events: asyncio.Queue[TResponseStreamEvent | None] = asyncio.Queue()
        last: list[TResponseStreamEvent] = []

        async def publish(delta: str) -> None:
            await ctx.emit(EventType.ASSISTANT_DELTA, {"delta": delta})

        async def call() -> dict[str, Any]:
            async with closing(self._model.stream_response(*args, **kwargs)) as stream:
                return await consumed(stream, events.put_nowait, last.append, publish, getattr(ctx, "clock", SYSTEM))

        step = asyncio.ensure_future(self._recorded(ctx, args, kwargs, call))
        step.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            saved = list(events_of(await step))
        except NoAnswer as error:
            saved = error.events()
        finally:
            await _stopped(step)
        for event in last or saved:
            yield event

    async def _recorded(
        self, ctx: RunContext, args: tuple[Any, ...], kwargs: dict[str, Any],
        call: Callable[[], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:  # fmt: skip
        """Return the record of the next model call of this agent loop."""
        scope, given = scope_of(ctx), _argument(1, "input", args, kwargs)
        instructions = _argument(0, "system_instructions", args, kwargs)

        def trace(record: dict[str, Any], contents: bool) -> dict[str, Any]:
            return {**self._trace(record), "input": chat_of_items(given, instructions) if contents else None}

        try:
            options: dict[str, Any] = {"usage": self._usage, "trace": trace, "key": scope.next_call(given)}
            return await original(scope, call, lambda noted: model_step(ctx, _MODEL, noted, **options))
        except BaseException:
            scope.failed(given)
            raise

    def _usage(self, record: dict[str, Any]) -> ModelUsage:
        usage = record["usage"]
        return ModelUsage(self._name or model_of(record), usage["input_tokens"], usage["output_tokens"])

    def _trace(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the model, the provider and the answer of a call."""
        answers = chat_of_items(record["output"])
        return {
            "model": self._usage(record).model or type(self._model).__name__,
            "provider": _provider_of(self._model),
            "output": answers[0] if answers else None,
        }

    def get_retry_advice(self, request: ModelRetryAdviceRequest) -> ModelRetryAdvice | None:
        """Return the model's advice about a failed call."""
        return self._model.get_retry_advice(request)

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self._model._cleanup_on_run_end(owner)  # the SDK calls this method of every model

    async def close(self) -> None:
        """Close the model."""
        await self._model.close()


class DurableModelProvider(_LooksLike, ModelProvider):
    """A model provider whose models are durable: `RunConfig(model_provider=DurableModelProvider())`.

    For `isinstance`, it is also a provider of the wrapped provider's class.

    Args:
        provider: The provider of the models, by default the SDK's own.
    """

    def __init__(self, provider: ModelProvider | None = None) -> None:
        self._provider = provider or MultiProvider()
        super().__init__(self._provider)

    def get_model(self, model_name: str | None) -> Model:
        """Return the durable model of that name."""
        return _durable_model(self._provider.get_model(model_name), model_name)

    async def aclose(self) -> None:
        """Close the provider."""
        await self._provider.aclose()


def durable(agent: Agent[T], *, on_in_doubt: str | Mapping[str, str] | None = None) -> Agent[T]:
    """Make the tool calls of an agent steps, and the calls of its model if that is a `Model`.

    The agent itself is changed, and so is each agent that it can reach by handoffs and as a tool. `run_agent` calls
    this function. Outside of a run, the agents work as before.

    Args:
        agent: The agent.
        on_in_doubt: What happens to a tool call that a crash interrupted: "retry", "fail" or "review". Or a dict with
            the names of tools. Tools that it does not name keep what an earlier call set, by default "retry".

    Returns:
        The same agent.

    Raises:
        InvalidArgument: An agent uses a local tool that is no function tool, such as a `ComputerTool`.
    """
    make_durable(agent, _durable_model, on_in_doubt)
    return agent


def durable_config(config: RunConfig | dict[str, Any] | None = None) -> RunConfig:
    """Return a copy of a run configuration whose models are durable.

    Args:
        config: The configuration, or a dict of its fields. If None, the SDK's defaults.
    """
    config = config if isinstance(config, RunConfig) else RunConfig(**(config or {}))
    provider, model = config.model_provider, config.model
    if not isinstance(provider, DurableModelProvider):
        provider = DurableModelProvider(provider)
    if isinstance(model, Model):
        model = _durable_model(model)
    for guardrail in (*(config.input_guardrails or ()), *(config.output_guardrails or ())):
        change_guardrail(guardrail)
    return replace(config, model_provider=provider, model=model)


def _durable_model(model: Model, name: str | None = None) -> Model:
    return model if isinstance(model, DurableModel) else DurableModel(model, name)


async def run_agent(
    agent: Agent[Any],
    input: str | list[TResponseInputItem],
    *,
    key: str | None = None,
    on_event: Callable[[StreamEvent], Awaitable[object]] | None = None,
    run_config: RunConfig | dict[str, Any] | None = None,
    **options: Any,
) -> RunResult | RunResultStreaming:
    """Run an agent as `Runner.run` does, with each model call and each tool call as a step of the current run.

    If a tool needs approval, the run waits for `runner.approve(run_id, "tool:<its name>", answer)`. The answer is True,
    False, or a dict `{"approved": ..., "reason": ..., "always": ...}`.

    Args:
        agent: The agent. `durable(agent)` is called.
        input: The input of the agent.
        key: Identifies this call. Without a key, the name of the agent and the number of its run do. Calls of an agent
            that run at the same time need keys.
        on_event: Streams the agent's answers, and receives each event.
        run_config: The configuration of the SDK.
        **options: Further arguments of `Runner.run`, such as `session`, `context`, `max_turns` and `hooks`.

    Returns:
        The result of the SDK. Outside of a run it may have `interruptions`.

    Raises:
        LimitExceeded: A limit of the run is reached.
    """
    durable(agent)
    config = durable_config(run_config)
    ctx = current_run()
    failure: AgentRuntimeError | None = None
    try:
        if ctx is None:
            return await _until_decided(ctx, agent, input, on_event, {**options, "run_config": config})
        with inside_agent(ctx, agent.name, key):
            return await _until_decided(ctx, agent, input, on_event, {**options, "run_config": config})
    except UserError as error:
        failure = _own_error(error)
        if failure is None:
            raise
    finally:
        if not isinstance(run_config, RunConfig) and "model_provider" not in (run_config or ()):
            await config.model_provider.aclose()
    raise failure


async def _until_decided(
    ctx: RunContext | None,
    agent: Agent[Any],
    input: str | list[TResponseInputItem] | RunState[Any],
    on_event: Callable[[StreamEvent], Awaitable[object]] | None,
    options: dict[str, Any],
) -> RunResult | RunResultStreaming:
    """Run an agent, and again after each question to a person, until there is none."""
    while True:
        result = await _run(agent, input, on_event, options)
        if ctx is None or not result.interruptions:
            return result
        state: RunState[Any] = result.to_state()
        await _decide(ctx, state, result.interruptions)
        input = state
        options = {**options, "previous_response_id": None, "conversation_id": None}  # the state contains them


async def _run(
    agent: Agent[Any], input: Any, on_event: Callable[[StreamEvent], Awaitable[object]] | None, options: dict[str, Any]
) -> RunResult | RunResultStreaming:
    if on_event is None:
        return await Runner.run(agent, input, **options)
    result = Runner.run_streamed(agent, input, **options)
    events: Any = result.stream_events()
    try:
        async with aclosing(events):
            async for event in events:
                await on_event(event)
    except BaseException:
        result.cancel()
        raise
    return result


async def _decide(ctx: RunContext, state: RunState[Any], items: list[ToolApprovalItem]) -> None:
    """Ask about all tool calls at the same time, and tell the state the answers."""
    scope = scope_of(ctx)
    scope.questions += 1
    asked = [
        asyncio.ensure_future(
            ctx.approve(
                f"tool:{item.name}", _details(item), schema=_ANSWER, key=scope.key(f"{scope.questions}.{index}")
            )
        )
        for index, item in enumerate(items)
    ]
    try:
        answers = await asyncio.gather(*asked)
    finally:
        for each in asked:
            await _stopped(each)
    for item, answer in zip(items, answers, strict=True):
        decision = answer if isinstance(answer, Mapping) else {"approved": answer}
        always = decision.get("always") is True
        if decision["approved"] is True:
            state.approve(item, always_approve=always)
        else:
            reason = decision.get("reason")
            state.reject(item, always_reject=always, rejection_message=None if reason is None else str(reason))


def _details(item: ToolApprovalItem) -> dict[str, Any]:
    arguments: Any = item.arguments
    with suppress(TypeError, ValueError):
        arguments = json.loads(arguments)
    return {"tool_name": item.name, "tool_args": arguments, "tool_call_id": item.call_id, "agent": item.agent.name}


def _own_error(error: UserError) -> AgentRuntimeError | None:
    """Return the error of this library that the SDK reports as the error of a tool, such as LimitExceeded."""
    cause = error.__cause__
    # A plain StepExecutionError is an error of the tool whose class is not imported; StepInDoubt is a subclass.
    return cause if isinstance(cause, AgentRuntimeError) and type(cause) is not StepExecutionError else None


def _argument(index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an argument of a model call, which is passed by its position or by its name."""
    return kwargs[name] if name in kwargs else args[index]


def _provider_of(model: Model) -> str:
    """Return the name of a model's provider, else what the SDK calls the model's class."""
    client = getattr(model, "_client", None)
    if isinstance(client, AsyncOpenAI):
        return "azure" if isinstance(client, AsyncAzureOpenAI) else "openai"
    return type(model).__name__.removesuffix("Model").lower()


async def _stopped(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it ends."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # raised where its result was awaited, or superseded by another error
