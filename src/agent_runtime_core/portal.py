"""Call async code from threads without an event loop.

`call(async_fn, *args)` runs a coroutine function on an event loop in a thread of its own and waits for it. It works
from any thread, also while another event loop runs there, as in Jupyter. `from_thread` calls back into the event loop
from a function that runs in a thread. All threads are daemons, so that none keeps a process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast, overload

from ._core.context_vars import start_soon
from ._core.threads import HOME_LOOP, in_thread, name_of, refuse_at_exit, run_in_thread
from .errors import PortalMisuse, brief

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["call", "from_thread", "in_thread"]

LOOK_UP = 0.5  # seconds that a thread waits in one go


class _Portal:
    """The loop thread; made on the first call."""

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
                except RuntimeError:  # there is none to be had now
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            # What is to end the program stops the loop, too: it belongs to who called, and others wait for theirs.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()


_portal = _Portal()


def _forked() -> None:
    """Drop the loop of the parent process: its thread is not in the child, and its lock may be held for ever."""
    global _portal
    _portal = _Portal()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def call(fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn(*args, **kwargs)` on the portal's loop and wait for its result.

    If a signal handler raises during the call, as Ctrl-C does, the call is cancelled. The error is raised when it has
    ended.

    Raises:
        PortalMisuse: `fn` is not a function, or the call comes from the portal's own loop, or while the interpreter
            shuts down.
    """
    takes_function("portal.call", fn)
    refuse_at_exit("portal.call", fn)
    loop = _portal.loop()
    if _running() is loop:
        raise PortalMisuse(f"portal.call({name_of(fn)}) from the portal's own loop would wait for itself: await it")
    return cast(T, _carried_out(loop, fn, args, kwargs))


@overload
def from_thread(fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...


@overload
def from_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


def from_thread(fn: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call `fn` on the loop that this thread works for, and wait; only inside a plain step function or tool."""
    takes_function("from_thread", fn)
    refuse_at_exit("from_thread", fn)
    loop = HOME_LOOP.get(None)
    if loop is None:
        raise PortalMisuse(f"from_thread({name_of(fn)}) works inside a plain step function; elsewhere use portal.call")
    if _running() is loop:
        raise PortalMisuse(f"from_thread({name_of(fn)}) from the loop itself would wait for itself: await it")

    async def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return _carried_out(loop, run, args, kwargs)


def takes_function(door: str, fn: object) -> None:
    """Refuse what is no function at a door that makes the call itself; a coroutine is closed."""
    if inspect.isasyncgenfunction(fn):
        name = name_of(fn)
        raise PortalMisuse(
            f"{door} waits for one result, and {name} gives many: go through them in a coroutine function of your own, "
            f"async def follow(): async for each in {name.rpartition('.')[2]}(...), and {door}(follow)"
        )
    if callable(fn):
        return
    if inspect.iscoroutine(fn):
        fn.close()
        name = name_of(fn)
        raise PortalMisuse(f"{door} makes the call itself: {door}({name}, ...), not {door}({name}(...))")
    raise PortalMisuse(f"{door} takes a function and its arguments, not {brief(fn)}")


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
        self.add_done_callback(lambda _: settled.set())  # not by way of `self`, which would keep itself


def _carried_out(loop: asyncio.AbstractEventLoop, fn: Callable[..., Awaitable[Any]], args: Any, kwargs: Any) -> Any:
    future = _Call()
    try:
        # Begun in here: it may be under way before this thread waits for it.
        _start(future, loop, fn, args, kwargs)
        return _awaited(future)
    except BaseException:  # its own, or what a signal handler raised in this thread while it was under way
        _stop(future, loop)
        raise


def _awaited(future: _Call) -> Any:
    """Its result. A Ctrl-C that comes just before a lock is waited for does not wake who waits: it is looked for."""
    # And not future.result(LOOK_UP), whose TimeoutError may be a signal handler's.
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

    _hand_over(partial(loop.call_soon_threadsafe, begin, context=context))


def _hand_over(tell: Callable[[], object]) -> None:
    """Tell a loop something, where what a signal handler raises meanwhile is not lost.

    asyncio takes an OSError that comes while it wakes a loop for the socket's, and a TimeoutError is one.
    """
    thread = threading.current_thread()
    # Signal handlers run in the main thread only. In the callbacks of atexit, where it is no longer alive, Python 3.12
    # does not start another thread.
    if thread is threading.main_thread() and thread.is_alive():
        run_in_thread(tell)
    else:
        tell()


def _stop(future: _Call, loop: asyncio.AbstractEventLoop) -> None:
    """Cancel it, and wait a while until it has let go."""
    if future.done():
        return

    def cancel() -> None:
        # Without a task it was not begun, and never will be.
        (future if future.task is None else future.task).cancel()

    loop.call_soon_threadsafe(cancel)
    future.settled.wait(10)
