"""Plans: what they are, and what makes one of a prompt."""

from __future__ import annotations

from ..errors import PlanningError
from .base import BasePlanner
from .by_model import LLMPlanner
from .plan import Plan, PlanStep, StepKind
from .references import resolve
from .rules import RuleBasedPlanner

__all__ = [
    "BasePlanner",
    "LLMPlanner",
    "Plan",
    "PlanStep",
    "PlanningError",
    "RuleBasedPlanner",
    "StepKind",
    "resolve",
]
