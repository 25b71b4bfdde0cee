"""The settings of this process: defaults, then the environment, then what the program says."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from ._refusals import is_number, meant, redacted, redacted_url
from .errors import InvalidArgument, UnknownSetting, brief

__all__ = ["RuntimeConfig", "configure", "get_config", "reset_config"]

log: logging.Logger = logging.getLogger("agent_runtime_core")

PREFIX = "AGENT_RUNTIME_"
_OF_FILES = ("turns_", "personality_")  # sections that a ConfigLoader reads
_KEYS = {"openai_api_key": "OPENAI_API_KEY", "anthropic_api_key": "ANTHROPIC_API_KEY"}
_TRUTHS = frozenset({"langfuse_enabled", "langfuse_content"})
_SECRETS = frozenset({*_KEYS, "langfuse_secret_key"})
_PRICES = frozenset({"input", "output", "cached_input", "cache_write"})
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_WHOLE = frozenset({"max_retries", "max_unsent_bytes"})
_POSITIVE = frozenset({
    "run_timeout_seconds", "heartbeat_interval_seconds", "lease_ttl_seconds", "max_retries", "max_unsent_bytes",
})  # fmt: skip
_NOT_NEGATIVE = frozenset({"retry_backoff_base", "retry_backoff_max", "park_after"})
_NUMBERS = _POSITIVE | _NOT_NEGATIVE
_WHERE = frozenset({"engine", "path", "db_path", "url", "redis_url"})

_Kind = TypeVar("_Kind")


def spelt(kind: type[_Kind]) -> type[_Kind]:
    """A dataclass of settings that answers a name it does not have with UnknownSetting, and so with the nearest."""
    made: Callable[..., None] = kind.__init__
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(made)
    def init(self: _Kind, *args: Any, **settings: Any) -> None:
        refuse_unknown(settings, names)
        made(self, *args, **settings)

    kind.__init__ = init  # type: ignore[method-assign, assignment]
    return kind


def refuse_unknown(settings: Iterable[str], names: Iterable[str]) -> None:
    """UnknownSetting, with the nearest of the names, for a setting that is none of them."""
    for name in settings:
        if name not in names:
            raise UnknownSetting(f"no setting {brief(name)}: {meant(name, names)}")


@spelt
@dataclass(frozen=True, kw_only=True, repr=False)
class RuntimeConfig:
    """Every setting this library reads; times are in seconds. Its text shows no key and no password.

    `backend_url` (`memory://`, `sqlite:///path`, `redis://host`) chooses queue, events, state and persistence at once,
    whatever `*_backend` says, which is a name from the backend tables or `"their_package.module:Class"`.
    """

    model_provider: str = "openai"
    default_model: str = "gpt-4o"
    openai_api_key: str | None = None
    anthropic_api_key: str | None = None
    backend_url: str | None = None
    queue_backend: str = "memory"
    event_bus_backend: str = "memory"
    state_store_backend: str = "memory"
    redis_url: str | None = None
    sqlite_path: str | None = None
    #: "full" survives a power loss, "normal" a crash of the process.
    durability: Literal["full", "normal"] = "full"
    run_timeout_seconds: float = 300
    heartbeat_interval_seconds: float = 30
    lease_ttl_seconds: float = 60
    max_retries: int = 3
    retry_backoff_base: float = 2
    retry_backoff_max: float = 300
    #: How long a wait keeps its worker before it parks the run; 0 parks at once.
    park_after: float = 5.0
    #: How many bytes an attached output may lag behind before its own run's model stream is paused.
    max_unsent_bytes: int = 131072
    #: USD per million tokens by model: `{"gpt-4o": {"input": 2.5, "output": 10, "cached_input": 1.25}}`.
    model_prices: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    #: Trace sinks of every runner: instances, names ("langfuse") or "their_package.module:Class".
    trace_sinks: Sequence[Any] = ()
    #: The name of the sink that `get_trace_sink()` gives; by default "langfuse" if that is enabled, else "noop".
    tracing_backend: str | None = None
    langfuse_enabled: bool = False
    langfuse_public_key: str | None = None
    langfuse_secret_key: str | None = None
    langfuse_host: str | None = None
    #: Whether messages, arguments and results go to Langfuse too.
    langfuse_content: bool = False

    def __post_init__(self) -> None:
        for name in FIELDS:
            check_setting(name, name, getattr(self, name))

    def get_openai_api_key(self) -> str | None:
        """The key that was set, or else the environment's OPENAI_API_KEY."""
        return self.openai_api_key or os.environ.get("OPENAI_API_KEY") or None

    def get_anthropic_api_key(self) -> str | None:
        """The key that was set, or else the environment's ANTHROPIC_API_KEY."""
        return self.anthropic_api_key or os.environ.get("ANTHROPIC_API_KEY") or None

    def chosen(self, setting: str, backend: str | None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """A backend's name and options: as given, else where `backend_url` says, else as that setting does."""
        if backend is None and self.backend_url is not None:
            backend, where = place_of(self.backend_url)
            if not _WHERE & options.keys():
                options = {**where, **options}
        name = getattr(self, setting) if backend is None else backend
        return name, self.placed(name, options)

    def placed(self, backend: str, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a backend, and where it is kept if they do not say."""
        if backend == "sqlite" and "engine" not in options:
            where = {} if "path" in options or "db_path" in options else {"path": self.sqlite_path}
            return {"durability": self.durability, **where, **options}
        if backend == "redis" and not {"engine", "url", "redis_url"} & options.keys():
            return {"url": self.redis_url, **options}
        return options

    def __repr__(self) -> str:
        return f"RuntimeConfig({', '.join(f'{name}={_shown(name, getattr(self, name))}' for name in FIELDS)})"


_URLS = {
    "memory": "memory://", "sqlite": "sqlite:///path", "redis": "redis://host:6379/0",
    "rediss": "rediss://host:6379/0", "unix": "unix:///path/of.sock",
}  # fmt: skip


def refuse_half_a_url(text: str) -> None:
    """InvalidArgument for a path that is more likely a URL: "redis", "memory:", "sqlite:agents.db"."""
    scheme, colon, _ = text.partition(":")
    url = _URLS.get(scheme.lower())
    if url is not None:  # what follows may be a password
        raise InvalidArgument(
            f"{scheme + colon!r} without '://' is no URL: write {url}, or ./{scheme + colon}... for a file of that name"
        )


_SQLITE_URLS = "write sqlite:///relative.db or sqlite:////absolute/path.db"


def place_of(path_or_url: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The backend's name, and the options that say where it is: `memory://`, `sqlite:///path`, a path, `redis://host`."""
    text = os.fspath(path_or_url) if isinstance(path_or_url, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidArgument(f"{brief(path_or_url)} is no place to keep anything: give a path or a URL as text")
    scheme, found, rest = text.partition("://")
    if text[:5].lower() == "file:":
        raise InvalidArgument(f"{brief(text, 500)}: there is no file: URL here; {_SQLITE_URLS}, or memory://")
    if not found:
        if text is path_or_url:
            refuse_half_a_url(text)
        return "sqlite", {"path": text}
    shown = brief(redacted_url(text), 500)
    match scheme:
        case "memory":
            return "memory", {}
        case "sqlite":
            if not rest.startswith("/") or rest == "/":
                raise InvalidArgument(f"{shown}: {_SQLITE_URLS}")
            path, found, _ = rest.partition("?")
            if found:
                raise InvalidArgument(
                    f"{shown}: a file takes no options: write sqlite://{path}, and %3F for a ? in its name"
                )
            return "sqlite", {"path": unquote(rest[1:])}
        case "redis" | "rediss" | "unix":
            return "redis", {"url": text}
    raise InvalidArgument(
        f"{shown}: there is memory://, sqlite:///path, redis://host:port/db, or the path of a SQLite file"
    )


FIELDS = {each.name: each for each in dataclasses.fields(RuntimeConfig)}
_current: RuntimeConfig | None = None


def configure(**settings: Any) -> RuntimeConfig:
    """Set this process's configuration afresh: defaults, then the environment, then `settings`.

    The environment's names are AGENT_RUNTIME_ and the setting in capitals, and OPENAI_API_KEY and
    ANTHROPIC_API_KEY; an empty one counts as not set, and one that is misspelt is told in the log.
    UnknownSetting (a ValueError) for a name nobody reads, InvalidArgument for a value that cannot be used; then
    nothing has changed.
    """
    global _current
    refuse_unknown(settings, FIELDS)
    _current = RuntimeConfig(**{**from_environment(os.environ), **settings})
    for variable, right in misspelt(os.environ):
        log.warning("the environment variable %s is read by nobody: did you mean %s?", variable, right)
    return _current


def get_config() -> RuntimeConfig:
    """The configuration of this process; the first call reads the environment if `configure` has not."""
    return _current if _current is not None else configure()


def reset_config() -> None:
    """Forget the configuration, so that the next `get_config` reads the environment again."""
    global _current
    _current = None


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that these variables say; InvalidArgument names a variable that cannot be used."""
    found: dict[str, Any] = {}
    for name in FIELDS:
        variable = _KEYS.get(name, PREFIX + name.upper())
        text = environment.get(variable, "").strip()
        if text:
            found[name] = _read(name, text)
            check_setting(name, variable, found[name])
    return found


def misspelt(environment: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Variables that nobody reads and that are spelt much like one that is read.

    Others are let be: Kubernetes sets AGENT_RUNTIME_PORT and more for a service of that name.
    """
    for variable in environment:
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in FIELDS and not name.startswith(_OF_FILES):
            near = difflib.get_close_matches(name[:100], FIELDS, n=1, cutoff=0.75)
            if near:
                yield variable, _KEYS.get(near[0], PREFIX + near[0].upper())


def _read(name: str, text: str) -> Any:
    """The value that an environment variable says, or its text where that says none."""
    if name in _NUMBERS:
        return number_in(text)
    if name in _TRUTHS:
        return truth_in(text)
    if name == "trace_sinks":
        return tuple(filter(None, map(str.strip, text.split(","))))
    if name == "model_prices":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def truth_in(text: str) -> bool | str:
    """True or False, or the text itself where it says neither."""
    return _TRUTH.get(text.lower(), text)


def number_in(text: str) -> float | str:
    """A number, or the text itself where it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_setting(name: str, called: str, value: Any) -> None:
    """InvalidArgument for a value that setting cannot have; `called` is what the message calls it."""
    if name in _NUMBERS:
        wanted = _misfit(name, value)
    elif name == "durability":
        wanted = "" if value in ("full", "normal") else "'full' or 'normal'"
    elif name in _TRUTHS:
        wanted = "" if isinstance(value, bool) else "True or False"
    elif name == "trace_sinks":
        wanted = "" if _are_sinks(value) else "trace sinks, or their names, in a list"
    elif name == "model_prices":
        wanted = "" if _are_prices(value) else _PRICES_WANTED
    else:
        optional = FIELDS[name].default is None
        fits = (isinstance(value, str) and value != "") or (optional and value is None)
        wanted = "" if fits else "a text" + (" or None" if optional else "")
    if wanted:
        raise InvalidArgument(f"{called}={_shown(name, value)} cannot be used: it must be {wanted}")


_PRICES_WANTED = (
    "prices by model, in USD per million tokens: {'a-model': {'input': 2.5, 'output': 10}}, "
    "and if they differ 'cached_input' and 'cache_write'"
)


def _are_sinks(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        (isinstance(each, str) and each)
        # A class in place of an instance could be called, and nobody would hear of it.
        or (not isinstance(each, type) and (hasattr(each, "trace") or hasattr(each, "log_event")))
        for each in value
    )


def _are_prices(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(model, str)
        and isinstance(prices, Mapping)
        and {"input", "output"} <= set(prices) <= _PRICES
        and all(is_number(p) and 0 <= p < math.inf for p in prices.values())
        for model, prices in value.items()
    )


def _misfit(name: str, value: Any) -> str:
    whole = name in _WHOLE
    fits = is_number(value) and 0 <= value < math.inf and (not whole or isinstance(value, int))
    if fits and (value or name in _NOT_NEGATIVE):
        return ""
    return f"a{' whole' if whole else ''} number{' above 0' if name in _POSITIVE else ' of 0 or more'}"


def _shown(name: str, value: Any) -> str:
    if name in _SECRETS:
        return "None" if value is None else "'***'"
    if isinstance(value, str):
        value = redacted_url(value) if name.endswith("_url") else redacted(value)
    return brief(value, 500)
