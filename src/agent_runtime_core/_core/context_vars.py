"""Tasks of this library, and context variables: variables set for a while, and a variable that names a task's run."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, Token
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

#: The code of the factories that `asyncio.create_eager_task_factory` makes (Python 3.12 and later).
_EAGER: Final = getattr(getattr(asyncio, "eager_task_factory", None), "__code__", None)


class Run(Protocol):
    """What the tasks of a claimed run name in their contexts."""

    #: Tasks that wait until other tasks of the run have done something.
    queued: frozenset[asyncio.Task[Any]]

    def cut_off(self) -> bool:
        """Return whether an error that code of the run raises now comes after the stop of its attempt."""

    def lacks_key(self, error: Exception) -> None:
        """Stop the attempt, whose code needs contents that this process cannot decrypt."""


#: The claimed run whose code this is. None for helper tasks of the library; unset outside of runs.
RUN: ContextVar[Run | None] = ContextVar("agent_runtime_run")


class ActiveRun(Protocol):
    """What leads from the code of a run to its context."""

    @property
    def context(self) -> Callable[[], Any]:
        """Return the context of the run; None if it is gone."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the run, after its start."""


#: The run whose code this is, including blocks of `open_run`, whose tasks belong to the caller. None in helper tasks.
ACTIVE_RUN: ContextVar[ActiveRun | None] = ContextVar("agent_runtime_active_run", default=None)


def claimed_run() -> Run | None:
    """Return the run that the current task belongs to."""
    return RUN.get(None)


@contextlib.contextmanager
def queued() -> Iterator[None]:
    """Inside the block the current task waits for other tasks of its run: it does no work itself."""
    run, task = claimed_run(), asyncio.current_task()
    if run is None or task is None:
        yield
        return
    run.queued |= {task}
    try:
        yield
    finally:
        run.queued -= {task}


def outside_run() -> Context:
    """Return a copy of the current context that names no run."""
    context = contextvars.copy_context()
    context.run(RUN.set, None)
    context.run(ACTIVE_RUN.set, None)
    return context


def start_helper(work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """Start a task of the library that belongs to no run, whatever run the caller is part of.

    Such a task neither keeps a run from being parked nor is cancelled with it.
    """
    return start_soon(work, name=name, context=outside_run())


def restore(variable: ContextVar[Any], token: Token[Any]) -> None:
    """Give a variable the value it had.

    A task that never finishes is garbage-collected in the context of another task: nothing is restored there.
    """
    try:  # noqa: SIM105 - each step does this, and suppress() takes as long as the reset
        variable.reset(token)
    except ValueError:
        pass


def start_soon(work: Awaitable[T], *, name: str | None = None, context: Context | None = None) -> asyncio.Task[T]:
    """Return a task whose coroutine starts in the next iteration of the loop, even where tasks are eager.

    An eager task runs before its maker registers it, and cannot enter a context in which its maker runs.
    """
    loop = asyncio.get_running_loop()
    coroutine: Any = work if hasattr(work, "cr_frame") else _awaited(work)
    factory = loop.get_task_factory()
    if factory is not None and _EAGER is not None and getattr(factory, "__code__", None) is _EAGER:
        return asyncio.Task(coroutine, loop=loop, name=name, context=context)
    return loop.create_task(coroutine, name=name, context=context)


async def _awaited(work: Awaitable[T]) -> T:
    return await work
