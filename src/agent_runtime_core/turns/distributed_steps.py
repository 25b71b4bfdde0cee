"""Execute the steps of a turn as child runs, so that any worker can claim them."""

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
from .hooks import logged_turn
from .personality_instance import PersonalityInstance
from .processor import TurnProgress
from .provider_steps import elsewhere_of
from .services import TurnServices
from .settings import ProviderSteps
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
        _replace_state(progress.turn, StepState.from_dict(output["state"]))
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


_to_text, _from_text = codec_for(PersonalityInstance)


def personality_text(personality: PersonalityInstance) -> str:
    """Encode a personality for a child run's input. Its pack may have changed by the time the step runs."""
    return _to_text(personality)


def personality_from(text: str) -> PersonalityInstance:
    """Decode a personality from `personality_text`."""
    return cast(PersonalityInstance, _from_text(text))


def _replace_state(turn: Turn, state: StepState) -> None:
    turn.steps = [state if each.step_number == state.step_number else each for each in turn.steps]


def _set_failure(state: StepState | None, failure: RunFailed) -> None:
    info = failure.error
    if state is not None and isinstance(info, ErrorInfo):
        state.error, state.attempt = info.message, int(info.details.get("attempts", state.attempt))


def _graph_step(planned: PlanStep) -> Step:
    def never(ctx: Any, state: Any) -> None:
        raise InvalidArgument(f"step {planned.step_number} of this plan must run in a child run. Use TurnManager.")

    return Step(step_name(planned), never, depends_on=[f"step_{each}" for each in planned.needs])


class StepAgent(AgentRuntime):
    """Executes one step of a turn. `final_output` has its `result` and its `state`."""

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
        personality = personality_from(input_["personality"])
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
        info.retriable = False  # the step has its own retries
        failure = deciding_error(error)
        if isinstance(failure, StepExecutionError):
            info.details = {"step": failure.step_name, "attempts": failure.attempts}
        return info
