"""Fixtures for the cases of an event bus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from uuid import UUID

from ...events.base import EventBus
from ...events.event import Event
from .checks import PATIENCE

Make = Callable[[], EventBus]
Case = Callable[[Make], Awaitable[None]]

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a01")
OTHER = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a02")


@contextlib.asynccontextmanager
async def opened(make: Make) -> AsyncIterator[EventBus]:
    bus = make()
    try:
        async with asyncio.timeout(PATIENCE):
            yield bus
    finally:
        await bus.close()


async def fill(bus: EventBus, count: int, first: int = 0, run_id: UUID = RUN) -> None:
    """Publish `count` events in one commit."""
    events = [(f"e{n}", "tick", {"n": n}) for n in range(first, first + count)]
    await bus.commits.commit(None, [bus.publishing(run_id, events)])


async def take(events: AsyncGenerator[Event, None], count: int) -> list[Event]:
    found: list[Event] = []
    async for event in events:
        found.append(event)
        if len(found) == count:
            break
    return found


def sequences(events: Sequence[Event]) -> list[int]:
    return [event.sequence for event in events]
