"""The runs that a runner executes in the tasks of their callers, and how they are stopped when it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from .._core.clock import Clock
from .._core.per_loop import call_in_loop
from .execution import ENCLOSING_RUNS, RunExecution
from .settings import SHUTDOWN_SECONDS


class _InlineRun:
    def __init__(self, drive: RunExecution) -> None:
        self.drive = drive
        self.run_id: str = drive.row.run_id
        self.within: tuple[str, ...] = ENCLOSING_RUNS.get(())
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.over: Future[None] = Future()

    def hand_back(self) -> None:
        if not self.drive.control.release_requested:
            call_in_loop(self.loop, self.drive.claim.request_release)


class InlineRuns:
    """Those of one runner, in whatever loops they are."""

    def __init__(self, clock: Clock, grace: float) -> None:
        self._clock, self._grace = clock, grace
        self._held: set[_InlineRun] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def executing(self, drive: RunExecution) -> Iterator[None]:
        held = _InlineRun(drive)
        with self._lock:
            self._held.add(held)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(held)
            held.over.set_result(None)

    async def stop(self, until: float) -> None:
        """Let them finish until then, by the boot clock, and have them given back; at once what waits in place.

        Those that this task is part of go on, but have nothing left to write to: it cannot wait for itself.
        """
        mine, boot = ENCLOSING_RUNS.get(()), self._clock.boot
        while (others := self._others(mine)) and boot() < until:
            for held in _outermost(others):
                if held.drive.control.paused_at is not None:
                    held.hand_back()
            await _one_over(others, min(0.1, self._grace))
        until = boot() + SHUTDOWN_SECONDS + self._grace / 5
        while others := self._others(mine):
            for held in _outermost(others):
                held.hand_back()
            if not await _one_over(others, max(until - boot(), 0)):
                break
        for held in self._here():
            held.drive.control.release_requested = True
            await held.drive.claim.try_release()

    def _all(self) -> list[_InlineRun]:
        with self._lock:
            return [held for held in self._held if not held.loop.is_closed()]

    def _others(self, mine: tuple[str, ...]) -> list[_InlineRun]:
        return [held for held in self._all() if held.run_id not in mine]

    def _here(self) -> list[_InlineRun]:
        here = asyncio.get_running_loop()
        return [held for held in self._all() if held.loop is here]


def _outermost(held: list[_InlineRun]) -> list[_InlineRun]:
    """Those that no other of them executes: what one executes is stopped with it, and is no failure of it."""
    run_ids = {each.run_id for each in held}
    return [each for each in held if run_ids.isdisjoint(each.within)]


async def _one_over(held: list[_InlineRun], seconds: float) -> bool:
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def ended(_: Future[None]) -> None:
        call_in_loop(loop, over.set)

    for each in held:
        each.over.add_done_callback(ended)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()
    return over.is_set()
