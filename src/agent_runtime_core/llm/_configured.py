"""What a client says that was made without a key."""

from __future__ import annotations

from ..errors import NotConfigured


class OpenAIConfigurationError(NotConfigured):
    """No key for OpenAI."""


class AnthropicConfigurationError(NotConfigured):
    """No key for Anthropic."""
