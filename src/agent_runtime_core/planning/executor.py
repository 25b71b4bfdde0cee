"""Plans, carried out: every step a durable step of the run, side by side where the plan lets them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from .._core.codec.json import MAX_BYTES, MAX_RESULT, arguments_digest
from .._core.event_types import EventType
from .._core.ids import step_id
from .._core.settings import POSITIVE, number
from .._execution.step_journal import RunJournal, StepJournal
from .._execution.step_policy import InDoubt
from ..errors import (
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    MissingDependency,
    NotSupported,
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
from ..retry import Backoff
from ..steps.checkpoint_only import labels_of
from ..steps.executor import StepExecutor
from ..steps.graph import Graph
from ..steps.graph_run import GraphRun
from ..steps.model import Step
from ..tools.registry import ToolRegistry
from ..tools.results import in_json
from ..tools.tool import Tool
from .base import registry_of
from .memory_operations import memory_operations
from .plan import Plan, PlanStep, StepKind
from .recorded_client import RecordedClient, configured_client, count_recorded
from .references import as_text, fitted, is_reference, resolve

SCOPE: Final = "plan"
MAX_RETRIES: Final = 3
BACKOFF_BASE: Final = 1.0
MAX_CONCURRENCY: Final = 16
#: (the step, its input, what carries it out), and gives the result.
Around = Callable[[PlanStep, dict[str, Any], Callable[[], Awaitable[Any]]], Awaitable[Any]]
_OPTIONS: Final = ("model", "temperature", "max_tokens")

#: Trying again would not help, or is for the run to decide: these come as they are.
AS_THEY_ARE: Final = (
    LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch, StorageError, UnknownPrice,
    MissingDependency,
)  # fmt: skip


@dataclass
class PlanResult:
    """What a plan came to: `result` is that of the step no other waits for, or a list of them where there are several.

    Each of `steps` is {"step_number", "tool_name", "tool_input", "result", "attempt"}, its input with results in the
    place of references. `usage` is what its model calls and tool calls used.
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
    max_concurrency: int = MAX_CONCURRENCY,
    max_retries: int = MAX_RETRIES,
    backoff_base: float = BACKOFF_BASE,
    budget: Budget | None = None,
    around: Around | None = None,
    known: Mapping[int, Any] | None = None,
) -> PlanResult:
    """Carry out a plan in a run: each step is recorded once, and begins when those it needs are.

    A step is tried `max_retries` times, `backoff_base` seconds, then twice as long … apart; a ToolResult without
    success is a failure. `client` is asked by an llm_call, the configured one by default. A tool that requires
    confirmation is called after a person approved of "tool:<name>", before which the run may be parked.
    `around(step, its input, do)` stands around each try: it awaits `do()` and gives the result. `known` are results,
    by step number, of steps that are carried out elsewhere.

    Before anything runs: PlanningError for a plan that cannot be carried out, LimitExceeded for one of more than
    `max_steps`, NotConfigured where it needs a model and there is none, NotSupported where a tool is another agent.
    Later: StepExecutionError after the last try of a step, whose dependents are left out while the others run;
    ToolFailed where a person refused a call.
    """
    number().or_none(" for no limit").check("max_steps", max_steps)
    if max_steps is not None and len(plan.steps) > max_steps:
        raise LimitExceeded("max_steps", max_steps, len(plan.steps), "the plan has more steps; none was begun")
    POSITIVE.check("max_retries", max_retries)
    registry = registry_of(tools)
    plan.validate(registry, memory_operations())
    _need_no_agent(plan, registry)
    known = known or {}
    asks = any(step.kind is StepKind.LLM_CALL for step in plan.steps if step.step_number not in known)
    if asks and client is None:
        client = configured_client()
    budget = budget if budget is not None else Budget(RunLimits(), getattr(ctx, "budget", None))
    tries = partial(Step, retries=max_retries - 1, backoff=Backoff(backoff_base, jitter="none"), retry_on=_may_help)
    execution = _Execution(ctx, plan, registry, client, budget, tries, max_concurrency)
    execution.around = around
    execution.results.update(known)
    return await execution.run()


class _Execution:
    """One pass of one plan."""

    def __init__(
        self, ctx: Any, plan: Plan, tools: ToolRegistry, client: LLMClient | None, budget: Budget,
        tries: Callable[..., Step], max_concurrency: int,
    ) -> None:  # fmt: skip
        self.ctx = ctx
        self.plan = plan
        self.tools = tools
        self.client = client
        self.budget = budget
        self.tries = tries
        book = getattr(ctx, "journal", None)
        self.book: RunJournal | None = book if isinstance(book, StepJournal) else None
        if self.book is not None:
            number = self.book.keys.next_key("p", SCOPE)
        else:  # nobody counts the plans of a run: one is known by what it says
            number = f"p:{arguments_digest((plan.to_dict(),), {})[0]}"
        self.scope: str = f"{SCOPE}/{number}"
        self.executor = StepExecutor(ctx, checkpoint_key=self.scope, max_concurrency=max_concurrency)
        self.memory: ToolRegistry = memory_operations()
        self.around: Around | None = None
        self.results: dict[int, Any] = {}
        self.attempts: dict[int, int] = dict.fromkeys((step.step_number for step in plan.steps), 0)
        self.approved: dict[int, dict[str, Any]] = {}  # what is to be called with what

    async def run(self) -> PlanResult:
        here = [step for step in self.plan.steps if step.step_number not in self.results]
        self._count(here)
        left = [step for step in self.plan.order() if step in here]
        while left:
            held = self._held(left)
            await self._side_by_side([step for step in left if step.step_number not in held])
            left = [step for step in left if step.step_number in held]
            for step in left:
                if self._is_asked_about(step) and all(each in self.results for each in step.needs):
                    self.approved[step.step_number] = await self._confirmed(step)
        return PlanResult(self._final(), [self._told(step) for step in here], self.budget.reported_usage())

    def _count(self, here: Sequence[PlanStep]) -> None:
        """Against the limits: all tool calls of these steps, and the model calls that are recorded already."""
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

    def _told(self, step: PlanStep) -> dict[str, Any]:
        number = step.step_number
        return {
            "step_number": number,
            "tool_name": step.tool_name or step.kind.value,
            "tool_input": self._given(step, self.results),
            "result": self.results[number],
            "attempt": self.attempts[number],
        }

    def _key(self, step: PlanStep) -> str:
        return f"{self.scope}:{step.step_number}"

    def _given(self, step: PlanStep, results: Mapping[int, Any]) -> dict[str, Any]:
        """What it is carried out with. What a person approved of is that and no other, whatever it looks like."""
        if step.step_number in self.approved:
            return self.approved[step.step_number]
        return step_input(step, results, self.tools)

    # -- people: asked between steps, where a run can be parked

    def _is_asked_about(self, step: PlanStep) -> bool:
        tool = self.tools.get(step.tool_name) if step.kind is StepKind.TOOL_CALL else None
        return tool is not None and tool.requires_confirmation and step.step_number not in self.approved

    def _held(self, left: Sequence[PlanStep]) -> set[int]:
        """Those that have to be approved of yet, and what waits for them."""
        held: set[int] = set()
        for step in left:
            if self._is_asked_about(step) or held.intersection(step.needs):
                held.add(step.step_number)
        return held

    async def _confirmed(self, step: PlanStep) -> dict[str, Any]:
        """The input a person approved of, which may be another one."""
        given = step_input(step, self.results, self.tools)
        details = {"tool_name": step.tool_name, "tool_args": given, "tool_call_id": step_name(step)}
        answer = await self.ctx.approve(f"tool:{step.tool_name}", details, key=self._key(step))
        if answer is True or (isinstance(answer, Mapping) and answer.get("approved") is True):
            return approved_input(answer, given)
        reason = answer.get("reason") if isinstance(answer, Mapping) else answer if isinstance(answer, str) else None
        raise ToolFailed(step.tool_name, f"a person refused this call: {reason or 'denied'}")

    # -- steps

    async def _side_by_side(self, planned: Sequence[PlanStep]) -> None:
        if not planned:
            return
        here = {step.step_number for step in planned}
        steps = [self._as_step(step, here) for step in planned]
        try:
            book, scope = await self.executor.open_journal(lambda: labels_of(steps))
            dag = GraphRun(self.executor.options, book, scope)
            done = await dag.run(Graph(steps), None, True)
            for each in planned:
                self.attempts[each.step_number] = book.view.completed[step_name(each), dag.key].attempt
        except StepExecutionError as error:
            if error.__cause__ is not None and holds(error.__cause__, AS_THEY_ARE):
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
            given = self._given(planned, known)
            if self.around is None:
                return await self._do(planned, given)
            return await self.around(planned, given, partial(self._do, planned, given))

        return self.tries(
            step_name(planned), fn, description=planned.reasoning or None,
            depends_on=[_name(each) for each in planned.needs if each in here], on_in_doubt=self._in_doubt(planned),
            max_result_bytes=MAX_BYTES if planned.kind is StepKind.LLM_CALL else MAX_RESULT,
        )  # fmt: skip

    async def _do(self, planned: PlanStep, given: dict[str, Any]) -> Any:
        match planned.kind:
            case StepKind.LLM_CALL:
                return await self._asked(planned, given)
            case StepKind.MEMORY_OP:
                return await self.memory.execute(planned.tool_name, given, self.ctx)
            case _:
                return await self._called(planned, given)

    def _in_doubt(self, planned: PlanStep) -> InDoubt:
        """The start of a call with side effects is durable before it is made, so that its doubt is known."""
        tool = self.tools.get(planned.tool_name) if planned.kind is StepKind.TOOL_CALL else None
        if tool is None:
            return "retry"
        wanted: InDoubt | None = tool.metadata.get("on_in_doubt")
        return wanted if wanted is not None else _again if tool.has_side_effects else "retry"

    async def _called(self, planned: PlanStep, given: dict[str, Any]) -> Any:
        ctx, told = self.ctx, {"tool_name": planned.tool_name, "tool_call_id": step_name(planned)}
        await ctx.emit(EventType.TOOL_CALL, {**told, "tool_args": given})
        tool = self.tools.get(planned.tool_name)
        try:
            result = await self.tools.execute(planned.tool_name, given, ctx)
            if tool is not None:
                result, _ = in_json(tool, result)
        except Exception as error:
            if not holds(error, AS_THEY_ARE):
                what = text_of(deciding_error(error))
                await ctx.emit(EventType.TOOL_RESULT, {**told, "result": None, "error": what})
            raise
        await ctx.emit(EventType.TOOL_RESULT, {**told, "result": result})
        return result

    async def _asked(self, planned: PlanStep, given: dict[str, Any]) -> str:
        assert self.client is not None
        client = RecordedClient(self.ctx, self.client, self._key(planned), self.budget)
        messages, options = request_of(given)
        content = (await client.generate(messages, **options)).message.get("content")
        return content if isinstance(content, str) else "" if content is None else str(content)


def step_input(planned: PlanStep, results: Mapping[int, Any], tools: ToolRegistry) -> dict[str, Any]:
    """The input of a step with results in the place of references, and as text where its tool takes only that."""
    given: dict[str, Any] = resolve(planned.tool_input, results)
    known = memory_operations() if planned.kind is StepKind.MEMORY_OP else tools
    tool = None if planned.kind is StepKind.LLM_CALL else known.get(planned.tool_name)
    referred = {name: given[name] for name, value in planned.tool_input.items() if is_reference(value)}
    return given if tool is None else {**given, **fitted(referred, tool.parameters)}


def request_of(given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The messages and options that an llm_call with that input asks a model with."""
    messages = [_sayable(each) for each in given.get("messages") or ()]
    if given.get("prompt") is not None or not messages:  # a result may be 0, or nothing
        messages.append({"role": "user", "content": as_text(given.get("prompt")) or ""})
    return messages, {name: given[name] for name in _OPTIONS if given.get(name) is not None}


def _sayable(message: Any) -> Any:
    """A message whose content a model takes: a text, or a list of parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return message if content is None or isinstance(content, list) else {**message, "content": as_text(content)}


def step_name(planned: PlanStep) -> str:
    """The name under which a step of a plan is recorded."""
    return _name(planned.step_number)


def planned_id(run_id: str, planned: PlanStep) -> str:
    """The id that a step of the first plan of a run has in the journal."""
    return step_id(run_id, step_name(planned), f"x:{SCOPE}/p:0:0")


def approved_input(answer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a person who said yes wants a tool to be called with."""
    other = answer.get("arguments") if isinstance(answer, Mapping) else None
    return dict(other) if isinstance(other, Mapping) else given


def _name(number: int) -> str:
    return f"step_{number}"


def _again() -> None:
    """A check function that knows nothing of what became of a call: it is made again, under the same key."""


def _may_help(error: BaseException) -> bool:
    """Whether it makes sense to try again after this."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_may_help, leaves_of(error)))
    if isinstance(error, ProviderError):
        return error.retriable
    return not isinstance(error, AS_THEY_ARE)


def _need_no_agent(plan: Plan, tools: ToolRegistry) -> None:
    for step in plan.steps:
        tool = tools.get(step.tool_name) if step.kind is StepKind.TOOL_CALL else None
        if tool is not None and tool.metadata.get("agent"):
            raise NotSupported(
                f"step {step.step_number}: {step.tool_name!r} is another agent, which a plan cannot call: "
                "call it with ctx.call(...), or lend it to a ToolCallingAgent"
            )
