"""Model clients. All of them retry, time out and report errors in the same way, whatever the provider."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from .._core.context_vars import restore
from .._core.lazy_exports import lazy_exports
from .._core.lazy_import import pick
from ..config import RuntimeConfig, get_config
from ..interfaces import LLMClient as LLMClient
from ..interfaces import LLMResponse as LLMResponse
from ..interfaces import LLMStreamChunk as LLMStreamChunk

if TYPE_CHECKING:
    from ._client import ChatClient as ChatClient
    from ._client_per_loop import AnthropicConfigurationError as AnthropicConfigurationError
    from ._client_per_loop import OpenAIConfigurationError as OpenAIConfigurationError
    from ._provider import Timeouts as Timeouts
    from ._retries import Retries as Retries
    from .anthropic import AnthropicClient as AnthropicClient
    from .litellm import LiteLLMClient as LiteLLMClient
    from .openai import OpenAIClient as OpenAIClient
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "._client_per_loop": "AnthropicConfigurationError OpenAIConfigurationError",
            "._client": "ChatClient",
            "._provider": "Timeouts",
            "._retries": "Retries",
            ".anthropic": "AnthropicClient",
            ".litellm": "LiteLLMClient",
            ".openai": "OpenAIClient",
        },
        "PROVIDERS LLMClient LLMResponse LLMStreamChunk get_llm_client use_llm_client",
    )

PROVIDERS = {
    "anthropic": ".anthropic:AnthropicClient",
    "litellm": ".litellm:LiteLLMClient",
    "openai": ".openai:OpenAIClient",
}
"""The classes of the built-in model clients by the name of their provider."""


_override: ContextVar[LLMClient | None] = ContextVar("agent_runtime_core_llm_client", default=None)

#: The shared client of agents without their own, with the configuration and environment it was created from.
_cached: tuple[ReferenceType[RuntimeConfig], dict[str, str], LLMClient] | None = None


def get_llm_client(provider: str | None = None, **options: Any) -> LLMClient:
    """Return a model client.

    Without arguments this is the active client of `use_llm_client`, if any. Otherwise it is a new client.

    Args:
        provider: "openai", "anthropic", "litellm" or `"their_package.module:Class"`; None for the configured provider.
        **options: Arguments of the client's constructor.

    Raises:
        InvalidArgument: The provider is unknown (also a ValueError).
        MissingDependency: Its package is not installed (also an ImportError).
        NotConfigured: There is no API key.
    """
    override = _override.get()
    if override is not None and provider is None and not options:
        return override
    name = get_config().model_provider if provider is None else provider
    client: LLMClient = pick(PROVIDERS, name, package=__name__, what="model provider")(**options)
    return client


def configured_client() -> LLMClient:
    """Return the client of `get_llm_client()`. A change of the configuration or the environment replaces it.

    The client is shared, so callers must not close it.
    """
    global _cached
    override = _override.get()
    if override is not None:
        return override
    config, environment, cached = get_config(), dict(os.environ), _cached
    if cached is None or cached[0]() is not config or cached[1] != environment:
        cached = _cached = ref(config, _forget), environment, get_llm_client()
    return cached[2]


def _forget(config: ReferenceType[RuntimeConfig]) -> None:
    global _cached
    if _cached is not None and _cached[0] is config:
        _cached = None


@contextlib.contextmanager
def use_llm_client(client: LLMClient) -> Iterator[LLMClient]:
    """Make `get_llm_client()` return `client` inside a `with` block, in this task and in tasks it starts.

    with use_llm_client(MockLLMClient(["hello"])):
        await runner.execute(agent, {"messages": []})

    Args:
        client: The client.

    Yields:
        The client.

    Examples:
        >>> from agent_runtime_core import MockLLMClient
        >>> from agent_runtime_core.llm import get_llm_client, use_llm_client
        >>> with use_llm_client(MockLLMClient(["hello"])) as client:
        ...     get_llm_client() is client
        True
    """
    token = _override.set(client)
    try:
        yield client
    finally:
        restore(_override, token)
