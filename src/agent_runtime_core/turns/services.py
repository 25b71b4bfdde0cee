"""The parts of a turn manager that the agents of its turns use."""

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
from .personality import PersonalityInstance
from .planner import PlanExecutor
from .processor import StepProcessor, TurnClient, TurnProgress
from .settings import Settings
from .turn import Turn

_OF_CLIENTS = ("model_provider", "default_model", "openai_api_key", "anthropic_api_key")


@dataclass
class TurnServices:
    """The parts of one turn manager.

    `key` is the agent key of its turns. `max_retries` are the attempts of a run, `step_tries` the attempts of a step.
    """

    key: str
    plans: PlanExecutor
    processor: StepProcessor
    contexts: ContextManager
    topics: EventPublisherSubscriber
    hooks: Hooks
    tools: ToolRegistry
    #: Returns the present settings; called once for each attempt of a turn.
    settings: Callable[[], Settings]
    #: Returns the personality of that name; for None the default personality.
    personality: Callable[[Settings, str | None], PersonalityInstance]
    client: LLMClient | None
    max_retries: int
    step_tries: int = 3
    backoff_base: float = 1.0
    _clients: dict[Any, LLMClient] = field(default_factory=dict)

    @property
    def step_key(self) -> str:
        """The agent key of child runs for steps."""
        return f"{self.key}.step"

    def with_default_model(self, personality: PersonalityInstance, settings: Settings) -> PersonalityInstance:
        """Set the configured model in a personality without a model, unless the manager uses its own client."""
        if self.client is not None or personality.model is not None:
            return personality
        options_of_clients = _explicit_options(settings.runtime)
        name = personality.provider or options_of_clients.get("model_provider") or get_config().model_provider
        own = settings.providers.get(name)
        # A model's name is valid only for the provider it was chosen for.
        named = (
            options_of_clients.get("default_model")
            if personality.provider in (None, settings.runtime.model_provider)
            else None
        )
        return replace(personality, model=(own and own.default_model) or named)

    def model_for(
        self, new_progress: TurnProgress, settings: Settings, own: LLMClient | None = None
    ) -> TurnClient | None:
        """Return the client for the planner and the steps of a turn; None if none is configured.

        `own` is the client of the caller. It is used if neither the manager, the personality nor the settings name a
        client.
        """
        client = self._client_of(new_progress.personality, settings, own)
        if client is None:
            return None
        return self.processor.client(new_progress, client, settings.runtime.model_prices)

    def _client_of(
        self, personality: PersonalityInstance, settings: Settings, own_client: LLMClient | None
    ) -> LLMClient | None:
        if self.client is not None:
            return self.client
        options_of_clients = _explicit_options(settings.runtime)
        provider = personality.provider or options_of_clients.get("model_provider")
        name = provider or get_config().model_provider
        own = settings.providers.get(name)
        options = {"api_key": options_of_clients[f"{name}_api_key"]} if f"{name}_api_key" in options_of_clients else {}
        options |= {} if own is None else own.options()
        key = (name, tuple(sorted(options.items())))
        try:
            if provider is None and not options:
                return own_client or configured_client()
            if key not in self._clients:
                make: Any = load("..llm:get_llm_client", package=__package__)
                self._clients[key] = make(name, **options)
        except (NotConfigured, MissingDependency):
            return own_client
        return self._clients[key]

    def new_progress(
        self, ctx: Context, turn: Turn, personality: PersonalityInstance, values: Mapping[str, Any]
    ) -> TurnProgress:
        """Return a turn in a new attempt, with `values` in the system prompt of its personality."""
        plain = {name: value for name, value in values.items() if isinstance(value, (str, int, float))}
        known = {name: str(value) if isinstance(value, bool) else value for name, value in plain.items()}
        system = personality.prompt("system", known) if personality.system_prompt else ""
        return TurnProgress(ctx, turn, personality, system)


def _explicit_options(runtime: RuntimeConfig) -> dict[str, Any]:
    """Return the options of clients that differ from their defaults. `configure` decides about the others."""
    return {name: value for name in _OF_CLIENTS if (value := getattr(runtime, name)) != FIELDS[name].default}
