"""SDK clients, one for each event loop, with their API keys and the trace header of their requests."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from .._core.log import log
from .._core.validation import must
from ..errors import NotConfigured
from ..interfaces import current_run


def with_traceparent(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a request with the span of the calling code as the header `traceparent`.

    They are unchanged outside of runs, and if no trace sink sends spans. A header of the caller takes precedence.
    """
    traceparent = getattr(current_run(), "traceparent", None)
    if traceparent is None:
        return arguments
    headers = arguments.get("extra_headers") or {}
    return {**arguments, "extra_headers": {"traceparent": traceparent, **headers}}


# Seconds that closing the connections of a client may take.
_CLOSING = 5.0


class PerLoopClients:
    """SDK clients, one for each event loop; with `shared`, the first client serves all loops.

    `first` is created immediately, so that invalid options raise in the constructor; the first loop that needs a client
    gets it. A shared client uses a transport of the caller, who closes it. The others close when their loop closes, as
    at the end of asyncio.run, and at the latest when another loop needs a client.
    """

    def __init__(self, make: Callable[[], Any], *, shared: bool = False) -> None:
        self._make, self._shared = make, shared
        self.first: Any = make()
        self._unbound = [self.first]
        self._bound: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]] = {}

    async def here(self) -> Any:
        """Return the client of the running loop."""
        if self._shared:
            return self.first
        loop = asyncio.get_running_loop()
        known = self._bound.get(loop)
        if known is not None:
            return known[0]
        try:
            client = self._unbound.pop()
        except IndexError:
            client = self._make()
        lifetime = _lifetime(client, loop, self._bound)
        self._bound[loop] = client, lifetime
        await anext(lifetime)
        for other in [each for each in list(self._bound) if each.is_closed()]:
            await self._end(other)
        return client

    async def close(self) -> None:
        """Close the client of the running loop, and the client that no loop used."""
        if self._shared:
            return
        while self._unbound:
            await _close(self._unbound.pop())
        await self._end(asyncio.get_running_loop())

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        _, lifetime = self._bound.pop(loop, (None, None))
        if lifetime is not None:
            await lifetime.aclose()


async def _lifetime(
    client: Any, loop: asyncio.AbstractEventLoop, bound: dict[asyncio.AbstractEventLoop, Any]
) -> AsyncGenerator[None, None]:
    """Close `client` with its loop: a loop closes its async generators before it closes, and offers no other hook."""
    try:
        yield
    finally:
        bound.pop(loop, None)
        await _close(client)


async def _close(client: Any) -> None:
    try:
        async with asyncio.timeout(_CLOSING):
            await client.close()
    except Exception as error:  # noqa: BLE001 - its loop, and so its connections, may be closed already
        log.debug("closing a client failed: %s", type(error).__name__)


class OpenAIConfigurationError(NotConfigured):
    """There is no API key for OpenAI."""


class AnthropicConfigurationError(NotConfigured):
    """There is no API key for Anthropic."""


#: SDK options that the ChatClient defines itself, with the option to use instead.
OWN_OPTIONS = {"max_retries": "retries=Retries(max_attempts=...)", "timeout": "timeouts=Timeouts(total=...)"}
#: The key for a server on this machine: most servers need no key, but the SDK requires a string.
_NO_KEY = "none"


def refuse_sdk_options(
    options: Mapping[str, Any], instead: Mapping[str, str] = OWN_OPTIONS, sdk: str = "the SDK"
) -> None:
    """Raise InvalidArgument for an SDK option that the ChatClient defines itself, under the name in `instead`."""
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
