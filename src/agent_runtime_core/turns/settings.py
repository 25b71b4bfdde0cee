"""Settings of turns: built from their sources, and reloaded when config.toml or the environment changes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from .._core.clock import SYSTEM, Clock
from .._core.context_vars import start_helper
from .._core.ids import path_text
from .._core.log import log
from .._core.per_loop import call_in_loop
from .._core.settings import (
    POSITIVE,
    POSITIVE_SECONDS,
    SECRET,
    TABLE,
    TEXT,
    TRUTH,
    URL,
    SettingType,
    check_all,
    choice,
    from_variables,
    without_credentials_in_repr,
)
from .._core.validation import Shown, must
from ..config import FIELDS, PREFIX, SETTINGS, RuntimeConfig, configure, from_environment
from ..errors import InvalidArgument, UnknownSetting
from ..planning.plan import StepKind
from .personality import (
    LoggedOnce,
    Mark,
    PackReader,
    PackScan,
    PackSet,
    Reading,
    mark_of,
    read_file,
    read_until_stable,
    tables_in,
    watch,
)

_SECTIONS = dict.fromkeys(("runtime", "model_prices", "turns", "personality", "providers"), TABLE)
_KINDS = tuple(kind.value for kind in StepKind)
_PROVIDER_STEPS = {
    "kinds": SettingType(f"a list of kinds of steps, which are {', '.join(_KINDS)}", lambda value: _are_kinds(value)),
    "deadline": POSITIVE_SECONDS,
    "heartbeat": POSITIVE_SECONDS,
    "fallback": choice("fail", "here"),
}
_TURNS = {"max_in_flight": POSITIVE, "remote_steps": TRUTH, "max_unsent_bytes": POSITIVE, "provider_steps": TABLE}
_PERSONALITY = {"default": TEXT, "folder": TEXT}
_PROVIDER = {"api_key": SECRET, "base_url": URL, "default_model": TEXT}
_PROVIDERS = {"openai": {**_PROVIDER, "organization": TEXT}}
_TURN_VARIABLES = {name: f"{PREFIX}TURNS_{name.upper()}" for name in ("max_in_flight", "remote_steps")}
_PERSONALITY_VARIABLES = {name: f"{PREFIX}PERSONALITY_{name.upper()}" for name in _PERSONALITY}


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class ProviderSteps:
    """Which steps of a turn are executed by an external worker, which answers on agent.step_results.

    Args:
        kinds: The kinds of these steps: "llm_call", "tool_call" or "memory_op".
        deadline: Seconds from the request of a step to its answer.
        heartbeat: Seconds that a provider worker may be silent after the first piece of its answer. A piece without
            text is enough.
        fallback: What happens without an answer: "fail" fails the attempt, "here" executes the step in the process of
            the turn.

    Raises:
        InvalidArgument: A value is invalid.
    """

    kinds: tuple[str, ...] = ("llm_call",)
    deadline: float = 300.0
    heartbeat: float = 30.0
    fallback: str = "fail"

    def __post_init__(self) -> None:
        for name, setting in _PROVIDER_STEPS.items():
            setting.check(name, getattr(self, name))
        object.__setattr__(self, "kinds", tuple(self.kinds))


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """Settings of turns.

    `max_in_flight` steps run at the same time. With `remote_steps`, other workers may execute steps. `max_unsent_bytes`
    is how far a reader of `stream(backpressure=True)` may lag. `provider_steps` are the steps that provider workers
    execute.

    Attributes:
        max_in_flight: Steps that run at the same time in this process.
        remote_steps: Whether other workers may execute steps.
        max_unsent_bytes: How many bytes a reader of `stream(backpressure=True)` may lag.
        provider_steps: The steps that provider workers execute, or None.
    """

    max_in_flight: int = 16
    remote_steps: bool = False
    max_unsent_bytes: int = 131072
    provider_steps: ProviderSteps | None = None


def _are_kinds(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(each in _KINDS for each in value)


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class PersonalitySettings:
    """The default personality, None for the pack with `default = true`; and the folder of packs, None for no packs.

    Attributes:
        default: The name of the default personality; None for the pack with `default = true`.
        folder: The folder of packs; None for no packs.
    """

    default: str | None = None
    folder: Path | None = None


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True, repr=False)
class ProviderSettings:
    """The options of the client of one provider. Its repr hides the API key.

    Attributes:
        api_key: The API key.
        base_url: The URL of the server.
        default_model: The model of calls that name none.
        organization: The organization, for OpenAI.
    """

    api_key: str | None = None
    base_url: str | None = None
    default_model: str | None = None
    organization: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that are set, for `get_llm_client(name, **options)`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def __repr__(self) -> str:
        shown = (f"{n}={_PROVIDERS['openai'][n].shown(value)!r}" for n, value in self.options().items())
        return f"ProviderSettings({', '.join(shown)})"


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings and packs of one load, immutable. `version` starts at 1.

    Attributes:
        runtime: The settings of the process.
        turns: The settings of turns.
        personality: The default personality and the folder of packs.
        providers: The options of the clients by provider.
        packs: The personalities.
        version: The number of the load, from 1.
    """

    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    turns: TurnSettings = TurnSettings()
    personality: PersonalitySettings = PersonalitySettings()
    providers: Mapping[str, ProviderSettings] = field(default_factory=dict)
    packs: PackSet = field(default_factory=lambda: PackSet.of(None))
    version: int = 1


@without_credentials_in_repr
@dataclass(frozen=True)
class Sources:
    """The checked values of config.toml and of the environment."""

    #: Settings of RuntimeConfig in the file, and in the environment.
    runtime: Mapping[str, Any]
    environment: Mapping[str, Any]
    turns: Mapping[str, Any]
    personality: PersonalitySettings
    providers: Mapping[str, ProviderSettings]

    @classmethod
    def of(cls, document: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Sources:
        """Check the tables of the file at `path`, and the environment. Relative folders start at the file's folder.

        Raises:
            InvalidArgument: Names the file or the variable, the key and the value.
        """
        where = "" if path is None else path.name
        for name in document:
            if name in SETTINGS and name not in _SECTIONS:
                raise UnknownSetting(f"{where}: {name} must be in [runtime], got it above all sections. Move it there.")
        tables: dict[str, Any] = {name: {} for name in _SECTIONS} | check_all(document, _SECTIONS, where, "section")
        runtime = check_all(tables["runtime"], SETTINGS, f"{where}: [runtime]")
        turns = check_all(tables["turns"], _TURNS, f"{where}: [turns]")
        for name, called, values in (
            ("model_prices", "[model_prices]", document),
            ("max_unsent_bytes", "[turns] max_unsent_bytes", turns),
        ):
            if name in values and name in runtime:
                raise InvalidArgument(f"{where}: {called} must be set once, got it in [runtime] too. Remove one.")
            if name in values:
                SETTINGS[name].check(f"{where}: {called}", values[name])
                runtime[name] = values[name]
        turns.pop("max_unsent_bytes", None)
        if "provider_steps" in turns:
            table = check_all(turns["provider_steps"], _PROVIDER_STEPS, f"{where}: [turns.provider_steps]")
            turns["provider_steps"] = ProviderSteps(**table)
        if "trace_sinks" in runtime:
            runtime["trace_sinks"] = tuple(runtime["trace_sinks"])
        personality = check_all(tables["personality"], _PERSONALITY, f"{where}: [personality]")
        personality |= from_variables(_PERSONALITY, _PERSONALITY_VARIABLES, environ)
        folder = personality.get("folder")
        home = Path() if path is None else path.parent
        return cls(
            runtime=runtime,
            environment=from_environment(environ),
            turns=turns | from_variables(_TURNS, _TURN_VARIABLES, environ),
            personality=PersonalitySettings(
                default=personality.get("default"), folder=None if folder is None else (home / folder).absolute()
            ),
            providers={
                name: ProviderSettings(
                    **check_all(table, _PROVIDERS.get(name, _PROVIDER), f"{where}: [providers.{name}]")
                )
                for name, table in check_all(
                    tables["providers"], dict.fromkeys(tables["providers"], TABLE), f"{where}: [providers]"
                ).items()
            },
        )

    def with_packs(self, packs: PackSet) -> Settings:
        """Return the settings. File and environment override the default personality's provider and model."""
        explicit = {**self.runtime, **self.environment}
        runtime = RuntimeConfig(**{**_settings_of_pack(packs, explicit), **explicit})
        turns = TurnSettings(**{**self.turns, "max_unsent_bytes": runtime.max_unsent_bytes})
        return Settings(
            runtime=runtime, turns=turns, personality=self.personality, providers=self.providers, packs=packs
        )


def _settings_of_pack(packs: PackSet, explicit: Mapping[str, Any]) -> dict[str, str]:
    pack, found = packs.get(), dict[str, str]()
    if pack.provider is not None:
        found["model_provider"] = pack.provider
    # A model's name is valid only for the provider it was chosen for.
    if pack.model is not None and pack.provider in (None, explicit.get("model_provider", pack.provider)):
        found["default_model"] = pack.model
    return found


def changes(old: Settings, new: Settings) -> list[str]:
    """Return the dotted names of settings that differ: `runtime.max_retries`, `packs.helper`."""
    changed: list[str] = []
    for section in ("runtime", "turns", "personality"):
        one, other = getattr(old, section), getattr(new, section)
        fields = [each.name for each in dataclasses.fields(one)]
        changed += [f"{section}.{name}" for name in fields if getattr(one, name) != getattr(other, name)]
    for section, there, now in (
        ("providers", old.providers, new.providers),
        ("packs", old.packs.packs, new.packs.packs),
    ):
        names = sorted({*there, *now})
        changed += [f"{section}.{name}" for name in names if there.get(name) != now.get(name)]
    if old.packs.default != new.packs.default:
        changed.append("packs.default")
    return changed


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

        Returns immediately if another thread, or a caller of this call, is notifying: it passes on the new events too.
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


@dataclass(frozen=True)
class ConfigChanged:
    """The event "config.changed". `changed` lists the dotted names of the changed settings: `runtime.max_retries`.

    Attributes:
        version: The number of the load.
        changed: The dotted names of the changed settings, such as `runtime.max_retries`.
        path: The path of config.toml, or "".
        event_type: "config.changed".
    """

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
    3. Invalid sources leave the last valid settings in place. `last_error` is the reason, which is logged once.
    4. Subscribers get one ConfigChanged for each reload that changes a value. A new file time or comment is no change.

    Args:
        path: The TOML file, or None for a program without a file.
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
            True if any setting changed.
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
        """Call `configure` with `current.runtime`, overridden by `settings`.

        Args:
            **settings: Settings that override the settings of the file.

        Returns:
            The new configuration of the process.
        """
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
