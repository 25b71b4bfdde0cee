"""How the function of a step is called: on the loop or in a thread, with the context where it asks for it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast
from weakref import ReferenceType, ref

from .._core.codec.json import MAX_RESULT
from .._core.codec.type_hints import returns_of
from .._core.codec.typed import codec_for
from .._core.threads import in_thread
from .._core.timeouts import log_abandoned_thread
from ..errors import InvalidArgument, brief
from ..tools.schema import context_parameter, place_context
from .step_scope import CURRENT_STEP


@dataclass(repr=False, eq=False)
class StepFunction:
    """How to call a step function: on the loop or in a thread, with the context where it asks for it."""

    is_async: bool
    encode: Callable[[object], str]
    decode: Callable[[str], object]
    #: None until `call` wants to know: the steps of a list get the context by place, and many are never called.
    takes_context: bool | None = None

    def takes_context_arg(self, fn: Callable[..., Any]) -> bool:
        """Whether `fn`, which this is of, has a parameter for the context."""
        if self.takes_context is None:
            self.takes_context = context_parameter(fn) is not None
        return self.takes_context


_callees: dict[ReferenceType[Any], StepFunction] = {}  # of functions, as long as they live


def step_function(fn: Callable[..., Any], returns: Any = None, max_result_bytes: int = MAX_RESULT) -> StepFunction:
    """How to call that function; with `returns`, or a size of its results, they are written and read so."""
    how = cached_step_function(fn)
    if returns is None and max_result_bytes == MAX_RESULT:
        return how
    to_text, from_text = codec_for(returns_of(fn) if returns is None else returns, max_result_bytes)
    # Asked before, so that not each of the copies has to find out.
    return replace(how, encode=to_text, decode=from_text, takes_context=how.takes_context_arg(fn))


def cached_step_function(fn: Callable[..., Any]) -> StepFunction:
    """`callee(fn)` without overrides, looked at once for each function."""
    key = fn.__func__ if type(fn) is MethodType else fn
    try:
        known = _callees.get(ref(key))
        if known is None:
            known = _callees[ref(key, _callees.pop)] = _inspect(fn)
    except TypeError:  # nothing can refer to it weakly, or find it again
        return _inspect(fn)
    return known


def _inspect(fn: Callable[..., Any]) -> StepFunction:
    if not callable(fn):
        raise InvalidArgument(
            f"a step function is callable, not {brief(fn)}: pass the function and its arguments, as in "
            "ctx.step('fetch', fetch, 1)"
        )
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
    to_text, from_text = codec_for(returns_of(fn))
    return StepFunction(is_async, to_text, from_text)


def call(fn: Callable[..., Any], how: StepFunction, args: Sequence[Any], ctx: Any) -> Awaitable[Any]:
    """Call a step function once: what to await."""
    if how.takes_context is not False and how.takes_context_arg(fn):
        args = place_context(fn, ctx, args)
    if how.is_async:
        return cast("Awaitable[Any]", fn(*args))
    return call_in_thread(fn, args)


async def call_in_thread(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run a plain step function in a thread, and await what it gives if that is awaitable."""

    def left() -> asyncio.Handle:
        frame = CURRENT_STEP.get()
        what = f"{getattr(fn, '__qualname__', 'a step')}()" if frame is None else f"step {frame.name!r}"
        return log_abandoned_thread(what)

    result = await in_thread(fn, *args, left=left)
    return await result if inspect.isawaitable(result) else result
