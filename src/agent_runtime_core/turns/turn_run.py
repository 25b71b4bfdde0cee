"""One attempt of a turn: the personality is picked, a plan made and carried out, the answer given."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, cast

from .._core.event_types import EventType
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
from ..status import RunStatus, StepStatus
from ..tools.registry import ToolRegistry
from .context_manager import Remembered
from .distributed_steps import execute_distributed, personality_text, remote_run
from .events import EventEnvelope, PlanRequest, StepEvent, TurnEvent
from .logs import TurnLog
from .personality_instance import MemorySettings, PersonalityInstance, places_in
from .planner import Planned
from .processor import TurnClient, TurnProgress
from .services import TurnServices
from .settings import Settings
from .turn import StepMetrics, StepState, Turn
from .turn_records import audited, load_turn, new_turn, save

PLANNING = "plan"
#: In the metadata of a turn that was published by somebody else, and need not be told of again.
FROM_TOPIC = "from_topic"


@dataclass(frozen=True, kw_only=True)
class TurnSelection:
    """What was decided when the turn began, from one look at all settings; a turn that is resumed keeps it."""

    personality: PersonalityInstance
    remote_steps: bool = False
    max_in_flight: int = 16
    settings_version: int = 1
    preferences: dict[str, Any] = field(default_factory=dict)
    stale: bool = False


class TurnRun:
    """One attempt of a turn's run."""

    def __init__(self, parts: TurnServices, ctx: Context) -> None:
        self.parts: TurnServices = parts
        self.ctx: Context = ctx
        self.settings: Settings = parts.settings()
        parts.processor.max_in_flight = self.settings.turns.max_in_flight
        self._saving = asyncio.Lock()

    async def run(self) -> RunResult:
        ctx, parts = self.ctx, self.parts
        turn = await load_turn(parts, ctx)
        self.turn: Turn = turn
        chosen = await self._begin()
        self.chosen: TurnSelection = chosen
        if not chosen.personality.memory.remember:
            ctx.own_conversation()
        turn.status, turn.personality, turn.error = RunStatus.RUNNING, chosen.personality.name, None
        values = {**chosen.preferences, **ctx.params, "user_id": turn.user_id or ""}
        self.work: TurnProgress = parts.work(ctx, turn, chosen.personality, values)
        self.work.save = self.save
        self.tools: ToolRegistry = chosen.personality.allowed(parts.tools)
        self.budget: Budget = Budget(chosen.personality.limits, ctx.budget)
        planned = await self._plan()
        await self._announce(planned)
        result = await self._carry_out(planned)
        return await self._answer(planned, result)

    async def save(self) -> None:
        # One after the other, so that the last one to be stored is the newest.
        async with self._saving:
            await save(self.parts, self.ctx, self.turn)

    # -- the beginning

    async def _begin(self) -> TurnSelection:
        async def begin() -> TurnSelection:
            return await self._choose()

        return cast(TurnSelection, await _unwrapped(self.ctx.step("begin", begin, returns=TurnSelection)))

    async def _choose(self) -> TurnSelection:
        ctx, parts, turn, settings = self.ctx, self.parts, self.turn, self.settings
        personality = parts.settled(parts.personality(settings, ctx.input.get("personality")), settings)
        preferred = await parts.contexts.preferences(turn.user_id) if turn.user_id else Remembered(dict[str, Any]())
        wanted = places_in(personality.system_prompt)
        used = {name: value for name, value in preferred.value.items() if name in wanted}
        turn.status, turn.personality = RunStatus.RUNNING, personality.name
        await self.save()
        event = TurnEvent(
            messages=turn.messages, turn_id=turn.id, conversation_id=turn.conversation_id, user_id=turn.user_id,
            personality=personality.name, trace_id=turn.trace_id, metadata=turn.metadata,
        )  # fmt: skip
        about = {"personality": personality.name, "stale": preferred.stale}
        told = [audited(parts, turn, "turn.started", about)]
        if not turn.metadata.get(FROM_TOPIC):
            told.append(
                parts.topics.envelope(event, event_id=f"turn:{turn.id}", trace_id=turn.trace_id, turn_id=turn.id)
            )
        await parts.topics.publish_all(told)
        TurnLog(turn.trace_id, turn.id).info("turn started, personality %s", personality.name)
        await parts.hooks.call("on_turn_start", turn)
        return TurnSelection(
            personality=personality, remote_steps=settings.turns.remote_steps,
            max_in_flight=settings.turns.max_in_flight, settings_version=settings.version,
            preferences=used, stale=preferred.stale,
        )  # fmt: skip

    # -- the plan

    async def _plan(self) -> Planned:
        ctx, parts, turn = self.ctx, self.parts, self.turn
        request = PlanRequest(
            prompt=TurnEvent(messages=turn.messages).prompt, tools=[tool.name for tool in self.tools.list_tools()],
            personality=self.chosen.personality.name, system_prompt=self.work.system,
        )  # fmt: skip
        count_recorded(ctx, PLANNING, self.budget)

        def recorded(own: LLMClient | None) -> RecordedClient | None:
            client = self._client(own)
            return None if client is None else RecordedClient(ctx, client, PLANNING, self.budget)

        async def make() -> dict[str, Any]:
            began = ctx.clock.boot()
            await self._requested(request)
            with parts.processor.planning() as running:
                planned = await parts.plans.plan(request, self.tools, recorded, self.work.log)
            took = round((ctx.clock.boot() - began) * 1000, 3)
            return {**planned.to_dict(), "metrics": (running.metrics + StepMetrics(took)).to_dict()}

        made = await _unwrapped(ctx.step(PLANNING, make))
        turn.planning = StepMetrics.from_dict(made["metrics"])
        return Planned.from_dict(made)

    async def _requested(self, request: PlanRequest) -> None:
        turn = self.turn
        await self.parts.topics.tell(
            request, event_id=f"plan:{turn.id}", trace_id=turn.trace_id, turn_id=turn.id
        )  # fmt: skip

    def _client(self, own: LLMClient | None = None) -> TurnClient | None:
        """The model's client, made only where a model is asked; `own` is that of a planner."""
        return self.parts.model_for(self.work, self.settings, own)

    def _conversation(self) -> list[Mapping[str, Any]]:
        """What was said, as much of it as the personality wants."""
        return last_said(self.ctx.input_messages, self.chosen.personality.memory, len(self.turn.messages))

    async def _announce(self, planned: Planned) -> None:
        turn, plan = self.turn, planned.plan
        turn.plan = plan
        states = [self._state(step) for step in plan.steps]
        left_out = [self._left_out(step, why) for step, why in planned.skipped]
        turn.steps = sorted([*states, *left_out], key=lambda state: state.step_number)
        if planned.direct:
            self.work.direct = self._conversation()

        async def announce() -> None:
            await self.save()
            skipped = {str(step.step_number): why for step, why in planned.skipped}
            told = [self._planned(step, position) for position, step in enumerate(plan.order())]
            ready = audited(self.parts, turn, "plan.ready", {"steps": len(plan.steps), "skipped": skipped})
            await self.parts.topics.publish_all([*told, ready])
            await self.parts.hooks.call("on_plan_ready", turn, plan)

        await _unwrapped(self.ctx.step("announce", announce))

    def _planned(self, step: PlanStep, position: int) -> EventEnvelope:
        event = StepEvent(
            step_number=step.step_number, kind=step.kind.value, tool_name=step.tool_name, tool_input=step.tool_input,
            depends_on=step.needs, reasoning=step.reasoning, position=position,
        )  # fmt: skip
        id_, turn = self._id(step), self.turn
        return self.parts.topics.envelope(
            event, event_id=id_, trace_id=turn.trace_id, turn_id=turn.id, step_id=id_
        )  # fmt: skip

    def _id(self, step: PlanStep) -> str:
        """The id of the step in the journal of the run that carries it out."""
        turn_id = self.turn.id
        run_id = remote_run(turn_id, self.parts.step_key, step) if self.chosen.remote_steps else turn_id
        return planned_id(run_id, step)

    def _state(self, step: PlanStep) -> StepState:
        known = self.turn.step(step.step_number)
        if known is not None and known.ended:
            return known
        return StepState(step.step_number, self._id(step), step.kind, step.tool_name)

    def _left_out(self, step: PlanStep, why: str) -> StepState:
        state = StepState(step.step_number, self._id(step), step.kind, step.tool_name)
        state.status, state.error = StepStatus.SKIPPED, why
        return state

    # -- the steps

    async def _carry_out(self, planned: Planned) -> Any:
        parts, chosen = self.parts, self.chosen
        asks = any(step.kind is StepKind.LLM_CALL for step in planned.plan.steps)
        client = self._client() if asks else None
        if asks and client is None:
            raise NotConfigured("the plan asks a model, and none is configured: give the manager a client")
        if chosen.remote_steps:
            about = self._elsewhere(planned)
            return await execute_distributed(self.ctx, parts, self.work, planned.plan, about, self.budget, client)
        done = await execute_plan(
            self.ctx, planned.plan, self.tools, client=client, max_concurrency=chosen.max_in_flight,
            max_retries=parts.step_tries, backoff_base=parts.backoff_base, budget=self.budget,
            around=parts.processor.around(self.work),
        )  # fmt: skip
        for told in done.steps:  # also those that were recorded in an earlier life, before the turn was saved
            state = self.turn.step(told["step_number"])
            if state is not None:
                state.status, state.error, state.attempt = StepStatus.COMPLETED, None, told["attempt"]
                if state.result != told["result"]:
                    state.result = told["result"]
        return done.result

    def _elsewhere(self, planned: Planned) -> dict[str, Any]:
        """What every step needs to be carried out by another worker: the same in each life of the turn.

        Of the turn that is what was asked, and nothing of how far it has come: a step that was begun under its id
        with another input is another step.
        """
        turn = new_turn(self.ctx)
        turn.status, turn.personality = RunStatus.RUNNING, self.chosen.personality.name
        return {
            "turn": turn.to_dict(), "plan": planned.plan.to_dict(),
            "personality": personality_text(self.chosen.personality), "system": self.work.system,
            "direct": self.work.direct,
            "limits": self.ctx.input.get("limits") or {}, "most": self.chosen.max_in_flight,
        }  # fmt: skip

    # -- the end

    async def _answer(self, planned: Planned, result: Any) -> RunResult:
        ctx, turn = self.ctx, self.turn
        said = _last(planned.plan, turn)
        turn.response = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
        turn.status = RunStatus.SUCCEEDED
        await ctx.emit(EventType.ASSISTANT_MESSAGE, {"content": turn.response})
        await self.save()
        output = {
            "response": turn.response, "result": result, "plan": planned.plan.to_dict(),
            "steps": [step.to_dict() for step in turn.steps], "metrics": turn.metrics.to_dict(),
        }  # fmt: skip
        return RunResult(final_output=output, usage=self.budget.reported_usage())


def last_said(said: Sequence[Any], memory: MemorySettings, own: int) -> list[Mapping[str, Any]]:
    """The last messages, as many as those settings want, and at least `own` of them; no result without its call."""
    count = max(memory.history_messages, own)
    if memory.history_tokens is not None:
        sizes = list(accumulate(map(_tokens, islice(reversed(said), count))))
        count = max(bisect_right(sizes, memory.history_tokens), own)
    return paired(said[max(len(said) - count, 0) :])


def _tokens(message: Any) -> int:
    """Rather too many than too few."""
    return len(str(message.get("content") or "")) // CHARS_A_TOKEN + 4


def _last(plan: Plan, turn: Turn) -> Any:
    """What the step at the end of the plan gave: the answer."""
    state = turn.step(plan.order()[-1].step_number)
    return None if state is None else state.result


async def _unwrapped(step: Any) -> Any:
    """The result of a step of this agent's own; its error as it is."""
    try:
        return await step
    except StepExecutionError as error:
        cause = None if error.__cause__ is None else deciding_error(error.__cause__)
        if isinstance(cause, (Postponed, ProviderError, PlanningError, InvalidArgument, UnknownTool)):
            raise cause from None
        raise
