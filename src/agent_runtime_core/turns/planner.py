"""Plans of turns: made by the turn's planner, mended where that can be, and done without where it cannot."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from .._core.codec.typed import PLAIN, build, to_plain
from ..errors import PlanningError, ProviderError, deciding_error
from ..interfaces import LLMClient
from ..planning.base import BasePlanner, plan_of
from ..planning.executor import AS_THEY_ARE
from ..planning.memory_operations import memory_operations
from ..planning.plan import MOST_STEPS, Plan, PlanStep, StepKind, problems_of_steps
from ..tools.registry import ToolRegistry
from .events import PlanRequest
from .logs import TurnLog

#: The one step of a turn that is answered without a plan: the model is sent the conversation in the prompt's place.
CONVERSATION = "the conversation"


@dataclass
class Planned:
    """The plan, and the steps that were left out of it, each with the reason; `direct` is an answer without a plan."""

    plan: Plan
    skipped: list[tuple[PlanStep, str]] = field(default_factory=list)
    direct: bool = False

    def to_dict(self) -> dict[str, Any]:
        return cast("dict[str, Any]", to_plain(self, Planned, PLAIN))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Planned:
        return cast(Planned, build(dict(data), cls, PLAIN))


class PlanExecutor:
    """Makes the plan of a turn.

    A planner that gives none, or fails, is logged, and the turn answered by one call of the model; with no model to
    ask, its PlanningError is raised. Of a plan with steps that cannot be carried out, those and what depends on them
    are left out, and logged. What goes wrong with the model itself is raised.
    """

    def __init__(self, planner: BasePlanner) -> None:
        self.planner = planner

    async def plan(
        self, request: PlanRequest, tools: ToolRegistry, client: Callable[[LLMClient | None], LLMClient | None],
        log: TurnLog,
    ) -> Planned:  # fmt: skip
        """`client` gives what is asked, by a planner with a client of its own or without one; called where need be."""
        try:
            plan = await self._made(self._with(client), request.prompt, tools)
            return self._without_broken(plan, tools, log)
        except PlanningError as error:
            if client(None) is None:
                raise
            why = error.__cause__  # what a planner of the application's own raised, to be found by its traceback
            log.warning("there is no plan, the model is asked to answer as it is: %s", error, exc_info=why)
        step = PlanStep(1, "", {"prompt": CONVERSATION}, "an answer without a plan", kind=StepKind.LLM_CALL)
        return Planned(Plan([step], request.prompt), direct=True)

    async def _made(self, planner: BasePlanner, prompt: str, tools: ToolRegistry) -> Plan:
        try:
            return await plan_of(planner, prompt, tools)
        except Exception as error:
            cause = deciding_error(error)
            if isinstance(cause, (PlanningError, ProviderError, *AS_THEY_ARE)):
                raise cause from cause.__cause__
            raise PlanningError(f"the planner failed: {type(error).__name__}: {error}") from error

    def _with(self, client: Callable[[LLMClient | None], LLMClient | None]) -> BasePlanner:
        own = getattr(self.planner, "client", None)
        found = client(own) if isinstance(own, LLMClient) else None
        if found is None:
            return self.planner
        planner: Any = copy.copy(self.planner)
        planner.client = found
        return cast(BasePlanner, planner)

    def _without_broken(self, plan: Plan, tools: ToolRegistry, log: TurnLog) -> Planned:
        memory = memory_operations()
        if not plan.problems(tools, memory):
            return Planned(plan)
        broken = _broken(plan.steps, tools, memory) if len(plan.steps) <= MOST_STEPS else {}
        kept = Plan([step for step in plan.steps if step.step_number not in broken], plan.final_goal)
        kept.validate(tools, memory)
        for number, why in broken.items():
            log.warning("step %d is left out: %s", number, why)
        return Planned(kept, [(step, broken[step.step_number]) for step in plan.steps if step.step_number in broken])


def _broken(steps: Sequence[PlanStep], tools: ToolRegistry, memory: ToolRegistry) -> dict[int, str]:
    """Numbers of steps that cannot be carried out, with the reason; what waits for such a step is one of them."""
    said: dict[int, list[str]] = {}
    for number, problem in problems_of_steps(steps, tools, memory):
        said.setdefault(number, []).append(problem)
    found = {number: "; ".join(problems) for number, problems in said.items()}
    waiting: dict[int, list[int]] = {}
    for step in steps:
        for each in step.needs:
            waiting.setdefault(each, []).append(step.step_number)
    lost = deque(found)
    while lost:
        number = lost.popleft()
        for each in waiting.get(number, ()):
            if each not in found:
                found[each] = f"it needs step {number}, which is left out"
                lost.append(each)
    return found
