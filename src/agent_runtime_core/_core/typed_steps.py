"""Types of the methods that call a function as a step: the result is of the type that the function returns.

A method is written once, with its parameters and its docstring. Its decorator gives it the overloads below for type
checkers, and returns it unchanged. Arguments are not checked, because a function may have a parameter for the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, TypeVarTuple, Unpack, overload

F = TypeVar("F")


class AttemptOptions(TypedDict, total=False):
    """The options that a type checker knows for each method."""

    retries: int
    retry_delay: float
    timeout: float | None
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
    backoff: Callable[[int, Any], float] | None
    on_in_doubt: str | Callable[..., Any]
    max_result_bytes: int


def takes_options_of(method: Callable[..., Any], without: Container[str] = ()) -> Callable[[F], F]:
    """Let `help()` and `inspect.signature` show the options of `method` instead of `**options`.

    Args:
        method: The method that lists the options. A method without a docstring gets its docstring.
        without: Names of options that are not taken.
    """

    def shown(taker: Any) -> Any:
        own = inspect.signature(taker)
        listed = {each.name: each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD}
        for each in inspect.signature(method).parameters.values():
            if each.kind is each.KEYWORD_ONLY and each.name not in without:
                listed.setdefault(each.name, each)
        taker.__signature__ = own.replace(parameters=list(listed.values()))
        taker.__doc__ = taker.__doc__ or method.__doc__
        return taker

    return shown


def _unchanged(method: F) -> F:
    return method


if TYPE_CHECKING:
    I = TypeVar("I")  # noqa: E741 - an item
    R = TypeVar("R")
    T = TypeVar("T")
    T_co = TypeVar("T_co", covariant=True)
    Ts = TypeVarTuple("Ts")

    class _Partial(Protocol[T_co]):
        """`functools.partial`; Pyright matches a partial coroutine function with several of the other overloads."""

        @property
        def func(self) -> Callable[..., object]: ...
        def __call__(self, /, *args: Any, **kwargs: Any) -> T_co: ...

    class _StepOf(AttemptOptions, total=False):
        """The options of `step`, except `returns`."""

        key: str | None
        on_changed_input: str
        description: str | None

    class _Step(_StepOf, total=False):
        returns: None

    class _MapOf(AttemptOptions, total=False):
        """The options of `map`, except `returns`."""

        key: Callable[[Any], str] | None

    class _Map(_MapOf, total=False):
        returns: None

    # In this order: `returns` decides, then a function whose parameters match, so that a generic function is resolved,
    # then any function. The type of a union in `returns` cannot be expressed yet.

    # fmt: off
    class _Steps(Protocol):
        @overload
        async def step(
            self, name: str, fn: Callable[..., object], *args: Any, returns: type[R], **kw: Unpack[_StepOf],
        ) -> R: ...
        @overload
        async def step(self, name: str, fn: _Partial[Awaitable[T]], *args: Any, **kw: Unpack[_Step]) -> T: ...
        @overload
        async def step(self, name: str, fn: Callable[[*Ts], Awaitable[T]], *args: *Ts, **kw: Unpack[_Step]) -> T: ...
        @overload
        async def step(self, name: str, fn: Callable[[*Ts], T], *args: *Ts, **kw: Unpack[_Step]) -> T: ...
        @overload
        async def step(self, name: str, fn: Callable[..., Awaitable[T]], *args: Any, **kw: Unpack[_Step]) -> T: ...
        @overload
        async def step(self, name: str, fn: Callable[..., T], *args: Any, **kw: Unpack[_Step]) -> T: ...
        @overload
        async def step(
            self, name: str, fn: Callable[..., object], *args: Any, returns: Any, **kw: Unpack[_StepOf],
        ) -> Any: ...

    class _BlockingSteps(Protocol):
        @overload
        def step(
            self, name: str, fn: Callable[..., object], *args: Any, returns: type[R], **kw: Unpack[_StepOf],
        ) -> R: ...
        @overload
        def step(self, name: str, fn: _Partial[Awaitable[T]], *args: Any, **kw: Unpack[_Step]) -> T: ...
        @overload
        def step(self, name: str, fn: Callable[[*Ts], Awaitable[T]], *args: *Ts, **kw: Unpack[_Step]) -> T: ...
        @overload
        def step(self, name: str, fn: Callable[[*Ts], T], *args: *Ts, **kw: Unpack[_Step]) -> T: ...
        @overload
        def step(self, name: str, fn: Callable[..., Awaitable[T]], *args: Any, **kw: Unpack[_Step]) -> T: ...
        @overload
        def step(self, name: str, fn: Callable[..., T], *args: Any, **kw: Unpack[_Step]) -> T: ...
        @overload
        def step(
            self, name: str, fn: Callable[..., object], *args: Any, returns: Any, **kw: Unpack[_StepOf],
        ) -> Any: ...

    class _Maps(Protocol):
        @overload
        async def map(
            self, name: str, fn: Callable[..., object], items: Iterable[Any], *, returns: type[R], **kw: Unpack[_MapOf],
        ) -> list[R]: ...
        @overload
        async def map(
            self, name: str, fn: _Partial[Awaitable[T]], items: Iterable[Any], **kw: Unpack[_Map],
        ) -> list[T]: ...
        @overload
        async def map(
            self, name: str, fn: Callable[[I], Awaitable[T]], items: Iterable[I], **kw: Unpack[_Map],
        ) -> list[T]: ...
        @overload
        async def map(self, name: str, fn: Callable[[I], T], items: Iterable[I], **kw: Unpack[_Map]) -> list[T]: ...
        @overload
        async def map(
            self, name: str, fn: Callable[..., Awaitable[T]], items: Iterable[Any], **kw: Unpack[_Map],
        ) -> list[T]: ...
        @overload
        async def map(self, name: str, fn: Callable[..., T], items: Iterable[Any], **kw: Unpack[_Map]) -> list[T]: ...
        @overload
        async def map(
            self, name: str, fn: Callable[..., object], items: Iterable[Any], *, returns: Any, **kw: Unpack[_MapOf],
        ) -> list[Any]: ...

    class _BlockingMaps(Protocol):
        @overload
        def map_sync(
            self, name: str, fn: Callable[..., object], items: Iterable[Any], *, returns: type[R], **kw: Unpack[_MapOf],
        ) -> list[R]: ...
        @overload
        def map_sync(
            self, name: str, fn: _Partial[Awaitable[T]], items: Iterable[Any], **kw: Unpack[_Map],
        ) -> list[T]: ...
        @overload
        def map_sync(
            self, name: str, fn: Callable[[I], Awaitable[T]], items: Iterable[I], **kw: Unpack[_Map],
        ) -> list[T]: ...
        @overload
        def map_sync(self, name: str, fn: Callable[[I], T], items: Iterable[I], **kw: Unpack[_Map]) -> list[T]: ...
        @overload
        def map_sync(
            self, name: str, fn: Callable[..., Awaitable[T]], items: Iterable[Any], **kw: Unpack[_Map],
        ) -> list[T]: ...
        @overload
        def map_sync(self, name: str, fn: Callable[..., T], items: Iterable[Any], **kw: Unpack[_Map]) -> list[T]: ...
        @overload
        def map_sync(
            self, name: str, fn: Callable[..., object], items: Iterable[Any], *, returns: Any, **kw: Unpack[_MapOf],
        ) -> list[Any]: ...

    # fmt: on
    def _typed_as(method: F) -> Callable[[Callable[..., Any]], F]: ...

    typed_step = _typed_as(_Steps.step)
    typed_blocking_step = _typed_as(_BlockingSteps.step)
    typed_map = _typed_as(_Maps.map)
    typed_blocking_map = _typed_as(_BlockingMaps.map_sync)
else:
    typed_step = typed_blocking_step = typed_map = typed_blocking_map = _unchanged
