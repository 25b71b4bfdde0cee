"""Tools: functions that a model may call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_exports import lazy_exports

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
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".arguments": "BadArguments",
            ".base": "BaseTool ToolFailed ToolResult",
            ".calculator": "CalculatorTool",
            ".invocation": "ToolAnswer answer_call",
            ".names": "tool_name",
            ".registry": "ToolRegistry ToolTimeout UnknownTool",
            ".results": "ContentParts",
            ".todo": "Todo TodoStoreTool",
        },
        "Tool ToolDefinition tool",
    )
