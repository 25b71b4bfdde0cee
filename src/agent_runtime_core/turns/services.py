"""What a turn manager lends to the agents that carry out its turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._core.lazy_import import load
from .._execution.context import Context
from ..config import FIELDS, RuntimeConfig, get_config
from ..errors import MissingDependency, NotConfigured
from ..interfaces import LLMClient
from ..planning.recorded_client import configured_client
from ..tools.registry import ToolRegistry
from .context_manager import ContextManager
from .event_topics import EventPublisherSubscriber
from .hooks import Hooks
from .personality_instance import PersonalityInstance
from .planner import PlanExecutor
from .processor import StepProcessor, TurnClient, TurnProgress
from .settings import Settings
from .turn import Turn

_OF_CLIENTS = ("model_provider", "default_model", "openai_api_key", "anthropic_api_key")


@dataclass
class TurnServices:
    """The parts of one manager. `key` is the agent key of its turns, `max_retries` how often a run may fail."""

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

    def settled(self, personality: PersonalityInstance, settings: Settings) -> PersonalityInstance:
        """With the model that the settings name, where it names none; a client of the program's own has one itself."""
        if self.client is not None or personality.model is not None:
            return personality
        said = _said(settings.runtime)
        name = personality.provider or said.get("model_provider") or get_config().model_provider
        own = settings.providers.get(name)
        # A model means nothing to another provider than the one it was named for.
        named = said.get("default_model") if personality.provider in (None, settings.runtime.model_provider) else None
        return replace(personality, model=(own and own.default_model) or named)

    def model_for(self, work: TurnProgress, settings: Settings, own: LLMClient | None = None) -> TurnClient | None:
        """The model as the planner and the steps of that turn ask it; None where none is configured.

        `own` is the client of who asks: it is asked where nobody names another one.
        """
        client = self._client_of(work.personality, settings, own)
        if client is None:
            return None
        return self.processor.client(work, client, settings.runtime.model_prices)

    def _client_of(
        self, personality: PersonalityInstance, settings: Settings, own_client: LLMClient | None
    ) -> LLMClient | None:
        if self.client is not None:
            return self.client
        said = _said(settings.runtime)
        provider = personality.provider or said.get("model_provider")
        name = provider or get_config().model_provider
        own = settings.providers.get(name)
        options = {"api_key": said[f"{name}_api_key"]} if f"{name}_api_key" in said else {}
        options |= {} if own is None else own.options()
        key = (name, tuple(sorted(options.items())))
        try:
            if provider is None and not options:
                return own_client or configured_client()
            if key not in self._clients:
                self._clients[key] = _client(name, **options)
        except (NotConfigured, MissingDependency):
            return own_client
        return self._clients[key]

    def work(
        self, ctx: Context, turn: Turn, personality: PersonalityInstance, values: Mapping[str, Any]
    ) -> TurnProgress:
        """A turn in one attempt of its run, with the prompt of its personality filled in."""
        plain = {name: value for name, value in values.items() if isinstance(value, (str, int, float))}
        known = {name: str(value) if isinstance(value, bool) else value for name, value in plain.items()}
        system = personality.prompt("system", known) if personality.system_prompt else ""
        return TurnProgress(ctx, turn, personality, system)


def _said(runtime: RuntimeConfig) -> dict[str, Any]:
    """What these settings say of clients; what they leave at its default is up to the configuration of the process."""
    return {name: value for name in _OF_CLIENTS if (value := getattr(runtime, name)) != FIELDS[name].default}


def _client(provider: str, **options: Any) -> LLMClient:
    make: Any = load("..llm:get_llm_client", package=__package__)
    client: LLMClient = make(provider, **options)
    return client
