"""What makes a plan of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from ..tools.registry import ToolRegistry
from ..tools.tool import Tool
from .plan import Plan


class BasePlanner(ABC):
    """Makes plans."""

    @abstractmethod
    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        """A valid plan that does what the prompt asks for with these tools; PlanningError where there is none."""


def listed(tools: ToolRegistry | Iterable[Tool]) -> list[Tool]:
    """The tools, whichever way they were given."""
    return tools.list_tools() if isinstance(tools, ToolRegistry) else list(tools)
