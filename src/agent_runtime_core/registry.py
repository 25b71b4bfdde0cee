"""The agents of this process, by key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple

from ._core.arguments import checked_name
from ._core.settings import TIME_LIMIT
from ._core.validation import Shown, must, type_name
from .errors import brief
from .interfaces import AgentRuntime
from .limits import RATE_LIMIT, RateLimit

__all__ = [
    "DEFAULT",
    "Registry",
    "clear_registry",
    "get_runtime",
    "list_runtimes",
    "register_runtime",
    "unregister_runtime",
]


#: The settings of a runner that an agent may have as attributes, and `register` as arguments.
TIME_LIMITS: Final = ("run_timeout_seconds", "stall_timeout_seconds")


class _Registered(NamedTuple):
    agent: AgentRuntime
    limits: dict[str, Any]  # the arguments of `register`


def key_of(runtime: AgentRuntime) -> str:
    """Return the key of an agent.

    Raises:
        InvalidArgument: It is not an agent, or a time limit of it is invalid.
        UnknownSetting: It defines an attribute that was meant to be a setting.
    """
    if runtime is None:
        fix = "get_runtime(key) returns None for a key that is not registered"
        raise must("agent", "be an AgentRuntime", None, fix)
    if isinstance(runtime, type):
        raise must("agent", "be an instance", runtime, f"Pass {runtime.__name__}()")
    if not hasattr(runtime, "key"):
        raise must("agent", "be an AgentRuntime", runtime)
    key = runtime.key
    if not isinstance(key, str) or not key:
        raise must(f"{type(runtime).__name__}.key", "be a non-empty string", key)
    if not callable(getattr(runtime, "run", None)):
        raise must("agent", "have a method run(ctx)", Shown(f"{type_name(type(runtime))} without one"))
    check = getattr(runtime, "_check_attributes", None)  # an agent of another base class lacks it
    if callable(check):
        check()
    check_code_versions(runtime)
    for name in TIME_LIMITS:
        if (value := getattr(runtime, name, None)) is not None:
            TIME_LIMIT.check(f"{type(runtime).__name__}.{name}", value)
    if (limit := getattr(runtime, "rate_limit", None)) is not None:
        RATE_LIMIT.check(f"{type(runtime).__name__}.rate_limit", limit)
    return key


def check_code_versions(runtime: AgentRuntime) -> None:
    """Raise InvalidArgument if `code_version` or `accepts_code_versions` of an agent is invalid."""
    version, accepted = getattr(runtime, "code_version", None), getattr(runtime, "accepts_code_versions", ())
    name = type(runtime).__name__
    if version is not None:
        checked_name(f"{name}.code_version", version)
    if isinstance(accepted, str) or not isinstance(accepted, Collection):
        raise must(f"{name}.accepts_code_versions", "be a list of versions", accepted)
    for each in accepted:
        checked_name(f"a version in {name}.accepts_code_versions", each)


def _class_name(runtime: AgentRuntime) -> str:
    return f"{type(runtime).__module__}.{type(runtime).__qualname__}"


class Registry:
    """Agents by their `key`. Every method is atomic, so threads may share a registry.

    registry = Registry()
    registry.register(MyAgent())
    runner = AgentRunner(registry=registry)
    """

    def __init__(self) -> None:
        self._agents: dict[str, _Registered] = {}
        #: The rate limits of the agents that had one when they were registered, by key. Each submission reads it.
        self.rate_limits: dict[str, RateLimit] = {}

    def register(
        self,
        runtime: AgentRuntime,
        *,
        run_timeout_seconds: float | None = None,
        stall_timeout_seconds: float | None = None,
    ) -> None:
        """Add an agent.

        It replaces an agent with the same key if the classes have the same name and module, as when a notebook cell
        runs again or a module is reloaded.

        Args:
            runtime: The agent.
            run_timeout_seconds: Time limit of an attempt, instead of the attribute of the agent and the setting of the
                runner. It may be higher or lower; `float("inf")` is no limit.
            stall_timeout_seconds: Seconds after which an attempt that records nothing ends, in the same way.

        Raises:
            InvalidArgument: The argument is not an agent, a time limit is invalid, or the key belongs to an agent of
                another class.
            UnknownSetting: The agent defines an attribute that was meant to be a setting, such as `max_token`.

        Examples:
            >>> from agent_runtime_core import AgentRuntime, RunResult
            >>> from agent_runtime_core.registry import Registry
            >>> class Hello(AgentRuntime):
            ...     key = "hello"
            ...     async def run(self, ctx):
            ...         return RunResult()
            >>> registry = Registry()
            >>> registry.register(Hello(), run_timeout_seconds=60)
            >>> registry.keys()
            ['hello']
        """
        limits: dict[str, Any] = {}
        for name, value in zip(TIME_LIMITS, (run_timeout_seconds, stall_timeout_seconds), strict=True):
            if value is not None:
                TIME_LIMIT.check(name, value)
                limits[name] = value
        key, entry = key_of(runtime), _Registered(runtime, limits)
        present = self._agents.setdefault(key, entry)
        if present is entry:
            self._keep_rate_limit(key, runtime)
            return
        if _class_name(present[0]) != _class_name(runtime):
            got = Shown(f"{brief(key)} for {_class_name(present[0])} and {_class_name(runtime)}")
            fix = f"Give one of them another key, or call unregister_runtime({brief(key)}) first"
            raise must("agent key", "be unique", got, fix)
        self._agents[key] = entry
        self._keep_rate_limit(key, runtime)

    def _keep_rate_limit(self, key: str, runtime: AgentRuntime) -> None:
        self.rate_limits.pop(key, None)
        if (limit := getattr(runtime, "rate_limit", None)) is not None:
            self.rate_limits[key] = limit

    def get(self, key: str) -> AgentRuntime | None:
        """Return the agent with that key, or None.

        Args:
            key: The key of the agent.
        """
        entry = self._agents.get(key) if isinstance(key, str) else None
        return entry.agent if entry else None

    def time_limits(self, runtime: AgentRuntime | None) -> dict[str, Any]:
        """Return the time limits that this agent uses instead of its runner's, by the name of the setting.

        The arguments of `register` have priority over the attributes of the agent.

        Args:
            runtime: The agent.
        """
        limits: dict[str, Any] = {}  # each run comes here
        for name in TIME_LIMITS:
            if (value := getattr(runtime, name, None)) is not None:
                limits[name] = value
        entry = self._agents.get(getattr(runtime, "key", ""))
        return limits | entry.limits if entry and type(entry.agent) is type(runtime) else limits

    def keys(self) -> list[str]:
        """Return the keys in the order of registration."""
        return list(self._agents)

    def unregister(self, key: str) -> bool:
        """Remove an agent; return False if there is no agent with that key.

        Args:
            key: The key of the agent.

        Returns:
            Whether an agent had that key.
        """
        if not isinstance(key, str) or self._agents.pop(key, None) is None:
            return False
        self.rate_limits.pop(key, None)
        return True

    def clear(self) -> None:
        """Remove every agent."""
        self._agents.clear()
        self.rate_limits.clear()


class Preferring(Registry):
    """A view of another registry, in which agents of one runner replace those with the same class and key.

    Agents are registered and unregistered in the other registry. This view only selects which of two agents `get`
    returns.
    """

    def __init__(self, other: Registry) -> None:
        super().__init__()
        self._other, self._agents = other, other._agents
        self.rate_limits: dict[str, RateLimit] = other.rate_limits
        self._own: dict[str, AgentRuntime] = {}

    def prefer(self, runtime: AgentRuntime) -> None:
        """Return this agent from `get` while an agent of the same class is registered under its key."""
        self._own[key_of(runtime)] = runtime

    def get(self, key: str) -> AgentRuntime | None:
        registered, preferred = self._other.get(key), self._own.get(key)
        return preferred if preferred is not None and type(preferred) is type(registered) else registered


DEFAULT = Registry()
"""The registry of the functions below, and of every runner without a separate registry."""


def register_runtime(
    runtime: AgentRuntime, *, run_timeout_seconds: float | None = None, stall_timeout_seconds: float | None = None
) -> None:
    """Add an agent to the default registry; see `Registry.register`.

    Args:
        runtime: The agent.
        run_timeout_seconds: As in `Registry.register`, in seconds.
        stall_timeout_seconds: As in `Registry.register`, in seconds.

    Raises:
        InvalidArgument: As in `Registry.register`.

    Examples:
        >>> from agent_runtime_core import AgentRuntime, RunResult, list_runtimes, register_runtime, unregister_runtime
        >>> class Report(AgentRuntime):
        ...     key = "report-of-the-month"
        ...     async def run(self, ctx):
        ...         return RunResult()
        >>> register_runtime(Report())
        >>> "report-of-the-month" in list_runtimes()
        True
        >>> unregister_runtime("report-of-the-month")
        True
    """
    DEFAULT.register(runtime, run_timeout_seconds=run_timeout_seconds, stall_timeout_seconds=stall_timeout_seconds)


def get_runtime(key: str) -> AgentRuntime | None:
    """Return the agent with that key from the default registry, or None.

    Args:
        key: The key of the agent.

    Examples:
        >>> from agent_runtime_core import get_runtime
        >>> get_runtime("unknown") is None
        True
    """
    return DEFAULT.get(key)


def list_runtimes() -> list[str]:
    """Return the keys of the default registry in the order of registration.

    Returns:
        The keys.
    """
    return DEFAULT.keys()


def unregister_runtime(key: str) -> bool:
    """Remove an agent from the default registry; return False if there is no agent with that key.

    Args:
        key: The key of the agent.

    Returns:
        Whether an agent had that key.

    Examples:
        >>> from agent_runtime_core import unregister_runtime
        >>> unregister_runtime("unknown")
        False
    """
    return DEFAULT.unregister(key)


def clear_registry() -> None:
    """Remove every agent from the default registry."""
    DEFAULT.clear()
