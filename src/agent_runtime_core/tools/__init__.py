"""Functions an agent lends to a model."""

from __future__ import annotations

from .arguments import BadArguments
from .base import BaseTool, ToolFailed, ToolResult
from .calculator import CalculatorTool
from .calls import ToolAnswer, answer_call
from .deadline import ToolTimeout
from .registry import ToolRegistry, UnknownTool
from .todo import Todo, TodoStoreTool
from .tool import Tool, ToolDefinition, tool

__all__ = [
    "BadArguments",
    "BaseTool",
    "CalculatorTool",
    "Todo",
    "TodoStoreTool",
    "Tool",
    "ToolAnswer",
    "ToolDefinition",
    "ToolFailed",
    "ToolRegistry",
    "ToolResult",
    "ToolTimeout",
    "UnknownTool",
    "answer_call",
    "tool",
]
