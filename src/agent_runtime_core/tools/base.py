"""A tool as a class of its own, which tells success and failure in its result."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument, ToolFailed, brief
from .tool import Tool

__all__ = ["BaseTool", "ToolFailed", "ToolResult"]


@dataclass
class ToolResult:
    """What a `BaseTool` comes to: its `output`, or with success=False what was wrong."""

    success: bool
    output: Any = None
    error: str | None = None


class BaseTool(ABC):
    """A tool as a class. Registered, it is a Tool like others: its output is the result, and a result without
    success is raised as ToolFailed, which an agent loop tells the model."""

    has_side_effects: bool = False
    requires_confirmation: bool = False
    #: Seconds after which it is given up.
    timeout: float | None = None

    @abstractmethod
    def name(self) -> str:
        """What a model calls it by."""

    @abstractmethod
    def description(self) -> str:
        """What it does, for a model to read."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """What it takes, as JSON Schema."""

    @abstractmethod
    async def execute(self, *args: Any, **kwargs: Any) -> ToolResult:
        """Do it. A subclass names its parameters, given by name; one annotated `RunContext` receives the context.

        Where it is a plain function it runs in a thread.
        """

    def as_tool(self) -> Tool:
        """This tool as what agents, loops and registries work with."""
        return Tool(
            name=self.name(),
            description=self.description(),
            parameters=self.parameters(),
            handler=_handler(self),
            has_side_effects=self.has_side_effects,
            requires_confirmation=self.requires_confirmation,
            timeout=self.timeout,
        )


def _handler(tool: BaseTool) -> Callable[..., Any]:
    def output_of(result: Any) -> Any:
        if not isinstance(result, ToolResult):
            raise InvalidArgument(f"{type(tool).__name__}.execute gives a ToolResult, not {brief(result)}")
        if not result.success:
            raise ToolFailed(tool.name(), result.error or "it gave no reason")
        return result.output

    async def awaited(result: Any) -> Any:
        return output_of(await result)

    # Wrapped, so that arguments are bound by the parameters of `execute` itself.
    @functools.wraps(tool.execute)
    def handler(*args: Any, **kwargs: Any) -> Any:
        result: Any = tool.execute(*args, **kwargs)
        return awaited(result) if inspect.isawaitable(result) else output_of(result)

    @functools.wraps(tool.execute)
    async def async_handler(*args: Any, **kwargs: Any) -> Any:
        return await handler(*args, **kwargs)

    return async_handler if inspect.iscoroutinefunction(tool.execute) else handler
