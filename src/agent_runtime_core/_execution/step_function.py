"""Call the function of a step: on the event loop or in a thread, with the context if it has a parameter for it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

from .._core.codec.json import MAX_RESULT
from .._core.codec.type_hints import returns_of
from .._core.codec.typed import codec_for
from .._core.threads import AGENT_CONTEXT, in_thread
from .._core.timeouts import log_abandoned_thread
from .._core.validation import must
from ..tools.schema import context_parameter, place_context
from .step_scope import CURRENT_STEP


@dataclass(repr=False, eq=False)
class StepFunction:
    """How to call a step function and to encode its result.

    Attributes:
        is_async: It is a coroutine function. Others run in a thread.
        encode: Encodes the result.
        decode: Decodes the result.
        takes_context: Whether it has a parameter for the context. None until `call` needs to know: steps of a list get
            the context as their first argument, and many of them never run.
    """

    is_async: bool
    encode: Callable[[object], str]
    decode: Callable[[str], object]
    takes_context: bool | None = None

    def takes_context_arg(self, fn: Callable[..., Any]) -> bool:
        """Return whether `fn`, the function that this describes, has a parameter for the context."""
        if self.takes_context is None:
            self.takes_context = context_parameter(fn) is not None
        return self.takes_context


#: For functions that contain nothing to inspect: neither annotations nor attributes.
_PLAIN, _PLAIN_ASYNC = (StepFunction(is_async, *codec_for(None), takes_context=False) for is_async in (False, True))
_known_functions: dict[ReferenceType[Any], StepFunction] = {}  # an entry is removed with its function


def step_function(fn: Callable[..., Any], returns: Any = None, max_result_bytes: int = MAX_RESULT) -> StepFunction:
    """Return how to call `fn`.

    Args:
        fn: The function.
        returns: The type of its result, instead of its annotation.
        max_result_bytes: The limit for its encoded result.
    """
    function = cached_step_function(fn)
    if returns is None and max_result_bytes == MAX_RESULT:
        return function
    to_text, from_text = codec_for(returns_of(fn) if returns is None else returns, max_result_bytes)
    # `takes_context` is computed first, so that it is cached for all copies.
    return replace(function, encode=to_text, decode=from_text, takes_context=function.takes_context_arg(fn))


def cached_step_function(fn: Callable[..., Any]) -> StepFunction:
    """Return how to call `fn`. Each function is inspected once."""
    key = fn.__func__ if type(fn) is MethodType else fn
    # Most are lambdas and closures, which are new functions in each call, so that no table has them.
    if type(key) is FunctionType and not key.__annotations__ and not key.__dict__:
        return _PLAIN_ASYNC if key.__code__.co_flags & inspect.CO_COROUTINE else _PLAIN
    try:
        known = _known_functions.get(ref(key))
        if known is None:
            known = _known_functions[ref(key, _known_functions.pop)] = _inspect(fn)
    except TypeError:  # it has no weak references, or is not hashable
        return _inspect(fn)
    return known


def _inspect(fn: Callable[..., Any]) -> StepFunction:
    if not callable(fn):
        fix = "Pass the function and its arguments without calling it, as in ctx.step('fetch', fetch, 1)"
        raise must("fn", "be a function", fn, fix)
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
    to_text, from_text = codec_for(returns_of(fn))
    return StepFunction(is_async, to_text, from_text)


def call(fn: Callable[..., Any], function: StepFunction, args: Sequence[Any], ctx: Any) -> Awaitable[Any]:
    """Call a step function once and return the awaitable of its result."""
    if function.takes_context is not False and function.takes_context_arg(fn):
        args = place_context(fn, ctx, args)
    if function.is_async:
        made: Awaitable[Any] = fn(*args)
        return made
    return call_in_thread(fn, args)


async def call_in_thread(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run a plain step function in a thread. If it returns an awaitable, await that on the event loop."""

    def abandoned() -> asyncio.Handle:
        scope = CURRENT_STEP.get()
        what = f"{getattr(fn, '__qualname__', 'a step')}()" if scope is None else f"step {scope.name!r}"
        return log_abandoned_thread(what)

    if (agent := AGENT_CONTEXT.get(None)) is not None:
        args = agent.for_thread(args)
    result = await in_thread(fn, *args, left=abandoned)
    return await result if inspect.isawaitable(result) else result
