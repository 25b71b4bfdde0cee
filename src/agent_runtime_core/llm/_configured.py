"""The key a client is made with, and what it says without one."""

from __future__ import annotations

from typing import Any

from ..errors import NotConfigured


class OpenAIConfigurationError(NotConfigured):
    """No key for OpenAI."""


class AnthropicConfigurationError(NotConfigured):
    """No key for Anthropic."""


def usable(key: Any, error: type[NotConfigured], provider: str) -> Any:
    """The key without the blanks that a file leaves around it, None if nothing is left; what is no text goes through.

    `error`: no HTTP header can carry it, which would look like a provider that is away.
    """
    if not isinstance(key, str):
        return key
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise error(f"the key for {provider} has characters that no key has: copy it again", provider=provider)
    return key or None
