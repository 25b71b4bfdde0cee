"""Listeners of this process by topic, and the thread that wakes them for commits of other processes."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from .._core.threads import started
from ..errors import StorageError


class Notifier(ABC):
    """Wakes listeners after commits. Its thread starts with the first listener."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            first = self._thread is None
            if first:
                self._setup()
            known = topic in self._listeners
            self._listeners.setdefault(topic, []).append(wake)
            if not known:
                self._topic_added(topic)
            if first:
                try:
                    self._thread = started(self._run, "agent-runtime-bell")
                except StorageError:
                    del self._listeners[topic]
                    raise

        def stop() -> None:
            with self._lock:
                listeners = self._listeners.get(topic, [])
                if wake in listeners:
                    listeners.remove(wake)
                    if not listeners:
                        del self._listeners[topic]
                        self._topic_removed(topic)

        return stop

    def wake(self, topics: Iterable[str] | None = None) -> None:
        """Wake the listeners of these topics, or all listeners."""
        for topic in tuple(self._listeners) if topics is None else topics:
            for wake in tuple(self._listeners.get(topic, ())):
                with contextlib.suppress(RuntimeError):  # the listener's event loop is closed
                    wake()

    def close(self, wake_thread: Callable[[], None], timeout: float) -> None:
        """End the thread, which `wake_thread` wakes from its wait, and wait for it at most `timeout` seconds."""
        self._closed = True
        if self._thread is not None:
            wake_thread()
            self._thread.join(timeout)

    def _setup(self) -> None:  # noqa: B027 - optional
        """Prepare what the thread will wait on."""

    def _topic_added(self, topic: str) -> None:  # noqa: B027 - optional: most get notifications of all topics
        """Called when the first listener of a topic is added."""

    def _topic_removed(self, topic: str) -> None:  # noqa: B027
        """Called when the last listener of a topic is removed."""

    @abstractmethod
    def _run(self) -> None:
        """Call `wake` for commits of other processes until the notifier is closed."""
