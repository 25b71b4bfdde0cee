"""A time limit for something awaited, kept even where it does not listen to being cancelled."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Collection
from typing import Any, Final

from .._contexts import start_soon
from .._refusals import is_number
from ..errors import InvalidArgument, ToolTimeout, brief

__all__ = ["GRACE", "ToolTimeout", "left_in_thread", "let_go", "limited", "seconds_or_none"]

log: logging.Logger = logging.getLogger("agent_runtime_core")

GRACE: Final = 5.0  # seconds what is cancelled has to let go before it is abandoned

_abandoned: set[asyncio.Task[Any]] = set()


def seconds_or_none(timeout: Any) -> float | None:
    """`timeout` if it can be one, else InvalidArgument."""
    if timeout is None:
        return None
    if not is_number(timeout) or not 0 < timeout < math.inf:
        raise InvalidArgument(f"timeout is a number of seconds above 0, or None for no limit, not {brief(timeout)}")
    return timeout


async def limited(awaitable: Awaitable[Any], seconds: float, what: str, late: Exception | None = None) -> Any:
    """The result, or after `seconds` the error `late`, else a TimeoutError; a task that will not stop is abandoned."""
    task: asyncio.Task[Any] = start_soon(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await let_go(task, what)
        raise
    if task.done():
        return task.result()
    task.cancel()
    await let_go(task, what)
    raise late or TimeoutError(f"timed out after {seconds:g} s")


async def let_go(task: asyncio.Task[Any], what: str, grace: float = GRACE) -> bool:
    """Wait for a cancelled task to end; after `grace` seconds it is abandoned, kept alive and named in the log."""
    return not await wait_cancelled((task,), what, grace)


async def wait_cancelled(
    tasks: Collection[asyncio.Task[Any]], what: str, grace: float = GRACE
) -> set[asyncio.Task[Any]]:
    """Wait for cancelled tasks to end, and return those that did not within `grace` seconds.

    They are abandoned, kept alive and named in the log.
    """
    # Before the wait, which may be cancelled itself.
    for task in tasks:
        _abandoned.add(task)
        task.add_done_callback(_retrieve)
    _, left = await asyncio.wait(tasks, timeout=grace)
    if left:
        log.warning("%s did not stop within %g s of being cancelled: abandoned, it may still have effects", what, grace)
    return left


def is_abandoned(task: asyncio.Task[Any]) -> bool:
    """Return whether a task was cancelled and is waited for, or was abandoned, by `let_go`."""
    return task in _abandoned


def left_in_thread(what: str) -> asyncio.Handle:
    """Name in the log, after GRACE seconds, a thread that was cancelled; `cancel` it where that has ended by then."""
    # Nobody waits for it: unlike a task, it would not hear that it is to stop.
    return asyncio.get_running_loop().call_later(
        GRACE,
        log.warning,
        "%s did not stop within %g s of being cancelled: it runs on in its thread and may still have effects",
        what,
        GRACE,
    )


def _retrieve(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()
