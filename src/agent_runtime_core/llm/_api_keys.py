"""Check the key and the options that a client is made with."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import InvalidArgument, NotConfigured, brief


class OpenAIConfigurationError(NotConfigured):
    """No key for OpenAI."""


class AnthropicConfigurationError(NotConfigured):
    """No key for Anthropic."""


#: Options of an SDK that the ChatClient replaces by its own.
OWN_OPTIONS = {"max_retries": "retries=Retries(tries=...)", "timeout": "timeouts=Timeouts(total=...)"}
#: The key for a server on this machine, which seldom needs one. The SDK requires one.
_NO_KEY = "none"


def refuse_sdk_options(
    options: Mapping[str, Any], instead: Mapping[str, str] = OWN_OPTIONS, sdk: str = "the SDK"
) -> None:
    """Raise InvalidArgument for an option that the ChatClient has itself, under the name `instead`."""
    for name, own in instead.items():
        if name in options:
            raise InvalidArgument(f"{name}={brief(options[name])} is not given to {sdk}: use {own}")


def required_key(key: Any, error: type[NotConfigured], client: str, provider: str, url: str) -> Any:
    """Return a key that can be sent; a server on this machine needs none.

    Raises:
        NotConfigured: As `error`: there is no key.
    """
    key = usable(key, error, provider) or (_NO_KEY if is_loopback(url) else None)
    if key is None:
        raise error(
            f"{client} has no key: give api_key=, configure({provider}_api_key=...) or set {provider.upper()}_API_KEY",
            provider=provider,
        )
    return key


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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
