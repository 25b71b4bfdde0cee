"""Track the runs that a runner executes in their callers' tasks, and stop them when it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from .._core.clock import Clock
from .._core.per_loop import call_in_loop
from .._execution.run_control import Stop
from .execution import ENCLOSING_RUNS, RunExecution
from .settings import SHUTDOWN_SECONDS


class _InlineRun:
    """A run that is executed in its caller's task."""

    def __init__(self, execution: RunExecution) -> None:
        self.execution = execution
        self.run_id: str = execution.row.run_id
        self.within: tuple[str, ...] = ENCLOSING_RUNS.get(())
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.ended: Future[None] = Future()

    def release(self) -> None:
        if not self.execution.control.release_requested:
            call_in_loop(self.loop, self.execution.claim.request_release)


class InlineRuns:
    """The inline runs of one runner, in all event loops."""

    def __init__(self, clock: Clock, grace: float) -> None:
        self._clock, self._grace = clock, grace
        self._runs: set[_InlineRun] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def executing(self, execution: RunExecution) -> Iterator[None]:
        """Track a run while the block executes it."""
        held = _InlineRun(execution)
        with self._lock:
            self._runs.add(held)
        try:
            yield
        finally:
            with self._lock:
                self._runs.discard(held)
            held.ended.set_result(None)

    async def stop(self, until: float) -> None:
        """Let the runs finish until `until` by the monotonic clock, then release them.

        Runs that only wait are released now.

        Runs that this task is part of are released without waiting, because it cannot wait for itself. They can write
        nothing from then on.
        """
        enclosing, now = ENCLOSING_RUNS.get(()), self._clock.monotonic
        while (others := self._others(enclosing)) and now() < until:
            for held in _outermost(others):
                if held.execution.control.paused_at is not None:
                    held.release()
            await _wait_for_one(others, min(0.1, self._grace))
        until = now() + SHUTDOWN_SECONDS + self._grace / 5
        while others := self._others(enclosing):
            for held in _outermost(others):
                held.release()
            if not await _wait_for_one(others, max(until - now(), 0)):
                break
        for held in self._of_this_loop():
            held.execution.control.release_requested = True
            held.execution.control.stop(Stop.RELEASE)
            await held.execution.claim.try_release()

    def _all(self) -> list[_InlineRun]:
        with self._lock:
            return [held for held in self._runs if not held.loop.is_closed()]

    def _others(self, enclosing: tuple[str, ...]) -> list[_InlineRun]:
        return [held for held in self._all() if held.run_id not in enclosing]

    def _of_this_loop(self) -> list[_InlineRun]:
        here = asyncio.get_running_loop()
        return [held for held in self._all() if held.loop is here]


def _outermost(held: list[_InlineRun]) -> list[_InlineRun]:
    """Return the runs that none of the others executes. Stopping a run stops its inline children, without a failure."""
    run_ids = {each.run_id for each in held}
    return [each for each in held if run_ids.isdisjoint(each.within)]


async def _wait_for_one(held: list[_InlineRun], seconds: float) -> bool:
    """Wait until one of these runs has ended; return False if none did within that many seconds."""
    loop, one_ended = asyncio.get_running_loop(), asyncio.Event()

    def ended(_: Future[None]) -> None:
        call_in_loop(loop, one_ended.set)

    for each in held:
        each.ended.add_done_callback(ended)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await one_ended.wait()
    return one_ended.is_set()
