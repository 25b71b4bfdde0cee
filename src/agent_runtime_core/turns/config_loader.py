"""Settings from config.toml, reloaded when the file, its personality packs or the environment change."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .._core.clock import SYSTEM, Clock
from .._core.context_vars import start_helper
from .._core.ids import path_text
from .._core.log import log
from .._core.per_loop import call_in_loop
from .._core.validation import Shown, must
from ..config import FIELDS, RuntimeConfig, configure
from ..errors import InvalidArgument
from .pack_reader import (
    LoggedOnce,
    Mark,
    PackReader,
    PackScan,
    Reading,
    mark_of,
    read_file,
    read_until_stable,
    tables_in,
    watch,
)
from .personality import PackSet
from .settings import PersonalitySettings, ProviderSettings, ProviderSteps, Settings, Sources, TurnSettings, changes

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


__all__ = [
    "ConfigChanged",
    "ConfigLoader",
    "PersonalitySettings",
    "ProviderSettings",
    "ProviderSteps",
    "Settings",
    "TurnSettings",
]


@dataclass(frozen=True)
class ConfigChanged:
    """The event "config.changed". `changed` has the dotted names of the changed settings: `runtime.max_retries`."""

    version: int
    changed: tuple[str, ...]
    path: str
    event_type: str = "config.changed"

    def payload(self) -> dict[str, Any]:
        """Return the event as JSON values."""
        return {"version": self.version, "changed": list(self.changed), "path": self.path}


class ConfigLoader:
    """Loads the settings from config.toml, the default personality and the environment.

    1. Precedence, lowest first: defaults, the provider and model of the default personality, config.toml, the
       environment, `apply(**settings)`.
    2. `current` is one immutable Settings, packs included. A reload replaces it as a whole.
    3. Invalid sources leave the last valid settings in place. `last_error` has the reason, which is logged once.
    4. Subscribers get one ConfigChanged for each reload that changes a value. A new file time or comment is no change.

    Args:
        path: The TOML file, or None for a program without one.
        environ: The environment variables; by default `os.environ`, read at every reload.

    Raises:
        InvalidArgument: The first load fails. The message names the file, the key and the value.
    """

    def __init__(
        self,
        path: str | Path | None = "config.toml",
        *,
        environ: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        text = None if path is None else path_text(path)
        if path is not None and text is None:
            raise must("path", "be the path of a file, or None for no file", path)
        self._path = None if text is None else Path(text).absolute()
        self._content = b""  # of the file, when it was last read
        self._environ, self._clock = environ, clock
        self._lock = threading.Lock()
        self._subscribers = Subscribers[ConfigChanged]()
        self._problems = LoggedOnce("the settings" if self._path is None else str(self._path))
        self._pack_errors: Mapping[str, InvalidArgument] = {}
        self._reader: PackReader | None = None
        self._last_good: dict[str, Any] = {}
        if self._path is not None and not self._path.exists():
            raise InvalidArgument(f"{self._path} not found. Create it, or pass path=None to use no file.")
        self._current = self._build(self._document())

    @property
    def current(self) -> Settings:
        """The settings of the last successful load."""
        return self._current

    @property
    def last_error(self) -> InvalidArgument | None:
        """Why the newest settings or one of their packs are not used; None if all are."""
        return self._problems.last or next(iter(self._pack_errors.values()), None)

    def reload(self) -> bool:
        """Read the files and the environment again; blocks while it reads.

        Returns:
            True if any setting has changed.
        """
        with self._lock:
            changed = self._update()
        self._subscribers.notify()
        return changed

    async def watch(self, interval: float = 1.0) -> None:
        """Reload after changes of the files, until cancelled; a file that is still being written is waited for.

        Args:
            interval: Seconds between two checks.
        """
        await watch(self, interval, self._clock)

    def subscribe(self, fn: Callable[[ConfigChanged], Any]) -> Callable[[], None]:
        """Call `fn` with every later change, in order. Its errors are logged.

        Args:
            fn: Subscribed inside a running event loop, it is called on that loop and may be sync or async. Otherwise
                it is called in the thread that reloads, and must be sync.

        Returns:
            A function that ends the subscription.
        """
        return self._subscribers.add(fn)

    def apply(self, **settings: Any) -> RuntimeConfig:
        """Call `configure` with `current.runtime`, overridden by `settings`."""
        runtime = self._current.runtime
        return configure(**{**{name: getattr(runtime, name) for name in FIELDS}, **settings})

    def marks(self) -> dict[Path, Mark]:
        """Return the file attributes that change when a file is modified."""
        own = {} if self._path is None else {self._path: mark_of(self._path)}
        return own if self._reader is None else {**own, **self._reader.marks()}

    def _update(self) -> bool:
        new = self._load()
        names = [] if new is None else changes(self._current, new)
        if new is None or not names:
            return False
        self._current = dataclasses.replace(new, version=self._current.version + 1)
        where = "" if self._path is None else str(self._path)
        self._subscribers.add_event(ConfigChanged(self._current.version, tuple(names), where))
        return True

    def _load(self) -> Settings | None:
        """Return the settings of the sources, or None if they are invalid even with the last valid file."""
        try:
            new = self._build(self._document())
            self._problems.clear()
            return new
        except InvalidArgument as error:
            self._problems.report(error, self._content)
        try:
            return self._build(self._last_good)
        except InvalidArgument:
            return None

    def _document(self) -> dict[str, Any]:
        """Return the tables of the file. Raise InvalidArgument if it cannot be read or is not TOML."""
        if (path := self._path) is None:
            return {}

        def read() -> Reading:
            try:
                return Reading({path.name: read_file(path, path.name)})
            except InvalidArgument as error:
                return Reading({}, str(error))

        reading = read_until_stable(read, path.name)
        self._content = reading.contents.get(path.name, b"")
        if reading.problem:
            raise InvalidArgument(reading.problem)
        if self._last_good and not self._content.strip():
            # An editor that writes the file in place first truncates it. A file for the defaults can have a comment.
            raise must(path.name, "not be empty", Shown("no content"), "Write a comment to use the defaults")
        return tables_in(self._content, path.name)

    def _build(self, document: dict[str, Any]) -> Settings:
        sources = Sources.of(document, os.environ if self._environ is None else self._environ, self._path)
        folder = sources.personality.folder
        reader, found = self._reader, PackScan({}, {})
        if reader is None or reader.folder != folder:
            reader = None if folder is None else PackReader(folder)
        if reader is not None:
            found = reader.read()
        built = sources.with_packs(PackSet.of(found.packs if reader else None, sources.personality.default))
        self._reader, self._last_good, self._pack_errors = reader, document, found.errors
        return built
