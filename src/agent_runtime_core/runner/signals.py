"""One handler for SIGTERM and SIGINT, shared by all worker loops of the process.

The first signal stops every loop, and a later signal makes them release their runs immediately. When the last loop
ends, the handlers that were installed before are restored and receive the same signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Protocol
from weakref import WeakSet

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


class Loop(Protocol):
    """A worker loop, which any thread may stop."""

    def stop(self) -> None:
        """Ask the loop to stop."""


class SharedSignals:
    """The running loops of this process, and the signals that they received.

    A signal can interrupt every method here, and its handler would wait forever for a lock that the interrupted code
    holds. So there is no lock, and each access to a container is a single operation.
    """

    def __init__(self) -> None:
        self._running: dict[Loop, bool] = {}  # True for a loop in the main thread
        self._received: deque[_Handler] = deque()
        self._unclosed: WeakSet[Loop] = WeakSet()  # stopped by a signal, and the runner is not closed yet

    @contextlib.contextmanager
    def stopping(self, loop: Loop) -> Iterator[None]:
        """Stop `loop` on a signal. The handlers are installed only while a loop runs in the main thread."""
        self._unclosed.discard(loop)
        self._running[loop] = in_main = _in_main_thread()
        if in_main:
            for number in NUMBERS:
                _install(number)
        if self._received:  # the other loops of this process are draining
            loop.stop()
        try:
            yield
        finally:
            self._leave(loop)

    def _leave(self, loop: Loop) -> None:
        if self._received:
            self._unclosed.add(loop)
        del self._running[loop]
        self._restore()
        while self._received and not self._running:
            self._received.popleft().pass_on()

    def closed(self, loop: Loop) -> None:
        """Note that the runner of this loop is closed."""
        self._unclosed.discard(loop)
        self._restore()

    def _restore(self) -> None:
        if not _in_main_thread() or any(list(self._running.values())):
            return
        for number in NUMBERS:
            handler: Any = signal.getsignal(number)
            if isinstance(handler, _Handler) and not self.is_handled(handler):
                handler.restore()

    def is_handled(self, handler: _Handler) -> bool:
        """Whether the default action would kill a process whose loops ended and which now closes its runners."""
        return handler.previous is signal.SIG_DFL and handler.was_received and bool(self._unclosed)

    def receive(self, handler: _Handler) -> bool:
        """Stop all loops. False if none is running."""
        self._received.append(handler)
        loops = list(self._running)
        for loop in loops:
            loop.stop()
        if loops:
            return True
        with contextlib.suppress(ValueError):
            self._received.remove(handler)
            return False
        return True  # another thread's loop was the last, and passed the signal on

    def forked(self) -> None:
        """Restore the handlers in a forked child, where none of the loops runs."""
        self._running.clear()
        self._received.clear()
        self._unclosed.clear()
        self._restore()


class _Handler:
    """The handler of one signal, which knows the handler that was installed before."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.previous: Any = signal.getsignal(number)
        self.was_received: bool = False
        # An event loop calls the handlers of its add_signal_handler, even if signal.signal installed another handler.
        # asyncio keeps them in a dictionary, where an empty handler replaces the host's until the loops have drained.
        loop = asyncio.get_running_loop()
        self._by_loop: dict[int, asyncio.Handle] = getattr(loop, "_signal_handlers", {})
        self._handle = self._by_loop.get(number)
        self._empty = asyncio.Handle(_nothing, (), loop)
        if self._handle is not None:
            self._by_loop[number] = self._empty
        #: Whether the event loop calls the host's handler immediately, as uvloop does. Its handlers cannot be read.
        self._is_called = self._handle is None and getattr(self.previous, "__self__", None) is loop

    def __call__(self, number: int, frame: Any) -> None:
        current: Any = signal.getsignal(number)
        if SHARED.receive(self):
            self.was_received = True
        elif SHARED.is_handled(self):
            return
        elif current is self:  # the host restored it after the last loop had ended
            self.restore()
            signal.raise_signal(number)
        elif callable(self.previous):
            self.previous(number, frame)

    def restore(self) -> None:
        """Install the previous handler again."""
        previous = self.previous
        if _main_task(previous) is not None and _main_task(previous).done():
            previous = signal.default_int_handler  # asyncio.run returned, and could not restore it itself
        signal.signal(self.number, previous)
        if self._handle is not None and self._by_loop.get(self.number) is self._empty:
            self._by_loop[self.number] = self._handle
            signal.siginterrupt(self.number, False)  # as add_signal_handler had set it

    def pass_on(self) -> None:
        """Deliver the signal to the previous handler, unless that is the default handler."""
        if self._is_default() or self._is_called:
            return
        if signal.getsignal(self.number) is not self.previous:
            self.previous(self.number, None)  # a handler that was installed later calls this handler
        elif _in_main_thread():
            signal.raise_signal(self.number)
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)

    def _is_default(self) -> bool:
        if self.previous is signal.SIG_DFL:
            return True
        is_of_asyncio = self.previous is signal.default_int_handler or _main_task(self.previous) is not None
        return self.number == signal.SIGINT and is_of_asyncio


def _install(number: signal.Signals) -> None:
    current = signal.getsignal(number)
    # A process that ignores a signal was started so, as by nohup or in the background of a shell. A handler that was
    # not installed from Python (None) could not be restored.
    if isinstance(current, _Handler) or current in (signal.SIG_IGN, None):
        return
    with contextlib.suppress(ValueError):  # in a subinterpreter
        signal.signal(number, _Handler(number))


def _main_task(handler: Any) -> Any:
    """The task that asyncio.run cancels on SIGINT, if asyncio.run installed this handler; else None."""
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return handler.keywords.get("main_task") if isinstance(owner, asyncio.Runner) else None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _nothing() -> None:
    return


SHARED: Final = SharedSignals()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED.forked)
