"""arq: a sorted set that is polled twice a second, and a record of the result for an hour."""

from __future__ import annotations

from typing import Any

from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.worker import Worker

from . import base


async def nothing(ctx: Any) -> int:
    return base.nothing()


async def tell(ctx: Any) -> int:
    return base.tell()


class Queue(base.Queue):
    _redis: ArqRedis

    async def open(self) -> None:
        self._redis = await create_pool(RedisSettings.from_dsn(self.where))

    async def enqueue(self, job: str) -> None:
        await self._redis.enqueue_job(job)

    async def left(self, at_most: int) -> int:
        return int(await self._redis.zcard(self._redis.default_queue_name))

    async def work(self, concurrency: int) -> None:
        await Worker([nothing, tell], redis_pool=self._redis, max_jobs=concurrency).main()

    async def close(self) -> None:
        await self._redis.aclose()
