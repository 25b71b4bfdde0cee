"""The steps of a turn while they run: their calls of a model, how many at once, and what is told of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .._core.clock import Clock
from .._core.context_vars import restore
from .._core.event_types import EventType
from .._core.per_loop import PerLoop
from .._core.settings import POSITIVE
from .._execution.context import Context
from .._execution.step_scope import CURRENT_STEP
from ..config import get_config
from ..errors import LeaseLost, NotSupported, Postponed, deciding_error, text_of
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..llm._circuit_breaker import Breakers
from ..llm._prices import cost_usd
from ..loop.model_calls import streamed
from ..planning.plan import PlanStep
from ..status import StepStatus
from .event_topics import EventPublisherSubscriber
from .events import AuditEvent, StepResultChunk
from .hooks import Hooks
from .logs import TurnLog
from .personality_instance import PersonalityInstance
from .step_semaphore import StepSlots
from .turn import StepMetrics, StepState, Turn

Do = Callable[[], Awaitable[Any]]


@dataclass
class CallMetrics:
    """A try of a step, or the planning of a turn: what it used, and how many pieces of its answer were told."""

    state: StepState | None = None
    metrics: StepMetrics = field(default_factory=StepMetrics)
    told: int = 0


_RUNNING: ContextVar[CallMetrics | None] = ContextVar("agent_runtime_core_turn_step", default=None)


@dataclass
class TurnProgress:
    """One turn in one attempt of its run, as its steps see it; `save` keeps the turn as it is now."""

    ctx: Context
    turn: Turn
    personality: PersonalityInstance
    system: str
    #: What the model is sent where there is no plan.
    direct: list[Any] | None = None
    save: Callable[[], Awaitable[None]] | None = None

    @property
    def log(self) -> TurnLog:
        return TurnLog(self.turn.trace_id, self.turn.id, self.ctx.step_id)

    @property
    def claim(self) -> str:
        return self.ctx.journal.writer.claim_id


class StepProcessor:
    """Runs the steps of all turns of this process.

    1. At most `max_in_flight` steps are at work at once; those that wait for a person, or for another worker, are not.
    2. Every call of a model is told in pieces as it comes: ASSISTANT_DELTA of the run, StepResultChunk on
       agent.step_results. For clients without a circuit breaker of their own there is one here, for each client and
       model: while it is open the run is put off, which costs it no attempt.
    3. A step that ended is told on agent.step_results and agent.audit once, under its step id.
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
        self._slots: PerLoop[StepSlots] = PerLoop(lambda loop: StepSlots())

    def _slot(self) -> contextlib.AbstractAsyncContextManager[None]:
        return self._slots.here().taken(lambda: self.max_in_flight)

    # -- steps

    def around(self, work: TurnProgress) -> Callable[[PlanStep, dict[str, Any], Do], Awaitable[Any]]:
        """What `execute_plan` does each try of each step through."""

        async def step(planned: PlanStep, given: dict[str, Any], do: Do) -> Any:
            state = work.turn.step(planned.step_number)
            assert state is not None
            frame = CURRENT_STEP.get()
            state.step_id = work.ctx.step_id or state.step_id
            state.status, state.error, state.attempt = StepStatus.RUNNING, None, 1 if frame is None else frame.attempt
            async with self._slot():
                return await self._run(work, state, do)

        return step

    async def _run(self, work: TurnProgress, state: StepState, do: Do) -> Any:
        await self.hooks.call("on_step_start", work.turn, state)
        running, began = CallMetrics(state), self._clock.boot()
        try:
            with _as(running):
                result = await do()
        except Exception as error:
            cause = deciding_error(error)
            if isinstance(cause, (Postponed, LeaseLost)):
                state.status = StepStatus.PENDING
                raise
            state.status, state.error = StepStatus.FAILED, text_of(cause)
            await self._ended(work, state, running, began, f"failed:{work.claim}:{state.attempt}")
            raise
        state.status, state.result = StepStatus.COMPLETED, result
        await self._ended(work, state, running, began, "result")
        return result

    async def _ended(self, work: TurnProgress, state: StepState, running: CallMetrics, began: float, what: str) -> None:
        took = (self._clock.boot() - began) * 1000
        state.metrics += running.metrics + StepMetrics(round(took, 3))
        log = work.log
        if state.status is StepStatus.FAILED:
            log.warning("step %d failed in try %d: %s", state.step_number, state.attempt, state.error)
        else:
            log.info("step %d (%s) is done", state.step_number, state.tool_name or state.kind.value)
        if work.save is not None:
            await work.save()
        chunk = StepResultChunk(
            step_number=state.step_number, index=running.told, final=True, status=state.status.value,
            result=state.result, error=state.error, attempt=state.attempt, metrics=state.metrics.to_dict(),
        )  # fmt: skip
        about = {"step_number": state.step_number, "attempt": state.attempt, "error": state.error}
        audit = AuditEvent(action=f"step.{state.status.value}", details=about)
        ids = {"trace_id": work.turn.trace_id, "turn_id": work.turn.id, "step_id": state.step_id}
        told = [self.topics.envelope(each, event_id=f"{state.step_id}:{what}", **ids) for each in (chunk, audit)]
        await self.topics.publish_all(told)
        await self.hooks.call("on_step_end", work.turn, state)

    # -- models

    def client(
        self, work: TurnProgress, client: LLMClient, model_prices: Mapping[str, Mapping[str, float]] | None = None
    ) -> TurnClient:
        """The model as the planner and the steps of a turn ask it; without prices those of the configuration hold."""
        return TurnClient(self, work, client, model_prices)

    @contextlib.contextmanager
    def planning(self) -> Iterator[CallMetrics]:
        """Counts what the calls of a model inside use."""
        running = CallMetrics()
        with _as(running):
            yield running

    async def told(self, work: TurnProgress, running: CallMetrics, delta: str) -> None:
        """A piece of an answer."""
        await work.ctx.emit(EventType.ASSISTANT_DELTA, {"delta": delta})
        state = running.state
        assert state is not None
        chunk = StepResultChunk(
            step_number=state.step_number, index=running.told, delta=delta, attempt=state.attempt
        )  # fmt: skip
        running.told += 1
        await self.topics.tell(
            chunk, event_id=f"{state.step_id}:{work.claim}:{state.attempt}:{chunk.index}", trace_id=work.turn.trace_id,
            turn_id=work.turn.id, step_id=state.step_id,
        )  # fmt: skip


class TurnClient(LLMClient):
    """A model's client with the personality of a turn: its prompt, model and sampling. What a call says itself wins."""

    def __init__(
        self, processor: StepProcessor, work: TurnProgress, client: LLMClient,
        model_prices: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:  # fmt: skip
        self.processor: StepProcessor = processor
        self.work: TurnProgress = work
        self.client: LLMClient = client
        self.model_prices: Mapping[str, Mapping[str, float]] = model_prices or get_config().model_prices

    @property
    def default_model(self) -> str | None:
        """What is asked where a call names no model, as far as it is known here."""
        return self.work.personality.model or getattr(self.client, "default_model", None)

    async def generate(
        self, messages: list[Any], *, model: str | None = None, stream: bool = False,
        tools: list[dict[str, Any]] | None = None, temperature: float | None = None, max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:  # fmt: skip
        mine = self.work.personality
        said = {"model": model, "tools": tools, "temperature": temperature, "max_tokens": max_tokens, **kwargs}
        options = {"model": mine.model, **mine.sampling.options()}
        options |= {name: value for name, value in said.items() if value is not None}
        options = {name: value for name, value in options.items() if value is not None}
        running = _RUNNING.get()
        if running is not None and running.state is not None and self.work.direct is not None:
            messages = self.work.direct
        sent = [{"role": "system", "content": self.work.system}, *messages] if self.work.system else list(messages)
        response = await self._guarded(sent, options, running)
        if running is not None:
            running.metrics += StepMetrics.of(
                0.0, {**(response.usage or {}), "cost_usd": self._cost(response, options)}
            )
        return response

    def recalled(self, answer: LLMResponse) -> None:
        """Count an answer of an earlier life, unless the turn was saved with what it used."""
        running = _RUNNING.get()
        if running is not None and (running.state is None or running.state.metrics.prompt_tokens == 0):
            running.metrics += StepMetrics.of(0.0, {**answer.usage, "cost_usd": answer.cost_usd})

    async def _guarded(self, sent: list[Any], options: dict[str, Any], running: CallMetrics | None) -> LLMResponse:
        """Behind a circuit breaker, which clients of ours have themselves."""
        if hasattr(self.client, "_breakers"):
            return await self._asked(sent, options, running)
        name = str(getattr(self.client, "provider", type(self.client).__name__))
        permit = self.processor.breakers.enter((name, "", str(options.get("model") or "")))
        try:
            response = await self._asked(sent, options, running)
        except Exception as error:
            permit.failed(error)
            raise
        except BaseException:
            permit.dropped()
            raise
        permit.answered()
        return response

    async def _asked(self, sent: list[Any], options: dict[str, Any], running: CallMetrics | None) -> LLMResponse:
        if running is None or running.state is None or not self.processor.stream:
            return await self.client.generate(sent, **options)

        async def tell(delta: str) -> None:
            await self.processor.told(self.work, running, delta)

        return await streamed(self.client, sent, options, tell, self.work.ctx.clock)

    def stream(
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        raise NotSupported("a turn tells answers in pieces by itself: use generate()")

    def _cost(self, response: LLMResponse, options: dict[str, Any]) -> float | None:
        if response.cost_usd is not None or not self.model_prices:
            return response.cost_usd
        model = response.model or str(options.get("model") or "")
        return cost_usd(response.usage or {}, model, self.model_prices)

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        return await self.client.embed(texts, model=model)


@contextlib.contextmanager
def _as(running: CallMetrics) -> Iterator[None]:
    token = _RUNNING.set(running)
    try:
        yield
    finally:
        restore(_RUNNING, token)
