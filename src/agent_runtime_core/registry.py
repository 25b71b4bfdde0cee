"""The agents this process knows, by key."""

from __future__ import annotations

from .errors import InvalidArgument, brief
from .interfaces import AgentRuntime

__all__ = [
    "DEFAULT",
    "Registry",
    "clear_registry",
    "get_runtime",
    "list_runtimes",
    "register_runtime",
    "unregister_runtime",
]


def key_of(runtime: AgentRuntime) -> str:
    """The key of an agent; InvalidArgument for what is none."""
    if runtime is None:
        raise InvalidArgument("None is no agent: get_runtime(key) gives it where no agent of that key is registered")
    if isinstance(runtime, type):
        raise InvalidArgument(f"{runtime.__name__} is a class, and no agent yet: write {runtime.__name__}()")
    key = getattr(runtime, "key", None)
    if not isinstance(key, str) or not key:
        raise InvalidArgument(f"{type(runtime).__name__}.key is {brief(key)}: an agent needs a text as its key")
    if not callable(getattr(runtime, "run", None)):
        raise InvalidArgument(f"{type(runtime).__name__} has no method run(ctx): it is no agent")
    return key


def _class_name(runtime: AgentRuntime) -> str:
    return f"{type(runtime).__module__}.{type(runtime).__qualname__}"


class Registry:
    """Agents by their `key`; every method is one atomic step, so threads may share it."""

    def __init__(self) -> None:
        self._agents: dict[str, tuple[AgentRuntime]] = {}

    def register(self, runtime: AgentRuntime) -> None:
        """Add an agent.

        It replaces an agent with the same key whose class has the same name and module, as when a notebook cell runs
        again or a module is reloaded.

        Raises:
            InvalidArgument: It is no agent, or the key belongs to an agent of another class.
        """
        key, entry = key_of(runtime), (runtime,)
        there = self._agents.setdefault(key, entry)
        if there is entry:
            return
        if _class_name(there[0]) != _class_name(runtime):
            raise InvalidArgument(
                f"the key of an agent must be unique, got {brief(key)} for {_class_name(there[0])} and "
                f"{_class_name(runtime)}. Give one of them another key, or call unregister_runtime({brief(key)}) first"
            )
        self._agents[key] = entry

    def get(self, key: str) -> AgentRuntime | None:
        """The agent of that key, or None."""
        entry = self._agents.get(key) if isinstance(key, str) else None
        return entry[0] if entry else None

    def keys(self) -> list[str]:
        """In the order of registration."""
        return list(self._agents)

    def unregister(self, key: str) -> bool:
        """False when no agent has that key."""
        return isinstance(key, str) and self._agents.pop(key, None) is not None

    def clear(self) -> None:
        """Forget every agent."""
        self._agents.clear()


class Preferring(Registry):
    """Another registry, with agents of one runner that answer there in the place of others of their kind and key.

    What is registered and taken out is so in that other registry: this one only says which of two is meant.
    """

    def __init__(self, other: Registry) -> None:
        super().__init__()
        self._other, self._agents = other, other._agents
        self._own: dict[str, AgentRuntime] = {}

    def prefer(self, runtime: AgentRuntime) -> None:
        """Answer with this agent here, for as long as one of its kind is registered under its key."""
        self._own[key_of(runtime)] = runtime

    def get(self, key: str) -> AgentRuntime | None:
        there, mine = self._other.get(key), self._own.get(key)
        return mine if mine is not None and type(mine) is type(there) else there


#: The registry of the functions below and of every runner that is given no other.
DEFAULT = Registry()


def register_runtime(runtime: AgentRuntime) -> None:
    """Add an agent to the default registry; see `Registry.register`."""
    DEFAULT.register(runtime)


def get_runtime(key: str) -> AgentRuntime | None:
    """The agent of that key, or None."""
    return DEFAULT.get(key)


def list_runtimes() -> list[str]:
    """In the order of registration."""
    return DEFAULT.keys()


def unregister_runtime(key: str) -> bool:
    """False when no agent has that key."""
    return DEFAULT.unregister(key)


def clear_registry() -> None:
    """Forget every agent."""
    DEFAULT.clear()
