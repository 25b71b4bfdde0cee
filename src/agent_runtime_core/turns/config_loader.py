"""The settings of a program in config.toml, read again whenever the file, its packs or the environment change."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._core.clock import SYSTEM, Clock
from .._core.ids import path_text
from ..config import FIELDS, RuntimeConfig, configure
from ..errors import InvalidArgument, brief
from .change_listeners import Subscribers
from .pack_reader import PackReader, PackScan
from .personality import PackSet
from .settings import PersonalitySettings, ProviderSettings, Settings, Sources, TurnSettings, changes
from .settings_files import LoggedOnce, Mark, Reading, mark_of, read_file, tables_in, twice, watch

__all__ = [
    "ConfigChanged",
    "ConfigLoader",
    "PersonalitySettings",
    "ProviderSettings",
    "Settings",
    "TurnSettings",
]


@dataclass(frozen=True)
class ConfigChanged:
    """The event "config.changed": settings differ now. `changed` are their dotted names, as `runtime.max_retries`."""

    version: int
    changed: tuple[str, ...]
    path: str
    event_type: str = "config.changed"

    def payload(self) -> dict[str, Any]:
        """The event as JSON has it."""
        return {"version": self.version, "changed": list(self.changed), "path": self.path}


class ConfigLoader:
    """The settings that config.toml, the default personality and the environment make together.

    1. The order is: defaults, the provider and model of the default personality, config.toml, the environment;
       `apply(**settings)` goes above them all.
    2. `current` is one Settings, packs included, replaced as a whole: who takes it once sees no mixture.
    3. What cannot be used leaves the last good settings in place. `last_error` says why, and the log says it once.
    4. Every change of a value is told to the subscribers as one ConfigChanged; a file's new time or comment is none.

    The first look is made here, and raises InvalidArgument, which names file, key and value. `path=None` is for
    programs without a file; `environ` is `os.environ` by default, read at every look.
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
            raise InvalidArgument(f"{brief(path, 500)} is no path of a file: give one, or path=None to do without")
        self._path = None if text is None else Path(text).absolute()
        self._content = b""  # of the file, as it was read last
        self._environ, self._clock = environ, clock
        self._lock = threading.Lock()
        self._subscribers = Subscribers[ConfigChanged]()
        self._problems = LoggedOnce("the settings" if self._path is None else str(self._path))
        self._pack_errors: Mapping[str, InvalidArgument] = {}
        self._reader: PackReader | None = None
        self._good: dict[str, Any] = {}
        if self._path is not None and not self._path.exists():
            raise InvalidArgument(f"{self._path} is not there: write it, or give path=None to do without a file")
        self._current = self._built(self._document())

    @property
    def current(self) -> Settings:
        """All settings, as of one moment."""
        return self._current

    @property
    def last_error(self) -> InvalidArgument | None:
        """Why the newest settings are not used, or None; a broken pack counts."""
        return self._problems.last or next(iter(self._pack_errors.values()), None)

    def reload(self) -> bool:
        """Look at the files and the environment; True if any setting has changed. It may block for the files."""
        with self._lock:
            changed = self._look()
        self._subscribers.tell()
        return changed

    async def watch(self, interval: float = 1.0) -> None:
        """Reload whenever the files have changed and lie still, looking every `interval` seconds until cancelled."""
        await watch(self, interval, self._clock)

    def subscribe(self, fn: Callable[[ConfigChanged], Any]) -> Callable[[], None]:
        """Tell `fn`, sync or async, of every change, in order; what is returned ends that. One that fails is logged.

        Inside a running loop it is called on that loop, else in the thread that reloads (then it must be sync).
        """
        return self._subscribers.add(fn)

    def apply(self, **settings: Any) -> RuntimeConfig:
        """Make `current.runtime`, and over it `settings`, the configuration of this process: `configure(…)`."""
        runtime = self._current.runtime
        return configure(**{**{name: getattr(runtime, name) for name in FIELDS}, **settings})

    def marks(self) -> dict[Path, Mark]:
        """What tells whether a file was touched."""
        own = {} if self._path is None else {self._path: mark_of(self._path)}
        return own if self._reader is None else {**own, **self._reader.marks()}

    def _look(self) -> bool:
        new = self._newest()
        names = [] if new is None else changes(self._current, new)
        if new is None or not names:
            return False
        self._current = dataclasses.replace(new, version=self._current.version + 1)
        where = "" if self._path is None else str(self._path)
        self._subscribers.put(ConfigChanged(self._current.version, tuple(names), where))
        return True

    def _newest(self) -> Settings | None:
        """What the sources say now: with the last good file where this one is broken, None if even that will not do."""
        try:
            new = self._built(self._document())
            self._problems.over()
            return new
        except InvalidArgument as error:
            self._problems.tell(error, self._content)
        try:
            return self._built(self._good)
        except InvalidArgument:
            return None

    def _document(self) -> dict[str, Any]:
        """Return the tables of the file; InvalidArgument if it cannot be read or is not TOML."""
        if (path := self._path) is None:
            return {}

        def read() -> Reading:
            try:
                return Reading({path.name: read_file(path, path.name)})
            except InvalidArgument as error:
                return Reading({}, str(error))

        reading = twice(read, path.name)
        self._content = reading.contents.get(path.name, b"")
        if reading.problem:
            raise InvalidArgument(reading.problem)
        if self._good and not self._content.strip():
            # An editor that writes the file in place has only begun. A file for the defaults can be a comment.
            raise InvalidArgument(f"{path.name} has become empty")
        return tables_in(self._content, path.name)

    def _built(self, document: dict[str, Any]) -> Settings:
        sources = Sources.of(document, os.environ if self._environ is None else self._environ, self._path)
        folder = sources.personality.folder
        reader, found = self._reader, PackScan({}, {})
        if reader is None or reader.folder != folder:
            reader = None if folder is None else PackReader(folder)
        if reader is not None:
            found = reader.read()
        built = sources.with_packs(PackSet.of(found.packs if reader else None, sources.personality.default))
        self._reader, self._good, self._pack_errors = reader, document, found.errors
        return built
