"""Tools: functions that a model may call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily

# Not lazily: `tool` must be the function, not the module of that name.
from .tool import Tool as Tool
from .tool import ToolDefinition as ToolDefinition
from .tool import tool as tool

if TYPE_CHECKING:
    from .arguments import BadArguments as BadArguments
    from .base import BaseTool as BaseTool
    from .base import ToolFailed as ToolFailed
    from .base import ToolResult as ToolResult
    from .calculator import CalculatorTool as CalculatorTool
    from .invocation import ToolAnswer as ToolAnswer
    from .invocation import answer_call as answer_call
    from .names import tool_name as tool_name
    from .registry import ToolRegistry as ToolRegistry
    from .registry import ToolTimeout as ToolTimeout
    from .registry import UnknownTool as UnknownTool
    from .results import ContentParts as ContentParts
    from .todo import Todo as Todo
    from .todo import TodoStoreTool as TodoStoreTool

_MODULES = {
    "arguments": "BadArguments",
    "base": "BaseTool ToolFailed ToolResult",
    "calculator": "CalculatorTool",
    "invocation": "ToolAnswer answer_call",
    "names": "tool_name",
    "results": "ContentParts",
    "registry": "ToolRegistry ToolTimeout UnknownTool",
    "todo": "Todo TodoStoreTool",
}
_LAZY = {name: f".{module}:{name}" for module, names in _MODULES.items() for name in names.split()}
_PUBLIC = sorted([*_LAZY, "Tool", "ToolDefinition", "tool"])

if not TYPE_CHECKING:  # type checkers see the imports above
    __all__ = _PUBLIC


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _PUBLIC
