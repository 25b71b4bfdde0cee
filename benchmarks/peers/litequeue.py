"""litequeue: a table with pop and done; the loop around them, and its poll, are the user's."""

from __future__ import annotations

import threading
import time

from litequeue import LiteQueue

from . import base

POLL = 0.01  # seconds between two looks at an empty queue
JOBS = {"nothing": base.nothing, "tell": base.tell}


class Queue(base.Queue):
    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._queue = LiteQueue(where)

    async def enqueue(self, job: str) -> None:
        self._queue.put(job)

    async def left(self, at_most: int) -> int:
        return self._queue.active_count()

    async def work(self, concurrency: int) -> None:
        for _ in range(concurrency):
            threading.Thread(target=self._loop, daemon=True).start()
        await base.for_ever()

    def _loop(self) -> None:
        while True:
            message = self._queue.pop()
            if message is None:
                time.sleep(POLL)
                continue
            JOBS[message.data]()
            self._queue.done(message.message_id, claim_id=message.claim_id)

    async def close(self) -> None:
        self._queue.close()
