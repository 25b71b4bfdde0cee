"""What a turn manager lends to the agents that carry out its turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._load import load
from ..context import Context
from ..errors import MissingDependency, NotConfigured
from ..interfaces import LLMClient
from ..tools.registry import ToolRegistry
from .contexts import ContextManager
from .hooks import Hooks
from .instances import PersonalityInstance
from .planner import PlanExecutor
from .processor import StepProcessor, Work
from .settings import Settings
from .topics import EventPublisherSubscriber
from .turn import Turn


@dataclass
class Parts:
    """The parts of one manager. `key` is the agent key of its turns, `max_retries` how often a run is tried."""

    key: str
    plans: PlanExecutor
    processor: StepProcessor
    contexts: ContextManager
    topics: EventPublisherSubscriber
    hooks: Hooks
    tools: ToolRegistry
    #: All settings of this moment, taken once for each turn.
    settings: Callable[[], Settings]
    #: The personality that a turn names, or the default one.
    personality: Callable[[Settings, str | None], PersonalityInstance]
    client: LLMClient | None
    max_retries: int
    step_tries: int = 3
    backoff_base: float = 1.0
    _clients: dict[Any, LLMClient] = field(default_factory=dict)

    @property
    def step_key(self) -> str:
        """The agent key of steps that are runs of their own."""
        return f"{self.key}.step"

    def client_of(self, personality: PersonalityInstance, settings: Settings) -> LLMClient | None:
        """The model's client that this personality wants, by the settings; None where none is configured."""
        if self.client is not None:
            return self.client
        provider = personality.provider
        own = settings.providers.get(provider or settings.runtime.model_provider)
        options = {} if own is None else own.options()
        key = (provider, tuple(sorted(options.items())))
        try:
            if provider is None and not options:
                return _configured()
            if key not in self._clients:
                self._clients[key] = _configured(provider or settings.runtime.model_provider, **options)
        except (NotConfigured, MissingDependency):
            return None
        return self._clients[key]

    def work(self, ctx: Context, turn: Turn, personality: PersonalityInstance, values: Mapping[str, Any]) -> Work:
        """A turn in one attempt of its run, with the prompt of its personality filled in."""
        plain = {name: value for name, value in values.items() if isinstance(value, (str, int, float))}
        known = {name: str(value) if isinstance(value, bool) else value for name, value in plain.items()}
        system = personality.prompt("system", known) if personality.system_prompt else ""
        return Work(ctx, turn, personality, system)


def _configured(*provider: str, **options: Any) -> LLMClient:
    make: Any = load("..llm:get_llm_client", package=__package__)
    client: LLMClient = make(*provider, **options)
    return client
