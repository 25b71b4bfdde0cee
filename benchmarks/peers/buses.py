"""Event buses in one vocabulary, and those that need no server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from agent_runtime_core.runner.backends import open_url

from .ours import place

EVENT = dict[str, Any]


class Bus(ABC):
    """The events of one run, `run_id`, as one process sees them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.run_id = ""

    @abstractmethod
    async def publish(self, events: Sequence[EVENT]) -> None:
        """Return once all are stored, or handed on where nothing is stored."""

    @abstractmethod
    async def subscribe(self) -> AsyncIterator[object]:
        """Every event published from now on, and before where that is kept."""

    async def close(self) -> None:  # noqa: B027 - some have nothing to let go of
        """Let go of connections."""


class Ours(Bus):
    """This library's, on memory, SQLite or Redis: kept, in sequence, from the start."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._backends = open_url(place(where) or "memory://")

    async def publish(self, events: Sequence[EVENT]) -> None:
        await asyncio.gather(*(self._backends.bus.publish(self.run_id, "word", event) for event in events))

    async def subscribe(self) -> AsyncIterator[object]:
        return self._backends.bus.subscribe(self.run_id, 0)

    async def close(self) -> None:
        await self._backends.close()


class _Inbox:
    def __init__(self) -> None:
        self._queue: asyncio.Queue[EVENT] = asyncio.Queue()
        self.put = self._queue.put_nowait

    def __aiter__(self) -> _Inbox:
        return self

    async def __anext__(self) -> EVENT:
        return await self._queue.get()


class Queues(Bus):
    """An asyncio.Queue for each subscriber: nothing is kept, nobody else hears."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._inboxes: list[_Inbox] = []

    async def publish(self, events: Sequence[EVENT]) -> None:
        for event in events:
            for inbox in self._inboxes:
                inbox.put({**event})
            await asyncio.sleep(0)

    async def subscribe(self) -> AsyncIterator[object]:
        self._inboxes.append(_Inbox())
        return self._inboxes[-1]
