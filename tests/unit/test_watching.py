"""Waiting for the end of a run from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast
from uuid import UUID

from agent_runtime_core.events.base import Event, EventBus
from agent_runtime_core.queue.base import RunQueue
from agent_runtime_core.queue.row import RunRow
from agent_runtime_core.runner.watching import events_until_ended, until_ended


class _Rings:
    """A queue that rings once for nothing, and whose run has ended by the third look at it."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def listen(self, topic: str, wake: Callable[[], None]) -> None:
        wake()

    async def must_get(self, run_id: str) -> RunRow:
        self.left -= 1
        return RunRow(run_id, "a", status="running" if self.left else "succeeded")


async def _waited(looks: int, at_most: float) -> Any:
    return await until_ended(cast(RunQueue, _Rings(looks)), "run", at_most)


async def test_the_last_look_is_when_the_time_is_over() -> None:
    ended = await _waited(3, 0.5)
    assert ended is not None
    assert ended.status == "succeeded"


async def test_after_that_nobody_looks() -> None:
    assert await _waited(4, 0.5) is None


class _Late:
    """A bus on which each event comes long after the run has ended."""

    async def subscribe(self, run_id: str, since: int) -> AsyncGenerator[Event, None]:
        for n in range(since, 3):
            for _ in range(20):
                await asyncio.sleep(0)
            yield Event(UUID(int=1), "tick", sequence=n)

    async def head(self, run_id: str) -> int:
        return 3


async def test_a_stream_of_a_run_that_has_ended_waits_for_its_last_event() -> None:
    queue, bus = cast(RunQueue, _Rings(1)), cast(EventBus, _Late())
    for since in range(3):
        told = [event.sequence async for event in events_until_ended(queue, bus, "run", since)]
        assert told == list(range(since, 3))
        queue = cast(RunQueue, _Rings(1))
