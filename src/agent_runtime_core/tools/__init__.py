"""Functions an agent lends to a model."""

from __future__ import annotations

from .registry import ToolRegistry, UnknownTool
from .tool import Tool, ToolDefinition

__all__ = ["Tool", "ToolDefinition", "ToolRegistry", "UnknownTool"]
