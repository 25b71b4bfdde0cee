"""Plans of turns: made by the turn's planner, mended where that can be, and done without where it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import NotConfigured, PlanningError, ProviderError
from ..interfaces import LLMClient
from ..planning.base import BasePlanner, plan_of
from ..planning.executing import AS_THEY_ARE
from ..planning.memory import memory_operations
from ..planning.plan import Plan, PlanStep, StepKind
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
        left_out = [[step.to_dict(), why] for step, why in self.skipped]
        return {"plan": self.plan.to_dict(), "skipped": left_out, "direct": self.direct}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Planned:
        skipped = [(PlanStep.from_dict(step), why) for step, why in data["skipped"]]
        return cls(Plan.from_dict(data["plan"]), skipped, data["direct"])


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
        except (PlanningError, ProviderError, NotConfigured, *AS_THEY_ARE):
            raise
        except Exception as error:
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
        broken = dict(_broken(plan.steps, tools, memory))
        kept = Plan([step for step in plan.steps if step.step_number not in broken], plan.final_goal)
        kept.validate(tools, memory)
        for number, why in broken.items():
            log.warning("step %d is left out: %s", number, why)
        return Planned(kept, [(step, broken[step.step_number]) for step in plan.steps if step.step_number in broken])


def _broken(steps: Iterable[PlanStep], tools: ToolRegistry, memory: ToolRegistry) -> Iterable[tuple[int, str]]:
    """Numbers of steps that cannot be carried out, with the reason; what waits for such a step is one of them."""
    left, found = list(steps), dict[int, str]()
    while True:
        plan = Plan([step for step in left if step.step_number not in found])
        more = {
            step.step_number: why
            for step in plan.steps
            if (why := _why_not(step, plan, found, tools, memory)) is not None
        }
        if not more:
            return found.items()
        found |= more


def _why_not(
    step: PlanStep, plan: Plan, found: Mapping[int, str], tools: ToolRegistry, memory: ToolRegistry
) -> str | None:
    lost = next((each for each in step.needs if each in found), None)
    if lost is not None:
        return f"it needs step {lost}, which is left out"
    where = f"step {step.step_number}: "
    said = [each.removeprefix(where) for each in plan.problems(tools, memory) if each.startswith(where)]
    return "; ".join(said) or None
