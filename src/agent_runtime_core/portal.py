"""One event loop in a thread of its own for callers without one, and daemon threads for blocking functions.

`call(async_fn, *args)` runs a coroutine function on that loop and waits for it, from any thread, also
while another loop runs there (Jupyter). `in_thread` and `from_thread` cross in the other direction.
All threads are daemons: nothing here keeps a process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast, overload

from ._contexts import start_soon
from .errors import PortalMisuse, brief

P = ParamSpec("P")
T = TypeVar("T")

IDLE_THREADS = 8
LOOK_UP = 0.5  # seconds that a thread waits in one go

_home: contextvars.ContextVar[asyncio.AbstractEventLoop] = contextvars.ContextVar("agent_runtime_home")

Job = Callable[[], None]

#: Given what a thread is about to do, gives what it does: for whoever has to know when that is over.
AROUND: contextvars.ContextVar[Callable[[Job], Job] | None] = contextvars.ContextVar(
    "agent_runtime_around", default=None
)


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


def call(fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn(*args, **kwargs)` on the portal's loop and wait for its result.

    If a signal handler raises during the call, as Ctrl-C does, the call is cancelled. The error is raised when it has
    ended.

    Raises:
        PortalMisuse: `fn` is not a function, or the call comes from the portal's own loop, or while the interpreter
            shuts down.
    """
    takes_function("portal.call", fn)
    _refuse_at_exit("portal.call", fn)
    loop = _portal.loop()
    if _running() is loop:
        raise PortalMisuse(f"portal.call({_name(fn)}) from the portal's own loop would wait for itself: await it")
    return cast(T, _carried_out(loop, fn, args, kwargs))


@overload
def from_thread(fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...


@overload
def from_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


def from_thread(fn: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call `fn` on the loop that this thread works for, and wait; only inside a plain step function or tool."""
    takes_function("from_thread", fn)
    _refuse_at_exit("from_thread", fn)
    loop = _home.get(None)
    if loop is None:
        raise PortalMisuse(f"from_thread({_name(fn)}) works inside a plain step function; elsewhere use portal.call")
    if _running() is loop:
        raise PortalMisuse(f"from_thread({_name(fn)}) from the loop itself would wait for itself: await it")

    async def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return _carried_out(loop, run, args, kwargs)


def takes_function(door: str, fn: object) -> None:
    """Refuse what is no function at a door that makes the call itself; a coroutine is closed."""
    if inspect.isasyncgenfunction(fn):
        name = _name(fn)
        raise PortalMisuse(
            f"{door} waits for one result, and {name} gives many: go through them in a coroutine function of your own, "
            f"async def follow(): async for each in {name.rpartition('.')[2]}(...), and {door}(follow)"
        )
    if callable(fn):
        return
    if inspect.iscoroutine(fn):
        fn.close()
        name = _name(fn)
        raise PortalMisuse(f"{door} makes the call itself: {door}({name}, ...), not {door}({name}(...))")
    raise PortalMisuse(f"{door} takes a function and its arguments, not {brief(fn)}")


def _refuse_at_exit(name: str, fn: object) -> None:
    # Daemon threads have stopped by then, so the call would wait forever.
    if sys.is_finalizing():
        raise PortalMisuse(
            f"{name}({_name(fn)}) must be called before the interpreter shuts down. "
            "Close runs and runners in a with block, or in a function for atexit.register"
        )


def _name(fn: object) -> str:
    return getattr(fn, "__qualname__", repr(fn))


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
        _threads.run(tell)
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
                    return
                self._idle += 1


_threads = _Threads()


def _forked() -> None:
    """None of their threads is in the child, and one that is not may hold their locks for ever."""
    global _portal, _threads
    _portal, _threads = _Portal(), _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


async def in_thread(fn: Callable[..., T], *args: Any, left: Callable[[], asyncio.Handle] | None = None) -> T:
    """Run a blocking function in a daemon thread, with this task's context variables.

    Cancelling stops the waiting, not the thread: `left` is called then, and what it gives is cancelled when the
    thread has ended.
    """
    _refuse_at_exit("in_thread", fn)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    behind: asyncio.Handle | None = None
    context = contextvars.copy_context()
    context.run(_home.set, loop)

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            if behind is not None:
                behind.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def job() -> None:
        result, error = None, None
        try:
            result = context.run(fn, *args)
        except BaseException as failure:  # noqa: BLE001 - it belongs to whoever awaits
            error = RuntimeError(f"StopIteration: {failure}") if isinstance(failure, StopIteration) else failure
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # that loop is closed: nobody waits any more

    around = AROUND.get()
    _threads.run(job if around is None else around(job))
    try:
        return await future
    except asyncio.CancelledError:
        if left is not None and future.cancelled():
            behind = left()
        raise
