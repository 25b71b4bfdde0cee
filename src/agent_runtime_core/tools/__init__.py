"""Tools: functions that a model may call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily
from .tool import Tool, ToolDefinition, tool  # not lazily: `tool` must be the function, not the module of that name

if TYPE_CHECKING:
    from .arguments import BadArguments
    from .base import BaseTool, ToolFailed, ToolResult
    from .calculator import CalculatorTool
    from .invocation import ToolAnswer, answer_call
    from .registry import ToolRegistry, ToolTimeout, UnknownTool
    from .todo import Todo, TodoStoreTool

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

_MODULES = {
    "arguments": "BadArguments",
    "base": "BaseTool ToolFailed ToolResult",
    "calculator": "CalculatorTool",
    "invocation": "ToolAnswer answer_call",
    "registry": "ToolRegistry ToolTimeout UnknownTool",
    "todo": "Todo TodoStoreTool",
}
_LAZY = {name: f".{module}:{name}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
