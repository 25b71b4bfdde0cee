"""Event buses as they are written with redis-py: JSON out, JSON in, a hundred commands in one round trip."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.asyncio import Redis

from .buses import EVENT, Bus

BLOCK = 2000  # milliseconds one XREAD waits
PAGE = 1000  # events one XREAD brings


class _OnRedis(Bus):
    command = ""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._redis: Any = Redis.from_url(where, max_connections=1000)

    async def publish(self, events: Sequence[EVENT]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for event in events:
                self._send(pipe, json.dumps(event))
            await pipe.execute()

    def _send(self, pipe: Any, text: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        await self._redis.aclose()


class PubSub(_OnRedis):
    """What is published while nobody listens, or while the connection is away, is lost."""

    def _send(self, pipe: Any, text: str) -> None:
        pipe.publish(self.run_id, text)

    async def subscribe(self) -> AsyncIterator[object]:
        pubsub = self._redis.pubsub(ignore_subscribe_messages=False)
        await pubsub.subscribe(self.run_id)
        await anext(pubsub.listen())
        return self._messages(pubsub)

    async def _messages(self, pubsub: Any) -> AsyncIterator[object]:
        async for message in pubsub.listen():
            yield json.loads(message["data"])


class Streams(_OnRedis):
    """A stream that each subscriber reads by itself, from the start."""

    def _send(self, pipe: Any, text: str) -> None:
        pipe.xadd(self.run_id, {"event": text})

    async def subscribe(self) -> AsyncIterator[object]:
        return self._events()

    async def _events(self) -> AsyncIterator[object]:
        last: Any = "0"
        while True:
            for _, entries in await self._redis.xread({self.run_id: last}, count=PAGE, block=BLOCK):
                for last, fields in entries:  # noqa: B007 - the cursor of the next read
                    yield json.loads(fields[b"event"])
