"""A tool that answers from a script and notes how it was called."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InvalidArgument, brief
from ..tools.schema import context_parameter
from ..tools.tool import Tool

__all__ = ["MockTool"]

_UNSET: Any = object()


class MockTool(Tool):
    """A tool that gives `result` every time, or `results` one after another, or what `fn(**arguments)` gives.

    An exception as a result is raised. `results` that are used up are an AssertionError. Without
    `parameters` the tool takes whatever `fn` takes, or else any arguments at all. Its handler is a
    coroutine function unless `fn` is a plain one. `calls` are the arguments of each call, without the
    context; `options` are those of Tool.
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
        requires_confirmation: bool = False,
        **options: Any,
    ) -> None:
        if (result is not _UNSET) + (results is not None) + (fn is not None) > 1:
            raise InvalidArgument(f"MockTool {brief(name)} takes one of result=, results= and fn=")
        self.calls: list[dict[str, Any]] = []
        self._result = None if result is _UNSET else result
        self._results = None if results is None else list(results)
        handler = self._scripted if fn is None else self._noting(fn)
        if parameters is None:
            parameters = _ANYTHING if fn is None else Tool.from_function(fn, name=name).parameters
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
        return len(self.calls)

    def assert_called_with(self, **arguments: Any) -> None:
        """AssertionError unless the last call had exactly these arguments."""
        if not self.calls:
            raise AssertionError(f"{self.name!r} was never called, so not with {arguments!r}")
        if self.calls[-1] != arguments:
            earlier = "; an earlier call was" if arguments in self.calls else ""
            raise AssertionError(
                f"the last of {self.call_count} calls of {self.name!r} was with {self.calls[-1]!r}, "
                f"not with {arguments!r}{earlier}"
            )

    def reset(self) -> None:
        """Forget the calls, and begin the results again."""
        self.calls.clear()

    async def _scripted(self, **arguments: Any) -> Any:
        self.calls.append(copy.deepcopy(arguments))
        result = self._result
        if self._results is not None:
            if self.call_count > len(self._results):
                raise AssertionError(f"{self.name!r} has {len(self._results)} results and call {self.call_count} came")
            result = self._results[self.call_count - 1]
        if isinstance(result, BaseException):
            raise result
        return copy.deepcopy(result)

    def _noting(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        context = context_parameter(fn)

        def note(arguments: dict[str, Any]) -> None:
            self.calls.append(copy.deepcopy({name: value for name, value in arguments.items() if name != context}))

        @functools.wraps(fn)
        def plain(**arguments: Any) -> Any:
            note(arguments)
            return fn(**arguments)

        @functools.wraps(fn)
        async def awaited(**arguments: Any) -> Any:
            note(arguments)
            return await fn(**arguments)

        return awaited if inspect.iscoroutinefunction(fn) else plain


_ANYTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
