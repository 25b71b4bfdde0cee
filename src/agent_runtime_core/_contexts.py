"""Context variables that tasks set for a while, and the one that names the run a task belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Coroutine
from contextvars import Context, ContextVar, Token
from typing import Any, TypeVar

T = TypeVar("T")

#: The claimed run whose code this is: its `Place`. None for code of the library and for code outside of runs.
RUN: ContextVar[object | None] = ContextVar("agent_runtime_run", default=None)


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
