"""The SDK's client of each event loop, as connections belong to the loop they were made in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

log: logging.Logger = logging.getLogger("agent_runtime_core")

# Seconds a client has to close its connections.
_CLOSING = 5.0


class PerLoopClients:
    """Clients that `make` makes, one for each event loop; with `shared` the first one serves them all.

    `first` is made at once, for what its constructor refuses; the loop that asks first gets it. A shared one is
    somebody else's transport, and theirs to close. The others close with their loop, as by the end of asyncio.run,
    and are let go at the latest when another loop asks.
    """

    def __init__(self, make: Callable[[], Any], *, shared: bool = False) -> None:
        self._make, self._shared = make, shared
        self.first: Any = make()
        self._unbound = [self.first]
        self._bound: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]] = {}

    async def here(self) -> Any:
        """The client of the running loop."""
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
        life = _life(client, loop, self._bound)
        self._bound[loop] = client, life
        await anext(life)
        for other in [each for each in list(self._bound) if each.is_closed()]:
            await self._end(other)
        return client

    async def close(self) -> None:
        """Close the client of the running loop, and the one nobody has used."""
        if self._shared:
            return
        while self._unbound:
            await _close(self._unbound.pop())
        await self._end(asyncio.get_running_loop())

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        _, life = self._bound.pop(loop, (None, None))
        if life is not None:
            await life.aclose()


async def _life(
    client: Any, loop: asyncio.AbstractEventLoop, bound: dict[asyncio.AbstractEventLoop, Any]
) -> AsyncGenerator[None, None]:
    """A generator, because a loop ends those that it began before it is closed: nothing else is told of that."""
    try:
        yield
    finally:
        bound.pop(loop, None)
        await _close(client)


async def _close(client: Any) -> None:
    try:
        async with asyncio.timeout(_CLOSING):
            await client.close()
    except Exception as error:  # noqa: BLE001 - its loop may be closed, and the connections with it
        log.debug("a client did not close: %s", type(error).__name__)
