"""A tool with scripted results that records its calls."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from .._core.validation import Shown, must
from ..errors import brief
from ..tools.confirmation import Confirmation
from ..tools.schema import context_parameter
from ..tools.tool import Tool

__all__ = ["MockTool"]

_UNSET: Any = object()


class MockTool(Tool):
    """A tool that always returns `result`, or `results` in order, or the value of `fn(**arguments)`.

    A result that is an exception is raised. A call after the last of `results` raises AssertionError. `calls` contains
    the arguments of each call, without the context. The handler is a coroutine function, unless `fn` is a plain
    function.

    Args:
        name: The name of the tool.
        result: What every call returns.
        results: What the calls return, in order.
        fn: Computes the result from the arguments.
        description: The description for the model; by default taken from `fn`.
        parameters: JSON Schema; by default taken from `fn`, or without `fn` a schema that accepts any arguments.
        has_side_effects: As in `Tool`.
        requires_confirmation: As in `Tool`.
        options: Passed to Tool.

    Raises:
        InvalidArgument: More than one of `result`, `results` and `fn` is passed.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import MockTool
        >>> from agent_runtime_core.tools import ToolRegistry
        >>> tools, weather = ToolRegistry(), MockTool("weather", result="sunny")
        >>> tools.register(weather)
        >>> asyncio.run(tools.execute("weather", {"city": "Ulm"}))
        'sunny'
        >>> weather.assert_called_with(city="Ulm")
    """

    def __init__(
        self,
        name: str,
        *,
        result: Any = _UNSET,
        results: Iterable[Any] | None = None,
        fn: Callable[..., Any] | None = None,
        description: str | None = None,
        parameters: dict[str, Any] | None = None,
        has_side_effects: bool = False,
        requires_confirmation: Confirmation = False,
        **options: Any,
    ) -> None:
        if (result is not _UNSET) + (results is not None) + (fn is not None) > 1:
            passed = {"result": result is not _UNSET, "results": results is not None, "fn": fn is not None}
            got = Shown(" and ".join(each for each, is_passed in passed.items() if is_passed))
            raise must(
                f"MockTool {brief(name)}", "have at most one of result=, results= and fn=", got, "Pass one of them"
            )
        self.calls: list[dict[str, Any]] = []
        self._result = None if result is _UNSET else result
        self._results = None if results is None else list(results)
        handler = self._scripted if fn is None else self._recording(fn)
        if parameters is None:
            parameters = _ANY_ARGUMENTS if fn is None else Tool.from_function(fn, name=name).parameters
        if description is None:
            description = f"{name} (mock)" if fn is None else Tool.from_function(fn, name=name).description
        super().__init__(
            name=name,
            description=description,
            parameters=copy.deepcopy(parameters),
            handler=handler,
            has_side_effects=has_side_effects,
            requires_confirmation=requires_confirmation,
            **options,
        )

    def __repr__(self) -> str:
        return f"MockTool({self.name!r}, {self.call_count} calls)"

    @property
    def call_count(self) -> int:
        """How often the tool was called."""
        return len(self.calls)

    def assert_called_with(self, **arguments: Any) -> None:
        """Raise AssertionError unless the last call had exactly these arguments.

        Args:
            **arguments: The arguments.

        Raises:
            AssertionError: The tool was not called, or the last call had other arguments.
        """
        if not self.calls:
            raise AssertionError(f"MockTool {self.name!r} must be called with {arguments!r}, got no call")
        if self.calls[-1] != arguments:
            earlier = ". An earlier call had these arguments" if arguments in self.calls else ""
            raise AssertionError(
                f"the last of {self.call_count} calls of MockTool {self.name!r} must have the arguments {arguments!r}, "
                f"got {self.calls[-1]!r}{earlier}"
            )

    def reset(self) -> None:
        """Delete the recorded calls and restart with the first result."""
        self.calls.clear()

    async def _scripted(self, **arguments: Any) -> Any:
        self.calls.append(copy.deepcopy(arguments))
        result = self._result
        if self._results is not None:
            if self.call_count > len(self._results):
                raise AssertionError(
                    f"MockTool {self.name!r} must have a result for each call, got {len(self._results)} for "
                    f"{self.call_count} calls. Add more to results="
                )
            result = self._results[self.call_count - 1]
        if isinstance(result, BaseException):
            raise result
        return copy.deepcopy(result)

    def _recording(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        context = context_parameter(fn)

        def record(arguments: dict[str, Any]) -> None:
            self.calls.append(copy.deepcopy({name: value for name, value in arguments.items() if name != context}))

        @functools.wraps(fn)
        def plain(**arguments: Any) -> Any:
            record(arguments)
            return fn(**arguments)

        @functools.wraps(fn)
        async def awaited(**arguments: Any) -> Any:
            record(arguments)
            return await fn(**arguments)

        return awaited if inspect.iscoroutinefunction(fn) else plain


_ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
