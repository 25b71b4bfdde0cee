"""Plans: make one from a prompt, check it, and execute it in a run."""

from __future__ import annotations

from ..errors import PlanningError
from .agent import PlanningAgent, built_in_tools
from .executor import PlanResult, execute_plan
from .llm_planner import LLMPlanner
from .memory_operations import memory_operations
from .plan import BasePlanner, Plan, PlanStep, StepKind
from .references import resolve
from .rule_planner import RuleBasedPlanner

__all__ = [
    "BasePlanner",
    "LLMPlanner",
    "Plan",
    "PlanResult",
    "PlanStep",
    "PlanningAgent",
    "PlanningError",
    "RuleBasedPlanner",
    "StepKind",
    "built_in_tools",
    "execute_plan",
    "memory_operations",
    "resolve",
]
