"""saq: one BLMOVE and one GET for a job, two writes of its whole record, a pub/sub message for each."""

from __future__ import annotations

from typing import Any

import saq
from saq.queue.redis import RedisQueue

from . import base


async def nothing(ctx: Any) -> int:
    return base.nothing()


async def tell(ctx: Any) -> int:
    return base.tell()


class Queue(base.Queue):
    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._queue = RedisQueue.from_url(where)

    async def open(self) -> None:
        await self._queue.connect()

    async def enqueue(self, job: str) -> None:
        await self._queue.enqueue(job)

    async def left(self, at_most: int) -> int:
        return int(await self._queue.count("incomplete"))

    async def work(self, concurrency: int) -> None:
        await saq.Worker(self._queue, [nothing, tell], concurrency=concurrency).start()

    async def close(self) -> None:
        await self._queue.disconnect()
