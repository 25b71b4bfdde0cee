"""Who in this process wants to hear of commits, and the thread that hears of those of other processes."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from .._core.threads import started
from ..errors import StorageError


class Notifier(ABC):
    """Listeners by topic. Its thread starts with the first of them."""

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
        """Wake those who listen to these topics, or all."""
        for topic in tuple(self._listeners) if topics is None else topics:
            for wake in tuple(self._listeners.get(topic, ())):
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    wake()

    def close(self, ring: Callable[[], None], patience: float) -> None:
        """Let the thread see that it is over, which `ring` wakes it for."""
        self._closed = True
        if self._thread is not None:
            ring()
            self._thread.join(patience)

    def _setup(self) -> None:  # noqa: B027 - most need nothing
        """Make ready what the thread will listen at."""

    def _topic_added(self, topic: str) -> None:  # noqa: B027 - most hear of all topics
        """Somebody listens to a topic that nobody has listened to."""

    def _topic_removed(self, topic: str) -> None:  # noqa: B027
        """Nobody listens to a topic any more."""

    @abstractmethod
    def _run(self) -> None:
        """Call `wake` for what others commit, until it is closed."""
