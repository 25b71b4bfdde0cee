"""Context variables that tasks set for a while, and the one that names the run a task belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Coroutine, Iterator
from contextvars import Context, ContextVar, Token
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Run(Protocol):
    """What the tasks of a claimed run name in their contexts."""

    #: Tasks that wait until other tasks of the run have done something.
    queued: set[asyncio.Task[Any]]


#: The claimed run whose code this is. None for helper tasks of the library; unset outside of runs.
RUN: ContextVar[Run | None] = ContextVar("agent_runtime_run")


def current_run() -> Run | None:
    """Return the run that the current task belongs to."""
    return RUN.get(None)


@contextlib.contextmanager
def queued() -> Iterator[None]:
    """Inside the block the current task waits for other tasks of its run: it does no work of its own."""
    run, task = current_run(), asyncio.current_task()
    if run is None or task is None:
        yield
        return
    run.queued.add(task)
    try:
        yield
    finally:
        run.queued.discard(task)


def outside_run() -> Context:
    """Return a copy of the current context that names no run."""
    context = contextvars.copy_context()
    context.run(RUN.set, None)
    return context


def start_helper(work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """Start a task of the library that belongs to no run, whatever run the caller is part of.

    Such a task neither keeps a run from being parked nor is cancelled with it.
    """
    return asyncio.get_running_loop().create_task(work, name=name, context=outside_run())


def restore(variable: ContextVar[Any], token: Token[Any]) -> None:
    """Give a variable the value it had.

    A task that waits for ever, as those that outlive their run do, is collected some day in whoever's context that is:
    nothing is restored there.
    """
    with contextlib.suppress(ValueError):
        variable.reset(token)
