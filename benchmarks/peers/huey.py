"""huey on SQLite: threads that poll; a job is deleted before it runs, and its result kept until it is read."""

from __future__ import annotations

from huey import SqliteHuey

from . import base


class Queue(base.Queue):
    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._huey = SqliteHuey(filename=where)
        self._tasks = {each.__name__: self._huey.task()(each) for each in (base.nothing, base.tell)}
        self._filled = 0

    async def enqueue(self, job: str) -> None:
        self._tasks[job]()

    async def fill(self, count: int) -> None:
        await super().fill(count)
        self._filled += count

    async def left(self, at_most: int) -> int:
        return self._filled - int(self._huey.result_count())

    async def work(self, concurrency: int) -> None:
        self._huey.create_consumer(workers=concurrency).start()
        await base.for_ever()

    async def close(self) -> None:
        self._huey.storage.close()
