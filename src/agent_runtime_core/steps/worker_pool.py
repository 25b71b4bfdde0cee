"""Those who work off items or a graph, side by side: whoever ends a step takes the next one that can begin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from .._core.context_vars import start_soon
from ..errors import LeaseLost, Postponed, StepCancelledError, StorageError, deciding_error, holds
from .graph import Graph

#: After these nothing else can begin, or should.
STOPS = (LeaseLost, StepCancelledError, StorageError)

Next = tuple[int | None, bool]  # a place, and whether its start is recorded


async def all_of(workers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait until all of them have ended, also when they are cancelled; then the error of the first that has one."""
    tasks = [start_soon(worker) for worker in workers]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    for task in tasks:
        task.result()


class WorkerPool:
    """At most `most` at once. `one(place, begun)` performs a step and gives the next; `failed(place)` hears of one
    whose dependents never begin.
    """

    def __init__(
        self, graph: Graph, most: int, one: Callable[[int, bool], Awaitable[Next]],
        failed: Callable[[int], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.graph: Graph = graph
        self.most: int = most
        self.stopped: bool = False
        self._one, self._failed = one, failed
        self._errors: dict[int, Exception] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = 0

    async def work(self) -> None:
        """Until nothing can begin any more and nothing runs; then the error of the first failed step of the list."""
        self._start_worker()
        try:
            while self._tasks:
                ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= ended
                for task in ended:
                    task.result()
        except GeneratorExit:  # it outlived its run and is collected, as are its workers
            raise
        except BaseException:
            await self._stop()
            raise
        self._raise()

    async def _stop(self) -> None:
        self.stopped = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start_worker(self) -> None:
        while self._busy < self.most and not self.stopped and (place := self.graph.take()) is not None:
            self._busy += 1
            self._tasks.add(start_soon(self._worker(place)))

    async def _worker(self, place: int) -> None:
        following: Next = (place, False)
        try:
            while following[0] is not None and not self.stopped:
                following = await self._next(following[0], following[1])
                self._start_worker()
        finally:
            self._busy -= 1

    async def _next(self, place: int, begun: bool) -> Next:
        """Perform a step, and what this worker goes on with."""
        following: Next = (None, False)
        try:
            following = await self._one(place, begun)
        except Exception as error:  # noqa: BLE001 - raised by work() when the rest has run
            await self._fail(place, error)
        if following[0] is None and not self.stopped:
            return self.graph.take(), False
        return following

    async def _fail(self, place: int, error: Exception) -> None:
        self._errors[place] = error
        self.stopped = self.stopped or holds(error, STOPS)
        if self.stopped or isinstance(deciding_error(error), Postponed):
            return  # what depends on it has its turn when the run goes on
        try:
            await self._failed(place)
        except Exception as other:  # noqa: BLE001 - as above
            self._errors[place], self.stopped = other, True

    def _raise(self) -> None:
        """What stopped everything, else the failure of the first step, else a postponement."""
        errors = [self._errors[place] for place in sorted(self._errors)]
        stops = [error for error in errors if holds(error, STOPS)]
        failures = [error for error in errors if not isinstance(deciding_error(error), Postponed)]
        for error in (*stops, *failures, *errors):
            raise error
