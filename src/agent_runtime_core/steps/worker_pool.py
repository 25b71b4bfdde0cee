"""Run the steps of a DAG, or other tasks, concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from .._core.context_vars import start_soon
from ..errors import LeaseLost, Postponed, StepCancelledError, StorageError, deciding_error, holds
from .graph import Graph

#: After these errors no other step starts.
STOPS = (LeaseLost, StepCancelledError, StorageError)

Next = tuple[int | None, bool]  # a position or None, and whether the start of its step is recorded


async def all_of(workers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines until all have ended, even if this is cancelled. Then raise the error of the first that failed."""
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
    """Runs the steps of a graph concurrently. A worker that completes a step continues with the next step.

    Args:
        graph: The graph, after `begin`.
        max_concurrency: How many steps run at the same time.
        run_step: Runs the step at a position; the second argument says whether its start is recorded. Returns what this
            worker runs next.
        step_failed: Called with the position of a failed step, whose dependents do not start.

    Attributes:
        stopped: No other step starts.
    """

    def __init__(
        self, graph: Graph, max_concurrency: int, run_step: Callable[[int, bool], Awaitable[Next]],
        step_failed: Callable[[int], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.graph: Graph = graph
        self.max_concurrency: int = max_concurrency
        self.stopped: bool = False
        self._run_step, self._step_failed = run_step, step_failed
        self._errors: dict[int, Exception] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = 0

    async def work(self) -> None:
        """Run all steps that can start; then raise the error that stopped the pool, or of the first failed step."""
        self._start_workers()
        try:
            while self._tasks:
                ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                self._tasks -= ended
                for task in ended:
                    task.result()
        except GeneratorExit:  # the coroutine is collected after the end of its run, and so are the workers
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

    def _start_workers(self) -> None:
        """Start a worker for each step that can start, up to the limit."""
        while self._busy < self.max_concurrency and not self.stopped and (position := self.graph.take()) is not None:
            self._busy += 1
            self._tasks.add(start_soon(self._worker(position)))

    async def _worker(self, position: int) -> None:
        following: Next = (position, False)
        try:
            while following[0] is not None and not self.stopped:
                following = await self._next(following[0], following[1])
                self._start_workers()
        finally:
            self._busy -= 1

    async def _next(self, position: int, started: bool) -> Next:
        """Run a step and return what this worker runs next."""
        following: Next = (None, False)
        try:
            following = await self._run_step(position, started)
        except Exception as error:  # noqa: BLE001 - work() raises it when the other steps have finished
            await self._fail(position, error)
        if following[0] is None and not self.stopped:
            return self.graph.take(), False
        return following

    async def _fail(self, position: int, error: Exception) -> None:
        self._errors[position] = error
        self.stopped = self.stopped or holds(error, STOPS)
        if self.stopped or isinstance(deciding_error(error), Postponed):
            return  # its dependents run when the run is resumed
        try:
            await self._step_failed(position)
        except Exception as other:  # noqa: BLE001 - work() raises it
            self._errors[position], self.stopped = other, True

    def _raise(self) -> None:
        """Raise what stopped the pool, else the error of the first failed step, else a postponement."""
        errors = [self._errors[position] for position in sorted(self._errors)]
        stops = [error for error in errors if holds(error, STOPS)]
        failures = [error for error in errors if not isinstance(deciding_error(error), Postponed)]
        for error in (*stops, *failures, *errors):
            raise error
