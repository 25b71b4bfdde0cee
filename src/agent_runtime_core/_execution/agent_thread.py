"""Run plain code of an agent in a thread, and what it calls in the task that waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, cast

from .._core.context_vars import claimed_run, restore
from .._core.threads import AGENT_CONTEXT, AROUND, HOME_LOOP, AgentContext, Job, run_in_thread
from .._core.timeouts import when_left
from ..portal import run_and_wait
from .step_scope import CURRENT_STEP, run_body

_MISSING: Final = object()


class Outcome(NamedTuple):
    """What a call returned, or the error it raised."""

    value: Any
    error: BaseException | None


class _Request:
    """A call that the thread waits for."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.work = work
        self.context = contextvars.copy_context()
        self.reply: SimpleQueue[Outcome] = SimpleQueue()


class AgentThread:
    """The thread of one plain function of an agent, and the task that waits for it.

    The task serves the calls of the thread itself, one after the other. A call therefore runs in the main task of the
    run, as in an async agent: waits can park the run, steps are in order, and a cancellation reaches the open call.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._around = AROUND.get()
        self._posted: deque[_Request | Outcome] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._request: _Request | None = None  # the one that the thread waits for
        self._tasks: set[asyncio.Task[Any]] = set()  # calls of other threads
        self._ident: int | None = None
        self._left = False  # the grace of the run has ended
        self._closed = False
        self._pause: Job | None = None
        self._ended: Callable[[], object] | None = None

    # -- in the task

    async def run(
        self, fn: Callable[..., Any], ctx: AgentContext, *args: Any, ended: Callable[[], object] | None = None
    ) -> Outcome:
        """Run `fn(ctx, *args)` in the thread, and call `ended` there when it has returned a result or raised.

        A cancellation is raised in the thread, by its open call or its next one, and this waits for the thread to end.
        It does not wait for a thread that outlives the grace of its run: otherwise the event loop could not end.
        """
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._ended = ended
        try:
            with when_left(task, partial(self._leave, task), lambda: self._ident):
                self._start(fn, ctx, args)
                return await self._serve_all()
        finally:
            self._close()

    async def _serve_all(self) -> Outcome:
        """Serve the calls of the thread until it ends."""
        pending = False  # a cancellation that the next call of the thread raises
        while not self._left:
            try:
                request = await self._next()
            except asyncio.CancelledError:
                if claimed_run() is None:  # outside of a runner, as in a test, a task has no grace
                    raise
                pending = True
                for task in tuple(self._tasks):  # the thread may wait for the threads that made these calls
                    task.cancel()
                continue
            if isinstance(request, Outcome):
                return request
            outcome = Outcome(None, asyncio.CancelledError()) if pending else await self._serve(request)
            pending = False
            self._set_computing()
            self._request = None
            request.reply.put(outcome)
            del request, outcome  # the error refers to this frame
        raise asyncio.CancelledError

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._left = True
        task.cancel()

    def _start(self, fn: Callable[..., Any], ctx: AgentContext, args: Sequence[Any]) -> None:
        context = self._context.copy()
        context.run(HOME_LOOP.set, self.loop)
        context.run(AGENT_CONTEXT.set, ctx)
        self._set_computing()
        run_in_thread(partial(self._execute, partial(context.run, fn, ctx, *args)))

    async def _next(self) -> _Request | Outcome:
        if not self._posted:
            self._arrived = self.loop.create_future()
            await self._arrived
        return self._posted.popleft()

    async def _serve(self, request: _Request) -> Outcome:
        """Do what the thread asks for, with the context variables of the thread."""
        tokens = [
            (variable, variable.set(value))
            for variable, value in request.context.items()
            if variable.get(_MISSING) is not value
        ]
        try:
            return Outcome(await request.work(), None)
        except GeneratorExit:  # the event loop has stopped
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the thread
            return Outcome(None, error)
        finally:
            for variable, token in reversed(tokens):
                restore(variable, token)

    def _set_computing(self) -> None:
        """Have the simulator wait for the thread until its next call. It does not while the thread waits here."""
        self._pause = None if self._around is None else self._around(_nothing)

    def _close(self) -> None:
        """End the open call of a thread that is left, and refuse later ones."""
        self._closed = True
        if (request := self._request) is not None:
            request.reply.put(Outcome(None, asyncio.CancelledError()))

    def _post(self, item: _Request | Outcome) -> None:
        self._posted.append(item)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    # -- in the thread

    def _execute(self, work: Callable[[], Any]) -> None:
        self._ident = threading.get_ident()
        try:
            outcome = Outcome(work(), None)
        except BaseException as error:  # noqa: BLE001 - raised in the task
            if (at := error.__traceback__) is not None and at.tb_next is not None:
                error.__traceback__ = at.tb_next  # begins in the agent's own code
            outcome = Outcome(None, error)
        if self._ended is not None and not inspect.isawaitable(outcome.value):
            self._ended()
        self._ident = None
        self._pauses()
        self._send(outcome)

    def call(
        self, ctx: AgentContext, fn: Callable[..., Awaitable[Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Await `fn(*args, **kwargs)` on the loop: in the task that waits for this thread, or in one of its own.

        Raises:
            CancelledError: The run was cancelled, parked or left.
        """
        if threading.get_ident() != self._ident:
            return self._call_in_task(ctx, fn, args, kwargs)
        self._request = request = _Request(partial(fn, *args, **kwargs))
        self._pauses()
        if self._closed or not self._send(request):
            raise asyncio.CancelledError
        value, error = request.reply.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame
        return value

    def _call_in_task(
        self, ctx: AgentContext, fn: Callable[..., Awaitable[Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Await a call of another thread: of a plain step, or of a pool that the agent started."""
        context = contextvars.copy_context()
        if AGENT_CONTEXT not in context:  # a pool copies no context variables
            context = self._context.copy()
            context.run(AGENT_CONTEXT.set, ctx)
        try:
            return context.run(run_and_wait, self.loop, self._tracked, (partial(fn, *args, **kwargs),), {})
        except concurrent.futures.CancelledError:  # an Exception, which the code might handle
            raise asyncio.CancelledError from None

    async def _tracked(self, work: Callable[[], Awaitable[Any]]) -> Any:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks.add(task)
        try:
            # A plain step calls in order, unless it has started threads with a copy of its context.
            return await run_body(CURRENT_STEP.get() if len(self._tasks) == 1 else None, work)
        finally:
            self._tasks.discard(task)

    def _pauses(self) -> None:
        if self._pause is not None:
            self._pause()
            self._pause = None

    def _send(self, item: _Request | Outcome) -> bool:
        try:
            self.loop.call_soon_threadsafe(self._post, item)
        except RuntimeError:  # the loop is closed, so no task waits
            return False
        return True


def _nothing() -> None:
    """Do nothing: a job that only marks when a thread computes."""
