"""dramatiq: threads that take messages in batches; nothing is left of a job but that its message is gone."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from . import base


class Queue(base.Queue):
    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._broker = RedisBroker(url=where)
        dramatiq.set_broker(self._broker)
        self._actors = {each.__name__: dramatiq.actor(each) for each in (base.nothing, base.tell)}

    async def enqueue(self, job: str) -> None:
        self._actors[job].send()

    async def left(self, at_most: int) -> int:
        return int(self._broker.client.hlen("dramatiq:default.msgs"))

    async def work(self, concurrency: int) -> None:
        dramatiq.Worker(self._broker, worker_threads=concurrency).start()
        await base.for_ever()

    async def close(self) -> None:
        self._broker.close()
