"""Call async code from threads without an event loop.

`call(async_fn, *args)` runs a coroutine function on the event loop of a dedicated thread and waits for the result. It
works in any thread, even in a thread that runs an event loop, as in Jupyter. `iterate` does the same for an async
generator. `from_thread` calls back into the event loop from a function that runs in a worker thread. All threads are
daemon threads, so they do not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast, overload

from ._core.context_vars import ACTIVE_RUN, start_soon
from ._core.threads import AGENT_CONTEXT, HOME_LOOP, in_thread, name_of, refuse_at_exit, run_in_thread
from ._core.validation import shown
from .errors import PortalMisuse

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["call", "from_thread", "in_thread", "iterate"]

LOOK_UP = 0.5  # seconds between two checks for a signal


class _Portal:
    """The dedicated thread and its event loop, created on the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._run, args=(loop,), name="agent-runtime-portal", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads in this process
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    @property
    def current(self) -> asyncio.AbstractEventLoop | None:
        """The loop, if a call already created it."""
        return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            # SystemExit of one call also stops the loop. It is raised in its caller; the other calls must continue.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()


_portal = _Portal()


def portal_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of `call`."""
    return _portal.loop()


def _forked() -> None:
    """Drop the event loop of the parent process: its thread does not exist here, and its lock may be locked."""
    global _portal
    _portal = _Portal()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def call(fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn(*args, **kwargs)` on the portal's event loop and wait for its result.

    If a signal handler raises during the call, as Ctrl-C does, the call is cancelled, and the error is raised when the
    call ends.

        result = portal.call(runner.execute, agent, {"messages": []})

    Args:
        fn: A coroutine function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result.

    Raises:
        PortalMisuse: `fn` is not a function, or the call comes from the portal's own loop, or the interpreter shuts
            down.

    Examples:
        >>> from agent_runtime_core import AgentRunner
        >>> from agent_runtime_core.portal import call
        >>> call(AgentRunner.open("memory://").runs)
        []
    """
    takes_function("portal.call", fn)
    refuse_at_exit("portal.call", fn)
    loop = _portal.loop()
    if _running() is loop:
        raise PortalMisuse(f"portal.call({name_of(fn)}) on the portal's own loop would deadlock. Await the coroutine")
    return cast(T, run_and_wait(loop, fn, args, kwargs))


@overload
def from_thread(fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...


@overload
def from_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


def from_thread(fn: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call `fn` on the event loop that started this thread, and wait for its result.

    Works in the threads of a run: inside a plain (not async) step function, tool, or `run` of an agent, and inside
    `asyncio.to_thread`.

    Args:
        fn: A function or a coroutine function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result.

    Raises:
        PortalMisuse: `fn` is not a function, this thread belongs to no run, or the interpreter shuts down.

    Examples:
        >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
        >>> from agent_runtime_core.portal import from_thread
        >>> async def double(n):
        ...     return 2 * n
        >>> def work():  # a plain function of a step runs in a thread
        ...     return from_thread(double, 21)
        >>> class Worker(AgentRuntime):
        ...     key = "worker"
        ...     async def run(self, ctx):
        ...         return RunResult(final_output={"n": await ctx.step("work", work)})
        >>> AgentRunner.open("memory://").execute_sync(Worker()).final_output
        {'n': 42}
    """
    takes_function("from_thread", fn)
    refuse_at_exit("from_thread", fn)
    loop = HOME_LOOP.get(None)
    if loop is None and (active := ACTIVE_RUN.get()) is not None:
        loop = active.loop
    if loop is None:
        raise PortalMisuse(
            f"from_thread({name_of(fn)}) must be called in a thread of a run: in a plain step function, tool or run(), "
            "or in asyncio.to_thread. Elsewhere use portal.call"
        )
    if _running() is loop:
        raise PortalMisuse(f"from_thread({name_of(fn)}) on the event loop would deadlock. Await the call")

    async def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    if (agent := AGENT_CONTEXT.get(None)) is not None and agent.runs_on(loop):
        return agent.call_on_loop(run, *args, **kwargs)
    return run_and_wait(loop, run, args, kwargs)


def iterate(fn: Callable[P, AsyncIterator[T]], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
    """Iterate over `fn(*args, **kwargs)` on the portal's event loop.

    The next value is requested when the caller asks for it. When the caller leaves the loop by `break`, an error or
    Ctrl-C, the async iterator is closed.

        for event in portal.iterate(runner.stream, run_id):
            print(event.event_type)

    Args:
        fn: An async generator function, or another function that returns an async iterator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Yields:
        The values of the async iterator.

    Raises:
        PortalMisuse: `fn` is not a function, or the call comes from the portal's own loop, or the interpreter shuts
            down.

    Examples:
        >>> from agent_runtime_core.portal import iterate
        >>> async def count():
        ...     for n in range(3):
        ...         yield n
        >>> list(iterate(count))
        [0, 1, 2]
    """
    if not callable(fn):
        raise PortalMisuse(f"fn must be a function, got {shown(fn)}. Write portal.iterate(function, arguments)")
    refuse_at_exit("portal.iterate", fn)
    loop = _portal.loop()
    if _running() is loop:
        raise PortalMisuse(f"portal.iterate({name_of(fn)}) on the portal's own loop would deadlock. Use async for")
    return _values(loop, _Pump(loop, partial(fn, *args, **kwargs)))


class _Pump:
    """Moves the values of an async iterator to a thread, one for each request.

    One task makes all steps of the iterator: its context variables and time limits belong to that task.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Callable[[], AsyncIterator[Any]]) -> None:
        self._loop, self._make = loop, make
        self._requested = asyncio.Event()
        #: A value in a tuple; None at the end.
        self.received: SimpleQueue[tuple[Any] | None] = SimpleQueue()

    def request(self) -> None:
        """Have the next value put into `received`. Called by the thread."""
        self._loop.call_soon_threadsafe(self._requested.set)

    async def run(self) -> None:
        iterator = self._make()
        try:
            await self._until_requested()
            async for value in iterator:
                self.received.put((value,))
                await self._until_requested()
        finally:
            if (close := getattr(iterator, "aclose", None)) is not None:
                await close()

    async def _until_requested(self) -> None:
        await self._requested.wait()
        self._requested.clear()


def _values(loop: asyncio.AbstractEventLoop, pump: _Pump) -> Iterator[Any]:
    future = _Call()
    received = pump.received
    future.add_done_callback(lambda _: received.put(None))
    try:
        _start(future, loop, pump.run, (), {})
        while True:
            _schedule(pump.request)
            while True:
                with contextlib.suppress(Empty):  # as in _wait_for: a signal may arrive just before the wait
                    item = received.get(timeout=LOOK_UP)
                    break
            if item is None:
                future.result()
                return
            yield item[0]
    finally:
        # A generator may be closed while the interpreter shuts down or in a forked process, where no loop runs, or by
        # the garbage collector on the loop itself, which must not wait.
        if _running() is loop:
            loop.call_soon(_cancel, future)
        elif not sys.is_finalizing() and loop is _portal.current:
            _stop(future, loop)


def takes_function(door: str, fn: object) -> None:
    """Raise PortalMisuse unless `fn` is a function; close it if it is a coroutine. `door` is the name of the caller."""
    if inspect.isasyncgenfunction(fn):
        name = name_of(fn)
        raise PortalMisuse(
            f"{door} returns one result, but {name} yields many. Iterate with portal.iterate({name}, ...), or in your "
            f"own coroutine function, async def follow(): async for each in {name.rpartition('.')[2]}(...), and call "
            f"{door}(follow)"
        )
    if callable(fn):
        return
    if inspect.iscoroutine(fn):
        fn.close()
        name = name_of(fn)
        raise PortalMisuse(
            f"fn must be a function, got a coroutine. Write {door}({name}, ...), not {door}({name}(...))"
        )
    raise PortalMisuse(f"fn must be a function, got {shown(fn)}. Write {door}(function, arguments)")


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Call(Future[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.task: asyncio.Task[Any] | None = None
        self.settled = settled = threading.Event()
        self.add_done_callback(lambda _: settled.set())  # not `self.settled`: a reference cycle


def run_and_wait(loop: asyncio.AbstractEventLoop, fn: Callable[..., Awaitable[Any]], args: Any, kwargs: Any) -> Any:
    future = _Call()
    try:
        # Inside `try`: a signal handler may raise after the start of the call.
        _start(future, loop, fn, args, kwargs)
        return _wait_for(future)
    except BaseException:  # of the call, or of a signal handler in this thread
        _stop(future, loop)
        raise


def _wait_for(future: _Call) -> Any:
    """Return the result of the call.

    A Ctrl-C just before the wait does not interrupt the lock, so the thread wakes every `LOOK_UP` seconds.
    """
    # Not future.result(LOOK_UP): its TimeoutError could come from a signal handler.
    while not future.settled.wait(LOOK_UP):
        pass
    return future.result()


def _start(
    future: _Call, loop: asyncio.AbstractEventLoop, fn: Callable[..., Awaitable[Any]], args: Any, kwargs: Any
) -> None:
    context = contextvars.copy_context()

    async def run() -> Any:
        return await fn(*args, **kwargs)

    def done(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            future.cancel()
            future.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def begin() -> None:
        if future.cancelled():
            return
        future.task = start_soon(run())
        future.task.add_done_callback(done)

    _schedule(partial(loop.call_soon_threadsafe, begin, context=context))


def _schedule(schedule: Callable[[], object]) -> None:
    """Call `schedule`, which wakes an event loop, without losing what a signal handler raises.

    asyncio ignores an OSError while it wakes a loop, because it takes it for the socket's; a TimeoutError is an
    OSError.
    """
    thread = threading.current_thread()
    # Signal handlers run in the main thread only. In atexit callbacks it is no longer alive, and Python 3.12 cannot
    # start another thread there.
    if thread is threading.main_thread() and thread.is_alive():
        run_in_thread(schedule)
    else:
        schedule()


def _stop(future: _Call, loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the call, and wait up to 10 seconds until it ends."""
    if future.done():
        return

    loop.call_soon_threadsafe(_cancel, future)
    future.settled.wait(10)


def _cancel(future: _Call) -> None:
    # Without a task the call was not started, and a cancelled future prevents it.
    (future if future.task is None else future.task).cancel()
