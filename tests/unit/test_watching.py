"""Waiting for the end of a run from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from agent_runtime_core.queue.base import RunQueue
from agent_runtime_core.queue.row import RunRow
from agent_runtime_core.runner.watching import until_ended


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
    ended = await _waited(3, 0.01)
    assert ended is not None
    assert ended.status == "succeeded"


async def test_after_that_nobody_looks() -> None:
    assert await _waited(4, 0.01) is None
