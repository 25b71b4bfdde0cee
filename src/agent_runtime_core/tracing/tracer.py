"""The tracer: passes what happens to runs to the trace sinks, from a dedicated thread."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Final, NamedTuple
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.event_types import EventType
from .._core.ids import checked
from .._core.log import log
from .._core.per_loop import call_in_loop
from .._core.redaction import Kind, Redaction
from ..interfaces import TraceSink

_LIBRARY: Final = frozenset({
    *(each.value for each in EventType), "llm.call", "tool.done", "topic.published", "topic.invalid",
    "approval.requested", "step.in_doubt",
})  # fmt: skip
#: Fields of traces of this library that are no contents.
_KEPT: Final = frozenset({
    "agent_key", "attempt", "attempts", "completed", "cost_usd", "duration_ms", "ended_at", "error_type",
    "finish_reason", "in_doubt", "latency_ms", "max_attempts", "model", "offset", "parent_id", "progress_percent",
    "provider", "request_id", "retry_delay", "sequence", "started_at", "step_id", "step_index", "step_name", "tenant",
    "time", "timestamp", "tool_call_id", "tool_name", "topic", "total_steps", "trace_id", "usage",
})  # fmt: skip
#: Fields that sinks read as dicts.
_DICTS: Final = frozenset({"metadata", "model_parameters"})
#: Fields that code of the application may have, because this library adds them to its events.
_ADDED: Final = frozenset({"parent_id", "step_id", "trace_id"})
_ERRORS: Final = frozenset({"details", "error", "message", "stack"})
_OF_ERRORS: Final = frozenset({
    EventType.RUN_FAILED.value, EventType.RUN_TIMED_OUT.value, EventType.STEP_FAILED.value,
    EventType.STEP_RETRYING.value, EventType.TOOL_RESULT.value, "llm.call", "tool.done",
})  # fmt: skip
_KINDS: Final[Mapping[str, Mapping[str, Kind]]] = {
    "start_run": {"input": "input", "metadata": "input"},
    "end_run": {"output": "result", "error": "error"},
    "llm.call": {"input": "message", "output": "message", "model_parameters": "event"},
    "tool.done": {"input": "input", "output": "result"},
}


def redacted_trace(redaction: Redaction, method: str, kind: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sinks get of a trace.

    Args:
        redaction: Calls the hook.
        method: The method of the sinks that gets it.
        kind: The type of an event, or the outcome of a run.
        about: The fields.
    """
    if method != "log_event":
        kinds = _KINDS[method]
        return {
            name: _field(redaction, kinds[name], name, each) if name in kinds else each for name, each in about.items()
        }
    kept = _KEPT if kind in _LIBRARY else _ADDED
    found = {name: each for name, each in about.items() if name in kept and _is_plain(each)}
    kinds, errors = _KINDS.get(kind, {}), _ERRORS if kind in _OF_ERRORS else frozenset()
    rest = {}
    for name, each in about.items():
        if errors and name in ("type", "retriable"):
            found[name] = each
        elif name in errors:
            found[name] = _field(redaction, "error", name, each)
        elif name in kinds:
            found[name] = _field(redaction, kinds[name], name, each)
        elif name not in found:
            rest[name] = each
    return {**redaction.for_sink("event", rest, {}), **found}


def _field(redaction: Redaction, kind: Kind, name: str, value: Any) -> Any:
    if kind == "message" and isinstance(value, list):
        return [redaction.for_sink(kind, each) for each in value]
    if kind == "error" and isinstance(value, Mapping):
        return {
            name: each if name in ("type", "retriable") else redaction.for_sink(kind, each)
            for name, each in value.items()
        }
    return redaction.for_sink(kind, value, {}) if name in _DICTS else redaction.for_sink(kind, value)


def _is_plain(value: Any) -> bool:
    """Whether the value of a kept field is a name, a number or counts."""
    return value is None or isinstance(value, str | int | float) or _are_counts(value)


def _are_counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        each is None or isinstance(each, int | float) or _are_counts(each) for each in value.values()
    )


TracedEvent = tuple[str, dict[str, Any]]  # the type and the payload
EventMaker = Callable[[], Iterable[TracedEvent]]  # makes events in order, in the thread of the sinks

MAX_WAITING = 10_000  # traces that may wait for the sinks
MAX_FAILURES = 20  # failures in a row after which a sink is paused
PAUSE = 60.0  # seconds that a failing sink is paused
BATCH = 64  # traces that are passed on before tasks of the sinks continue
GATHER_SECONDS = 0.02  # how long traces are gathered before they are passed on
CALL_TIMEOUT = 10.0  # seconds that a coroutine of a sink may take for one trace
_EVENT_FIELDS = ("type", "run_id", "time")


class _Trace(NamedTuple):
    method: str
    run_id: UUID
    kind: str
    about: dict[str, Any]
    time: float

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments for the sink's own method, with a dict of this sink's own."""
        if self.method == "log_event":
            return (self.run_id, self.kind, dict(self.about))
        timed = {"time": self.time, **self.about}
        return (self.run_id, timed) if self.method == "start_run" else (self.run_id, self.kind, timed)

    def event(self) -> dict[str, Any]:
        """Return the trace as one dict: type, run_id, time and the keys of the payload.

        If a key of the payload is one of these names, the whole payload is also there, as `payload`.
        """
        event = dict(self.about)
        if not event.keys().isdisjoint(_EVENT_FIELDS):
            event["payload"] = self.about
        event["type"] = self.kind if self.method == "log_event" else self.method
        if self.method == "end_run":
            event["outcome"] = self.kind
        return event | {"run_id": str(self.run_id), "time": self.time}


class _LaterEvents(NamedTuple):
    """Events that the thread of the sinks makes."""

    run_id: UUID
    make: EventMaker
    time: float

    def traces(self) -> list[_Trace]:
        try:
            return [_Trace("log_event", self.run_id, kind, about, self.time) for kind, about in self.make()]
        except Exception as error:  # the type of a value cannot be decoded
            log.warning("the traces of some events of run %s are missing", self.run_id, exc_info=error)
            return []


class Tracer:
    """Passes what happens to runs to trace sinks. It never delays a run or makes it fail.

    1. A trace is copied one level deep. A daemon thread, which starts with the first trace, makes the events of
       records, and passes the traces in order to each sink: to its start_run, log_event or end_run, and as one dict to
       its trace(event), on the event loop of that thread.
    2. If the sinks are slow, at most 10,000 traces wait; later traces are dropped and counted.
    3. An error of a sink is logged once for each kind of error. After 20 failures in a row the sink is paused for 60 s.
       A coroutine of a sink that takes more than 10 s counts as a failure.

    The dict contains `type` (of the event, or "start_run" or "end_run"), `run_id` (str), `time` (seconds since 1970),
    and the keys of the payload. start_run and end_run get the time in their metadata.

    Args:
        sinks: The trace sinks.
        clock: Source of time, for tests.
        redaction: Redacts the traces before a sink gets them. If its hook fails, the sinks get ids, names and times.
    """

    def __init__(
        self, sinks: Sequence[TraceSink] = (), *, clock: Clock = SYSTEM, redaction: Redaction | None = None
    ) -> None:
        self._clock, self._redaction = clock, redaction
        self._callers: tuple[_SinkCaller, ...] = ()
        self._activate: list[tuple[str, Callable[[str], AbstractContextManager[object] | None]]] = []
        self._activation_failed: set[str] = set()
        self._sources: list[TraceSink] = []
        #: The sinks.
        self.sinks: tuple[TraceSink, ...] = ()
        for sink in sinks:
            self.add(sink)
        self._waiting: deque[_Trace | _LaterEvents] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_event: asyncio.Event | None = None
        self._pid = 0
        self._asleep = False
        self._closed = False
        #: How many traces were dropped.
        self.dropped: int = 0

    def add(self, sink: TraceSink) -> None:
        """Pass later traces to another sink too."""
        self.sinks = (*self.sinks, sink)
        caller = _SinkCaller(sink, self._clock)
        if caller.wants:
            self._callers = (*self._callers, caller)
        if (activate := _overridden(sink, "activate")) is not None:
            self._activate.append((type(sink).__name__, activate))
        if _overridden(sink, "current_traceparent") is not None:
            self._sources.append(sink)

    # -- called by the runner

    @property
    def redaction_failures(self) -> int:
        """How often the redact hook failed, so that a sink or a log record got no content."""
        return 0 if self._redaction is None else self._redaction.failures

    @property
    def contents(self) -> bool:
        """Whether a sink uses contents."""
        return any(getattr(sink, "content", True) for sink in self.sinks)

    @property
    def activates(self) -> bool:
        """Whether a sink makes spans of runs current while their code runs."""
        return bool(self._activate)

    def activated(self, traceparent: str) -> ExitStack:
        """Return a context manager in which this span is the current span for each sink that wants that.

        A sink that fails is logged once, and the code runs without it.
        """
        stack = ExitStack()
        for name, activate in self._activate:
            try:
                if (manager := activate(traceparent)) is not None:
                    stack.enter_context(manager)
            except Exception as error:
                if name not in self._activation_failed:
                    self._activation_failed.add(name)
                    log.warning("trace sink %s failed in activate(); logged once", name, exc_info=error)
        return stack

    def current_traceparent(self) -> str | None:
        """Return the current span of the calling code, from the first sink that names a span."""
        for sink in self._sources:
            with suppress(Exception):  # a run is submitted nevertheless
                if (found := sink.current_traceparent()) is not None:
                    return checked(found)
        return None

    def start_run(self, run_id: UUID, about: dict[str, Any]) -> None:
        """Trace that this process began to execute the run."""
        if self._callers:
            self._add("start_run", run_id, "", about)

    def event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        """Trace an event of the run."""
        if self._callers:
            self._add("log_event", run_id, event_type, payload)

    def events(self, run_id: UUID, make: EventMaker) -> None:
        """Trace the events of the run that `make` returns."""
        if self._callers:
            self._put(_LaterEvents(run_id, make, self._clock.wall()))

    def end_run(self, run_id: UUID, outcome: str, about: dict[str, Any] | None = None) -> None:
        """Trace that this process stopped executing the run; `outcome` says why."""
        if self._callers:
            self._add("end_run", run_id, outcome, about or {})

    def close(self, timeout: float = 2.0) -> None:
        """Pass the waiting traces to the sinks, then flush these; later traces are dropped.

        Args:
            timeout: Seconds to wait for the sinks.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        atexit.unregister(self.close)
        if thread is None or thread is threading.current_thread():
            return
        self._wake()
        thread.join(timeout)
        if thread.is_alive():
            log.warning("trace sinks did not finish within %g s; traces not sent: %d", timeout, len(self._waiting))

    # -- from the threads of the runs to the thread of the sinks

    def _add(self, method: str, run_id: UUID, kind: str, about: dict[str, Any]) -> None:
        self._put(_Trace(method, run_id, kind, _copied(about), self._clock.wall()))

    def _put(self, trace: _Trace | _LaterEvents) -> None:
        if self._closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("trace sinks are too slow: %d traces are waiting; later traces are dropped", MAX_WAITING)
            return
        self._waiting.append(trace)
        if self._thread is None or self._pid != os.getpid():  # after a fork, the thread is in the parent process
            self._start_thread()
        elif self._asleep:
            self._asleep = False
            self._wake()

    def _start_thread(self) -> None:
        with self._lock:
            if self._closed or (self._thread is not None and self._pid == os.getpid()):
                return
            if self._pid not in (0, os.getpid()):
                # In a forked child: the parent process passes on the traces from before the fork.
                last = self._waiting.pop()
                self._waiting.clear()
                self._waiting.append(last)
            self._pid, self._asleep = os.getpid(), False
            self._loop = self._wake_event = None
            thread = threading.Thread(target=self._run, name="agent-runtime-traces", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads in this process, or it is shutting down
                log.debug("starting the tracer thread failed: %s", error)
                return
            self._thread = thread
        atexit.register(self.close)

    def _wake(self) -> None:
        if self._loop is not None and self._wake_event is not None:
            call_in_loop(self._loop, self._wake_event.set)

    # -- in the thread of the sinks

    def _run(self) -> None:
        try:
            asyncio.run(self._drain())
        finally:  # the next trace starts another thread if a sink ended this thread
            with self._lock:
                if self._thread is threading.current_thread() and not self._closed:
                    self._thread = None

    async def _drain(self) -> None:
        wake_event = self._wake_event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while True:
            while self._waiting:
                for _ in range(min(BATCH, len(self._waiting))):
                    for trace in self._made(self._waiting.popleft()):
                        for sink in self._callers:
                            await sink.send(trace)
                await asyncio.sleep(0)  # let tasks of the sinks continue
            if self._closed:
                break
            wake_event.clear()
            self._asleep = True
            # A trace that was added before `_asleep` was set did not wake this thread.
            if not self._waiting and not self._closed:
                await wake_event.wait()
            self._asleep = False
            if not self._closed:
                # A run produces traces one by one. Waking for each trace would cost more than the trace itself.
                await asyncio.sleep(GATHER_SECONDS)
        if self.dropped:
            log.warning("dropped traces: %d; the trace sinks are too slow", self.dropped)
        for sink in self._callers:
            await sink.flush()

    def _made(self, waiting: _Trace | _LaterEvents) -> Iterable[_Trace]:
        """Return the traces as the sinks get them."""
        traces = [waiting] if isinstance(waiting, _Trace) else waiting.traces()
        if self._redaction is None:
            return traces
        return [
            each._replace(about=redacted_trace(self._redaction, each.method, each.kind, each.about)) for each in traces
        ]


class _SinkCaller:
    """Calls one sink, and pauses it after too many failures."""

    def __init__(self, sink: TraceSink, clock: Clock) -> None:
        self._sink, self._clock = sink, clock
        names = ("start_run", "log_event", "end_run", "trace", "flush")
        self._methods = {name: method for name in names if (method := _overridden(sink, name)) is not None}
        self._failures = 0
        self._paused_until = float("-inf")
        self._logged: set[tuple[str, type]] = set()

    @property
    def wants(self) -> bool:
        """Whether the sink overrides a method that gets traces."""
        return bool(self._methods.keys() - {"flush"})

    async def send(self, trace: _Trace) -> None:
        if self._failures >= MAX_FAILURES and self._clock.boot() < self._paused_until:
            return
        succeeded = True
        if trace.method in self._methods:
            succeeded = await self._call(trace.method, *trace.arguments())
        if "trace" in self._methods:
            succeeded = await self._call("trace", trace.event()) and succeeded
        if succeeded:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._paused_until = self._clock.boot() + PAUSE
            if self._failures == MAX_FAILURES:
                log.warning("%s failed %d times in a row: paused for %g s", self._name, MAX_FAILURES, PAUSE)

    async def flush(self) -> None:
        if "flush" in self._methods:
            await self._call("flush")

    @property
    def _name(self) -> str:
        return f"trace sink {type(self._sink).__name__}"

    async def _call(self, method: str, *arguments: Any) -> bool:
        try:
            answer = self._methods[method](*arguments)
            if answer is not None and inspect.isawaitable(answer):
                async with asyncio.timeout(CALL_TIMEOUT):
                    await answer
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if (method, type(error)) not in self._logged:
                self._logged.add((method, type(error)))
                log.warning(
                    "%s failed in %s(); further failures of this kind are not logged",
                    self._name,
                    method,
                    exc_info=error,
                )
            return False
        return True


def _overridden(sink: TraceSink, name: str) -> Callable[..., Any] | None:
    """Return the sink's method with that name, or None if it is the default that does nothing."""
    method: Callable[..., Any] | None = getattr(sink, name, None)
    if not callable(method) or getattr(method, "__func__", None) is getattr(TraceSink, name):
        return None
    return method


def _copied(about: dict[str, Any]) -> dict[str, Any]:
    """Return a copy one level deep: the run may append to its lists later."""
    copied = dict(about)
    for key, value in about.items():
        if type(value) is list or type(value) is dict:
            copied[key] = value.copy()
    return copied


class NoopTraceSink(TraceSink):
    """Does nothing. A runner with no other sink traces nothing, at no cost."""

    content: bool = False
