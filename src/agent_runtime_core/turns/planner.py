"""Make the plan of a turn: drop invalid steps, and fall back to one model call if there is no plan."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from .._core.codec.typed import PLAIN, build, to_plain
from ..errors import PlanningError, ProviderError, deciding_error
from ..interfaces import LLMClient
from ..planning.executor import AS_THEY_ARE
from ..planning.memory_operations import memory_operations
from ..planning.plan import MOST_STEPS, BasePlanner, Plan, PlanStep, StepKind, plan_of, problems_of_steps
from ..tools.registry import ToolRegistry
from .events import PlanRequest
from .hooks import TurnLog

#: The prompt of the only step of a turn without a plan. The model gets the conversation in its place.
CONVERSATION = "the conversation"


@dataclass
class Planned:
    """A plan, and the steps that were dropped from it with the reasons. `direct`: the planner made no plan."""

    plan: Plan
    skipped: list[tuple[PlanStep, str]] = field(default_factory=list)
    direct: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_dict` reads."""
        return cast("dict[str, Any]", to_plain(self, Planned, PLAIN))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Planned:
        """Return the value that `to_dict` wrote."""
        return cast(Planned, build(dict(data), cls, PLAIN))


class PlanExecutor:
    """Makes the plan of a turn.

    If the planner fails or makes no plan, that is logged and one model call answers the turn. Invalid steps, and the
    steps that depend on them, are dropped and logged. Errors of the model itself are raised.

    Args:
        planner: Makes the plans.
    """

    def __init__(self, planner: BasePlanner) -> None:
        self.planner = planner

    async def plan(
        self, request: PlanRequest, tools: ToolRegistry, client: Callable[[LLMClient | None], LLMClient | None],
        log: TurnLog,
    ) -> Planned:  # fmt: skip
        """Return the plan for `request`.

        Args:
            request: The prompt to plan for.
            tools: The tools of the plan.
            client: Called with the planner's own client, or None, when a model is needed. Returns the client to use.
            log: Receives the warnings.

        Raises:
            PlanningError: There is no plan, and no model either.
        """
        try:
            plan = await self._create_plan(self._planner_with(client), request.prompt, tools)
            return self._without_invalid_steps(plan, tools, log)
        except PlanningError as error:
            if client(None) is None:
                raise
            cause = error.__cause__  # an error of the application's planner: its traceback shows where
            log.warning("planning failed; the model answers without a plan: %s", error, exc_info=cause)
        step = PlanStep(1, "", {"prompt": CONVERSATION}, "an answer without a plan", kind=StepKind.LLM_CALL)
        return Planned(Plan([step], request.prompt), direct=True)

    async def _create_plan(self, planner: BasePlanner, prompt: str, tools: ToolRegistry) -> Plan:
        try:
            return await plan_of(planner, prompt, tools)
        except Exception as error:
            cause = deciding_error(error)
            if isinstance(cause, (PlanningError, ProviderError, *AS_THEY_ARE)):
                raise cause from cause.__cause__
            raise PlanningError(f"{type(planner).__name__} failed: {type(error).__name__}: {error}") from error

    def _planner_with(self, client: Callable[[LLMClient | None], LLMClient | None]) -> BasePlanner:
        own = getattr(self.planner, "client", None)
        found = client(own) if isinstance(own, LLMClient) else None
        if found is None:
            return self.planner
        planner: Any = copy.copy(self.planner)
        planner.client = found
        return cast(BasePlanner, planner)

    def _without_invalid_steps(self, plan: Plan, tools: ToolRegistry, log: TurnLog) -> Planned:
        memory = memory_operations()
        if not plan.problems(tools, memory):
            return Planned(plan)
        broken = _invalid_steps(plan.steps, tools, memory) if len(plan.steps) <= MOST_STEPS else {}
        valid = Plan([step for step in plan.steps if step.step_number not in broken], plan.final_goal)
        valid.validate(tools, memory)
        for number, reason in broken.items():
            log.warning("step %d is dropped: %s", number, reason)
        return Planned(valid, [(step, broken[step.step_number]) for step in plan.steps if step.step_number in broken])


def _invalid_steps(steps: Sequence[PlanStep], tools: ToolRegistry, memory: ToolRegistry) -> dict[int, str]:
    """Return the numbers of invalid steps and of the steps that depend on them, with the reasons."""
    by_step: dict[int, list[str]] = {}
    for number, problem in problems_of_steps(steps, tools, memory):
        by_step.setdefault(number, []).append(problem)
    found = {number: "; ".join(problems) for number, problems in by_step.items()}
    waiting: dict[int, list[int]] = {}
    for step in steps:
        for each in step.needs:
            waiting.setdefault(each, []).append(step.step_number)
    unvisited = deque(found)
    while unvisited:
        number = unvisited.popleft()
        for each in waiting.get(number, ()):
            if each not in found:
                found[each] = f"it needs step {number}, which is dropped"
                unvisited.append(each)
    return found
