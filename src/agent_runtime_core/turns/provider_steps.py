"""Steps that only provider workers execute: programs that know the topics, and nothing else of this library.

The turn publishes a StepRequest on agent.steps and waits for the final StepResultChunk with the same step id on
agent.step_results. Both are in the store, so either side may be killed and restarted.
"""

from __future__ import annotations

import contextlib
from typing import Any

from .._core.event_types import EventType
from ..errors import LimitExceeded, ToolFailed
from ..planning.executor import request_of
from ..planning.plan import PlanStep, StepKind
from .event_topics import EventPublisherSubscriber, next_unless
from .events import RESULTS, STEPS, AuditEvent, EventEnvelope, StepRequest, StepResultChunk
from .processor import CallMetrics, Do, TurnProgress, call_arguments
from .services import TurnServices
from .settings import ProviderSteps
from .turn import StepMetrics


class NoAnswer(TimeoutError):
    """No provider worker answered a step in time."""


class ProviderWorkers:
    """Lets provider workers execute the steps of one turn."""

    def __init__(self, services: TurnServices, settings: ProviderSteps, progress: TurnProgress) -> None:
        self._services, self._settings, self._progress = services, settings, progress

    def takes(self, planned: PlanStep) -> bool:
        """Return whether provider workers execute the step."""
        return planned.kind.value in self._settings.kinds

    def only(self, planned: PlanStep) -> bool:
        """Return whether nothing else executes the step."""
        return self.takes(planned) and self._settings.fallback == "fail"

    async def execute(
        self, planned: PlanStep, step_input: dict[str, Any], attempt: int, calls: CallMetrics, here: Do
    ) -> Any:
        """Return the result of an attempt of the step, from a provider worker or as the fallback says.

        Raises:
            NoAnswer: No provider worker answered in time.
            ToolFailed: A provider worker reported a failure.
            LimitExceeded: A limit of the run is reached.
        """
        ctx, is_call = self._progress.ctx, planned.kind is StepKind.LLM_CALL
        if is_call:
            ctx.check_limits()
        try:
            chunk = await _answer(self._services, self._settings, self._progress, planned, step_input, attempt)
        except NoAnswer as error:
            if self._settings.fallback == "fail":
                raise
            await self._report(planned, error)
            return await here()
        calls.answer = chunk
        calls.metrics += StepMetrics.from_dict(chunk.metrics)
        if chunk.status != "completed":
            raise ToolFailed(planned.tool_name or planned.kind.value, chunk.error or f"the step is {chunk.status}")
        if is_call:
            used = calls.metrics
            with contextlib.suppress(LimitExceeded):  # the answer is kept, and no other call begins
                ctx.charge(
                    input_tokens=used.prompt_tokens, output_tokens=used.completion_tokens, cost_usd=used.cost_usd
                )
        return chunk.result

    async def _report(self, planned: PlanStep, error: NoAnswer) -> None:
        """Publish on agent.audit that the step is executed here instead."""
        step_id, turn = self._progress.ctx.step_id, self._progress.turn
        self._progress.log.warning("%s. It is executed here", error)
        details = {"step_number": planned.step_number, "error": str(error)}
        await self._services.topics.tell(
            AuditEvent(action="step.not_answered", details=details),
            event_id=f"{step_id}:not_answered",
            step_id=step_id,
            **turn.event_ids,
        )


def elsewhere_of(
    services: TurnServices, settings: ProviderSteps | None, progress: TurnProgress
) -> ProviderWorkers | None:
    """Return what lets provider workers execute the steps of a turn; None if they execute none."""
    return None if settings is None else ProviderWorkers(services, settings, progress)


async def _answer(
    services: TurnServices, settings: ProviderSteps, progress: TurnProgress, planned: PlanStep,
    given: dict[str, Any], attempt: int,
) -> StepResultChunk:  # fmt: skip
    """Request an attempt of a step, and return the final chunk of its answer. Called inside the step.

    A completed answer counts for every attempt, so an answer that came too late for an attempt is used by the next.

    Raises:
        NoAnswer: There is no answer within the deadline, or the provider worker is silent for too long.
    """
    step_id = progress.ctx.step_id or ""
    first = await _requested(services, settings, progress, planned, given, 1, step_id)
    request = (
        first if attempt == 1 else await _requested(services, settings, progress, planned, given, attempt, step_id)
    )
    waiting = _Waiting(progress, settings, step_id, attempt, request.deadline, services.topics, first.results_from)
    return await waiting.answer()


async def _requested(
    services: TurnServices, settings: ProviderSteps, progress: TurnProgress, planned: PlanStep,
    given: dict[str, Any], attempt: int, step_id: str,
) -> StepRequest:  # fmt: skip
    """Publish the request of an attempt, and return the request that is stored: of an earlier execution, if any."""
    topics, turn, clock = services.topics, progress.turn, progress.ctx.clock
    messages: list[Any] = []
    options: dict[str, Any] = {}
    if planned.kind is StepKind.LLM_CALL:
        messages, options = call_arguments(progress, *request_of(given), in_step=True)
    request = StepRequest(
        step_number=planned.step_number, kind=planned.kind.value, tool_name=planned.tool_name, tool_input=given,
        attempt=attempt, messages=messages, options=options, deadline=clock.wall() + settings.deadline,
        results_from=await topics.head(RESULTS),
    )  # fmt: skip
    envelope = topics.envelope(request, event_id=f"{step_id}:request:{attempt}", step_id=step_id, **turn.event_ids)
    published = await topics.publish(envelope)
    stored = await topics.read(STEPS, published.offset or 0)
    return stored.payload if stored is not None and isinstance(stored.payload, StepRequest) else request


class _Waiting:
    """Waits for the answer to one request.

    The deadline decides only after everything that is stored was read. So an answer counts that came while no worker
    had the turn, and nothing is executed here while a stored answer exists.
    """

    def __init__(
        self, progress: TurnProgress, settings: ProviderSteps, step_id: str, attempt: int, deadline: float,
        topics: EventPublisherSubscriber, position: int,
    ) -> None:  # fmt: skip
        self._progress, self._settings, self._step_id, self._attempt = progress, settings, step_id, attempt
        self._clock = progress.ctx.clock
        self._deadline = deadline
        self._topics, self._position = topics, position
        self._heard: float | None = None  # when the last piece of this attempt came, in wall seconds
        self._next_index = 0

    async def answer(self) -> StepResultChunk:
        """Return the final chunk of the answer.

        Raises:
            NoAnswer: There is none in time.
        """
        if (chunk := await self._stored()) is not None:
            return chunk
        async with contextlib.aclosing(self._topics.subscribe(RESULTS, self._position)) as results:
            while (envelope := await next_unless(results, self._silence())) is not None:
                if (chunk := await self._taken(envelope)) is not None:
                    return chunk
        if (chunk := await self._stored()) is not None:
            return chunk
        silent = self._heard is not None and self._clock.wall() < self._deadline
        name = f"step {self._step_id!r}"
        if silent:
            raise NoAnswer(f"{name}: no heartbeat from its provider worker for {self._settings.heartbeat:g} s")
        raise NoAnswer(f"{name}: no provider worker answered within {self._settings.deadline:g} s")

    async def _stored(self) -> StepResultChunk | None:
        """Read what is stored and was not read yet; return the final chunk of the answer, if it is there."""
        async with contextlib.aclosing(self._topics.subscribe(RESULTS, self._position, follow=False)) as results:
            async for envelope in results:
                if (chunk := await self._taken(envelope)) is not None:
                    return chunk
        return None

    async def _taken(self, envelope: EventEnvelope) -> StepResultChunk | None:
        """Take an event of the topic; return the final chunk of the answer, if it is that."""
        self._position = (envelope.offset or 0) + 1
        chunk = envelope.payload
        if not self._is_own(envelope) or not isinstance(chunk, StepResultChunk):
            return None
        if chunk.final:
            return chunk if chunk.status == "completed" or chunk.attempt == self._attempt else None
        if chunk.attempt == self._attempt:
            await self._piece(chunk)
        return None

    def _is_own(self, envelope: EventEnvelope) -> bool:
        turn = self._progress.turn
        # A provider worker that does not know tenants answers without a tenant.
        if envelope.tenant not in (None, turn.tenant):
            return False
        return (envelope.step_id, envelope.turn_id) == (self._step_id, turn.id)

    async def _piece(self, chunk: StepResultChunk) -> None:
        """Publish a piece of the answer as part of the run. A restarted provider worker may send it again."""
        self._heard = self._clock.wall()
        if chunk.delta and chunk.index >= self._next_index:
            self._next_index = chunk.index + 1
            await self._progress.ctx.emit(EventType.ASSISTANT_DELTA, {"delta": chunk.delta})

    async def _silence(self) -> None:
        """Return at the deadline, or when the provider worker was silent for too long."""
        until = self._deadline if self._heard is None else min(self._deadline, self._heard + self._settings.heartbeat)
        await self._clock.sleep(max(until - self._clock.wall(), 0.0))
