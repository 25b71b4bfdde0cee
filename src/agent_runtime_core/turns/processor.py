"""Run the steps of turns: limit concurrency, call models, publish progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from .._core.clock import Clock
from .._core.context_vars import restore
from .._core.event_types import EventType
from .._core.per_loop import PerLoop
from .._core.settings import POSITIVE
from .._execution.context import Context
from .._execution.step import CURRENT_STEP
from ..config import get_config
from ..errors import LeaseLost, NotSupported, Postponed, deciding_error, text_of
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..llm._prices import cost_usd, provider_of
from ..llm._retries import Breakers
from ..loop.model_calls import streamed
from ..planning.plan import PlanStep
from ..status import StepStatus
from .event_topics import EventPublisherSubscriber
from .events import AuditEvent, StepResultChunk
from .hooks import Hooks, TurnLog
from .personality import PersonalityInstance
from .turn import StepMetrics, StepState, Turn


class StepSlots:
    """Concurrency slots for steps, granted in order of arrival."""

    def __init__(self) -> None:
        self._in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def acquired(self, limit: Callable[[], int]) -> AsyncIterator[None]:
        """Hold a slot inside the block. Waits while `limit()` slots are in use."""
        if self._waiting or self._in_use >= limit():
            await self._wait(limit)
        else:
            self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1
            self._wake_waiters(limit)

    async def _wait(self, limit: Callable[[], int]) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._wake_waiters(limit)  # the limit may have grown
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)
            else:
                self._in_use -= 1  # granted at the moment of the cancellation
                self._wake_waiters(limit)
            raise

    def _wake_waiters(self, limit: Callable[[], int]) -> None:
        while self._waiting and self._in_use < limit():
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._in_use += 1
                waiter.set_result(None)


Do = Callable[[], Awaitable[Any]]


@dataclass
class CallMetrics:
    """The usage of one attempt of a step, or of planning.

    `chunks` counts the published pieces of the answer. `answer` is the end of a step that a provider worker executed.
    """

    state: StepState | None = None
    metrics: StepMetrics = field(default_factory=StepMetrics)
    chunks: int = 0
    answer: StepResultChunk | None = None


_CURRENT_CALLS: ContextVar[CallMetrics | None] = ContextVar("agent_runtime_core_turn_step", default=None)


@dataclass
class TurnProgress:
    """A turn in one attempt of its run, as its steps see it. `save` saves the turn."""

    ctx: Context
    turn: Turn
    personality: PersonalityInstance
    system: str
    #: The messages to send to the model if there is no plan.
    direct: list[Any] | None = None
    save: Callable[[], Awaitable[None]] | None = None

    @property
    def log(self) -> TurnLog:
        """A logger that adds the ids of the turn and of the present step."""
        return TurnLog(self.turn.trace_id, self.turn.id, self.ctx.step_id)

    @property
    def claim(self) -> str:
        """The id of the claim under which the turn runs."""
        return self.ctx.journal.writer.claim_id


class Elsewhere(Protocol):
    """Lets provider workers execute some steps of a turn; see `provider_steps`."""

    def takes(self, planned: PlanStep) -> bool:
        """Return whether provider workers execute the step."""

    async def execute(
        self, planned: PlanStep, step_input: dict[str, Any], attempt: int, calls: CallMetrics, here: Do
    ) -> Any:
        """Return the result of an attempt of the step. `here` executes it in this process."""


class StepProcessor:
    """Runs the steps of all turns of this process.

    1. At most `max_in_flight` steps run at the same time. Steps that wait for a person or another worker do not count.
    2. Each piece of a model's answer is published as it arrives: as ASSISTANT_DELTA of the run and as StepResultChunk
       on agent.step_results.
    3. A client without a circuit breaker gets one here for each model. While it is open, the run is deferred without
       using an attempt.
    4. The end of a step is published once on agent.step_results and agent.audit, under its step id.

    Args:
        topics: Publishes the events.
        hooks: Called at the start and end of each step.
        clock: Measures the time of steps.
        max_in_flight: The number of steps that run at the same time.
        breakers: The circuit breakers.
        stream: Whether answers are published in pieces.
    """

    def __init__(
        self, topics: EventPublisherSubscriber, hooks: Hooks, *, clock: Clock, max_in_flight: int = 16,
        breakers: Breakers | None = None, stream: bool = True,
    ) -> None:  # fmt: skip
        POSITIVE.check("max_in_flight", max_in_flight)
        self.topics: EventPublisherSubscriber = topics
        self.hooks: Hooks = hooks
        self.max_in_flight: int = max_in_flight
        self.stream: bool = stream
        self.breakers: Breakers = breakers or Breakers(clock)
        self._clock = clock
        self._slots_by_loop: PerLoop[StepSlots] = PerLoop(lambda loop: StepSlots())

    def _slot(self) -> contextlib.AbstractAsyncContextManager[None]:
        return self._slots_by_loop.here().acquired(lambda: self.max_in_flight)

    # -- steps

    def around(
        self, progress: TurnProgress, elsewhere: Elsewhere | None = None
    ) -> Callable[[PlanStep, dict[str, Any], Do], Awaitable[Any]]:
        """Return a function for `execute_plan(around=...)` that runs each attempt of a step, here or `elsewhere`.

        Args:
            progress: The turn.
            elsewhere: Lets provider workers execute some steps.
        """

        async def step(planned: PlanStep, step_input: dict[str, Any], do: Do) -> Any:
            state = progress.turn.step(planned.step_number)
            assert state is not None
            scope = CURRENT_STEP.get()
            state.step_id = progress.ctx.step_id or state.step_id
            state.status, state.error, state.attempt = StepStatus.RUNNING, None, 1 if scope is None else scope.attempt
            calls = CallMetrics(state)
            if elsewhere is None or not elsewhere.takes(planned):
                async with self._slot():
                    return await self._run(progress, state, calls, do)

            async def here() -> Any:
                async with self._slot():
                    return await do()

            execute = partial(elsewhere.execute, planned, step_input, state.attempt, calls, here)
            return await self._run(progress, state, calls, execute)

        return step

    async def _run(self, progress: TurnProgress, state: StepState, calls: CallMetrics, do: Do) -> Any:
        await self.hooks.call("on_step_start", progress.turn, state)
        began = self._clock.boot()
        try:
            with _counting_calls_in(calls):
                result = await do()
        except Exception as error:
            cause = deciding_error(error)
            if isinstance(cause, (Postponed, LeaseLost)):
                state.status = StepStatus.PENDING
                raise
            state.status, state.error = StepStatus.FAILED, text_of(cause)
            await self._publish_end(progress, state, calls, began, f"failed:{progress.claim}:{state.attempt}")
            raise
        state.status, state.result = StepStatus.COMPLETED, result
        await self._publish_end(progress, state, calls, began, "result")
        return result

    async def _publish_end(
        self, progress: TurnProgress, state: StepState, calls: CallMetrics, began: float, event_suffix: str
    ) -> None:
        latency = (self._clock.boot() - began) * 1000
        state.metrics += replace(calls.metrics, latency_ms=round(latency, 3))
        log = progress.log
        if state.status is StepStatus.FAILED:
            log.warning("step %d failed in attempt %d: %s", state.step_number, state.attempt, state.error)
        else:
            log.info("step %d (%s) completed", state.step_number, state.tool_name or state.kind.value)
        if progress.save is not None:
            await progress.save()
        chunk = StepResultChunk(
            step_number=state.step_number, index=calls.chunks, final=True, status=state.status.value,
            result=state.result, error=state.error, attempt=state.attempt, metrics=state.metrics.to_dict(),
        )  # fmt: skip
        details = {"step_number": state.step_number, "attempt": state.attempt, "error": state.error}
        audit = AuditEvent(action=f"step.{state.status.value}", details=details)
        ids = {**progress.turn.event_ids, "step_id": state.step_id}
        event_id = f"{state.step_id}:{event_suffix}"
        events = (chunk, audit) if calls.answer is None else (audit,)  # the provider worker published the chunk
        await self.topics.publish_all([self.topics.envelope(each, event_id=event_id, **ids) for each in events])
        await self.hooks.call("on_step_end", progress.turn, state)

    # -- models

    def client(
        self, progress: TurnProgress, client: LLMClient, model_prices: Mapping[str, Mapping[str, float]] | None = None
    ) -> TurnClient:
        """Return the client for the planner and the steps of a turn. `model_prices` default to the configuration.

        Args:
            progress: The turn.
            client: The model client.
            model_prices: The prices in USD per million tokens; by default the configured prices.
        """
        return TurnClient(self, progress, client, model_prices)

    @contextlib.contextmanager
    def planning(self) -> Iterator[CallMetrics]:
        """Count the usage of the model calls inside the block.

        Yields:
            The usage of these calls.
        """
        calls = CallMetrics()
        with _counting_calls_in(calls):
            yield calls

    async def publish_delta(self, progress: TurnProgress, calls: CallMetrics, delta: str) -> None:
        """Publish a piece of a step's answer."""
        await progress.ctx.emit(EventType.ASSISTANT_DELTA, {"delta": delta})
        state = calls.state
        assert state is not None
        chunk = StepResultChunk(step_number=state.step_number, index=calls.chunks, delta=delta, attempt=state.attempt)
        calls.chunks += 1
        await self.topics.tell(
            chunk,
            event_id=f"{state.step_id}:{progress.claim}:{state.attempt}:{chunk.index}",
            step_id=state.step_id,
            **progress.turn.event_ids,
        )


class TurnClient(LLMClient):
    """A model client that adds the prompt, model and sampling options of a turn's personality to each call.

    Options of the call take precedence.
    """

    def __init__(
        self, processor: StepProcessor, progress: TurnProgress, client: LLMClient,
        model_prices: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:  # fmt: skip
        self.processor: StepProcessor = processor
        self.progress: TurnProgress = progress
        self.client: LLMClient = client
        self.model_prices: Mapping[str, Mapping[str, float]] = model_prices or get_config().model_prices

    @property
    def default_model(self) -> str | None:
        """The model for calls that name none; None if only the provider knows it."""
        return self.progress.personality.model or getattr(self.client, "default_model", None)

    @property
    def provider(self) -> str:
        """The name of the provider."""
        return provider_of(self.client)

    async def generate(
        self, messages: list[Any], *, model: str | None = None, stream: bool = False,
        tools: list[dict[str, Any]] | None = None, temperature: float | None = None, max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:  # fmt: skip
        passed = {"model": model, "tools": tools, "temperature": temperature, "max_tokens": max_tokens, **kwargs}
        calls = _CURRENT_CALLS.get()
        in_step = calls is not None and calls.state is not None
        sent, options = call_arguments(self.progress, messages, passed, in_step=in_step)
        response = await self._guarded(sent, options, calls)
        if calls is not None:
            calls.metrics += StepMetrics.of(0.0, {**(response.usage or {}), "cost_usd": self._cost(response, options)})
        return response

    def recalled(self, answer: LLMResponse) -> None:
        """Count the usage of an answer from an earlier execution, unless the saved turn includes it."""
        calls = _CURRENT_CALLS.get()
        if calls is not None and (calls.state is None or calls.state.metrics.prompt_tokens == 0):
            calls.metrics += StepMetrics.of(0.0, {**answer.usage, "cost_usd": answer.cost_usd})

    async def _guarded(self, sent: list[Any], options: dict[str, Any], calls: CallMetrics | None) -> LLMResponse:
        """Call the model through a circuit breaker. The built-in clients have their own."""
        if hasattr(self.client, "_breakers"):
            return await self._generate(sent, options, calls)
        permit = self.processor.breakers.enter((self.provider, "", str(options.get("model") or "")))
        try:
            response = await self._generate(sent, options, calls)
        except Exception as error:
            permit.failed(error)
            raise
        except BaseException:
            permit.dropped()
            raise
        permit.answered()
        return response

    async def _generate(self, sent: list[Any], options: dict[str, Any], calls: CallMetrics | None) -> LLMResponse:
        if calls is None or calls.state is None or not self.processor.stream:
            return await self.client.generate(sent, **options)

        async def publish(delta: str) -> None:
            await self.processor.publish_delta(self.progress, calls, delta)

        return await streamed(self.client, sent, options, publish, self.progress.ctx.clock)

    def stream(
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        raise NotSupported(
            "the model client of a turn does not support stream(). Use generate(): the turn streams its answer."
        )

    def _cost(self, response: LLMResponse, options: dict[str, Any]) -> float | None:
        if response.cost_usd is not None or not self.model_prices:
            return response.cost_usd
        model = response.model or str(options.get("model") or "")
        return cost_usd(response.usage or {}, model, self.model_prices)

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        return await self.client.embed(texts, model=model)


def call_arguments(
    progress: TurnProgress, messages: Sequence[Any], passed: Mapping[str, Any], *, in_step: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages and options of a model call, with the prompt and the options of the turn's personality.

    Args:
        progress: The turn.
        messages: The messages of the call. A step of a turn without a plan sends the conversation instead.
        passed: The options of the call, which take precedence.
        in_step: Whether a step makes the call, and not the planner.
    """
    personality = progress.personality
    options = {"model": personality.model, **personality.sampling.options()}
    options |= {name: value for name, value in passed.items() if value is not None}
    if in_step and progress.direct is not None:
        messages = progress.direct
    system = [{"role": "system", "content": progress.system}] if progress.system else []
    return [*system, *messages], {name: value for name, value in options.items() if value is not None}


@contextlib.contextmanager
def _counting_calls_in(calls: CallMetrics) -> Iterator[None]:
    token = _CURRENT_CALLS.set(calls)
    try:
        yield
    finally:
        restore(_CURRENT_CALLS, token)
