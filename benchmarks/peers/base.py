"""What is asked of every queue that is measured, ours included."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

AT_ONCE = 100  # enqueued at the same time, to fill a queue


def nothing() -> int:
    """The job that is drained: it leaves a small result, where the queue keeps results."""
    return 1


def tell() -> int:
    """The job of an idle worker: it says when it began."""
    print(time.monotonic(), flush=True)
    return 1


class Queue(ABC):
    """One queue with the jobs "nothing" and "tell", as one process sees it.

    `where` is a redis:// URL of an empty database, or the path of a SQLite file. Everything that is not
    said here stays as the queue sets it by default.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    async def open(self) -> None:  # noqa: B027 - some have nothing to open
        """Connect, and make what must be there before the first job is enqueued."""

    @abstractmethod
    async def enqueue(self, job: str) -> None:
        """Return once the job is stored."""

    async def fill(self, count: int) -> None:
        """Enqueue `count` jobs that do nothing, by any way."""
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(self.enqueue("nothing") for _ in range(min(AT_ONCE, count - start))))

    @abstractmethod
    async def left(self, at_most: int) -> int:
        """How many jobs have no record of their end; beyond `at_most` the answer may be too small."""

    @abstractmethod
    async def work(self, concurrency: int) -> None:
        """Run jobs, at most so many at once, until this process is ended."""

    async def chain(self, count: int) -> float:
        """Run one job of so many small steps, one after the other, and return the seconds between first and last."""
        raise NotImplementedError

    async def close(self) -> None:  # noqa: B027 - some have nothing to let go of
        """Let go of connections."""


async def for_ever() -> None:
    """What is awaited where threads do the work."""
    await asyncio.Event().wait()
