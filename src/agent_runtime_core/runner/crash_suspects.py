"""Execute runs that crashed their worker one at a time, so that a crash can be attributed to one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from .._core.clock import Clock
from ..queue.records import RunRow

ISOLATION_TIMEOUT = 30.0  # seconds after the last start for which a crash suspect has the worker to itself


def is_crash_suspect(row: RunRow, max_crashes: int) -> bool:
    """Return whether the next crash would be the run's last, unless it made progress since the one before.

    A run that has not crashed is none, even with `max_crashes` 1: a worker would execute all runs one at a time.
    """
    return row.crashes_in_row > 0 and row.crashes_in_row == max_crashes - 1


def crashes_without_progress(row: RunRow, recorded: int) -> int:
    """Return how often the run crashed in a row since its last recorded step.

    Args:
        row: The run.
        recorded: How many finished steps its journal has.
    """
    if recorded <= max(row.min_step_count, 0):
        return row.crashes_in_row
    return int(not row.parked)  # the claim of a parked run that was resumed is no crash


class _Execution(Protocol):
    @property
    def row(self) -> RunRow: ...


class CrashSuspects:
    """Decides which runs a worker may start while one of them may crash it.

    Args:
        clock: The clock of the worker.
        busy: Returns how many runs use a slot of the worker.
        max_crashes: Returns the setting of that name of the worker's runner.
    """

    def __init__(self, clock: Clock, busy: Callable[[], int], max_crashes: Callable[[], int]) -> None:
        self._clock = clock
        self._busy = busy
        self._max_crashes = max_crashes
        self._started: list[_Execution] = []  # were suspects when they started, and have not ended
        self._recently_seen = False  # one has ended here since the last claim that returned none
        self._last_start = 0.0

    def claimed(self, rows: Iterable[RunRow]) -> None:
        """Note what a claim returned."""
        if not any(self._is_suspect(row) for row in rows):
            self._recently_seen = False

    def starts(self, execution: _Execution) -> None:
        """Note that a run starts."""
        if self._is_suspect(execution.row):
            self._started.append(execution)
        self._last_start = self._clock.boot()

    def ended(self, execution: _Execution) -> None:
        """Note that a run uses no slot of the worker any more."""
        if execution in self._started:
            self._started.remove(execution)
        self._recently_seen = self._recently_seen or self._is_suspect(execution.row)

    def may_start(self, row: RunRow) -> bool:
        """Return whether `row` may start on this worker now.

        A crash suspect runs alone, so that a crash can be attributed to it. Isolation ends after `ISOLATION_TIMEOUT`
        seconds, so a long run cannot block the worker; two suspects still never run together, except parent and child.
        """
        running = self._running()
        if not self._is_suspect(row):
            return not running or self.is_isolated()
        return self.is_isolated() and all(each.row.run_id == row.parent_id for each in running)

    def startable(self, rows: list[RunRow]) -> list[RunRow]:
        """Return which of these claimed runs may start: the first suspect alone, or all that are none."""
        allowed = [row for row in rows if self.may_start(row)]
        return [row for row in allowed if self._is_suspect(row)][:1] or allowed

    def is_isolated(self) -> bool:
        """Return whether no other run uses a slot, or the last start was `ISOLATION_TIMEOUT` seconds ago."""
        return self._busy() == 0 or self._clock.boot() - self._last_start > ISOLATION_TIMEOUT

    def is_careful(self) -> bool:
        """Return whether the worker starts runs one at a time, because it executes or has just released a suspect."""
        return self._recently_seen or bool(self._running())

    def claimable(self, free: int) -> int:
        """Return for how many of its free slots the worker claims runs; after a suspect one at a time."""
        if not self.is_careful():
            return free
        if self._busy() == 0:
            return min(free, 1)
        return free if self.is_isolated() else 0

    def _is_suspect(self, row: RunRow) -> bool:
        return is_crash_suspect(row, self._max_crashes())

    def _running(self) -> list[_Execution]:
        """Return the suspects that execute now; a run that has made progress is a suspect no longer."""
        return [each for each in self._started if self._is_suspect(each.row)]
