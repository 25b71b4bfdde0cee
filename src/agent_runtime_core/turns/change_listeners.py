"""Who wants to hear of changes: functions, called where they subscribed, one event after the other."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .._core.context_vars import start_helper
from .._core.per_loop import call_in_loop
from ..errors import InvalidArgument, brief

log: logging.Logger = logging.getLogger("agent_runtime_core")

T = TypeVar("T")


class Subscribers(Generic[T]):
    """Tells each event to each subscriber, in order. One that fails is logged, and hurts nobody."""

    def __init__(self) -> None:
        self._all: tuple[_Subscriber[T], ...] = ()
        self._waiting: deque[T] = deque()
        self._adding, self._telling = threading.Lock(), threading.Lock()

    def add(self, fn: Callable[[T], Any]) -> Callable[[], None]:
        """Tell `fn` from now on, until what is returned is called.

        Inside a running loop it is called on that loop, sync or async; else in the thread that brings the event, and
        must be sync (InvalidArgument).
        """
        subscriber = _Subscriber(fn)
        with self._adding:
            self._all += (subscriber,)

        def remove() -> None:
            with self._adding:
                self._all = tuple(each for each in self._all if each is not subscriber)
            subscriber.gone = True

        return remove

    def put(self, event: T) -> None:
        """Take an event in; `tell` hands it on."""
        self._waiting.append(event)

    def tell(self) -> None:
        """Hand on what was taken in. Where another thread, or a caller of this one, is at it, that one does it."""
        while self._waiting:
            if not self._telling.acquire(blocking=False):
                return
            try:
                with contextlib.suppress(IndexError):
                    event = self._waiting.popleft()
                    for each in self._all:
                        each.tell(event)
            finally:
                self._telling.release()


class _Subscriber(Generic[T]):
    """One function, with the loop it belongs to, if it belongs to one."""

    def __init__(self, fn: Callable[[T], Any]) -> None:
        if not callable(fn):
            raise InvalidArgument(f"{brief(fn)} cannot be told of changes: it is no function")
        self._fn = fn
        self.gone: bool = False
        self._waiting: deque[T] = deque()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        if self._loop is None and inspect.iscoroutinefunction(fn):
            raise InvalidArgument(f"{brief(fn)} is async: subscribe it inside the loop that it shall run on")

    def tell(self, event: T) -> None:
        if self.gone:
            return
        if self._loop is None:
            try:
                self._fn(event)
            except Exception:  # noqa: BLE001 - it is the subscriber's, and logged
                self._failed()
            return
        self._waiting.append(event)
        call_in_loop(self._loop, self._begin)

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = start_helper(self._drain())

    async def _drain(self) -> None:
        while self._waiting and not self.gone:
            try:
                outcome = self._fn(self._waiting.popleft())
                if inspect.isawaitable(outcome):
                    await outcome
            except Exception:  # noqa: BLE001 - it is the subscriber's, and logged
                self._failed()

    def _failed(self) -> None:
        log.exception("a subscriber to changes of the configuration failed: %r", self._fn)
