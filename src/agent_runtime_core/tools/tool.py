"""One function a model may call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

from .._core.validation import is_number
from ..errors import InvalidArgument, brief
from .schema import describe, parameters_of, unbound

__all__ = ["Tool", "ToolDefinition", "tool"]


@dataclass
class Tool:
    """A function with what a model needs to know of it. `parameters` is JSON Schema.

    A tool without side effects may run beside others and again; one that requires confirmation
    waits for a person. One that has no result after `timeout` seconds is given up: a coroutine is
    cancelled, a plain function runs on in its thread. Calling a tool calls its handler.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    handler: Callable[..., Any]
    has_side_effects: bool = False
    requires_confirmation: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise InvalidArgument(
                f"timeout is a number of seconds above 0, or None for no limit, not {brief(self.timeout)}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)

    @classmethod
    def from_function(
        cls,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: dict[str, Any] | None = None,
        has_side_effects: bool = False,
        requires_confirmation: bool = False,
        metadata: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Tool:
        """A tool from a function's name, docstring and type hints (a Google-style "Args:" describes parameters).

        A parameter annotated `RunContext` receives the context and is left out of the schema; so is one that
        functools.partial has bound, which no call can change.
        """
        if not callable(fn):
            raise InvalidArgument(f"{brief(fn)} is no function")
        plain = unbound(fn)
        found = name or getattr(plain, "__name__", "")
        if not found or found == "<lambda>":
            raise InvalidArgument(f"{brief(fn)} has no name that a model could call it by: give name=")
        return cls(
            name=found,
            description=describe(plain)[0] if description is None else description,
            parameters=parameters_of(fn) if parameters is None else parameters,
            handler=fn,
            has_side_effects=has_side_effects,
            requires_confirmation=requires_confirmation,
            metadata={} if metadata is None else metadata,
            timeout=timeout,
        )

    def to_openai_format(self) -> dict[str, Any]:
        """This tool as OpenAI's chat API takes it."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}


ToolDefinition = Tool


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    has_side_effects: bool = False,
    requires_confirmation: bool = False,
    metadata: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Decorate a function, and it is a Tool: `@tool`, or `@tool(timeout=5)` with the options of `from_function`."""
    if fn is None:
        return functools.partial(Tool.from_function, **options)
    return Tool.from_function(fn, **options)
