"""The run context in blocking form, for agents whose `run` is a plain function, and the thread of that function."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import datetime as _dt
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar, cast
from uuid import UUID

from .._core.arguments import run_input
from .._core.context_vars import claimed_run, restore
from .._core.event_types import EventType
from .._core.threads import AGENT_CONTEXT, AROUND, HOME_LOOP, AgentContext, Job, in_thread, name_of, run_in_thread
from .._core.timeouts import when_left
from .._core.typed_steps import takes_options_of, typed_blocking_step
from .._core.validation import Shown, must
from ..errors import PortalMisuse
from ..interfaces import AgentRuntime, RunContext, RunResult
from ..portal import run_and_wait
from ..tools.registry import ToolRegistry
from .step import CURRENT_STEP, run_body

if TYPE_CHECKING:
    from collections.abc import Mapping


# -- the thread of a plain run

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
        self._request: _Request | None = None  # the request that the thread waits for
        self._tasks: set[asyncio.Task[Any]] = set()  # calls of other threads
        self._ident: int | None = None
        self._left = False  # the grace of the run ended
        self._closed = False
        self._pause: Job | None = None
        self._ended: Callable[[], object] | None = None

    # -- in the task

    async def run(
        self, fn: Callable[..., Any], ctx: AgentContext, *args: Any, ended: Callable[[], object] | None = None
    ) -> Outcome:
        """Run `fn(ctx, *args)` in the thread, and call `ended` there when it returns a result or raises.

        A cancellation is raised in the thread, by its open call or its next call, and this waits for the thread to end.
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
                if claimed_run() is None:  # outside of a runner, as in a test, a task gets no grace
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
        except GeneratorExit:  # the event loop is stopped
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
        """End the open call of a thread that is left, and refuse later calls."""
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
        """Await `fn(*args, **kwargs)` on the loop: in the task that waits for this thread, or in a separate task.

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
            # A plain step calls in order, unless it started threads with a copy of its context.
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


P = ParamSpec("P")
T = TypeVar("T")


class Caller(Protocol):
    """Awaits calls of plain code on the event loop of the run."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the run."""

    def call(
        self, ctx: AgentContext, fn: Callable[..., Awaitable[Any]], args: Sequence[Any], kwargs: Mapping[str, Any], /
    ) -> Any:
        """Return the result of `await fn(*args, **kwargs)`."""


async def _called(fn: Callable[[], None]) -> None:
    """Call a plain function that changes what only the event loop may change."""
    fn()


def _attribute(name: str) -> Any:
    """Return a property that reads an attribute of the asynchronous context."""
    return property(attrgetter(f"_ctx.{name}"), doc=getattr(RunContext, name).__doc__)


class SyncRunContext:
    """The interface of a plain `run(ctx)` to its run: each coroutine function of `RunContext` is a blocking call here.

        class Greeter(AgentRuntime):
            key = "greeter"

            def run(self, ctx: SyncRunContext) -> RunResult:
                name = ctx.step("name", find_name)
                return RunResult(final_output={"response": f"Hello, {name}!"})

    Call it in the thread of `run`, or in a thread that `run` waits for. Names, arguments and errors are the same as for
    `RunContext`. A run that is cancelled, parked or taken over raises `asyncio.CancelledError` in the open call or the
    next call, which `except Exception` does not catch.

    Args:
        ctx: The context in its asynchronous form.
        caller: Awaits the calls on the event loop of the run.
    """

    def __init__(self, ctx: RunContext, caller: Caller) -> None:
        self._ctx = ctx
        self._caller = caller
        self._returns_awaitables = False

    # For isinstance: the coroutine function that a plain wrapper returned holds this object, and may need a journal.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._ctx) if self._returns_awaitables else SyncRunContext

    @property
    def async_context(self) -> RunContext:
        """The same context for coroutine functions, as in `from_thread(run_turn_loop, ctx.async_context, ...)`."""
        return self._ctx

    def runs_on(self, loop: asyncio.AbstractEventLoop, /) -> bool:
        """Return whether this is the event loop of the run.

        Args:
            loop: An event loop.
        """
        return loop is self._caller.loop

    def call_on_loop(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a coroutine function on the event loop of the run, and return its result.

        Args:
            fn: A coroutine function.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The result.

        Raises:
            PortalMisuse: The call comes from that loop, where it would wait for itself.
        """
        try:
            on_loop = self.runs_on(asyncio.get_running_loop())
        except RuntimeError:
            on_loop = False
        if not on_loop:
            return cast("T", self._caller.call(self, fn, args, kwargs))
        if self._returns_awaitables:
            return cast("T", fn(*args, **kwargs))
        raise PortalMisuse(
            f"{name_of(fn)} of a plain run() must not be called on the event loop, where it would wait for itself. In "
            "a coroutine function await it on ctx.async_context"
        )

    def for_thread(self, args: Sequence[Any], /) -> Sequence[Any]:
        """Return the arguments of plain code: the context in its synchronous form, others as they are.

        Args:
            args: The arguments.
        """
        return [self if each is self._ctx else each for each in args]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._ctx, name)

    # -- attributes

    run_id: UUID = _attribute("run_id")
    run_key: str | None = _attribute("run_key")
    tenant: str | None = _attribute("tenant")
    conversation_id: UUID | None = _attribute("conversation_id")
    input_messages: list[Any] = _attribute("input_messages")
    params: dict[str, Any] = _attribute("params")
    metadata: dict[str, Any] = _attribute("metadata")
    scheduled_at: _dt.datetime | None = _attribute("scheduled_at")
    tool_registry: ToolRegistry = _attribute("tool_registry")
    tools: ToolRegistry = _attribute("tools")
    attempt: int = _attribute("attempt")
    traceparent: str | None = _attribute("traceparent")
    trace_id: str = _attribute("trace_id")
    step_id: str | None = _attribute("step_id")
    idempotency_key: str | None = _attribute("idempotency_key")
    persistence: Any = _attribute("persistence")

    # -- what needs no loop

    def charge(
        self, *, model: str = "", input_tokens: int = 0, output_tokens: int = 0, cost_usd: float | None = None,
        turns: int = 1, tool_calls: int = 0, trace: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        charge = partial(
            self._ctx.charge, model=model, input_tokens=input_tokens, output_tokens=output_tokens, cost_usd=cost_usd,
            turns=turns, tool_calls=tool_calls, trace=trace,
        )  # fmt: skip
        self.call_on_loop(_called, charge)

    def check_limits(self) -> None:
        self.call_on_loop(_called, self._ctx.check_limits)

    def own_conversation(self) -> None:
        self._ctx.own_conversation()

    def cancelled(self) -> bool:
        return self._ctx.cancelled()

    def is_cancelled(self) -> bool:
        return self._ctx.is_cancelled()

    def renamed(self, old: str, new: str) -> None:
        self._ctx.renamed(old, new)

    def trace(self, kind: str, payload: dict[str, Any]) -> None:
        self._ctx.trace(kind, payload)

    def started_without(self, name: str) -> bool:
        """Return whether the run recorded steps, but no `recorded_value` of that name.

        Args:
            name: Name of the value.
        """
        return cast("bool", cast("Any", self._ctx).started_without(name))

    # -- what waits

    def emit(self, event_type: EventType | str, payload: dict[str, Any] | None = None) -> None:
        return self.call_on_loop(self._ctx.emit, event_type, {} if payload is None else payload)

    def checkpoint(self, state: dict[str, Any]) -> None:
        return self.call_on_loop(self._ctx.checkpoint, state)

    def get_state(self) -> dict[str, Any] | None:
        return self.call_on_loop(self._ctx.get_state)

    @typed_blocking_step
    @takes_options_of(RunContext.step)
    def step(self, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.call_on_loop(cast("Any", self._ctx.step), name, fn, *args, **options)

    def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        return self.call_on_loop(self._ctx.transaction, name, fn, *args)

    def sleep(self, seconds: float, *, key: str | None = None) -> None:
        return self.call_on_loop(self._ctx.sleep, seconds, key=key)

    def wait_for_signal(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        return self.call_on_loop(self._ctx.wait_for_signal, name, timeout=timeout, key=key)

    def messages(self, timeout: float | None = 0, *, key: str | None = None) -> list[dict[str, Any]]:
        return self.call_on_loop(cast("Any", self._ctx).messages, timeout, key=key)

    def approve(
        self,
        name: str,
        details: Any = None,
        *,
        schema: dict[str, Any] | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Any:
        return self.call_on_loop(self._ctx.approve, name, details, schema=schema, timeout=timeout, key=key)

    def call(
        self, agent: AgentRuntime | str, input: Mapping[str, Any] | None = None, *, key: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> RunResult:  # fmt: skip
        return self.call_on_loop(self._ctx.call, agent, run_input(input, params), key=key)

    def patched(self, name: str) -> bool:
        return self.call_on_loop(self._ctx.patched, name)

    def now(self, *, key: str | None = None) -> _dt.datetime:
        return self.call_on_loop(self._ctx.now, key=key)

    def random(self, *, key: str | None = None) -> float:
        return self.call_on_loop(self._ctx.random, key=key)

    def uuid4(self, *, key: str | None = None) -> UUID:
        return self.call_on_loop(self._ctx.uuid4, key=key)

    def recorded_value(self, name: str, make: Callable[[], Any], key: str | None = None) -> Any:
        """Return what `make()` returned when the run first called this; `make` is plain or a coroutine function.

        Args:
            name: Name of the value.
            make: Makes the value.
            key: Identifies the call instead of the number of its use, as for `step`.
        """

        async def made() -> Any:
            value = make() if is_async(make) else await in_thread(make)
            return await value if inspect.isawaitable(value) else value

        return self.call_on_loop(cast("Any", self._ctx).recorded_value, name, made, key)


# The names and texts of the async form also apply here.
for _name, _member in vars(SyncRunContext).items():
    if not _name.startswith("_") and not getattr(_member, "__doc__", None) and hasattr(RunContext, _name):
        _member.__doc__ = getattr(RunContext, _name).__doc__


class _LoopCaller:
    """Awaits the calls of plain steps and tools of an agent that runs on the event loop."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()

    def call(
        self, ctx: AgentContext, fn: Callable[..., Awaitable[Any]], args: Sequence[Any], kwargs: Mapping[str, Any], /
    ) -> Any:
        try:
            return run_and_wait(self.loop, fn, args, kwargs)
        except concurrent.futures.CancelledError:  # an Exception, which the code might handle
            raise asyncio.CancelledError from None


def blocking_form(ctx: Any) -> Any:
    """Return a context in the form for a plain function that this task calls in a thread."""
    agent = AGENT_CONTEXT.get(None)
    return SyncRunContext(ctx, _LoopCaller()) if agent is None else agent.for_thread([ctx])[0]


def is_async(fn: Callable[..., Any]) -> bool:
    """Return whether `fn` is called on the event loop: it is, or wraps by functools.wraps, a coroutine function."""
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if type(code) is CodeType and code.co_flags & inspect.CO_COROUTINE:
        return True  # as almost always, and with fewer calls
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inspect.unwrap(fn))


async def run_plain(fn: Callable[..., Any], ctx: Any, *args: Any, ended: Callable[[], object] | None = None) -> Any:
    """Return `fn(ctx, *args)`, which is called in a thread with the context in its synchronous form.

    The thread calls `ended` when the function returns a result or raises.

    Raises:
        InvalidArgument: `fn` is a generator function.
    """
    thread = AgentThread()
    sync = SyncRunContext(ctx, thread)
    value, error = await thread.run(fn, sync, *args, ended=ended)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame
    if inspect.isawaitable(value):  # a wrapper of a coroutine function
        sync._returns_awaitables = True
        return await value
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        fix = "Remove `yield`, and publish progress with ctx.emit"
        raise must(f"{name_of(fn)}()", "return its result", Shown("a generator"), fix)
    return value


def run_agent(agent: AgentRuntime, ctx: Any, ended: Callable[[], object] | None = None) -> Awaitable[Any]:
    """Return the awaitable of an agent's `run`, which may be a coroutine function or a plain function.

    The thread of a plain function calls `ended` when the function returns a result or raises.
    """
    if is_async(agent.run):
        return cast("Awaitable[Any]", agent.run(ctx))
    return run_plain(agent.run, ctx, ended=ended)


def call_method(method: Callable[..., Any], ctx: Any, *args: Any) -> Awaitable[Any]:
    """Return the awaitable of a method of an agent, which may be a coroutine function or a plain function."""
    return cast("Awaitable[Any]", method(ctx, *args)) if is_async(method) else run_plain(method, ctx, *args)


def in_agent(traceback: TracebackType) -> TracebackType:
    """Return the part of a traceback that begins in the agent's own code."""
    following = traceback.tb_next
    is_ours = traceback.tb_frame.f_code is run_plain.__code__
    return following if is_ours and following is not None else traceback
