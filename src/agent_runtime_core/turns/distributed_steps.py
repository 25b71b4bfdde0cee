"""Steps as runs of their own: whichever worker is free claims them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from .._core.codec.typed import codec_for
from .._core.ids import child_run_id, step_id
from .._execution.context import Context
from .._execution.recorded_calls import UNRECORDED, RecordedCalls
from ..errors import InvalidArgument, RunFailed, StepExecutionError, deciding_error
from ..interfaces import AgentRuntime, ErrorInfo, LLMClient, RunContext, RunResult
from ..limits import Budget, RunLimits
from ..planning.executor import execute_plan, request_of, step_input, step_name
from ..planning.plan import Plan, PlanStep, StepKind
from ..planning.recorded_client import RecordedClient
from ..status import StepStatus
from ..steps.graph import Graph
from ..steps.model import Step
from ..steps.worker_pool import Next, WorkerPool
from .personality_instance import PersonalityInstance
from .processor import TurnProgress
from .services import TurnServices
from .turn import StepMetrics, StepState, Turn


async def execute_distributed(
    ctx: Context, parts: TurnServices, work: TurnProgress, plan: Plan, about: Mapping[str, Any], budget: Budget,
    client: LLMClient | None,
) -> Any:  # fmt: skip
    """Have every step of the plan carried out by a run of its own, side by side where the plan lets them.

    The turn's own run waits for them between its steps, so it may be parked meanwhile and holds no worker. `client` is
    as the one they ask, for what their calls may use.
    """
    paid = {step.step_number for step in plan.steps if _count_recorded(ctx, parts, step, budget)}
    graph = Graph([_listed(step) for step in plan.steps])
    results: dict[int, Any] = {}

    def reserve(planned: PlanStep) -> dict[str, Any] | None:
        """What the model call of a step may use at most; nothing where it asks none, or fails before it does."""
        if client is None or planned.kind is not StepKind.LLM_CALL:
            return None
        try:
            messages, options = request_of(step_input(planned, results, parts.tools))
        except InvalidArgument:
            return None
        return RecordedClient(ctx, client, "", budget).reserve(messages, options)

    async def one(place: int, begun: bool) -> Next:
        planned = plan.steps[place]
        number = planned.step_number
        needed = {str(each): results[each] for each in planned.needs}
        input_ = {**about, "number": number, "needed": needed}
        try:
            if number in paid:
                ended = await ctx.call(parts.step_key, input_, key=_key(planned))
            else:
                async with budget.concurrent(reserve(planned), turn=planned.kind is StepKind.LLM_CALL):
                    ended = await ctx.call(parts.step_key, input_, key=_key(planned))
                    budget.used(ended.usage, ended.usage.get("cost_usd"))
        except RunFailed as error:
            _take_failure(work.turn.step(number), error)
            raise
        done = ended.final_output
        results[number] = done["result"]
        _take(work.turn, StepState.from_dict(done["state"]))
        if work.save is not None:
            await work.save()
        graph.finished(place)
        return None, False

    async def failed(place: int) -> None:
        state = work.turn.step(plan.steps[place].step_number)
        if state is not None:
            state.status = StepStatus.FAILED
        if work.save is not None:
            await work.save()

    graph.begin(set())
    await WorkerPool(graph, int(about["most"]), one, failed).work()
    needed = {number for step in plan.steps for number in step.needs}
    last = [results[step.step_number] for step in plan.steps if step.step_number not in needed]
    return last[0] if len(last) == 1 else last


def _count_recorded(ctx: Context, parts: TurnServices, planned: PlanStep, budget: Budget) -> bool:
    """Whether the step ended in an earlier life of the turn; what it used then is counted."""
    steps, step = RecordedCalls(ctx), (f"call:{parts.step_key}", _key(planned))
    told = steps.replayed(*step)
    if told is UNRECORDED:
        return False
    if not steps.from_fork(*step):
        usage = told.get("usage") or {}
        budget.used(usage, usage.get("cost_usd"))
        if planned.kind is StepKind.LLM_CALL:
            budget.turn()
    return True


def remote_run(turn_id: str, step_key: str, planned: PlanStep) -> str:
    """The id of the run that carries out that step of that turn."""
    return str(child_run_id(step_id(turn_id, f"call:{step_key}", f"k:{_key(planned)}")))


def _key(planned: PlanStep) -> str:
    return f"step:{planned.step_number}"


_to_text, _from_text = codec_for(PersonalityInstance)


def personality_text(personality: PersonalityInstance) -> str:
    """A personality as a run's input can hold it: the packs may have changed when the step is carried out."""
    return _to_text(personality)


def personality_in(text: str) -> PersonalityInstance:
    """The one that `personality_text` wrote."""
    return cast(PersonalityInstance, _from_text(text))


def _take(turn: Turn, state: StepState) -> None:
    turn.steps = [state if each.step_number == state.step_number else each for each in turn.steps]


def _take_failure(state: StepState | None, failure: RunFailed) -> None:
    info = failure.error
    if state is not None and isinstance(info, ErrorInfo):
        state.error, state.attempt = info.message, int(info.details.get("attempts", state.attempt))


def _listed(planned: PlanStep) -> Step:
    def never(ctx: Any, state: Any) -> None:
        raise InvalidArgument(f"step {planned.step_number} is run by a worker of its own")

    return Step(step_name(planned), never, depends_on=[f"step_{each}" for each in planned.needs])


class StepAgent(AgentRuntime):
    """Carries out one step of a turn: `final_output` has its `result` and its `state`."""

    key: str = "turn.step"

    def __init__(self, parts: TurnServices) -> None:
        self.parts: TurnServices = parts
        self.key = parts.step_key

    async def run(self, ctx: RunContext) -> RunResult:
        assert isinstance(ctx, Context)
        parts, given = self.parts, ctx.input
        plan, number = Plan.from_dict(given["plan"]), given["number"]
        planned = next(step for step in plan.steps if step.step_number == number)
        turn = Turn.from_dict(given["turn"])
        personality = personality_in(given["personality"])
        work = TurnProgress(ctx, turn, personality, given["system"], given["direct"])
        client = parts.model_for(work, parts.settings()) if planned.kind is StepKind.LLM_CALL else None
        turn.steps = [StepState(number, "", planned.kind, planned.tool_name)]
        # What stands elsewhere is no matter of this run; only what the step refers to is read.
        known = {step.step_number: None for step in plan.steps} | {int(n): r for n, r in given["needed"].items()}
        del known[number]
        budget = Budget(RunLimits.of(given["limits"]), ctx.budget)
        done = await execute_plan(
            ctx, plan, personality.allowed(parts.tools), known=known, budget=budget, max_retries=parts.step_tries,
            client=client, backoff_base=parts.backoff_base, around=parts.processor.around(work),
        )  # fmt: skip
        result = done.steps[0]["result"]
        state = turn.steps[0]
        state.status, state.result, state.attempt = StepStatus.COMPLETED, result, done.steps[0]["attempt"]
        state.step_id = state.step_id or str(ctx.run_id)
        if state.metrics == StepMetrics():  # it was recorded in an earlier life, which did not come to tell of it
            state.metrics = StepMetrics.of(0.0, done.usage)
        return RunResult(final_output={"result": result, "state": state.to_dict()}, usage=done.usage)

    async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
        info = await super().on_error(ctx, error)
        assert info is not None
        info.retriable = False  # the step was tried again by itself
        failure = deciding_error(error)
        if isinstance(failure, StepExecutionError):
            info.details = {"step": failure.step_name, "attempts": failure.attempts}
        return info
