"""Functions an agent lends to a model."""

from __future__ import annotations

from .arguments import BadArguments
from .calls import ToolAnswer, answer_call
from .deadline import ToolTimeout
from .registry import ToolRegistry, UnknownTool
from .tool import Tool, ToolDefinition, tool

__all__ = [
    "BadArguments",
    "Tool",
    "ToolAnswer",
    "ToolDefinition",
    "ToolRegistry",
    "ToolTimeout",
    "UnknownTool",
    "answer_call",
    "tool",
]
