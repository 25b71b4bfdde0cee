"""Daemon threads for blocking functions. None keeps a process alive."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ..errors import PortalMisuse, StorageBusy

T = TypeVar("T")

IDLE_THREADS = 8

#: The event loop that a function in a thread works for.
HOME_LOOP: contextvars.ContextVar[asyncio.AbstractEventLoop] = contextvars.ContextVar("agent_runtime_home")


class AgentContext(Protocol):
    """The context of an agent whose plain code runs in a thread."""

    def runs_on(self, loop: asyncio.AbstractEventLoop, /) -> bool:
        """Return whether this is the event loop of the run."""

    def call_on_loop(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Await a coroutine function on the event loop of the run, and return its result."""

    def for_thread(self, args: Sequence[Any], /) -> Sequence[Any]:
        """Return the arguments of plain code: the context in its synchronous form, others as they are."""


#: The context of the agent whose plain code runs in a thread. It is also set in what that code calls on the loop.
AGENT_CONTEXT: contextvars.ContextVar[AgentContext] = contextvars.ContextVar("agent_runtime_agent_context")

Job = Callable[[], None]

#: Wraps the job of a thread. The simulator sets it to learn when the job ends.
AROUND: contextvars.ContextVar[Callable[[Job], Job] | None] = contextvars.ContextVar(
    "agent_runtime_around", default=None
)


def refuse_at_exit(name: str, fn: object) -> None:
    """Raise PortalMisuse while the interpreter shuts down."""
    # Daemon threads have stopped by then, so the call would wait forever.
    if sys.is_finalizing():
        raise PortalMisuse(
            f"{name}({name_of(fn)}) must be called before the interpreter shuts down. "
            "Close runs and runners in a with block, or in a function for atexit.register"
        )


def name_of(fn: object) -> str:
    """Return the name of a function, as errors show it."""
    return getattr(fn, "__qualname__", repr(fn))


class _Threads:
    """Daemon threads that run one blocking function at a time; grows as needed, keeps a few idle."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, job: Callable[[], object]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                threading.Thread(target=self._loop, args=(self._work,), name="agent-runtime-step", daemon=True).start()
        self._work.put(job)

    def _loop(self, work: SimpleQueue[Callable[[], object]]) -> None:
        while True:
            work.get()()
            with self._lock:
                if self._idle >= IDLE_THREADS:
                    break
                self._idle += 1
        _close_event_loop()


def _close_event_loop() -> None:
    """Close the event loop that code made for this thread and left open, as `run_sync` of some frameworks does."""
    with contextlib.suppress(RuntimeError):  # there is none
        asyncio.get_event_loop().close()


_threads = _Threads()


def _forked() -> None:
    """Drop the threads of the parent process. They do not exist in the child, where their locks may be held forever."""
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def run_in_thread(job: Callable[[], object]) -> None:
    """Run a job in a daemon thread."""
    _threads.run(job)


def started(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread for an engine.

    Raises:
        StorageBusy: The system cannot start another thread now.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise StorageBusy(
            f"{error}. Nothing was written. Try again when this process may have more memory or threads"
        ) from error
    return thread


async def in_thread(fn: Callable[..., T], *args: Any, left: Callable[[], asyncio.Handle] | None = None) -> T:
    """Run a blocking function in a daemon thread, with this task's context variables.

    A cancellation ends the wait, not the thread. Then `left` is called, and the handle that it returns is cancelled
    when the thread ends.

    Args:
        fn: The function.
        *args: Its arguments.
        left: Called if the wait is cancelled.

    Returns:
        The result.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core.portal import in_thread
        >>> asyncio.run(in_thread(sum, [1, 2, 3]))
        6
    """
    refuse_at_exit("in_thread", fn)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    abandoned: asyncio.Handle | None = None
    context = contextvars.copy_context()
    context.run(HOME_LOOP.set, loop)

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            if abandoned is not None:
                abandoned.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def job() -> None:
        result, error = None, None
        try:
            result = context.run(fn, *args)
        except BaseException as failure:  # noqa: BLE001 - raised to the awaiting task
            error = RuntimeError(f"StopIteration: {failure}") if isinstance(failure, StopIteration) else failure
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed, so no task waits

    around = AROUND.get()
    _threads.run(job if around is None else around(job))
    try:
        return await future
    except asyncio.CancelledError:
        if left is not None and future.cancelled():
            abandoned = left()
        raise
