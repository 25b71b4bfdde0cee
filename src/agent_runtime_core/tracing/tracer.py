"""What the runner tells of its runs, handed to the trace sinks by a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.per_loop import call_in_loop
from ..interfaces import TraceSink

log: logging.Logger = logging.getLogger("agent_runtime_core")

ROOM = 10_000  # happenings that may wait for the sinks
IN_A_ROW = 20  # failures after which a sink is left out
LEFT_OUT = 60.0  # seconds
AT_MOST = 10.0  # seconds that a sink's coroutine may take over one happening
NAMES = ("type", "run_id", "time")


class _Happening(NamedTuple):
    method: str
    run_id: UUID
    kind: str
    about: dict[str, Any]
    time: float

    def arguments(self) -> tuple[Any, ...]:
        """What the sink's own method of that name is called with, its dict for this sink alone."""
        if self.method == "log_event":
            return (self.run_id, self.kind, dict(self.about))
        timed = {"time": self.time, **self.about}
        return (self.run_id, timed) if self.method == "start_run" else (self.run_id, self.kind, timed)

    def event(self) -> dict[str, Any]:
        """The same as one dict: type, run_id, time, and what the payload has beside them.

        A payload with a key of one of these names is there as a whole too, as `payload`.
        """
        event = dict(self.about)
        if not event.keys().isdisjoint(NAMES):
            event["payload"] = self.about
        event["type"] = self.kind if self.method == "log_event" else self.method
        if self.method == "end_run":
            event["outcome"] = self.kind
        return event | {"run_id": str(self.run_id), "time": self.time}


class Tracer:
    """Tells trace sinks what happens to runs, and never makes a run wait or fail.

    1. What is told is copied one level deep and handed on by a daemon thread, in order, to each sink in turn:
       to its start_run, log_event or end_run, and as one dict to its trace(event), on a loop of that thread.
       The thread starts with the first happening.
    2. Where the sinks are slow, at most ROOM happenings wait; later ones are dropped and counted.
    3. A sink that fails is logged once for each kind of error. After 20 failures in a row it is left out for
       60 s; a coroutine of its that takes more than 10 s is such a failure.

    The dict has `type` (of the event, or "start_run" or "end_run"), `run_id` (text), `time` (seconds since the
    epoch), and the payload's own keys. start_run and end_run find the time among their metadata.
    """

    def __init__(self, sinks: Sequence[TraceSink] = (), *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._outlets = tuple(outlet for outlet in (_Outlet(sink, clock) for sink in sinks) if outlet.wants)
        self._waiting: deque[_Happening] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell: asyncio.Event | None = None
        self._pid = 0
        self._asleep = False
        self._closed = False
        #: How many happenings found no room.
        self.dropped: int = 0

    # -- what the runner calls

    def start_run(self, run_id: UUID, about: dict[str, Any]) -> None:
        """A process took the run up, for the first time or again."""
        if self._outlets:
            self._put("start_run", run_id, "", about)

    def event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        if self._outlets:
            self._put("log_event", run_id, event_type, payload)

    def end_run(self, run_id: UUID, outcome: str, about: dict[str, Any] | None = None) -> None:
        """The process let go of the run; `outcome` says why."""
        if self._outlets:
            self._put("end_run", run_id, outcome, about or {})

    def close(self, timeout: float = 2.0) -> None:
        """Hand over what waits, then flush the sinks, for at most `timeout` seconds; what is told later is dropped."""
        with self._lock:
            self._closed = True
            thread = self._thread
        atexit.unregister(self.close)
        if thread is None or thread is threading.current_thread():
            return
        self._ring()
        thread.join(timeout)
        if thread.is_alive():
            log.warning("the trace sinks were not done after %g s; %d traces still wait", timeout, len(self._waiting))

    # -- from the run's thread to the sinks'

    def _put(self, method: str, run_id: UUID, kind: str, about: dict[str, Any]) -> None:
        if self._closed:
            return
        if len(self._waiting) >= ROOM:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("the trace sinks are too slow: %d traces wait, and later ones are dropped", ROOM)
            return
        self._waiting.append(_Happening(method, run_id, kind, _copied(about), self._clock.wall()))
        if self._thread is None or not self._thread.is_alive():
            self._begin()
        elif self._asleep:
            self._asleep = False
            self._ring()

    def _begin(self) -> None:
        with self._lock:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            if self._pid not in (0, os.getpid()):
                # A forked child: what waits is its parent's to tell.
                last = self._waiting.pop()
                self._waiting.clear()
                self._waiting.append(last)
            self._pid, self._asleep = os.getpid(), False
            self._loop = self._bell = None
            thread = threading.Thread(target=self._run, name="agent-runtime-traces", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or the process is ending
                log.debug("no thread for traces: %s", error)
                return
            self._thread = thread
        atexit.register(self.close)

    def _ring(self) -> None:
        if self._loop is not None and self._bell is not None:
            call_in_loop(self._loop, self._bell.set)

    # -- in the sinks' thread

    def _run(self) -> None:
        asyncio.run(self._drain())

    async def _drain(self) -> None:
        bell = self._bell = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while True:
            while self._waiting:
                happening = self._waiting.popleft()
                for outlet in self._outlets:
                    await outlet.tell(happening)
                # Lets tasks of the sinks run, and the thread of the runs.
                await asyncio.sleep(0)
            if self._closed:
                break
            bell.clear()
            self._asleep = True
            # Whoever added one before it could see us asleep did not ring.
            if not self._waiting and not self._closed:
                await bell.wait()
            self._asleep = False
        if self.dropped:
            log.warning("%d traces were dropped: the trace sinks were too slow", self.dropped)
        for outlet in self._outlets:
            await outlet.flush()


class _Outlet:
    """One sink, and how it has been doing."""

    def __init__(self, sink: TraceSink, clock: Clock) -> None:
        self._sink, self._clock = sink, clock
        names = ("start_run", "log_event", "end_run", "trace", "flush")
        self._methods = {name: method for name in names if (method := _overridden(sink, name)) is not None}
        self._failures = 0
        self._back = float("-inf")
        self._said: set[tuple[str, type]] = set()

    @property
    def wants(self) -> bool:
        """Whether the sink does anything with what happens."""
        return bool(self._methods.keys() - {"flush"})

    async def tell(self, happening: _Happening) -> None:
        if self._failures >= IN_A_ROW and self._clock.boot() < self._back:
            return
        went_well = True
        if happening.method in self._methods:
            went_well = await self._call(happening.method, *happening.arguments())
        if "trace" in self._methods:
            went_well = await self._call("trace", happening.event()) and went_well
        if went_well:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= IN_A_ROW:
            self._back = self._clock.boot() + LEFT_OUT
            if self._failures == IN_A_ROW:
                log.warning("%s failed %d times in a row: it is left out for %g s", self._name, IN_A_ROW, LEFT_OUT)

    async def flush(self) -> None:
        if "flush" in self._methods:
            await self._call("flush")

    @property
    def _name(self) -> str:
        return f"trace sink {type(self._sink).__name__}"

    async def _call(self, method: str, *arguments: Any) -> bool:
        try:
            answer = self._methods[method](*arguments)
            if inspect.isawaitable(answer):
                async with asyncio.timeout(AT_MOST):
                    await answer
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if (method, type(error)) not in self._said:
                self._said.add((method, type(error)))
                log.warning("%s failed in %s(); that is said once", self._name, method, exc_info=error)
            return False
        return True


def _overridden(sink: TraceSink, name: str) -> Callable[..., Any] | None:
    """The sink's method of that name, or None where it is the one that does nothing."""
    method: Callable[..., Any] | None = getattr(sink, name, None)
    if not callable(method) or getattr(method, "__func__", None) is getattr(TraceSink, name):
        return None
    return method


def _copied(about: dict[str, Any]) -> dict[str, Any]:
    """A copy that stays as it is when the run adds a message to its list."""
    copied = dict(about)
    for key, value in about.items():
        if type(value) is list or type(value) is dict:
            copied[key] = value.copy()
    return copied
