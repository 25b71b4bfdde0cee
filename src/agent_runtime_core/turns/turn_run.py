"""One attempt of a turn: choose the personality, make a plan, execute it, answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, cast

from .._core.clock import aware
from .._core.event_types import EventType
from .._core.ids import trace_id
from .._core.log import log
from .._execution.context import Context
from ..errors import (
    InvalidArgument,
    NotConfigured,
    PlanningError,
    Postponed,
    ProviderError,
    StepExecutionError,
    UnknownTool,
    deciding_error,
)
from ..interfaces import LLMClient, RunResult
from ..limits import Budget
from ..loop.model_calls import CHARS_A_TOKEN
from ..persistence.chat_format import paired
from ..planning.executor import execute_plan, planned_id
from ..planning.plan import Plan, PlanStep, StepKind
from ..planning.recorded_client import RecordedClient, count_recorded
from ..runner.settings import RunInfo
from ..status import RunStatus, StepStatus
from ..tools.registry import ToolRegistry
from .context_manager import Remembered
from .distributed_steps import execute_distributed, personality_text, remote_run_id
from .events import AuditEvent, EventEnvelope, PlanRequest, StepEvent, TurnEvent
from .hooks import TurnLog
from .personality_instance import MemorySettings, PersonalityInstance, placeholders_in
from .planner import Planned
from .processor import TurnClient, TurnProgress
from .provider_steps import elsewhere_of
from .services import TurnServices
from .settings import ProviderSteps, Settings
from .turn import StepMetrics, StepState, Turn


async def load_turn(services: TurnServices, ctx: Context) -> Turn:
    """Return the turn of a run as saved, else as requested."""
    return await services.contexts.for_tenant(ctx.tenant).get_turn(str(ctx.run_id)) or new_turn(ctx)


def new_turn(ctx: Context) -> Turn:
    """Return the turn of a run as requested, without progress."""
    return turn_of(str(ctx.run_id), ctx.trace_id, ctx.input, ctx.metadata, ctx.tenant)


def turn_of(
    run_id: str, trace_id: str, input: Mapping[str, Any], metadata: Mapping[str, Any], tenant: str | None
) -> Turn:
    """Return the turn of a run with this input, without progress."""
    return Turn(
        run_id, trace_id, list(input.get("messages") or ()), conversation_id=input.get("conversation_id"),
        user_id=input.get("user_id"), personality=input.get("personality"), metadata=dict(metadata),
        tenant=tenant,
    )  # fmt: skip


async def save(services: TurnServices, ctx: Context, turn: Turn) -> None:
    """Store the turn with the present time."""
    turn.updated_at = aware(ctx.clock.wall())
    turn.created_at = turn.created_at or turn.updated_at
    await services.contexts.for_tenant(turn.tenant).save_turn(turn)


def audit_event(services: TurnServices, turn: Turn, action: str, details: dict[str, Any]) -> EventEnvelope:
    """Return an audit event of the turn, in the envelope of its topic."""
    event = AuditEvent(action=action, details=details)
    return services.topics.envelope(event, event_id=f"{action}:{turn.id}", **turn.event_ids)


async def finished_turn(services: TurnServices, info: RunInfo, result: RunResult) -> Turn:
    """Return the turn of a finished run; as requested if it was not saved or its store is unavailable."""
    try:
        turn = await services.contexts.for_tenant(info.tenant).get_turn(str(info.run_id))
    except Exception as error:  # noqa: BLE001 - a store may fail in any way, the end is published all the same
        log.warning("reading turn %s failed; publishing its end without its steps: %s", info.run_id, error)
        turn = None
    turn = turn or turn_of(str(info.run_id), trace_id(info.run_id), info.input, info.metadata, info.tenant)
    finish_turn(turn, result)
    return turn


def finish_turn(turn: Turn, result: RunResult) -> None:
    """Set status and error of a turn from its run's result. The saved error may be that of an earlier attempt."""
    turn.status, error = result.status or RunStatus.FAILED, result.error
    turn.error = None if error is None else {"type": error.type, "message": error.message, "details": error.details}
    stop_steps(turn)


def stop_steps(turn: Turn) -> None:
    """Set the final status of the unfinished steps of a finished turn."""
    for step in turn.steps:
        if turn.status is RunStatus.CANCELLED and not step.ended:
            step.status = StepStatus.CANCELLED
        elif step.status is StepStatus.RUNNING:
            timed_out = turn.status is RunStatus.TIMED_OUT
            step.status = StepStatus.CANCELLED if timed_out else StepStatus.PENDING


def end_event(services: TurnServices, turn: Turn, generation: int) -> EventEnvelope:
    """Return the audit event for the end of a turn, with one event id for each generation of its run."""
    details = {"status": turn.status.value, "metrics": turn.metrics.to_dict(), "error": turn.error}
    event = AuditEvent(action=f"turn.{turn.status.value}", details=details)
    event_id = f"end:{turn.id}:{generation}"
    return services.topics.envelope(event, event_id=event_id, **turn.event_ids)


PLANNING = "plan"
#: In the metadata of a turn that started from its event on agent.turns, which is not published again.
FROM_TOPIC = "from_topic"


@dataclass(frozen=True, kw_only=True)
class TurnSelection:
    """The settings and preferences of a turn, read once when it starts. A resumed turn keeps them."""

    personality: PersonalityInstance
    remote_steps: bool = False
    provider_steps: ProviderSteps | None = None
    max_in_flight: int = 16
    settings_version: int = 1
    preferences: dict[str, Any] = field(default_factory=dict)
    stale: bool = False


class TurnRun:
    """One attempt of a turn's run."""

    def __init__(self, services: TurnServices, ctx: Context) -> None:
        self.services: TurnServices = services
        self.ctx: Context = ctx
        self.settings: Settings = services.settings()
        services.processor.max_in_flight = self.settings.turns.max_in_flight
        self._saving = asyncio.Lock()

    async def run(self) -> RunResult:
        """Plan the turn, execute the plan, and return the answer."""
        ctx, services = self.ctx, self.services
        turn = await load_turn(services, ctx)
        self.turn: Turn = turn
        selection = await self._begin()
        self.selection: TurnSelection = selection
        if not selection.personality.memory.remember:
            ctx.own_conversation()
        turn.status, turn.personality, turn.error = RunStatus.RUNNING, selection.personality.name, None
        values = {**selection.preferences, **ctx.params, "user_id": turn.user_id or ""}
        self.progress: TurnProgress = services.new_progress(ctx, turn, selection.personality, values)
        self.progress.save = self.save
        self.tools: ToolRegistry = selection.personality.allowed(services.tools)
        self.budget: Budget = Budget(selection.personality.limits, ctx.budget)
        planned = await self._plan()
        await self._announce(planned)
        result = await self._execute(planned)
        return await self._answer(planned, result)

    async def save(self) -> None:
        """Store the present state of the turn."""
        # One at a time: with concurrent saves an older state could be stored last.
        async with self._saving:
            await save(self.services, self.ctx, self.turn)

    # -- the beginning

    async def _begin(self) -> TurnSelection:
        async def begin() -> TurnSelection:
            return await self._choose()

        return cast(TurnSelection, await _unwrap_cause(self.ctx.step("begin", begin, returns=TurnSelection)))

    async def _choose(self) -> TurnSelection:
        ctx, services, turn, settings = self.ctx, self.services, self.turn, self.settings
        personality = services.with_default_model(
            services.personality(settings, ctx.input.get("personality")), settings
        )
        preferred = Remembered(dict[str, Any]())
        if turn.user_id:
            preferred = await services.contexts.for_tenant(turn.tenant).preferences(turn.user_id)
        names = placeholders_in(personality.system_prompt)
        used = {name: value for name, value in preferred.value.items() if name in names}
        turn.status, turn.personality, turn.stale_history = RunStatus.RUNNING, personality.name, ctx.history_stale
        await self.save()
        event = TurnEvent(
            messages=turn.messages, turn_id=turn.id, conversation_id=turn.conversation_id, user_id=turn.user_id,
            personality=personality.name, trace_id=turn.trace_id, metadata=turn.metadata,
            tenant=turn.tenant,
        )  # fmt: skip
        stale = preferred.stale or ctx.history_stale
        details = {"personality": personality.name, "stale": stale}
        events = [audit_event(services, turn, "turn.started", details)]
        if not turn.metadata.get(FROM_TOPIC):
            events.append(services.topics.envelope(event, event_id=f"turn:{turn.id}", **turn.event_ids))
        await services.topics.publish_all(events)
        TurnLog(turn.trace_id, turn.id).info("started with personality %s", personality.name)
        await services.hooks.call("on_turn_start", turn)
        return TurnSelection(
            personality=personality, remote_steps=settings.turns.remote_steps,
            provider_steps=settings.turns.provider_steps,
            max_in_flight=settings.turns.max_in_flight, settings_version=settings.version,
            preferences=used, stale=stale,
        )  # fmt: skip

    # -- the plan

    async def _plan(self) -> Planned:
        ctx, services, turn = self.ctx, self.services, self.turn
        request = PlanRequest(
            prompt=TurnEvent(messages=turn.messages).prompt,
            tools=[tool.name for tool in self.tools.list_tools()],
            personality=self.selection.personality.name,
            system_prompt=self.progress.system,
        )
        count_recorded(ctx, PLANNING, self.budget)

        def recorded(own: LLMClient | None) -> RecordedClient | None:
            client = self._client(own)
            return None if client is None else RecordedClient(ctx, client, PLANNING, self.budget)

        async def make() -> dict[str, Any]:
            began = ctx.clock.boot()
            await services.topics.tell(request, event_id=f"plan:{turn.id}", **turn.event_ids)
            with services.processor.planning() as calls:
                planned = await services.plans.plan(request, self.tools, recorded, self.progress.log)
            latency = round((ctx.clock.boot() - began) * 1000, 3)
            return {**planned.to_dict(), "metrics": (calls.metrics + StepMetrics(latency)).to_dict()}

        recorded_plan = await _unwrap_cause(ctx.step(PLANNING, make))
        turn.planning = StepMetrics.from_dict(recorded_plan["metrics"])
        return Planned.from_dict(recorded_plan)

    def _client(self, own: LLMClient | None = None) -> TurnClient | None:
        """Return the model client, for a planner with a client of its own in `own`. Created at the first model call."""
        return self.services.model_for(self.progress, self.settings, own)

    async def _announce(self, planned: Planned) -> None:
        turn, plan = self.turn, planned.plan
        turn.plan = plan
        states = [self._state(step) for step in plan.steps]
        left_out = [self._skipped_state(step, why) for step, why in planned.skipped]
        turn.steps = sorted([*states, *left_out], key=lambda state: state.step_number)
        if planned.direct:
            memory = self.selection.personality.memory
            self.progress.direct = recent_messages(self.ctx.input_messages, memory, len(turn.messages))

        async def announce() -> None:
            await self.save()
            skipped = {str(step.step_number): why for step, why in planned.skipped}
            events = [self._planned_event(step, position) for position, step in enumerate(plan.order())]
            ready = audit_event(self.services, turn, "plan.ready", {"steps": len(plan.steps), "skipped": skipped})
            await self.services.topics.publish_all([*events, ready])
            await self.services.hooks.call("on_plan_ready", turn, plan)

        await _unwrap_cause(self.ctx.step("announce", announce))

    def _planned_event(self, step: PlanStep, position: int) -> EventEnvelope:
        event = StepEvent(
            step_number=step.step_number, kind=step.kind.value, tool_name=step.tool_name, tool_input=step.tool_input,
            depends_on=step.needs, reasoning=step.reasoning, position=position,
        )  # fmt: skip
        id_, turn = self._step_id(step), self.turn
        return self.services.topics.envelope(event, event_id=id_, step_id=id_, **turn.event_ids)

    def _step_id(self, step: PlanStep) -> str:
        """Return the id of the step in the journal of the run that executes it."""
        turn_id = self.turn.id
        run_id = remote_run_id(turn_id, self.services.step_key, step) if self.selection.remote_steps else turn_id
        return planned_id(run_id, step)

    def _state(self, step: PlanStep) -> StepState:
        known = self.turn.step(step.step_number)
        if known is not None and known.ended:
            return known
        return StepState(step.step_number, self._step_id(step), step.kind, step.tool_name)

    def _skipped_state(self, step: PlanStep, why: str) -> StepState:
        state = StepState(step.step_number, self._step_id(step), step.kind, step.tool_name)
        state.status, state.error = StepStatus.SKIPPED, why
        return state

    # -- the steps

    async def _execute(self, planned: Planned) -> Any:
        services, selection = self.services, self.selection
        elsewhere = elsewhere_of(services, selection.provider_steps, self.progress)
        needs_model = any(
            step.kind is StepKind.LLM_CALL and not (elsewhere and elsewhere.only(step)) for step in planned.plan.steps
        )
        client = self._client() if needs_model else None
        if needs_model and client is None:
            raise NotConfigured(
                "the plan of the turn needs a model, and none is configured. Pass client= to TurnManager"
            )
        if selection.remote_steps:
            step_input = self._remote_input(planned)
            return await execute_distributed(
                self.ctx, services, self.progress, planned.plan, step_input, self.budget, client
            )
        done = await execute_plan(
            self.ctx, planned.plan, self.tools, client=client, max_concurrency=selection.max_in_flight,
            max_retries=services.step_tries, backoff_base=services.backoff_base, budget=self.budget,
            around=services.processor.around(self.progress, elsewhere), needs_model=needs_model,
            only_waits=None if elsewhere is None else elsewhere.only,
        )  # fmt: skip
        # An earlier execution may have recorded a step and ended before it saved the turn.
        for step in done.steps:
            state = self.turn.step(step["step_number"])
            if state is not None:
                state.status, state.error, state.attempt = StepStatus.COMPLETED, None, step["attempt"]
                if state.result != step["result"]:
                    state.result = step["result"]
        return done.result

    def _remote_input(self, planned: Planned) -> dict[str, Any]:
        """Return the input that all child runs share, the same in each execution of the turn.

        It has the turn as requested, without its progress: a child run cannot resume with another input.
        """
        turn = new_turn(self.ctx)
        turn.status, turn.personality = RunStatus.RUNNING, self.selection.personality.name
        provider = self.selection.provider_steps
        # Without the key if there are none: the input of a child run of an earlier version must not differ.
        more = {} if provider is None else {"provider_steps": dataclasses.asdict(provider)}
        return {
            **more, "turn": turn.to_dict(), "plan": planned.plan.to_dict(),
            "personality": personality_text(self.selection.personality), "system": self.progress.system,
            "direct": self.progress.direct,
            "limits": self.ctx.input.get("limits") or {}, "most": self.selection.max_in_flight,
        }  # fmt: skip

    # -- the end

    async def _answer(self, planned: Planned, result: Any) -> RunResult:
        ctx, turn = self.ctx, self.turn
        answer = _final_result(planned.plan, turn)
        turn.response = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
        turn.status = RunStatus.SUCCEEDED
        await ctx.emit(EventType.ASSISTANT_MESSAGE, {"content": turn.response})
        await self.save()
        output = {
            "response": turn.response, "result": result, "plan": planned.plan.to_dict(),
            "steps": [step.to_dict() for step in turn.steps], "metrics": turn.metrics.to_dict(),
        }  # fmt: skip
        return RunResult(final_output=output, usage=self.budget.reported_usage())


def recent_messages(messages: Sequence[Any], memory: MemorySettings, own: int) -> list[Mapping[str, Any]]:
    """Return the last messages within the limits of `memory`, but at least `own`; no tool result without its call."""
    count = max(memory.history_messages, own)
    if memory.history_tokens is not None:
        sizes = list(accumulate(map(_tokens, islice(reversed(messages), count))))
        count = max(bisect_right(sizes, memory.history_tokens), own)
    return paired(messages[max(len(messages) - count, 0) :])


def _tokens(message: Any) -> int:
    """Estimate the tokens of a message. The estimate is rather too high."""
    return len(str(message.get("content") or "")) // CHARS_A_TOKEN + 4


def _final_result(plan: Plan, turn: Turn) -> Any:
    """Return the result of the last step of the plan, which is the answer."""
    state = turn.step(plan.order()[-1].step_number)
    return None if state is None else state.result


async def _unwrap_cause(step: Any) -> Any:
    """Return the result of a step of this agent. If it failed, raise the original error instead of the step's error."""
    try:
        return await step
    except StepExecutionError as error:
        cause = None if error.__cause__ is None else deciding_error(error.__cause__)
        if isinstance(cause, (Postponed, ProviderError, PlanningError, InvalidArgument, UnknownTool)):
            raise cause from None
        raise
