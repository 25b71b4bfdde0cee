"""The base class of planners, and helpers for planners and tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from .._core.validation import must
from ..errors import PlanningError
from ..tools.base import BaseTool
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .plan import Plan


class BasePlanner(ABC):
    """Makes plans from prompts."""

    @abstractmethod
    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        """Return a valid plan for the prompt that uses only these tools.

        Raises:
            PlanningError: No plan can be made.
        """


def checked_planner(planner: BasePlanner) -> BasePlanner:
    """Return the planner. Raise InvalidArgument if it has no `create_plan` or is a class instead of an instance."""
    if isinstance(planner, type) or not callable(getattr(planner, "create_plan", None)):
        fix = f"Pass {planner.__name__}()" if isinstance(planner, type) else ""
        raise must("a planner", "be an instance with create_plan", planner, fix)
    return planner


async def plan_of(planner: BasePlanner, prompt: str, tools: ToolRegistry) -> Plan:
    """Return the planner's plan. Raise PlanningError if it returns something else."""
    plan: object = await planner.create_plan(prompt, tools)
    if not isinstance(plan, Plan):
        raise PlanningError(str(must(f"{type(planner).__name__}.create_plan", "return a Plan", plan)))
    return plan


def registry_of(tools: ToolRegistry | Iterable[Tool | BaseTool]) -> ToolRegistry:
    """Return the registry, or a new one with these tools."""
    if isinstance(tools, ToolRegistry):
        return tools
    if not isinstance(tools, Iterable):
        raise must("tools", "be a ToolRegistry or a list of tools", tools)
    registry = ToolRegistry()
    for tool in tools:
        registry.register(tool)
    return registry


def as_list(tools: ToolRegistry | Iterable[Tool]) -> list[Tool]:
    """Return the tools of a registry or of an iterable as a list."""
    return tools.list_tools() if isinstance(tools, ToolRegistry) else list(tools)
