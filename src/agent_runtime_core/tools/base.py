"""Tools as classes that report success and failure in their result."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ToolFailed
from .retries import RetryDelay, RetryOn
from .tool import Tool

__all__ = ["BaseTool", "ToolFailed", "ToolResult"]


@dataclass
class ToolResult:
    """The result of a `BaseTool`.

    Args:
        success: Whether the tool succeeded.
        output: The output, if it succeeded.
        error: Why it failed, otherwise.
    """

    success: bool
    output: Any = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return {"success", "output", "error"}."""
        return {"success": self.success, "output": self.output, "error": self.error}

    def model_dump(self) -> dict[str, Any]:
        """Return the same as `to_dict`, under the name that pydantic uses."""
        return self.to_dict()


class BaseTool(ABC):
    """Base class of tools that are classes.

        class Greet(BaseTool):
            def name(self):
                return "greet"

            def description(self):
                return "Greets a person."

            def parameters(self):
                return {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}

            async def execute(self, who: str) -> ToolResult:
                return ToolResult(True, f"Hello, {who}!")

    A registry converts it to a `Tool`: the output becomes the result, and a result without success raises ToolFailed,
    which an agent loop reports to the model.

    Attributes:
        requires_confirmation: Whether a person must approve each call, or a method `requires_confirmation(self,
            arguments, ctx)`; see `Tool`.
        timeout: Time limit of one attempt in seconds; None means no limit.
        retries: Attempts after the first attempt, if an attempt raises an error or returns no success.
        retry_delay: Seconds before each retry.
        retry_on: Error types that are retried.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import ToolRegistry
        >>> from agent_runtime_core.tools import BaseTool, ToolResult
        >>> class Greet(BaseTool):
        ...     def name(self):
        ...         return "greet"
        ...     def description(self):
        ...         return "Greets a person."
        ...     def parameters(self):
        ...         return {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
        ...     async def execute(self, who: str) -> ToolResult:
        ...         return ToolResult(True, f"Hello, {who}!")
        >>> tools = ToolRegistry()
        >>> tools.register(Greet())
        >>> asyncio.run(tools.execute("greet", {"who": "Ada"}))
        'Hello, Ada!'
    """

    has_side_effects: bool = False
    requires_confirmation: Any = False
    timeout: float | None = None
    retries: int = 0
    retry_delay: RetryDelay = 1.0
    retry_on: RetryOn = Exception

    @abstractmethod
    def name(self) -> str:
        """Return the name by which a model calls the tool."""

    @abstractmethod
    def description(self) -> str:
        """Return what the tool does, for a model to read."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments."""

    @abstractmethod
    async def execute(self, *args: Any, **kwargs: Any) -> ToolResult:
        """Run the tool. A plain function runs in a thread.

        A subclass declares its own parameters, which are passed by name. A parameter that is annotated `RunContext`
        receives the context of the run.

        Args:
            *args: Not passed; a subclass declares its parameters instead.
            **kwargs: The arguments by name.

        Returns:
            The result.
        """

    def as_tool(self) -> Tool:
        """Return this tool as a `Tool`, as agents, loops and registries use it."""
        return Tool(
            name=self.name(),
            description=self.description(),
            parameters=self.parameters(),
            handler=_handler(self),
            has_side_effects=self.has_side_effects,
            requires_confirmation=self.requires_confirmation,
            timeout=self.timeout,
            retries=self.retries,
            retry_delay=self.retry_delay,
            retry_on=self.retry_on,
        )


def output_of(name: str, result: Any) -> Any:
    """Return the output of a ToolResult, which a plain function may return as well, and any other result unchanged.

    The tool ran, so a result of another type is no error: after an error, the model could repeat the call.
    """
    if not isinstance(result, ToolResult):
        return result
    if not result.success:
        raise ToolFailed(name, result.error or "no reason given")
    return result.output


def _handler(tool: BaseTool) -> Callable[..., Any]:
    async def awaited(result: Any) -> Any:
        return output_of(tool.name(), await result)

    # functools.wraps, so that arguments are bound to the parameters of `execute` itself.
    @functools.wraps(tool.execute)
    def handler(*args: Any, **kwargs: Any) -> Any:
        result: Any = tool.execute(*args, **kwargs)
        return awaited(result) if inspect.isawaitable(result) else output_of(tool.name(), result)

    @functools.wraps(tool.execute)
    async def async_handler(*args: Any, **kwargs: Any) -> Any:
        return await handler(*args, **kwargs)

    return async_handler if inspect.iscoroutinefunction(tool.execute) else handler
