"""The SDK's client of each event loop, as connections belong to the loop they were made in."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any


class ByLoop:
    """Clients that `make` makes, one for each event loop; with `shared` the first one serves them all.

    `first` is made at once, for what its constructor refuses; the loop that asks first gets it. A shared one is
    somebody else's transport, and theirs to close.
    """

    def __init__(self, make: Callable[[], Any], *, shared: bool = False) -> None:
        self._make, self._shared = make, shared
        self.first: Any = make()
        self._unbound = [self.first]
        self._bound: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def here(self) -> Any:
        """The client of the running loop."""
        if self._shared:
            return self.first
        loop = asyncio.get_running_loop()
        client = self._bound.get(loop)
        if client is None:
            try:
                client = self._unbound.pop()
            except IndexError:
                client = self._make()
            self._bound[loop] = client
        return client

    async def close(self) -> None:
        """Close the client of the running loop, and the one nobody has used."""
        mine = [*self._unbound, self._bound.pop(asyncio.get_running_loop(), None)]
        if not self._shared:
            for client in filter(None, mine):
                await client.close()
