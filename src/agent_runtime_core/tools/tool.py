"""A function that a model may call."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

from .._core.json_schema import require_references
from .._core.validation import Shown, is_number, must
from ..errors import NotSupported
from .confirmation import Confirmation, check_confirmation
from .names import check_name
from .retries import RetryDelay, RetryOn, check_retries
from .schema import describe, parameters_of, unbound

__all__ = ["Tool", "ToolDefinition", "tool"]


def no_handler(**arguments: Any) -> Any:
    """Replaces the handler of a tool that only describes itself to a planner or a model."""


@dataclass
class Tool:
    """A function, with the description that a model needs to call it.

    Calling a tool calls its handler. A tool without a handler only describes a tool: `NotSupported` is raised when it
    is executed.

    Args:
        name: The name by which a model calls it: at most 64 letters, digits, "_" and "-". `tool_name` converts others.
        description: What it does, for the model.
        parameters: JSON Schema of its arguments.
        handler: The function; by default there is none.
        has_side_effects: False means that calls may run concurrently and may be repeated.
        requires_confirmation: Whether a person must approve each call, or a function `condition(arguments, ctx)`, plain
            or async, that decides for each call: False asks no person, True asks, and text is the question.
        metadata: Further data of the application.
        timeout: Time limit of one attempt in seconds, or None. After it a coroutine is cancelled; a plain function
            continues in its thread, and its result is ignored.
        retries: Attempts after the first attempt. Each attempt of a tool with side effects uses the same idempotency
            key.
        retry_delay: Seconds before each retry, or a function such as `Backoff()`.
        retry_on: Error types that are retried, or a function that decides for an error. Invalid arguments, and errors
            that end the run, are never retried.

    Raises:
        InvalidArgument: The name is invalid, a `$ref` in the parameters names nothing, `timeout` is not a number above
            0, `requires_confirmation` is neither a bool nor a function, or a setting of the retries is invalid.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    handler: Callable[..., Any] = no_handler
    has_side_effects: bool = False
    requires_confirmation: Confirmation = False
    metadata: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    retries: int = 0
    retry_delay: RetryDelay = 1.0
    retry_on: RetryOn = Exception

    def __post_init__(self) -> None:
        check_name(self.name)
        require_references(self.parameters, f"tool {self.name!r}: parameters")
        if self.timeout is not None and not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            constraint = "be a number of seconds above 0, or None for no limit"
            raise must(f"tool {self.name!r}: timeout", constraint, self.timeout)
        check_confirmation(f"tool {self.name!r}", self.requires_confirmation)
        check_retries(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler."""
        require_handler(self)
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
        requires_confirmation: Confirmation = False,
        metadata: dict[str, Any] | None = None,
        timeout: float | None = None,
        retries: int = 0,
        retry_delay: RetryDelay = 1.0,
        retry_on: RetryOn = Exception,
    ) -> Tool:
        """Create a tool from a function's name, docstring and type hints.

        The docstring describes the parameters, in the style of Google, NumPy or Sphinx. A parameter annotated
        `RunContext` receives the context and is not part of the schema, nor is a parameter that functools.partial
        binds.

        Args:
            fn: The function or coroutine function.
            name: By default the name of the function.
            description: By default the docstring without its sections.
            parameters: JSON Schema of the arguments, by default from the type hints.
            has_side_effects: See `Tool`.
            requires_confirmation: See `Tool`.
            metadata: See `Tool`.
            timeout: See `Tool`. Seconds, or None for no limit.
            retries: See `Tool`.
            retry_delay: See `Tool`. Seconds, or a function.
            retry_on: See `Tool`.

        Returns:
            The tool.

        Raises:
            InvalidArgument: `fn` is not a function, is a generator, has no name, or takes a parameter without a JSON
                Schema.

        Examples:
            >>> from agent_runtime_core import Tool
            >>> def get_weather(city: str) -> str:
            ...     "Get the weather of a city."
            ...     return f"sunny in {city}"
            >>> Tool.from_function(get_weather).parameters["required"]
            ['city']
        """
        if not callable(fn):
            raise must("fn", "be a function", fn, "Pass the function itself, without calling it")
        function = unbound(fn)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            # Calling it would run nothing of it, and the model would learn that the tool ran.
            got = Shown(f"the generator {function.__name__}")
            raise must("a tool", "return its result", got, "Return a list in place of yield")
        tool_name = name or getattr(function, "__name__", "")
        if not tool_name or tool_name == "<lambda>":
            raise must("a tool", "have a name", fn, "Pass name=")
        return cls(
            name=tool_name,
            description=describe(function)[0] if description is None else description,
            parameters=parameters_of(fn) if parameters is None else parameters,
            handler=fn,
            has_side_effects=has_side_effects,
            requires_confirmation=requires_confirmation,
            metadata={} if metadata is None else metadata,
            timeout=timeout,
            retries=retries,
            retry_delay=retry_delay,
            retry_on=retry_on,
        )

    def to_openai_format(self) -> dict[str, Any]:
        """Return this tool in OpenAI's format. The model client adapts the parameters to what its provider accepts.

        Examples:
            >>> from agent_runtime_core import tool
            >>> @tool
            ... def ping() -> str:
            ...     "Answer with pong."
            ...     return "pong"
            >>> ping.to_openai_format()["function"]["description"]
            'Answer with pong.'
        """
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}


ToolDefinition = Tool
"""Another name of `Tool`."""


def require_handler(tool: Tool) -> None:
    """Raise NotSupported for a tool without a handler."""
    if tool.handler is no_handler:
        raise NotSupported(f"tool {tool.name!r} has no handler. Pass handler= to Tool(...)")


def in_doubt_policy(tool: Tool | None) -> str | Callable[..., Any]:
    """Return what to do about a call of which no outcome is known.

    Unless the tool specifies otherwise, the start of a call with side effects is stored, and the call is repeated under
    the same idempotency key.
    """
    policy: str | Callable[..., Any] | None = None if tool is None else tool.metadata.get("on_in_doubt")
    if policy is None:
        return repeat_call if tool is not None and tool.has_side_effects else "retry"
    return policy


def repeat_call() -> None:
    """A check function that returns no outcome, so that the call is repeated."""


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    has_side_effects: bool = False,
    requires_confirmation: Confirmation = False,
    metadata: dict[str, Any] | None = None,
    timeout: float | None = None,
    retries: int = 0,
    retry_delay: RetryDelay = 1.0,
    retry_on: RetryOn = Exception,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function a Tool: `@tool`, or `@tool(timeout=5)` with the options of `Tool.from_function`.

    @tool
    def get_weather(city: str) -> str:
        "Get the weather of a city."
        return f"sunny in {city}"

    tools.register(get_weather)

    Args:
        fn: The function, if the decorator is used without options.
        **options: The options of `Tool.from_function`.

    Returns:
        The tool; with options, a decorator that makes a tool.

    Raises:
        InvalidArgument: As in `Tool.from_function`.

    Examples:
        >>> from agent_runtime_core import tool
        >>> @tool(timeout=5)
        ... def get_weather(city: str) -> str:
        ...     "Get the weather of a city."
        ...     return f"sunny in {city}"
        >>> get_weather.name, get_weather("Ulm")
        ('get_weather', 'sunny in Ulm')
    """
    if fn is None:
        return functools.partial(Tool.from_function, **options)
    return Tool.from_function(fn, **options)
