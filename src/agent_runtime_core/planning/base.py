"""What makes a plan of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from ..errors import InvalidArgument, PlanningError, brief
from ..tools.base import BaseTool
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .plan import Plan


class BasePlanner(ABC):
    """Makes plans."""

    @abstractmethod
    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        """A valid plan that does what the prompt asks for with these tools; PlanningError where there is none."""


def checked_planner(planner: BasePlanner) -> BasePlanner:
    """That planner; InvalidArgument for what makes no plans, a class in the place of its object for one."""
    if isinstance(planner, type) or not callable(getattr(planner, "create_plan", None)):
        raise InvalidArgument(f"a planner is an object with create_plan, as a BasePlanner is, not {brief(planner)}")
    return planner


async def plan_of(planner: BasePlanner, prompt: str, tools: ToolRegistry) -> Plan:
    """The plan that a planner makes; PlanningError for one that gives something else."""
    plan: object = await planner.create_plan(prompt, tools)
    if not isinstance(plan, Plan):
        raise PlanningError(f"{type(planner).__name__}.create_plan gives a Plan, not {brief(plan)}")
    return plan


def registry_of(tools: ToolRegistry | Iterable[Tool | BaseTool]) -> ToolRegistry:
    """The tools as a registry: itself, or one made of a list of them."""
    if isinstance(tools, ToolRegistry):
        return tools
    if not isinstance(tools, Iterable):
        raise InvalidArgument(f"tools are a ToolRegistry or a list of tools, not {brief(tools)}")
    registry = ToolRegistry()
    for tool in tools:
        registry.register(tool)
    return registry


def listed(tools: ToolRegistry | Iterable[Tool]) -> list[Tool]:
    """The tools, whichever way they were given."""
    return tools.list_tools() if isinstance(tools, ToolRegistry) else list(tools)
