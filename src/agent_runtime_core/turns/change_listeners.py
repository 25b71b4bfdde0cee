"""Functions that are called for each change, in order, on the event loop where they subscribed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .._core.context_vars import start_helper
from .._core.log import log
from .._core.per_loop import call_in_loop
from .._core.validation import must

T = TypeVar("T")


class Subscribers(Generic[T]):
    """Calls each subscriber with each event, in order. The error of a subscriber is logged and stops no other."""

    def __init__(self) -> None:
        self._all: tuple[_Subscriber[T], ...] = ()
        self._waiting: deque[T] = deque()
        self._adding, self._notifying = threading.Lock(), threading.Lock()

    def add(self, fn: Callable[[T], Any]) -> Callable[[], None]:
        """Call `fn` with each later event.

        Args:
            fn: Subscribed inside a running event loop, it is called on that loop and may be sync or async. Otherwise
                it is called in the thread that notifies, and must be sync.

        Returns:
            A function that ends the subscription.

        Raises:
            InvalidArgument: `fn` is not callable, or is async and no event loop is running.
        """
        subscriber = _Subscriber(fn)
        with self._adding:
            self._all += (subscriber,)

        def remove() -> None:
            with self._adding:
                self._all = tuple(each for each in self._all if each is not subscriber)
            subscriber.removed = True

        return remove

    def add_event(self, event: T) -> None:
        """Queue an event for the next `notify`."""
        self._waiting.append(event)

    def notify(self) -> None:
        """Call the subscribers with the queued events.

        Returns at once if another thread, or a caller of this call, is notifying: it passes on the new events too.
        """
        while self._waiting:
            if not self._notifying.acquire(blocking=False):
                return
            try:
                with contextlib.suppress(IndexError):
                    event = self._waiting.popleft()
                    for each in self._all:
                        each.notify(event)
            finally:
                self._notifying.release()


class _Subscriber(Generic[T]):
    """One function, and the event loop it is called on, if any."""

    def __init__(self, fn: Callable[[T], Any]) -> None:
        if not callable(fn):
            raise must("a subscriber", "be a function", fn)
        self._fn = fn
        self.removed: bool = False
        self._waiting: deque[T] = deque()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        if self._loop is None and inspect.iscoroutinefunction(fn):
            fix = "Call subscribe() in a coroutine, or pass a function that is not async"
            raise must("an async subscriber", "be added inside a running event loop", fn, fix)

    def notify(self, event: T) -> None:
        if self.removed:
            return
        if self._loop is None:
            try:
                self._fn(event)
            except Exception:  # noqa: BLE001 - a subscriber may fail in any way
                self._log_failure()
            return
        self._waiting.append(event)
        call_in_loop(self._loop, self._start)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = start_helper(self._drain())

    async def _drain(self) -> None:
        while self._waiting and not self.removed:
            try:
                outcome = self._fn(self._waiting.popleft())
                if inspect.isawaitable(outcome):
                    await outcome
            except Exception:  # noqa: BLE001 - a subscriber may fail in any way
                self._log_failure()

    def _log_failure(self) -> None:
        log.exception("subscriber %r to configuration changes failed", self._fn)
