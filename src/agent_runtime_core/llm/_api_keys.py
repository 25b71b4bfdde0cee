"""Check the API key and the options of a client."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from .._core.validation import must
from ..errors import NotConfigured


class OpenAIConfigurationError(NotConfigured):
    """There is no API key for OpenAI."""


class AnthropicConfigurationError(NotConfigured):
    """There is no API key for Anthropic."""


#: SDK options that the ChatClient has itself, with the option to use instead.
OWN_OPTIONS = {"max_retries": "retries=Retries(max_attempts=...)", "timeout": "timeouts=Timeouts(total=...)"}
#: The key for a server on this machine: most need none, but the SDK requires one.
_NO_KEY = "none"


def refuse_sdk_options(
    options: Mapping[str, Any], instead: Mapping[str, str] = OWN_OPTIONS, sdk: str = "the SDK"
) -> None:
    """Raise InvalidArgument for an SDK option that the ChatClient has itself, under the name in `instead`."""
    for name, own in instead.items():
        if name in options:
            raise must(name, f"not be an option of {sdk}", options[name], f"Pass {own}")


def required_key(key: Any, error: type[NotConfigured], client: str, provider: str, url: str) -> Any:
    """Return a key that can be sent; a server on this machine needs none.

    Raises:
        NotConfigured: There is no key; raised as the class `error`.
    """
    key = usable(key, error, provider) or (_NO_KEY if is_loopback(url) else None)
    if key is None:
        raise error(
            f"{client} has no API key. Pass api_key=, configure({provider}_api_key=...) or {provider.upper()}_API_KEY",
            provider=provider,
        )
    return key


def is_loopback(url: str) -> bool:
    """Return whether the host of a URL is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def usable(key: Any, error: type[NotConfigured], provider: str) -> Any:
    """Return a key without surrounding whitespace, None if it is empty, or as it is if it is not a string.

    A key with characters that an HTTP header cannot have raises `error`: sending it would look like an outage of the
    provider.
    """
    if not isinstance(key, str):
        return key
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise error(
            f"API key for {provider} must have only printable ASCII characters, got others. Copy it again",
            provider=provider,
        )
    return key or None
