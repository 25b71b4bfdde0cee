"""taskiq with its brokers for Redis; by default it keeps no result, `results` adds its own backend for them."""

from __future__ import annotations

from typing import Any

import taskiq_redis
from redis.asyncio import Redis
from taskiq.api import run_receiver_task

from . import base


async def nothing() -> int:
    return base.nothing()


async def tell() -> int:
    return base.tell()


class Queue(base.Queue):
    def __init__(self, where: str, broker: str = "ListQueueBroker", results: bool = False) -> None:
        super().__init__(where)
        self._broker: Any = getattr(taskiq_redis, broker)(where)
        if results:
            self._broker = self._broker.with_result_backend(taskiq_redis.RedisAsyncResultBackend(where))
        self._tasks = {each.__name__: self._broker.register_task(each, each.__name__) for each in (nothing, tell)}
        self._filled, self._results = 0, results
        self._redis: Redis = Redis.from_url(where)

    async def open(self) -> None:
        await self._broker.startup()

    async def enqueue(self, job: str) -> None:
        await self._tasks[job].kiq()

    async def fill(self, count: int) -> None:
        await super().fill(count)
        self._filled += count

    async def left(self, at_most: int) -> int:
        name = self._broker.queue_name
        if self._results:
            # The queue's own keys are no results.
            own = await self._redis.exists(name, f"autoclaim:{name}:{name}")
            return self._filled - (int(await self._redis.dbsize()) - int(own))
        if not hasattr(self._broker, "consumer_group_name"):
            # Nothing is left of a job that was taken: the last few may still run.
            return int(await self._redis.llen(name))
        (group,) = await self._redis.xinfo_groups(name)
        return int(group["pending"]) + int(group["lag"])

    async def work(self, concurrency: int) -> None:
        await run_receiver_task(self._broker, max_async_tasks=concurrency)

    async def close(self) -> None:
        await self._broker.shutdown()
        await self._redis.aclose()
