"""An agent that makes a plan from a prompt and executes it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from .._core.codec.json import decode
from .._core.settings import POSITIVE
from .._core.validation import must
from .._journal.record import DONE, FAILED, RETRYING, Record
from ..errors import InvalidArgument, PlanningError, StepExecutionError, ToolFailed, deciding_error
from ..interfaces import AgentRuntime, ErrorInfo, LLMClient, RunContext, RunResult
from ..limits import Budget, RunLimits
from ..tools.base import BaseTool
from ..tools.calculator import CalculatorTool
from ..tools.registry import ToolRegistry
from ..tools.todo import TodoStoreTool
from ..tools.tool import Tool
from . import executor
from .executor import BACKOFF_BASE, MAX_CONCURRENCY, MAX_RETRIES
from .llm_planner import LLMPlanner
from .plan import BasePlanner, Plan, PlanStep, checked_planner, plan_of, registry_of
from .recorded_client import RecordedClient, count_recorded
from .rule_planner import RuleBasedPlanner

#: The step that makes the plan, and the name of the model calls inside it.
PLANNING = "plan"


class PlanningAgent(AgentRuntime):
    """Makes a plan from the last user message, or from `params["prompt"]`, and executes it with `execute_plan`.

    The plan is a recorded step, and so is each model call of an LLMPlanner. `final_output` is {"result", "plan",
    "steps"}, as in PlanResult. A run without a plan, or with a step that failed its last attempt, is not retried.

    Args:
        key: The agent key.
        planner: Makes the plan; by default a RuleBasedPlanner.
        tools: The tools of plans; by default a CalculatorTool and a TodoStoreTool.
        client: The model of llm_call steps; by default the configured client.
        max_steps: The most steps of a plan, None for no limit. `params["max_steps"]` can only lower it.
        on_long_plan: What happens to a plan with more steps: "cut" executes the first steps, "fail" none.
        max_retries: Attempts of each step, including the first.
        backoff_base: Seconds before the second attempt of a step; doubled for each later attempt.
        max_concurrency: Steps that run at the same time.

    Examples:
        >>> from agent_runtime_core import AgentRunner
        >>> from agent_runtime_core.planning import PlanningAgent
        >>> runner = AgentRunner.open("memory://")
        >>> runner.execute_sync(PlanningAgent(), params={"prompt": "add 3 and 4"}).final_output["result"]
        7
    """

    key: str = "planning"
    trace_operation: str = "invoke_workflow"  # the name of its spans

    def __init__(
        self,
        key: str = "planning",
        planner: BasePlanner | None = None,
        tools: ToolRegistry | Iterable[Tool | BaseTool] | None = None,
        *,
        client: LLMClient | None = None,
        max_steps: int | None = None,
        on_long_plan: str = "cut",
        max_retries: int = MAX_RETRIES,
        backoff_base: float = BACKOFF_BASE,
        max_concurrency: int = MAX_CONCURRENCY,
    ) -> None:
        self.key = key
        self.planner: BasePlanner = RuleBasedPlanner() if planner is None else checked_planner(planner)
        self.tools: ToolRegistry = built_in_tools() if tools is None else registry_of(tools)
        self.client = client
        self.max_steps = max_steps
        executor.ON_LONG_PLAN.check("on_long_plan", on_long_plan)
        self.on_long_plan: str = on_long_plan
        self.max_retries = max_retries
        self.backoff_base = backoff_base
        self.max_concurrency = max_concurrency

    async def run(self, ctx: RunContext) -> RunResult:
        budget = Budget(RunLimits(), getattr(ctx, "budget", None))
        plan = await self._plan(ctx, budget)
        done = await executor.execute_plan(
            ctx, plan, self.tools, client=self.client, max_steps=self._step_limit(ctx), on_long_plan=self.on_long_plan,
            max_retries=self.max_retries, backoff_base=self.backoff_base, max_concurrency=self.max_concurrency,
            budget=budget,
        )  # fmt: skip
        return RunResult({"result": done.result, "plan": plan.to_dict(), "steps": done.steps}, usage=done.usage)

    async def _plan(self, ctx: RunContext, budget: Budget) -> Plan:
        prompt = prompt_of(ctx)
        count_recorded(ctx, PLANNING, budget)

        async def make() -> dict[str, Any]:
            return (await plan_of(self._planner(ctx, budget), prompt, self.tools)).to_dict()

        try:
            return Plan.from_dict(await ctx.step(PLANNING, make))
        except StepExecutionError as error:
            raise error.__cause__ or error from None

    async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
        info = await super().on_error(ctx, error)
        cause = deciding_error(error)
        if info is None or not isinstance(cause, (PlanningError, StepExecutionError, ToolFailed)):
            return info
        info.retriable = False
        if isinstance(cause, PlanningError):
            info.details = {"problems": cause.problems}
        elif isinstance(cause, StepExecutionError):
            info.type = type(deciding_error(cause.__cause__ or cause)).__name__
            info.details = {"step": cause.step_name, "attempts": cause.attempts}
        return info

    def _planner(self, ctx: RunContext, budget: Budget) -> BasePlanner:
        planner = self.planner
        if isinstance(planner, LLMPlanner):
            planner = copy.copy(planner)
            planner.client = RecordedClient(ctx, planner.client, PLANNING, budget)
        return planner

    def _step_limit(self, ctx: RunContext) -> int | None:
        requested = ctx.params.get("max_steps")
        POSITIVE.or_none().check("max_steps", requested)
        return min((each for each in (self.max_steps, requested) if each is not None), default=None)


def built_in_tools() -> ToolRegistry:
    """Return a new registry with the built-in tools: a calculator and a to-do store."""
    registry = ToolRegistry()
    registry.register(CalculatorTool())
    registry.register(TodoStoreTool())
    return registry


def prompt_of(ctx: RunContext) -> str:
    """Return the prompt to plan for: `params["prompt"]`, or the text of the last user message."""
    prompt = ctx.params.get("prompt")
    if prompt is None:
        messages = [each for each in ctx.input_messages if isinstance(each, Mapping) and each.get("role") == "user"]
        prompt = messages[-1].get("content") if messages else None
        if isinstance(prompt, list):
            prompt = "\n".join(str(part.get("text") or "") for part in prompt if isinstance(part, Mapping)).strip()
    if not isinstance(prompt, str):
        raise must("the user message or params['prompt']", "be a string", prompt)
    return prompt


_STEPS = f"x:{executor.SCOPE}/p:0:"


def tried_steps(
    records: Iterable[Record], tools: ToolRegistry, read: Callable[[str], Any] = decode
) -> list[dict[str, Any]]:
    """Return the finished attempts of the steps of a PlanningAgent's plan, by step number and then in order.

    Each is {"step_number", "tool_name", "tool_input", "result", "attempt"}, and its result is
    {"success", "output", "error"}. `read` decodes stored results.
    """
    reading = _Reading(tools, read)
    for record in records:
        reading.read(record)
    return sorted(reading.tried, key=lambda each: cast(int, each["step_number"]))


class _Reading:
    def __init__(self, tools: ToolRegistry, read: Callable[[str], Any]) -> None:
        self.tools, self.decode = tools, read
        self.steps: dict[str, PlanStep] = {}
        self.results: dict[int, Any] = {}
        self.approved: dict[str, dict[str, Any]] = {}
        self.tried: list[dict[str, Any]] = []

    def read(self, record: Record) -> None:
        if record.kind == DONE and (record.name, record.key) == (PLANNING, "s:0"):
            plan = Plan.from_dict(cast("dict[str, Any]", self.decode(record.result or "{}")))
            self.steps = {executor.step_name(step): step for step in plan.steps}
        elif record.kind == DONE and record.name.startswith("signal:tool:"):
            unchanged: dict[str, Any] = {}
            approved = executor.approved_input(self.decode(record.result or "null"), unchanged)
            if approved is not unchanged:  # a person changed the arguments, maybe to an empty object
                self.approved[f"step_{record.key.rpartition(':')[2]}"] = approved
        elif record.kind in (DONE, RETRYING, FAILED) and record.key.startswith(_STEPS) and record.name in self.steps:
            self._tried(record, self.steps[record.name])

    def _tried(self, record: Record, step: PlanStep) -> None:
        output, error = None, None
        if record.kind == DONE:
            output = self.decode(record.result or "null")
            self.results[step.step_number] = output
        else:
            error = json.loads(record.info or "{}").get("error") or "it failed"
        self.tried.append(
            {
                "step_number": step.step_number,
                "tool_name": step.tool_name or step.kind.value,
                "tool_input": self._input(record.name, step),
                "result": {"success": error is None, "output": output, "error": error},
                "attempt": record.attempt,
            }
        )

    def _input(self, name: str, step: PlanStep) -> dict[str, Any]:
        if name in self.approved:
            return self.approved[name]
        try:
            return executor.step_input(step, self.results, self.tools)
        except InvalidArgument:
            return step.tool_input  # the step failed with this error
