"""Execute plans: each plan step is a durable step of the run; independent steps run concurrently."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from .._core.codec.json import MAX_BYTES, MAX_RESULT, arguments_digest
from .._core.event_types import EventType
from .._core.ids import step_id
from .._core.log import log
from .._core.settings import TRIES, choice, number
from .._execution.recorded_calls import RecordedCalls
from .._execution.step_journal import RunJournal, StepJournal
from ..errors import (
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    MissingDependency,
    NotSupported,
    OutputMismatch,
    Postponed,
    ProviderError,
    StepCancelledError,
    StepExecutionError,
    StorageError,
    ToolFailed,
    UnknownPrice,
    deciding_error,
    holds,
    leaves_of,
    text_of,
)
from ..interfaces import LLMClient
from ..limits import Budget, RunLimits
from ..loop.answers import flaw_of
from ..loop.prepared_calls import Question
from ..retry import Backoff
from ..steps.executor import StepExecutor, labels_of
from ..steps.graph import Graph
from ..steps.graph_run import GraphRun
from ..steps.model import Step
from ..tools.confirmation import decision_of
from ..tools.registry import ToolRegistry
from ..tools.results import in_json
from ..tools.tool import Tool, in_doubt_policy
from .memory_operations import memory_operations
from .plan import Plan, PlanStep, StepKind, registry_of
from .recorded_client import RecordedClient, configured_client, count_recorded
from .references import as_text, is_reference, resolve, with_text_values

SCOPE: Final = "plan"
MAX_RETRIES: Final = 3
BACKOFF_BASE: Final = 1.0
ON_LONG_PLAN: Final = choice("cut", "fail")
MAX_CONCURRENCY: Final = 16
#: Called with the step, its input and a function that performs it; returns the result.
Around = Callable[[PlanStep, dict[str, Any], Callable[[], Awaitable[Any]]], Awaitable[Any]]
_OPTIONS: Final = ("model", "temperature", "max_tokens")

#: Errors that are raised unchanged: a retry would not help, or the run decides about it.
AS_THEY_ARE: Final = (
    LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch, StorageError, UnknownPrice,
    MissingDependency,
)  # fmt: skip


@dataclass
class PlanResult:
    """The result of a plan.

    `result` is the result of the step that no other step needs, or a list of results if there are several such steps.
    Each of `steps` is {"step_number", "tool_name", "tool_input", "result", "attempt"}; references in `tool_input` are
    replaced by results. `usage` is the usage of all model and tool calls.

    Attributes:
        result: The result of the step that no other step needs, or a list of results if there are several such steps.
        steps: One dict for each step: {"step_number", "tool_name", "tool_input", "result", "attempt"}. References in
            `tool_input` are replaced by results.
        usage: The usage of all model and tool calls.
    """

    result: Any = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)


async def execute_plan(
    ctx: Any,
    plan: Plan,
    tools: ToolRegistry | Iterable[Tool],
    *,
    client: LLMClient | None = None,
    max_steps: int | None = None,
    on_long_plan: str = "cut",
    max_concurrency: int = MAX_CONCURRENCY,
    max_retries: int = MAX_RETRIES,
    backoff_base: float = BACKOFF_BASE,
    budget: Budget | None = None,
    around: Around | None = None,
    known: Mapping[int, Any] | None = None,
    needs_model: bool | None = None,
    only_waits: Callable[[PlanStep], bool] | None = None,
) -> PlanResult:
    """Execute a plan in a run. Each step is recorded once, and starts when the steps that it needs have finished.

    A tool that requires confirmation is called after a person approves "tool:<name>"; the run may be parked until then.
    A ToolResult without success is a failure.

    Args:
        ctx: The context of the run.
        plan: The plan.
        tools: The tools of the plan.
        client: The model of llm_call steps; by default the configured client.
        max_steps: The most steps that are executed, None for no limit.
        on_long_plan: What happens to a plan with more steps: "cut" executes the first steps, "fail" none.
        max_concurrency: Steps that run at the same time.
        max_retries: Attempts of each step, including the first.
        backoff_base: Seconds before the second attempt of a step; doubled for each later attempt.
        budget: Counts the usage; by default within the limits of the run.
        around: Called as `around(step, its input, do)` for each attempt. It awaits `do()` and returns the result.
        known: Results, by step number, of steps that are executed elsewhere.
        needs_model: Whether the configured client is used without `client`; by default if there are llm_call steps.
        only_waits: Whether `around` only waits for the result of a step that another program executes. Such a step is
            never in doubt: after a crash it waits again, whatever `on_in_doubt` of its tool says.

    Returns:
        The result of the plan.

    Raises:
        PlanningError: The plan is invalid. This and the next three are raised before a step starts.
        LimitExceeded: The plan contains more than `max_steps` steps, and `on_long_plan` is "fail".
        NotConfigured: The plan needs a model, and none is configured.
        NotSupported: A tool of the plan is another agent.
        StepExecutionError: A step failed its last attempt. Steps that need it do not run, the others do.
        ToolFailed: A person rejected a call.
    """
    number().or_none(" for no limit").check("max_steps", max_steps)
    ON_LONG_PLAN.check("on_long_plan", on_long_plan)
    most = len(plan.steps) if max_steps is None else int(max_steps)
    if len(plan.steps) > most and on_long_plan == "fail":
        raise LimitExceeded("max_steps", most, len(plan.steps), "the plan has more steps, and none was started")
    TRIES.check("max_retries", max_retries)
    registry = registry_of(tools)
    plan.validate(registry, memory_operations())
    if len(plan.steps) > most:
        log.warning("max_steps=%d cuts a plan of %d steps", most, len(plan.steps))
        plan = Plan(plan.order()[:most], plan.final_goal)
    _reject_agents(plan, registry)
    known = known or {}
    if needs_model is None:
        needs_model = any(step.kind is StepKind.LLM_CALL for step in plan.steps if step.step_number not in known)
    if needs_model and client is None:
        client = configured_client()
    budget = budget if budget is not None else Budget(RunLimits(), getattr(ctx, "budget", None))
    make_step = partial(
        Step, retries=max_retries - 1, backoff=Backoff(backoff_base, jitter="none"), retry_on=_is_worth_retrying
    )
    execution = _Execution(ctx, plan, registry, client, budget, make_step, max_concurrency)
    execution.around, execution.only_waits = around, only_waits
    execution.results.update(known)
    return await execution.run()


class _Execution:
    """One execution of one plan."""

    def __init__(
        self, ctx: Any, plan: Plan, tools: ToolRegistry, client: LLMClient | None, budget: Budget,
        make_step: Callable[..., Step], max_concurrency: int,
    ) -> None:  # fmt: skip
        self.ctx = ctx
        self.plan = plan
        self.tools = tools
        self.client = client
        self.budget = budget
        self.make_step = make_step
        journal = getattr(ctx, "journal", None)
        self.journal: RunJournal | None = journal if isinstance(journal, StepJournal) else None
        if self.journal is not None:
            number = self.journal.keys.next_key("p", SCOPE)
        else:  # without a journal that counts the plans of a run, its content identifies a plan
            number = f"p:{arguments_digest(plan.to_dict())}"
        self.scope: str = f"{SCOPE}/{number}"
        self.executor = StepExecutor(ctx, checkpoint_key=self.scope, max_concurrency=max_concurrency)
        self.memory: ToolRegistry = memory_operations()
        self.around: Around | None = None
        self.only_waits: Callable[[PlanStep], bool] | None = None
        self.results: dict[int, Any] = {}
        self.attempts: dict[int, int] = dict.fromkeys((step.step_number for step in plan.steps), 0)
        self.approved: dict[int, dict[str, Any]] = {}  # inputs that a person approved, or that need no approval
        self.steps: RecordedCalls = RecordedCalls(ctx)

    async def run(self) -> PlanResult:
        here = [step for step in self.plan.steps if step.step_number not in self.results]
        self._count_calls(here)
        left = [step for step in self.plan.order() if step in here]
        while left:
            unapproved = self._unapproved(left)
            await self._run_steps([step for step in left if step.step_number not in unapproved])
            left = [step for step in left if step.step_number in unapproved]
            for step in left:
                if self._needs_approval(step) and all(each in self.results for each in step.needs):
                    self.approved[step.step_number] = await self._approved_input(step)
        return PlanResult(self._final(), [self._step_result(step) for step in here], self.budget.reported_usage())

    def _count_calls(self, here: Sequence[PlanStep]) -> None:
        """Count all tool calls of these steps and their recorded model calls against the limits."""
        calls = sum(step.kind is StepKind.TOOL_CALL for step in here)
        self.budget.before_tools(calls)
        self.budget.tool(calls)
        for step in here:
            if step.kind is StepKind.LLM_CALL:
                count_recorded(self.ctx, self._key(step), self.budget)

    def _final(self) -> Any:
        needed = {number for step in self.plan.steps for number in step.needs}
        last = [self.results[step.step_number] for step in self.plan.steps if step.step_number not in needed]
        return last[0] if len(last) == 1 else last

    def _step_result(self, step: PlanStep) -> dict[str, Any]:
        number = step.step_number
        return {
            "step_number": number,
            "tool_name": step.tool_name or step.kind.value,
            "tool_input": self._input_of(step, self.results),
            "result": self.results[number],
            "attempt": self.attempts[number],
        }

    def _key(self, step: PlanStep) -> str:
        return f"{self.scope}:{step.step_number}"

    def _input_of(self, step: PlanStep, results: Mapping[int, Any]) -> dict[str, Any]:
        """Return the input of a step. An approved input is used unchanged, even if it looks like a reference."""
        if step.step_number in self.approved:
            return self.approved[step.step_number]
        return step_input(step, results, self.tools)

    # -- approvals: requested between steps, where a run can be parked

    def _needs_approval(self, step: PlanStep) -> bool:
        tool = self._tool(step)
        return tool is not None and bool(tool.requires_confirmation) and step.step_number not in self.approved

    def _tool(self, step: PlanStep) -> Tool | None:
        return self.tools.get(step.tool_name) if step.kind is StepKind.TOOL_CALL else None

    def _unapproved(self, left: Sequence[PlanStep]) -> set[int]:
        """Return the numbers of steps that still need approval, and of the steps that depend on them."""
        unapproved: set[int] = set()
        for step in left:
            if self._needs_approval(step) or unapproved.intersection(step.needs):
                unapproved.add(step.step_number)
        return unapproved

    async def _approved_input(self, step: PlanStep) -> dict[str, Any]:
        """Wait for the approval of a step and return the approved input, which may differ from the planned input."""
        planned_input, tool = step_input(step, self.results, self.tools), self._tool(step)
        assert tool is not None
        key, name = self._key(step), step.tool_name
        question = Question(self.ctx, self.steps, key, tool, name, planned_input, step_name(step))
        if not await question.is_asked():
            return planned_input
        decision = await question.ask()
        if decision.rejection is not None:
            raise ToolFailed(name, f"a person rejected this call: {decision.rejection}")
        return planned_input if decision.arguments is None else decision.arguments

    # -- steps

    async def _run_steps(self, planned: Sequence[PlanStep]) -> None:
        if not planned:
            return
        here = {step.step_number for step in planned}
        steps = [self._as_step(step, here) for step in planned]
        try:
            journal, scope = await self.executor.open_journal(lambda: labels_of(steps))
            dag = GraphRun(self.executor.options, journal, scope)
            done = await dag.run(Graph(steps), None, True)
            for each in planned:
                self.attempts[each.step_number] = journal.view.completed[step_name(each), dag.key].attempt
        except StepExecutionError as error:
            if error.__cause__ is not None and holds(error.__cause__, (*AS_THEY_ARE, OutputMismatch)):
                raise error.__cause__ from None
            raise
        self.results.update({each.step_number: done[step_name(each)] for each in planned})

    def _as_step(self, planned: PlanStep, here: set[int]) -> Step:
        async def fn(_: Any, state: Any) -> Any:
            number = planned.step_number
            self.attempts[number] += 1
            known = {
                each: self.results[each] if each in self.results else state.results[_name(each)]
                for each in planned.needs
            }
            given = self._input_of(planned, known)
            if self.around is None:
                return await self._perform(planned, given)
            return await self.around(planned, given, partial(self._perform, planned, given))

        tool = self.tools.get(planned.tool_name) if planned.kind is StepKind.TOOL_CALL else None
        waits = self.only_waits is not None and self.only_waits(planned)
        return self.make_step(
            step_name(planned),
            fn,
            description=planned.reasoning or None,
            depends_on=[_name(each) for each in planned.needs if each in here],
            on_in_doubt="retry" if waits else in_doubt_policy(tool),
            max_result_bytes=MAX_BYTES if planned.kind is StepKind.LLM_CALL else MAX_RESULT,
        )

    async def _perform(self, planned: PlanStep, given: dict[str, Any]) -> Any:
        match planned.kind:
            case StepKind.LLM_CALL:
                return await self._call_model(planned, given)
            case StepKind.MEMORY_OP:
                return await self.memory.execute(planned.tool_name, given, self.ctx)
            case _:
                return await self._call_tool(planned, given)

    async def _call_tool(self, planned: PlanStep, given: dict[str, Any]) -> Any:
        ctx, names = self.ctx, {"tool_name": planned.tool_name, "tool_call_id": step_name(planned)}
        await ctx.emit(EventType.TOOL_CALL, {**names, "tool_args": given})
        tool = self.tools.get(planned.tool_name)
        try:
            result = await self.tools.execute(planned.tool_name, given, ctx)
            if tool is not None:
                result, _ = in_json(tool, result)
        except Exception as error:
            if not holds(error, AS_THEY_ARE):
                message = text_of(deciding_error(error))
                await ctx.emit(EventType.TOOL_RESULT, {**names, "result": None, "error": message})
            raise
        await ctx.emit(EventType.TOOL_RESULT, {**names, "result": result})
        return result

    async def _call_model(self, planned: PlanStep, given: dict[str, Any]) -> str:
        assert self.client is not None
        client = RecordedClient(self.ctx, self.client, self._key(planned), self.budget)
        messages, options = request_of(given)
        response = await client.generate(messages, **options)
        accept = given.get("on_truncated") == "accept"
        if (flaw := flaw_of(response.message, response.finish_reason, accept_truncated=accept)) is not None:
            raise flaw.error()
        content = response.message.get("content")
        return content if isinstance(content, str) else "" if content is None else str(content)


def step_input(planned: PlanStep, results: Mapping[int, Any], tools: ToolRegistry) -> dict[str, Any]:
    """Return the input of a step with references replaced by results, as text if the tool accepts only text."""
    resolved: dict[str, Any] = resolve(planned.tool_input, results)
    known = memory_operations() if planned.kind is StepKind.MEMORY_OP else tools
    tool = None if planned.kind is StepKind.LLM_CALL else known.get(planned.tool_name)
    referred = {name: resolved[name] for name, value in planned.tool_input.items() if is_reference(value)}
    return resolved if tool is None else {**resolved, **with_text_values(referred, tool.parameters)}


def request_of(given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages and options of the model call of an llm_call step with this input."""
    messages = [_with_text_content(each) for each in given.get("messages") or ()]
    if given.get("prompt") is not None or not messages:  # a result may be 0 or None
        messages.append({"role": "user", "content": as_text(given.get("prompt")) or ""})
    return messages, {name: given[name] for name in _OPTIONS if given.get(name) is not None}


def _with_text_content(message: Any) -> Any:
    """Return the message with text as content, unless the content is a list of parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return message if content is None or isinstance(content, list) else {**message, "content": as_text(content)}


def step_name(planned: PlanStep) -> str:
    """Return the name that a step of a plan is recorded under."""
    return _name(planned.step_number)


def planned_id(run_id: str, planned: PlanStep) -> str:
    """Return the id of a step of the run's first plan in the journal."""
    return step_id(run_id, step_name(planned), f"x:{SCOPE}/p:0:0")


def approved_input(answer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an approval, or `given` if the person did not change them."""
    edited = decision_of(answer).arguments
    return given if edited is None else edited


def _name(number: int) -> str:
    return f"step_{number}"


def _is_worth_retrying(error: BaseException) -> bool:
    """Return whether another attempt may succeed after this error."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_worth_retrying, leaves_of(error)))
    if isinstance(error, ProviderError):
        return error.retriable
    # The answer is recorded, so another attempt finds the same answer.
    return not isinstance(error, (*AS_THEY_ARE, OutputMismatch))


def _reject_agents(plan: Plan, tools: ToolRegistry) -> None:
    for step in plan.steps:
        tool = tools.get(step.tool_name) if step.kind is StepKind.TOOL_CALL else None
        if tool is not None and tool.metadata.get("agent"):
            raise NotSupported(
                f"step {step.step_number}: the tool of a plan must not be an agent, got {step.tool_name!r}. "
                "Call it with ctx.call(...), or pass it to a ToolCallingAgent."
            )
