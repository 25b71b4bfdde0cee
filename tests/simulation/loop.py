"""An event loop that owns time and chance: the same seed turns the same way, and hosts on it can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from typing import Any, TypeVar, TypeVarTuple, Unpack
from zlib import crc32

#: The incarnation of a host that code belongs to; "" is the world outside of all hosts.
HOST: ContextVar[str] = ContextVar("simulated_host", default="")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURNS = 60_000  # after which a seed is taken to run in circles
_CLOSES = 8


class Deadlock(Exception):
    """Nothing is ready and no timer is set: something waits for a wake-up that was lost."""


class SimLoop(asyncio.BaseEventLoop):
    """Time jumps from timer to timer; which of the ready callbacks is next is up to the seed.

    Killing a host drops every callback of its context, so that no `finally` of it ever runs; stopping one
    keeps them for later, and suspending one holds its timers back as well. Asyncio promises callbacks of
    one loop in order, so with `shuffle` off the seed only chooses between hosts.
    """

    _ready: deque[Any]

    def __init__(self, seed: int, *, shuffle: bool = True) -> None:
        super().__init__()
        self.now = 0.0
        self.dead: set[str] = set()
        self.stopped: dict[str, list[Any]] = {}
        self.asleep: dict[str, float] = {}  # hosts whose machine sleeps, and since when
        self.turns = 0
        self.fallen: list[str] = []
        self.digest = 0
        self._chance = random.Random(seed)
        self._shuffle = shuffle
        self._tasks: list[asyncio.Task[Any]] = []
        self._timers: list[tuple[float, int, Any]] = []  # of one time, the one set first comes first
        self._set = 0
        self.set_task_factory(self._task)

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        # Held until the end: garbage collection would throw GeneratorExit into the tasks of a killed host.
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        self._tasks.append(task)
        return task

    def time(self) -> float:
        return self.now

    def note(self, text: str) -> None:
        """Make `text` part of what two runs of a seed must agree in."""
        self.digest = crc32(text.encode(), self.digest)

    # -- hosts

    def kill(self, host: str) -> None:
        self.dead.add(host)
        self.stopped.pop(host, None)
        self.asleep.pop(host, None)

    def stop_host(self, host: str) -> None:
        self.stopped.setdefault(host, [])

    def suspend(self, host: str) -> None:
        """As when its machine sleeps: the time until it is resumed does not count for its timers."""
        self.stop_host(host)
        self.asleep.setdefault(host, self.now)

    def resume_host(self, host: str) -> None:
        kept, since = self.stopped.pop(host, []), self.asleep.pop(host, None)
        if since is None:
            self._ready.extend(kept)
            return
        own = [entry for entry in self._timers if entry[2]._context.get(HOST, "") == host and entry[0] > since]
        if own:
            moved = {order for _, order, _ in own}
            self._timers = [entry for entry in self._timers if entry[1] not in moved]
            heapq.heapify(self._timers)
            for when, _, timer in sorted(own):
                self._push(when + self.now - since, timer)
        for handle in kept:
            if isinstance(handle, asyncio.TimerHandle) and handle.when() > since:
                self._push(handle.when() + self.now - since, handle)
            else:
                self._ready.append(handle)

    # -- what a loop is made of

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._push(when, timer)
        return timer

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        when = self.now + delay
        if delay > 0:  # what is left of a wait may be too little for this float: without this it would never be over
            when = max(when, math.nextafter(self.now, math.inf))
        return self.call_at(when, callback, *args, context=context)

    def _push(self, when: float, timer: Any) -> None:
        self._set += 1
        timer._when = when
        heapq.heappush(self._timers, (when, self._set, timer))

    def _process_events(self, event_list: object) -> None:
        """There is no input or output."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(lambda: future.set_result(func(*args)))
        return future

    def call_exception_handler(self, context: Any) -> None:
        """What a task raised and nobody asked for may belong to a host that is gone; a callback that fell may not."""
        if "handle" in context:
            self.fallen.append(repr(context.get("exception")))

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Deadlock(f"at {self.now:.3f} s")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        if not ready:
            return
        if len(ready) > 1:
            self._choose(ready)
        handle = ready.popleft()
        if handle._cancelled:
            return
        host = handle._context.get(HOST, "")
        if host in self.dead:
            return
        if host in self.stopped:
            self.stopped[host].append(handle)
            return
        self.turns += 1
        if self.turns > TURNS:
            raise Deadlock(f"{TURNS} turns and no end, at {self.now:.3f} s")
        handle._run()

    def _choose(self, ready: deque[Any]) -> None:
        """Bring the callback that is next to the front."""
        if self._shuffle:
            place = int(self._chance.random() * len(ready))
        else:
            first: dict[str, int] = {}
            for i, handle in enumerate(ready):
                first.setdefault(handle._context.get(HOST, ""), i)
            hosts = list(first.values())
            place = hosts[int(self._chance.random() * len(hosts))]
        if place:
            handle = ready[place]
            del ready[place]
            ready.appendleft(handle)
        self.digest = crc32(b"%d" % place, self.digest)

    # -- the end

    def bury(self) -> None:
        """End what is left of all tasks, quietly, and close."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coro: Any = task.get_coro()
                for _ in range(_CLOSES):
                    try:
                        coro.close()
                        break
                    except (RuntimeError, ValueError, asyncio.CancelledError):
                        continue  # it awaited in a `finally`, or left a context it was not in
            else:
                with contextlib.suppress(asyncio.CancelledError):
                    task.exception()
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()
        self.close()
