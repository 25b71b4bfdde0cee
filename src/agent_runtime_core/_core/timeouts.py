"""Wait for a task with a time limit, and abandon a task that does not end when it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any, Final

from ..errors import deciding_error, is_interrupt, text_of
from .context_vars import start_soon
from .log import log
from .run_tasks import frames_of, is_waiting_code

GRACE: Final = 5.0  # seconds in which a cancelled task must end; after that it is abandoned

_abandoned: set[asyncio.Task[Any]] = set()
_when_left: dict[asyncio.Task[Any], Callable[[], object]] = {}  # called when the grace of a task ends
_threads: dict[asyncio.Task[Any], Callable[[], int | None]] = {}  # the thread that a task waits for

#: Waits for a task, at most so many seconds; it may return earlier.
Wait = Callable[[asyncio.Task[Any], float], Awaitable[object]]


def _wait(task: asyncio.Task[Any], seconds: float) -> Awaitable[object]:
    return asyncio.wait({task}, timeout=seconds)


async def done_in_time(task: asyncio.Task[Any], time_left: Callable[[], float], wait: Wait = _wait) -> bool:
    """Wait until `task` is done; return False as soon as `time_left()`, in seconds, is not above 0.

    `time_left` is called each time `wait` returns, so the limit can be paused, extended and cut short.
    """
    while not task.done():
        if (left := time_left()) <= 0:
            return False
        await wait(task, left)
    return True


async def ended_in_time(
    task: asyncio.Task[Any], time_left: Callable[[], float], what: str, wait: Wait = _wait, grace: float | None = None
) -> bool:
    """`done_in_time` for a task that must not outlive the wait: it is cancelled when its time is up, or the caller is.

    Args:
        task: The task.
        time_left: Returns the seconds that are left.
        what: Names the task in the log if it does not end.
        wait: Waits for the task.
        grace: Seconds in which the cancelled task must end. None means `GRACE`.
    """
    try:
        if await done_in_time(task, time_left, wait):
            return True
    except asyncio.CancelledError:
        task.cancel()
        await wait_cancelled((task,), what, grace)
        raise
    task.cancel()
    await wait_cancelled((task,), what, grace)
    return False


def contained(error: BaseException, where: str) -> BaseException:
    """Return what code that a runner executes fails with, if it raises `error`.

    `sys.exit`, argparse and test frameworks raise errors that are no Exception. In a task they would end the event
    loop, and with it all runs of the process. So such an error becomes a RuntimeError. Ctrl-C (KeyboardInterrupt in the
    main thread), a cancellation and the end of the event loop stay what they are.

    Args:
        error: The error that the code raised.
        where: Names the code in the message.
    """
    cause = deciding_error(error)
    if isinstance(cause, (Exception, asyncio.CancelledError, GeneratorExit)) or is_interrupt(cause):
        return error
    text = f"{type(cause).__name__}: {text_of(cause)}".rstrip(": ")
    return RuntimeError(f"{where} must not end the process, got {text}. Handle it in the code")


async def contain(call: Callable[[], Awaitable[Any]], where: str) -> Any:
    """Return the result of code that a runner executes in a task; see `contained` for what it raises."""
    try:
        return await call()
    except BaseException as raised:
        if (error := contained(raised, where)) is raised:
            raise
        raise error from raised


async def with_time_limit(awaitable: Awaitable[Any], seconds: float, what: str, late: Exception | None = None) -> Any:
    """Return the result of `awaitable`; after `seconds` cancel it and raise `late`, or TimeoutError if that is None."""
    task, loop = start_soon(awaitable), asyncio.get_running_loop()
    ends_at = loop.time() + seconds
    if await ended_in_time(task, lambda: ends_at - loop.time(), what):
        return task.result()
    raise late or TimeoutError(f"timed out after {seconds:g} s")


async def wait_cancelled(
    tasks: Collection[asyncio.Task[Any]], what: str, grace: float | None = None
) -> set[asyncio.Task[Any]]:
    """Wait for cancelled tasks to end, and return those that did not within `grace` seconds; None means `GRACE`.

    These are abandoned: they are kept alive, and the log names them.
    """
    grace = GRACE if grace is None else grace
    # Before the wait, which may be cancelled itself.
    for task in tasks:
        _abandoned.add(task)
        task.add_done_callback(_retrieve)
    try:
        _, left = await asyncio.wait(tasks, timeout=grace)
    except asyncio.CancelledError:  # the caller waits no longer
        _leave(tasks)
        raise
    if left:
        places = ", ".join(place_of(task) for task in left)  # before they are left, which may move them
        _leave(left)
        log.warning(
            "%s did not stop within %g s of being cancelled: abandoned, it may still have effects. It is in %s",
            what,
            grace,
            places,
        )
    return left


def place_of(task: asyncio.Task[Any]) -> str:
    """Return the name of a task, and the file, line and function where it, or the thread that it waits for, is now."""
    find = _threads.get(task)
    frame = None if find is None else sys._current_frames().get(find() or 0)
    frames = frames_of(task.get_coro())
    if frame is not None:
        frames = [each for each, _ in traceback.walk_stack(frame)][::-1]
    if not frames:
        return task.get_name()
    frame = next((each for each in reversed(frames) if not is_waiting_code(each)), frames[-1])
    return f"{task.get_name()} at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def is_abandoned(task: asyncio.Task[Any]) -> bool:
    """Return whether a task was passed to `wait_cancelled` and still runs."""
    return task in _abandoned


@contextlib.contextmanager
def when_left(
    task: asyncio.Task[Any], leave: Callable[[], object], thread: Callable[[], int | None] = lambda: None
) -> Iterator[None]:
    """Inside the block, call `leave` if the task is cancelled and outlives its grace, or no caller awaits it longer.

    Args:
        task: The task.
        leave: What to call.
        thread: Returns the identifier of the thread that the task waits for.
    """
    outer = _when_left.get(task)
    _when_left[task], _threads[task] = leave, thread
    try:
        yield
    finally:
        _threads.pop(task, None)
        if outer is None:
            del _when_left[task]
        else:
            _when_left[task] = outer


def cancellations() -> int:
    """Return how many cancellations of the current task were requested and not taken back."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def replaced_cancellation(error: BaseException) -> asyncio.CancelledError:
    """Return the cancellation that the code of a task replaced by `error`.

    `asyncio.timeout` and `TaskGroup` only recognize a CancelledError, and anyio only an error with its text.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, asyncio.CancelledError):
        cause = cause.__context__
    return asyncio.CancelledError(*(() if cause is None else cause.args))


def log_abandoned_thread(what: str) -> asyncio.Handle:
    """Log after `GRACE` seconds that a cancelled call still runs in its thread, unless the handle is cancelled."""
    return asyncio.get_running_loop().call_later(
        GRACE,
        log.warning,
        "%s did not stop within %g s of being cancelled: it runs on in its thread and may still have effects",
        what,
        GRACE,
    )


def _leave(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if not task.done() and (leave := _when_left.get(task)) is not None:
            leave()


def _retrieve(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # else it would be reported as never retrieved
