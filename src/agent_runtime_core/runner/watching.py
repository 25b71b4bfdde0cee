"""Following a run from outside: until its end, or event by event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from ..events.base import Event, EventBus
from ..queue.base import RunQueue
from ..queue.row import LIVE, RunRow

LOOK_EVERY = 1.0  # seconds between looks at a run that is waited for, behind the bell


async def until_ended(queue: RunQueue, run_id: str, at_most: float | None = None) -> RunRow | None:
    """The run's row once it has ended; None after `at_most` seconds."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    end = float("inf") if at_most is None else loop.time() + at_most

    def wake() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    stop = queue.listen("done", wake)
    try:
        while True:
            last = loop.time() >= end
            row = await queue.must_get(run_id)
            if row.status not in LIVE:
                return row
            if last:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_EVERY, end - loop.time())):
                    await done.wait()
            done.clear()
    finally:
        if stop is not None:
            stop()


async def events_until_ended(queue: RunQueue, bus: EventBus, run_id: str, since: int) -> AsyncGenerator[Event, None]:
    """The run's events from `since` on, replayed and then live, until the run has ended."""
    events = bus.subscribe(run_id, since)
    ended = asyncio.ensure_future(until_ended(queue, run_id))
    upcoming: asyncio.Task[Event] | None = None
    cursor = since

    def over() -> bool:
        return ended.done() and ended.result() is not None  # a queue that did not answer is no end

    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(anext(events))
            await asyncio.wait({upcoming} if over() else {upcoming, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done():
                if over() and cursor >= await bus.head(run_id):
                    return
                await asyncio.wait({upcoming})
            event, upcoming = upcoming.result(), None
            cursor = event.sequence + 1
            yield event
            if over() and cursor >= await bus.head(run_id):
                return
    finally:
        ended.cancel()
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait({upcoming})
        await events.aclose()
