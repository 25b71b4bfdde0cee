"""The runs of turns and of their steps: choose the personality, make a plan, execute it, answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, cast
from uuid import UUID

from .._core.clock import aware
from .._core.codec.typed import codec_for
from .._core.event_types import EventType
from .._core.ids import child_run_id, step_id, trace_id
from .._core.log import log
from .._engines.base import Op
from .._execution.context import Context
from .._execution.recorded_calls import UNRECORDED, RecordedCalls
from ..errors import (
    InvalidArgument,
    NotConfigured,
    PlanningError,
    Postponed,
    ProviderError,
    RunFailed,
    StepExecutionError,
    ToolFailed,
    UnknownTool,
    deciding_error,
)
from ..interfaces import AgentRuntime, ErrorInfo, LLMClient, RunContext, RunResult
from ..limits import Budget, RunLimits
from ..loop.model_calls import CHARS_A_TOKEN
from ..persistence.base.conversations import ConversationStore
from ..persistence.chat_format import paired
from ..persistence.stored_history import StoredHistory
from ..planning.executor import execute_plan, planned_id, request_of, step_input, step_name
from ..planning.plan import Plan, PlanStep, StepKind
from ..planning.recorded_client import RecordedClient, count_recorded
from ..runner.completion_hooks import CompletionHook, HistoryReader
from ..runner.outcomes import FINAL_ERRORS
from ..runner.settings import RunInfo
from ..status import RunStatus, StepStatus
from ..steps.graph import Graph
from ..steps.model import Step
from ..steps.worker_pool import Next, WorkerPool
from ..tools.registry import ToolRegistry
from .context_manager import Remembered
from .events import AuditEvent, EventEnvelope, PlanRequest, StepEvent, TurnEvent
from .hooks import TurnLog, logged_turn
from .personality import MemorySettings, PersonalityInstance, placeholders_in
from .planner import Planned
from .processor import TurnClient, TurnProgress
from .provider_steps import elsewhere_of
from .services import TurnServices
from .settings import ProviderSteps, Settings
from .turn import StepMetrics, StepState, Turn


async def execute_distributed(
    ctx: Context, services: TurnServices, progress: TurnProgress, plan: Plan, common_input: Mapping[str, Any],
    budget: Budget, client: LLMClient | None,
) -> Any:  # fmt: skip
    """Execute each step of the plan as a child run, concurrently where the plan allows it.

    The turn's run waits for them between its own steps, so it may be parked.

    Args:
        ctx: The context of the turn's run.
        services: The services of the turn manager.
        progress: The turn in this attempt.
        plan: The plan of the turn.
        common_input: The part of the input that all child runs share.
        budget: Counts what the child runs use.
        client: The client that the child runs call, to reserve usage for their calls.

    Returns:
        The result of the step that no other step needs, or a list of results if there are several such steps.
    """
    recorded_steps = {step.step_number for step in plan.steps if _count_recorded(ctx, services, step, budget)}
    graph = Graph([_graph_step(step) for step in plan.steps])
    results: dict[int, Any] = {}

    def reserve(planned: PlanStep) -> dict[str, Any] | None:
        """Return the most that the model call of a step may use; None if the step will not call a model."""
        if client is None or planned.kind is not StepKind.LLM_CALL:
            return None
        try:
            messages, options = request_of(step_input(planned, results, services.tools))
        except InvalidArgument:
            return None
        return RecordedClient(ctx, client, "", budget).reserve(messages, options)

    async def run_step(index: int, started: bool) -> Next:
        planned = plan.steps[index]
        number = planned.step_number
        needed = {str(each): results[each] for each in planned.needs}
        input_ = {**common_input, "number": number, "needed": needed}
        try:
            if number in recorded_steps:
                ended = await ctx.call(services.step_key, input_, key=_key(planned))
            else:
                async with budget.concurrent(reserve(planned), turn=planned.kind is StepKind.LLM_CALL):
                    ended = await ctx.call(services.step_key, input_, key=_key(planned))
                    budget.used(ended.usage, ended.usage.get("cost_usd"))
        except RunFailed as error:
            _set_failure(progress.turn.step(number), error)
            raise
        output = ended.final_output
        results[number] = output["result"]
        turn, state = progress.turn, StepState.from_dict(output["state"])
        turn.steps = [state if each.step_number == state.step_number else each for each in turn.steps]
        if progress.save is not None:
            await progress.save()
        graph.finished(index)
        return None, False

    async def step_failed(index: int) -> None:
        state = progress.turn.step(plan.steps[index].step_number)
        if state is not None:
            state.status = StepStatus.FAILED
        if progress.save is not None:
            await progress.save()

    graph.begin(set())
    await WorkerPool(graph, int(common_input["most"]), run_step, step_failed).work()
    needed = {number for step in plan.steps for number in step.needs}
    last = [results[step.step_number] for step in plan.steps if step.step_number not in needed]
    return last[0] if len(last) == 1 else last


def _count_recorded(ctx: Context, services: TurnServices, planned: PlanStep, budget: Budget) -> bool:
    """Return whether an earlier execution of the turn finished the step. If so, count its usage."""
    steps, step = RecordedCalls(ctx), (f"call:{services.step_key}", _key(planned))
    recorded = steps.replayed(*step)
    if recorded is UNRECORDED:
        return False
    if not steps.from_fork(*step):
        usage = recorded.get("usage") or {}
        budget.used(usage, usage.get("cost_usd"))
        if planned.kind is StepKind.LLM_CALL:
            budget.turn()
    return True


def remote_run_id(turn_id: str, step_key: str, planned: PlanStep) -> str:
    """Return the id of the child run that executes the step."""
    return str(child_run_id(step_id(turn_id, f"call:{step_key}", f"k:{_key(planned)}")))


def _key(planned: PlanStep) -> str:
    return f"step:{planned.step_number}"


#: Encode and decode a personality in the input of a child run: its pack may have changed by the time the step runs.
_personality_text, _personality_of = codec_for(PersonalityInstance)


def _set_failure(state: StepState | None, failure: RunFailed) -> None:
    info = failure.error
    if state is not None and isinstance(info, ErrorInfo):
        state.error, state.attempt = info.message, int(info.details.get("attempts", state.attempt))


def _graph_step(planned: PlanStep) -> Step:
    def never(ctx: Any, state: Any) -> None:
        raise InvalidArgument(f"step {planned.step_number} of this plan must run in a child run. Use TurnManager.")

    return Step(step_name(planned), never, depends_on=[f"step_{each}" for each in planned.needs])


class StepAgent(AgentRuntime):
    """Executes one step of a turn. `final_output` contains its `result` and its `state`."""

    key: str = "turn.step"

    def __init__(self, services: TurnServices) -> None:
        self.services: TurnServices = services
        self.key = services.step_key

    async def run(self, ctx: RunContext) -> RunResult:
        assert isinstance(ctx, Context)
        with logged_turn(str(ctx.input["turn"]["id"])):
            return await self._run(ctx)

    async def _run(self, ctx: Context) -> RunResult:
        services, input_ = self.services, ctx.input
        plan, number = Plan.from_dict(input_["plan"]), input_["number"]
        planned = next(step for step in plan.steps if step.step_number == number)
        turn = Turn.from_dict(input_["turn"])
        personality = cast(PersonalityInstance, _personality_of(input_["personality"]))
        progress = TurnProgress(ctx, turn, personality, input_["system"], input_["direct"])
        provider = input_.get("provider_steps")
        elsewhere = elsewhere_of(services, None if provider is None else ProviderSteps(**provider), progress)
        needs_model = planned.kind is StepKind.LLM_CALL and not (elsewhere and elsewhere.only(planned))
        client = services.model_for(progress, services.settings()) if needs_model else None
        turn.steps = [StepState(number, "", planned.kind, planned.tool_name)]
        # Steps of other runs count as done, or this run would execute them; only the needed results are read.
        known = {step.step_number: None for step in plan.steps} | {int(n): r for n, r in input_["needed"].items()}
        del known[number]
        budget = Budget(RunLimits.of(input_["limits"]), ctx.budget)
        done = await execute_plan(
            ctx, plan, personality.allowed(services.tools), known=known, budget=budget, max_retries=services.step_tries,
            client=client, backoff_base=services.backoff_base, around=services.processor.around(progress, elsewhere),
            needs_model=needs_model, only_waits=None if elsewhere is None else elsewhere.only,
        )  # fmt: skip
        result = done.steps[0]["result"]
        state = turn.steps[0]
        state.status, state.result, state.attempt = StepStatus.COMPLETED, result, done.steps[0]["attempt"]
        state.step_id = state.step_id or str(ctx.run_id)
        if state.metrics == StepMetrics():  # recorded by an earlier execution that ended before it saved the metrics
            state.metrics = StepMetrics.of(0.0, done.usage)
        return RunResult(final_output={"result": result, "state": state.to_dict()}, usage=done.usage)

    async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
        info = await super().on_error(ctx, error)
        assert info is not None
        info.retriable = False  # the step makes its own retries
        failure = deciding_error(error)
        if isinstance(failure, StepExecutionError):
            info.details = {"step": failure.step_name, "attempts": failure.attempts}
        return info


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
    """Set status and error of a turn from its run's result. The saved error may come from an earlier attempt."""
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
        """Return the model client. `own` is the separate client of a planner. Created at the first model call."""
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

        It contains the turn as requested, without its progress: a child run cannot resume with another input.
        """
        turn = new_turn(self.ctx)
        turn.status, turn.personality = RunStatus.RUNNING, self.selection.personality.name
        provider = self.selection.provider_steps
        # Without the key if there are no packs: the input of a child run of an earlier version must not differ.
        more = {} if provider is None else {"provider_steps": dataclasses.asdict(provider)}
        return {
            **more, "turn": turn.to_dict(), "plan": planned.plan.to_dict(),
            "personality": _personality_text(self.selection.personality), "system": self.progress.system,
            "direct": self.progress.direct,
            "limits": self.ctx.input.get("limits") or {}, "most": self.selection.max_in_flight,
        }  # fmt: skip

    # -- the end

    async def _answer(self, planned: Planned, result: Any) -> RunResult:
        ctx, turn = self.ctx, self.turn
        last = turn.step(planned.plan.order()[-1].step_number)
        answer = None if last is None else last.result
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


async def _unwrap_cause(step: Any) -> Any:
    """Return the result of a step of this agent. If it failed, raise the original error instead of the step's error."""
    try:
        return await step
    except StepExecutionError as error:
        cause = None if error.__cause__ is None else deciding_error(error.__cause__)
        if isinstance(cause, (Postponed, ProviderError, PlanningError, InvalidArgument, UnknownTool)):
            raise cause from None
        raise


#: Errors that another attempt of the run would only repeat: each step makes its own retries.
_FINAL = (*FINAL_ERRORS, PlanningError, UnknownTool, NotConfigured, ToolFailed)


class TurnAgent(AgentRuntime, HistoryReader, CompletionHook):
    """Executes turns. `final_output` contains `response`, `plan`, `steps` and `metrics`."""

    key: str = "turn"
    trace_operation: str = "invoke_workflow"  # the name of its spans

    def __init__(self, services: TurnServices) -> None:
        self.services: TurnServices = services
        self.key = services.key

    async def run(self, ctx: RunContext) -> RunResult:
        assert isinstance(ctx, Context)
        with logged_turn(str(ctx.run_id)):
            return await TurnRun(self.services, ctx).run()

    async def read_history(self, ctx: Context, store: ConversationStore, conversation_id: UUID) -> StoredHistory | None:
        found = await self.services.contexts.for_tenant(ctx.tenant).conversation(store, conversation_id)
        ctx.history_stale = found.stale
        return found.value

    async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
        info = await super().on_error(ctx, error)
        assert info is not None
        failure = deciding_error(error)
        cause = deciding_error(failure.__cause__ or failure) if isinstance(failure, StepExecutionError) else failure
        if isinstance(failure, StepExecutionError):
            info.type = type(cause).__name__
            info.details = {"step": failure.step_name, "attempts": failure.attempts}
            info.retriable = isinstance(cause, ProviderError) and cause.retriable
        if isinstance(cause, PlanningError):
            info.details = {**info.details, "problems": cause.problems}
        if isinstance(cause, _FINAL):
            info.retriable = False
        assert isinstance(ctx, Context)
        await self._save_failure(ctx, error, info)
        return info

    async def _save_failure(self, ctx: Context, error: BaseException, info: ErrorInfo) -> None:
        services, turn = self.services, await load_turn(self.services, ctx)
        is_final = not info.retriable or ctx.failures + 1 >= services.max_retries
        turn.status = RunStatus.FAILED if is_final else RunStatus.PENDING
        turn.error = {"type": info.type, "message": info.message, "details": info.details}
        await save(services, ctx, turn)
        await services.hooks.call("on_error", turn, error)

    async def cancel(self, ctx: RunContext) -> None:
        assert isinstance(ctx, Context)
        turn = await load_turn(self.services, ctx)
        turn.status = RunStatus.CANCELLED
        stop_steps(turn)
        await save(self.services, ctx, turn)

    async def operations(self, info: RunInfo, result: RunResult) -> Sequence[Op]:
        turn = await finished_turn(self.services, info, result)
        return [self.services.topics.publication(end_event(self.services, turn, info.generation))]

    async def on_end(self, info: RunInfo, result: RunResult) -> None:
        turn = await finished_turn(self.services, info, result)
        TurnLog(turn.trace_id, turn.id).info("finished: %s", turn.status.value)
        await self.services.hooks.call("on_turn_end", turn)
