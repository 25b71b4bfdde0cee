"""The settings of this process: defaults, overridden by the environment, overridden by `configure`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import unquote

from ._core.lazy_import import BUILT_IN, installed_schemes, load
from ._core.log import log
from ._core.settings import (
    POSITIVE,
    POSITIVE_SECONDS,
    SECONDS,
    SECRET,
    TEXT,
    TIME_LIMIT,
    TRIES,
    TRUTH,
    URL,
    SettingType,
    check_known,
    choice,
    from_variables,
    number,
    shown_setting,
    with_known_names,
)
from ._core.validation import Shown, must, redacted_url, without_credentials
from .errors import InvalidArgument, brief

if TYPE_CHECKING:
    from ._core.redaction import Redaction

__all__ = ["RuntimeConfig", "configure", "get_config", "reset_config"]


PREFIX = "AGENT_RUNTIME_"
_SECTIONS_OF_FILES = ("turns_", "personality_")  # read by ConfigLoader
_KEYS = {"openai_api_key": "OPENAI_API_KEY", "anthropic_api_key": "ANTHROPIC_API_KEY"}
#: Variables of Langfuse's own SDK. They apply if this library's variable is not set.
OTHER_VARIABLES: dict[str, tuple[str, ...]] = {
    "langfuse_public_key": ("LANGFUSE_PUBLIC_KEY",),
    "langfuse_secret_key": ("LANGFUSE_SECRET_KEY",),
    "langfuse_host": ("LANGFUSE_BASE_URL", "LANGFUSE_HOST"),
}
_PRICES = frozenset({"input", "output", "cached_input", "cache_write", "cache_write_1h", "web_search"})
_LOCATION_OPTIONS = frozenset({"engine", "path", "db_path", "url", "redis_url"})


class DefaultSeconds(int):
    """A default that differs from the same number set by the user. A queue may recommend another number."""


HEARTBEAT_SECONDS, LEASE_SECONDS = DefaultSeconds(30), DefaultSeconds(60)


@with_known_names
@dataclass(frozen=True, kw_only=True, repr=False)
class RuntimeConfig:
    """Every setting of this library. Times are in seconds. Its repr hides keys and passwords.

    `backend_url` (`memory://`, `sqlite:///path`, `redis://host`, `postgresql://host/database`, or a URL of an installed
    package) selects the queue, events, state and persistence backends together and overrides the `*_backend` settings.
    Each of those is a built-in name, such as "sqlite", or `"their_package.module:Class"`.

    Attributes:
        model_provider: The provider of `get_llm_client()`: "openai", "anthropic", "litellm" or
            "their_package.module:Class".
        default_model: The model of calls that name none.
        openai_api_key: The API key for OpenAI. None means the variable OPENAI_API_KEY.
        anthropic_api_key: The API key for Anthropic. None means the variable ANTHROPIC_API_KEY.
        backend_url: The store URL of queue, events, state and persistence. None means the `*_backend` settings.
        queue_backend: The backend of the queue.
        event_bus_backend: The backend of the event bus.
        state_store_backend: The backend of the state store.
        redis_url: The server of the backends named "redis".
        sqlite_path: The file of the backends named "sqlite"; None means `agent_runtime.db`.
        durability: "full" survives a power loss, "normal" a crash of the process.
        payload_codec: Encrypts contents before they are stored: an instance, such as `AESGCMCodec`, or the place of an
            instance as "their_package.module:codec".
        redact: `redact(kind, value)` returns what logs, trace sinks and relays get: a function, or the place of one as
            "their_package.module:function". `kind` is "input", "result", "state", "event", "error", "message" or "log".
        redact_stored: Whether `redact` is called before values are stored too. The HTTP API, streams and the inspector
            show what is stored, so only this setting changes it.
        run_timeout_seconds: Time limit of one attempt in seconds; inf is no limit. An agent may have its own, as for
            the next setting.
        stall_timeout_seconds: Seconds after which an attempt that records nothing ends; None is no limit.
        heartbeat_interval_seconds: Seconds between two extensions of a lease. On Redis and PostgreSQL the default is
            10.
        lease_ttl_seconds: Seconds after which another worker takes over the runs of a crashed worker. On Redis and
            PostgreSQL the default is 30.
        max_retries: Failed attempts after which a run is `failed`, including the first attempt. Crashes do not count.
        max_crashes: Crashes of its worker in a row, without a new recorded step, after which a run is `dead`.
        retry_backoff_base: The next attempt of a run starts after `retry_backoff_base ** attempt` seconds.
        retry_backoff_max: Longest delay before the next attempt of a run, in seconds.
        park_after: Seconds that a waiting run stays on its worker before it is parked; 0 parks it immediately.
        max_unsent_bytes: Unsent bytes of an attached output at which the model stream of its run is paused.
        model_prices: USD per million tokens by model: `{"gpt-4o": {"input": 2.5, "output": 10, "cached_input": 1.25}}`.
            `web_search` is the price of 1,000 searches.
        trace_sinks: Trace sinks of every runner: instances, names ("langfuse") or "their_package.module:Class".
        tracing_backend: The sink that `get_trace_sink()` returns; None is "langfuse" if langfuse_enabled is set, else
            "noop".
        langfuse_enabled: Whether runs are sent to Langfuse.
        langfuse_public_key: The public key of the Langfuse project.
        langfuse_secret_key: The secret key of the Langfuse project.
        langfuse_host: The Langfuse server; None means Langfuse's cloud.
        langfuse_content: Whether messages, arguments and results are sent to Langfuse too.

    Raises:
        UnknownSetting: A setting does not exist.
        InvalidArgument: A value is invalid.

    Examples:
        >>> from agent_runtime_core import RuntimeConfig
        >>> RuntimeConfig(backend_url="sqlite:///runs.db").max_retries
        3
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
    durability: Literal["full", "normal"] = "full"
    payload_codec: Any = None
    redact: Any = None
    redact_stored: bool = False
    run_timeout_seconds: float = 300
    stall_timeout_seconds: float | None = None
    heartbeat_interval_seconds: float = HEARTBEAT_SECONDS
    lease_ttl_seconds: float = LEASE_SECONDS
    max_retries: int = 3
    max_crashes: int = 3
    retry_backoff_base: float = 2
    retry_backoff_max: float = 300
    park_after: float = 5.0
    max_unsent_bytes: int = 131072
    model_prices: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    trace_sinks: Sequence[Any] = ()
    tracing_backend: str | None = None
    langfuse_enabled: bool = False
    langfuse_public_key: str | None = None
    langfuse_secret_key: str | None = None
    langfuse_host: str | None = None
    langfuse_content: bool = False

    def __post_init__(self) -> None:
        for name, kind in SETTINGS.items():
            kind.check(name, getattr(self, name))
        if self.redact_stored and self.redact is None:
            raise must("redact_stored", "be set together with redact", True, "Set redact to a function")

    def get_openai_api_key(self) -> str | None:
        """Return the `openai_api_key` setting, else OPENAI_API_KEY, else None.

        Examples:
            >>> from agent_runtime_core import RuntimeConfig
            >>> RuntimeConfig(openai_api_key="sk-1").get_openai_api_key()
            'sk-1'
        """
        return self.openai_api_key or os.environ.get("OPENAI_API_KEY") or None

    def get_anthropic_api_key(self) -> str | None:
        """Return the `anthropic_api_key` setting, else ANTHROPIC_API_KEY, else None."""
        return self.anthropic_api_key or os.environ.get("ANTHROPIC_API_KEY") or None

    def chosen(self, setting: str, backend: str | None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the name and the options of a backend.

        Priority: `backend`, then `backend_url`, then the setting named `setting`.

        Args:
            setting: The name of a `*_backend` setting.
            backend: The name of a backend. None means the configured backend.
            options: The options of the caller for that backend.

        Raises:
            InvalidArgument: The scheme of `backend_url` belongs to an installed package, which opens all three backends
                together.
        """
        if backend is None and self.backend_url is not None:
            backend, location = place_of(self.backend_url)
            if backend == INSTALLED:
                raise _needs_all_three(setting, self.backend_url)
            if not _LOCATION_OPTIONS & options.keys():
                options = {**location, **options}
        name = getattr(self, setting) if backend is None else backend
        return name, self.placed(name, options)

    def redaction(self) -> Redaction | None:
        """Return what calls the `redact` hook; None without a hook."""
        hook = self.redact
        if hook is None:
            return None
        if isinstance(hook, str):
            hook = load(hook)
            SETTINGS["redact"].check("redact", hook)
        by: Any = load("._core.redaction:redaction_by", package=__package__)
        return cast("Redaction", by(hook))

    def codec(self) -> Any:
        """Return the payload codec; None without a codec."""
        codec = self.payload_codec
        if isinstance(codec, str):
            codec = load(codec)
            SETTINGS["payload_codec"].check("payload_codec", codec)
        return codec

    def encode_contents(self, *backends: Any) -> None:
        """Make these backends redact and encode what they store, if `redact_stored` and `payload_codec` are set.

        Args:
            *backends: The backends.
        """
        if (redaction := self.redaction()) is not None:
            for backend in backends:
                backend.sink_redaction = redaction
                backend.redaction = redaction if self.redact_stored else None
        codec = self.codec()
        if codec is None:
            return
        encode: Any = load("._engines.payloads:encode_contents", package=__package__)
        encode(backends, codec)

    def placed(self, backend: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a backend, with the configured location if they name none.

        Args:
            backend: The name of the backend.
            options: The options of the caller.
        """
        if backend == "sqlite" and "engine" not in options:
            location = {} if "path" in options or "db_path" in options else {"path": self.sqlite_path}
            return {"durability": self.durability, **location, **options}
        if backend == "redis" and not {"engine", "url", "redis_url"} & options.keys():
            return {"url": self.redis_url, **options}
        return options

    def __repr__(self) -> str:
        shown = (f"{name}={brief(kind.shown(getattr(self, name)), 500)}" for name, kind in SETTINGS.items())
        return f"RuntimeConfig({', '.join(shown)})"


_URLS = {
    "memory": "memory://", "sqlite": "sqlite:///path", "redis": "redis://host:6379/0",
    "rediss": "rediss://host:6379/0", "unix": "unix:///path/of.sock", "postgresql": "postgresql://host:5432/database",
    "postgres": "postgresql://host:5432/database",
}  # fmt: skip


def refuse_half_a_url(text: str) -> None:
    """Raise InvalidArgument for a path that is probably a URL, such as "redis", "memory:" or "sqlite:agents.db"."""
    scheme, colon, _ = text.partition(":")
    url = _URLS.get(scheme.lower())
    if url is not None:  # not quoted in full: the rest may hold a password
        fix = f"Use {url}, or ./{scheme + colon}... for a file of that name"
        raise must("store URL", "contain '://'", scheme + colon, fix)


#: What `place_of` returns as the backend of a URL whose scheme another installed package adds.
INSTALLED = "installed"
_SQLITE_URLS = "Use sqlite:///relative.db or sqlite:////absolute/path.db"


def place_of(path_or_url: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return the backend name and the location options of a store URL or path.

    Args:
        path_or_url: `memory://`, `sqlite:///path`, `redis://host:port/db`, `postgresql://host:port/database`, the path
            of a SQLite file, or a URL whose scheme an installed package adds. Its backend is `INSTALLED`.

    Raises:
        InvalidArgument: It is neither, or its scheme is not supported.
    """
    text = os.fspath(path_or_url) if isinstance(path_or_url, str | os.PathLike) else None
    if not isinstance(text, str):
        raise must("store URL", "be a path or a URL string", shown_setting(path_or_url))
    scheme, found, rest = text.partition("://")
    if text[:5].lower() == "file:":
        fix = f"{_SQLITE_URLS}, or memory://"
        raise must("store URL", "not begin with file:", Shown(brief(without_credentials(text), 500)), fix)
    if not found:
        if text is path_or_url:
            refuse_half_a_url(text)
        return "sqlite", {"path": text}
    shown = Shown(brief(redacted_url(text), 500))
    match scheme:
        case "memory":
            return "memory", {}
        case "sqlite":
            if not rest.startswith("/") or rest == "/":
                raise must("store URL", "have three or four slashes after sqlite:", shown, _SQLITE_URLS)
            path, found, _ = rest.partition("?")
            if found:
                fix = f"Use sqlite://{path}, and %3F for a ? in a file name"
                raise must("store URL", "have no options after sqlite:", shown, fix)
            return "sqlite", {"path": unquote(rest[1:])}
        case "redis" | "rediss" | "unix":
            return "redis", {"url": text}
        case "postgresql" | "postgres":
            return "postgres", {"url": text}
    added = installed_schemes()
    if scheme.lower() in added:
        return INSTALLED, {"url": text}
    schemes = (
        "memory://, sqlite:///path, redis://host:port/db, rediss://host:port/db, unix:///path/of.sock, "
        "postgresql://host:port/database"
    )
    more = "".join(f", {each}://" for each in sorted(added.keys() - BUILT_IN))
    raise must("store URL", f"be {schemes}{more} or the path of a SQLite file", shown)


def _needs_all_three(setting: str, url: str) -> InvalidArgument:
    shown = Shown(brief(redacted_url(url), 500))
    fix = "Use AgentRunner.open, or pass all three backends to AgentRunner"
    return must(setting.removesuffix("_backend"), "be opened together with the others of its store URL", shown, fix)


class _StoreURL(SettingType):
    """A URL or path that `place_of` accepts, whose error says what is wrong with it."""

    def check(self, called: str, value: Any) -> None:
        super().check(called, value)
        if value is not None:
            try:
                place_of(value)
            except InvalidArgument as error:
                raise InvalidArgument(f"{called}: {error}") from None


def _are_sinks(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        (isinstance(each, str) and each)
        # A class instead of an instance would receive no events.
        or (not isinstance(each, type) and (hasattr(each, "trace") or hasattr(each, "log_event")))
        for each in value
    )


def _are_prices(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(model, str)
        and isinstance(prices, Mapping)
        and {"input", "output"} <= set(prices) <= _PRICES
        and all(number().fits(price) for price in prices.values())
        for model, prices in value.items()
    )


def _json_in(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_codec(value: Any) -> bool:
    return isinstance(value, str) or all(callable(getattr(value, name, None)) for name in ("encode", "decode"))


def _is_hook(value: Any) -> bool:
    return isinstance(value, str) or (callable(value) and not inspect.iscoroutinefunction(value))


FIELDS = {each.name: each for each in dataclasses.fields(RuntimeConfig)}
#: The type of each setting.
SETTINGS: dict[str, SettingType] = {
    **{name: TEXT if isinstance(each.default, str) else TEXT.or_none() for name, each in FIELDS.items()},
    "backend_url": _StoreURL(URL.wanted, URL.fits, shown=URL.shown).or_none(),
    "redis_url": URL.or_none(),
    **dict.fromkeys((*_KEYS, "langfuse_secret_key"), SECRET.or_none()),
    "run_timeout_seconds": TIME_LIMIT,
    "stall_timeout_seconds": TIME_LIMIT.or_none(),
    **dict.fromkeys(("heartbeat_interval_seconds", "lease_ttl_seconds"), POSITIVE_SECONDS),
    **dict.fromkeys(("retry_backoff_max", "park_after"), SECONDS),
    "max_retries": TRIES,
    **dict.fromkeys(("max_crashes", "max_unsent_bytes"), POSITIVE),
    **dict.fromkeys(("langfuse_enabled", "langfuse_content"), TRUTH),
    "retry_backoff_base": number(),
    "durability": choice("full", "normal"),
    "trace_sinks": SettingType(
        "a list of trace sinks or their names", _are_sinks,
        lambda text: tuple(filter(None, map(str.strip, text.split(",")))),
    ),
    "payload_codec": SettingType("a payload codec or its place", _is_codec).or_none(),
    "redact": SettingType("a function or its place", _is_hook).or_none(),
    "redact_stored": TRUTH,
    "model_prices": SettingType(
        "prices by model, in USD per million tokens: {'a-model': {'input': 2.5, 'output': 10}}, "
        "and if they differ 'cached_input', 'cache_write', 'cache_write_1h' and 'web_search'", _are_prices, _json_in,
    ),
}  # fmt: skip
#: The environment variable of each setting.
VARIABLES = {name: _KEYS.get(name, PREFIX + name.upper()) for name in FIELDS}
_current: RuntimeConfig | None = None


def configure(**settings: Any) -> RuntimeConfig:
    """Replace the configuration of this process: defaults, then the environment, then `settings`.

    Environment variables are named AGENT_RUNTIME_ and the setting in capitals; the API keys are OPENAI_API_KEY and
    ANTHROPIC_API_KEY. LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY, LANGFUSE_BASE_URL and LANGFUSE_HOST are read if the
    variables with the prefix are not set. An empty variable counts as not set. A variable that looks like a misspelled
    setting is logged as a warning.

        configure(backend_url="sqlite:///runs.db", default_model="gpt-4o-mini")

    Args:
        **settings: Fields of `RuntimeConfig`.

    Returns:
        The new configuration.

    Raises:
        UnknownSetting: A setting does not exist; the configuration is unchanged.
        InvalidArgument: A value is invalid; the configuration is unchanged.

    Examples:
        >>> from agent_runtime_core import configure, get_config, reset_config
        >>> configure(default_model="gpt-4o-mini").default_model
        'gpt-4o-mini'
        >>> get_config().default_model
        'gpt-4o-mini'
        >>> reset_config()
    """
    global _current
    for name in settings:
        check_known(name, FIELDS)
    _current = RuntimeConfig(**{**from_environment(os.environ), **settings})
    for variable, right in misspelt(os.environ):
        log.warning("unknown environment variable %s. Did you mean %s?", variable, right)
    return _current


def get_config() -> RuntimeConfig:
    """Return the configuration of this process; the first call reads the environment.

    Returns:
        The configuration.

    Examples:
        >>> from agent_runtime_core import get_config
        >>> get_config().queue_backend
        'memory'
    """
    return _current if _current is not None else configure()


def use(config: RuntimeConfig) -> None:
    """Replace the configuration of this process."""
    global _current
    _current = config


def reset_config() -> None:
    """Discard the configuration, so that the next `get_config` reads the environment again."""
    global _current
    _current = None


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that these variables set; InvalidArgument names an invalid variable."""
    found = from_variables(SETTINGS, VARIABLES, environment)
    for name in OTHER_VARIABLES.keys() - found.keys():
        if (variable := variable_of(name, environment)) is not None:
            found |= from_variables(SETTINGS, {name: variable}, environment)
    return found


def variable_of(name: str, environment: Mapping[str, str]) -> str | None:
    """Return the variable that sets a setting; None if none does."""
    variables = (VARIABLES[name], *OTHER_VARIABLES.get(name, ()))
    return next((each for each in variables if environment.get(each, "").strip()), None)


def misspelt(environment: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each unknown variable that looks misspelled, with the variable that was probably meant.

    Other variables are ignored: Kubernetes sets AGENT_RUNTIME_PORT and more for a service with that name.
    """
    for variable in environment:
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in FIELDS and not name.startswith(_SECTIONS_OF_FILES):
            near = difflib.get_close_matches(name[:100], FIELDS, n=1, cutoff=0.75)
            if near:
                yield variable, VARIABLES[near[0]]
