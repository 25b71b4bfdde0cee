"""Language models: clients that retry, time out and break off in one way, whoever the provider is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from .._core.context_vars import restore
from .._core.lazy_import import lazily, pick
from ..config import RuntimeConfig, get_config
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk

if TYPE_CHECKING:
    from ._api_keys import AnthropicConfigurationError, OpenAIConfigurationError
    from ._client import ChatClient
    from ._provider import Timeouts
    from ._retries import Retries
    from .anthropic import AnthropicClient
    from .litellm import LiteLLMClient
    from .openai import OpenAIClient

__all__ = [
    "PROVIDERS",
    "AnthropicClient",
    "AnthropicConfigurationError",
    "ChatClient",
    "LLMClient",
    "LLMResponse",
    "LLMStreamChunk",
    "LiteLLMClient",
    "OpenAIClient",
    "OpenAIConfigurationError",
    "Retries",
    "Timeouts",
    "get_llm_client",
    "use_llm_client",
]

PROVIDERS = {
    "anthropic": ".anthropic:AnthropicClient",
    "litellm": ".litellm:LiteLLMClient",
    "openai": ".openai:OpenAIClient",
}

_LAZY = {dotted.partition(":")[2]: dotted for dotted in PROVIDERS.values()} | {
    "AnthropicConfigurationError": "._api_keys:AnthropicConfigurationError",
    "ChatClient": "._client:ChatClient",
    "OpenAIConfigurationError": "._api_keys:OpenAIConfigurationError",
    "Retries": "._retries:Retries",
    "Timeouts": "._provider:Timeouts",
}

_used: ContextVar[LLMClient | None] = ContextVar("agent_runtime_core_llm_client", default=None)

#: The client that agents without one of their own share, and what it was made by; gone with that configuration.
_kept: tuple[ReferenceType[RuntimeConfig], dict[str, str], LLMClient] | None = None


def get_llm_client(provider: str | None = None, **options: Any) -> LLMClient:
    """Without arguments the client of `use_llm_client`, else one for the provider, by default the configured one.

    `options` go to its constructor. InvalidArgument (a ValueError): there is no such provider; MissingDependency
    (an ImportError): its package is not installed; NotConfigured: there is no key.
    """
    used = _used.get()
    if used is not None and provider is None and not options:
        return used
    name = get_config().model_provider if provider is None else provider
    client: LLMClient = pick(PROVIDERS, name, package=__name__, what="model provider")(**options)
    return client


def configured_client() -> LLMClient:
    """What `get_llm_client()` gives, and the same one until the configuration or the environment changes.

    It is shared: whoever asks leaves it open.
    """
    global _kept
    used = _used.get()
    if used is not None:
        return used
    config, environment, kept = get_config(), dict(os.environ), _kept
    if kept is None or kept[0]() is not config or kept[1] != environment:
        kept = _kept = ref(config, _forget), environment, get_llm_client()
    return kept[2]


def _forget(config: ReferenceType[RuntimeConfig]) -> None:
    global _kept
    if _kept is not None and _kept[0] is config:
        _kept = None


@contextlib.contextmanager
def use_llm_client(client: LLMClient) -> Iterator[LLMClient]:
    """Inside, `get_llm_client()` returns this client: in this task and those it starts."""
    token = _used.set(client)
    try:
        yield client
    finally:
        restore(_used, token)


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
