"""What this process knows of one store: the claims that it executes, and when the runs that it delayed are due."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

from .._core.clock import Clock, Duration
from .._engines.outages import StoreOutage
from .records import RunRow, RunUpdate

INTERVAL = 30.0  # heartbeat interval of processes on this store, if this process has no runner
DEFERRED_INTERVALS = 1.25  # a heartbeat that waited for a whole interval needs some time for its commit
AGES = 1e9  # seconds, more than any lease lasts
_SAME = 0.01  # seconds by which two clocks differ that were read one after the other; no heartbeat is shorter


class ClaimHolder(Protocol):
    """What extends leases of this process: the heartbeat of a runner."""

    @property
    def queue(self) -> object:
        """The queue that it extends leases in."""

    @property
    def interval(self) -> float:
        """Seconds between two of its extensions."""

    def unextended(self) -> list[tuple[str, str]]:
        """Return run id and claim id of live claims whose lease may have run out."""

    def abandoned(self, run_id: str | None = None) -> list[tuple[str, RunUpdate]]:
        """Remove the claims that no code executes any more, and return what releases them."""


class LiveClaims:
    """The live claims of this process on one store; see the module.

    Args:
        clock: The clock of the store in this process.
        outage: The outages of the store.
    """

    _of: ClassVar[WeakKeyDictionary[Any, LiveClaims]] = WeakKeyDictionary()
    _of_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, clock: Clock, outage: StoreOutage) -> None:
        self._clock = clock
        self._holders: tuple[ref[ClaimHolder], ...] = ()  # replaced as a whole: each claim reads it, in any thread
        self._lock = threading.Lock()
        self._boot, self._monotonic = clock.boot(), clock.monotonic()  # of the last comparison that found no suspend
        self.posts: int = 0  # messages that this process was asked to post
        #: The outages of the store.
        self.outage: StoreOutage = outage
        self._owed: dict[str, RunUpdate] = {}  # releases that an outage has refused, by run id
        self._before, self._until = 0.0, float("-inf")  # boot time before the suspend; end of the deferral

    @classmethod
    def of(cls, store: Any, clock: Clock) -> LiveClaims:
        """Return the live claims of a store, which all queues on one engine share."""
        with cls._of_lock:
            found = cls._of.get(store)
            if found is None:
                found = cls._of[store] = cls(clock, StoreOutage.of(store, clock))
            return found

    def add(self, holder: ClaimHolder) -> None:
        """Ask this holder too, as long as it exists."""
        with self._lock:
            self._holders = (*(each for each in self._holders if each() is not None), ref(holder))

    def _interval(self) -> float:
        return max((holder.interval for holder in self._all()), default=INTERVAL)

    def _all(self) -> list[ClaimHolder]:
        return [holder for each in self._holders if (holder := each()) is not None]

    def suspended(self) -> float:
        """Compare the clocks, and return the seconds that do not count against leases at this moment.

        They are those since the suspend began, or at most one heartbeat interval more: it is not known when it began.
        After an outage of the store, no lease is taken over for one interval: all processes renew theirs first. The
        interval begins when the store is found to answer, because nothing tells how long before that it was back.
        """
        boot, now = self._clock.boot(), self._clock.monotonic()
        if (outage := self.outage).failed_at >= 0 and (
            outage.since is not None or now - outage.ended_at < DEFERRED_INTERVALS * self._interval()
        ):
            return AGES
        if (boot - self._boot) - (now - self._monotonic) < _SAME and now >= self._until:
            return 0.0
        interval = self._interval()
        with self._lock:
            awake = now - self._monotonic
            if jumped := boot - self._boot - awake > interval:
                if now >= self._until:
                    self._before = self._boot + max(awake - interval, 0.0)
                self._until = now + DEFERRED_INTERVALS * interval
            if jumped or awake >= interval:
                self._boot, self._monotonic = boot, now
            return boot - self._before if now < self._until else 0.0

    def unextended(self, queue: object) -> list[tuple[str, str]]:
        """Return run id and claim id of all live claims of a queue object whose lease may have run out."""
        return [claim for holder in self._all() if holder.queue is queue for claim in holder.unextended()]

    def abandoned(self, run_id: str | None = None) -> list[tuple[str, RunUpdate]]:
        """Remove and return the claims that no code executes any more.

        Args:
            run_id: A run that its caller is about to take: its claim counts as abandoned too if the task that opened
                it has ended.
        """
        return [claim for each in self._holders if (holder := each()) is not None for claim in holder.abandoned(run_id)]

    def owe_release(self, run_id: str, how: RunUpdate) -> None:
        """Remember a release that an outage has refused, for the next heartbeat or claim of this process."""
        with self._lock:
            self._owed[run_id] = how

    def owed_releases(self) -> list[tuple[str, RunUpdate]]:
        """Remove and return the releases that an outage has refused."""
        if not self._owed:
            return []
        with self._lock:
            owed, self._owed = self._owed, {}
        return list(owed.items())


MOST = 10_000  # runs that are remembered; of more, the earliest delayed runs follow the wall clock alone
LATE = 0.05  # seconds by which the wall clock must be behind: until then a claim of a due run may be under way
AGAIN = 1.0  # seconds until a run is tried again that could not be claimed


class DelayedRun(NamedTuple):
    """A run that is due later."""

    monotonic: float  # when it is due by the monotonic clock
    run_id: str
    wall: float  # when it is due by the wall clock of this process
    cause: str  # the `cause_of` its row while it is delayed


def cause_of(row: RunRow) -> str:
    """Return what has delayed or parked a run: the id of its last claim, or its creation."""
    return row.claim_id or repr(row.created_at)


class DelayedRuns:
    """The runs that the queue object of a process has delayed or parked.

    Args:
        clock: The clock of the queue.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, DelayedRun] = {}
        self._heap: list[DelayedRun] = []  # also of runs that were delayed again since
        self._waits: dict[str, dict[float, float]] = {}

    def remember(self, run_id: str, cause: str, wall: float, monotonic: float | None = None) -> None:
        """Remember when a run is due. Call it before the commit that delays or parks the run.

        After the commit, the wall clock may have been set back, or the caller cancelled.

        Args:
            run_id: The run.
            cause: The claim that delays or parks it.
            wall: When it is due by the wall clock of this process.
            monotonic: When it is due by the monotonic clock. None for the same time from now.
        """
        clock = self._clock
        if monotonic is None:
            monotonic = clock.monotonic() + max(wall - clock.wall(), 0.0)
        with self._lock:
            self._push(DelayedRun(monotonic, run_id, wall, cause))

    def remember_new(self, row: RunRow) -> None:
        """Remember when a new run is due. Call it before the commit that stores the run.

        If the run is stored already, it keeps the delay that this process knows.
        """
        if row.due_at and row.run_id not in self._runs:
            self.remember(row.run_id, cause_of(row), row.due_at)

    def _push(self, delayed: DelayedRun) -> None:
        self._runs.pop(delayed.run_id, None)
        self._runs[delayed.run_id] = delayed
        heapq.heappush(self._heap, delayed)
        if len(self._runs) > MOST:
            del self._runs[next(iter(self._runs))]
        if len(self._heap) > 2 * MOST:
            self._heap = list(self._runs.values())
            heapq.heapify(self._heap)

    def remember_waits(self, run_id: str, claim_id: str, limits: Sequence[Duration]) -> None:
        """Remember the time limits of the waits of a run. Call it before the commit that parks the run."""
        if not limits:
            return
        first = min(limits, key=lambda limit: limit.monotonic_end)
        self.remember(run_id, claim_id, first.until, first.monotonic_end)
        with self._lock:
            self._waits[run_id] = {limit.until: limit.monotonic_end for limit in limits}
            if len(self._waits) > MOST:
                del self._waits[next(iter(self._waits))]

    def wait_ends(self, run_id: str) -> dict[float, float]:
        """Return where time limits of the run's waits end by the monotonic clock, by their ends in wall seconds."""
        with self._lock:
            return self._waits.pop(run_id, {})

    def forget(self, run_id: str, cause: str | None = None) -> None:
        """Forget a run that was claimed. With a cause, only its delay of that cause."""
        if self._runs:
            with self._lock:
                delayed = self._runs.get(run_id)
                if delayed is not None and cause in (None, delayed.cause):
                    del self._runs[run_id]

    def seconds_left(self) -> float:
        """Return the seconds until `overdue` may return a run; infinity if no run is delayed."""
        with self._lock:
            while self._heap and self._runs.get(self._heap[0].run_id) is not self._heap[0]:
                heapq.heappop(self._heap)
            return self._heap[0].monotonic + LATE - self._clock.monotonic() if self._heap else float("inf")

    def overdue(self) -> DelayedRun | None:
        """Return a run that is due by the monotonic clock, while the wall clock is behind; None without.

        Until it is forgotten it is returned again after a moment, because its claim may fail.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        with self._lock:
            while self._heap and self._heap[0].monotonic + LATE <= now:
                first = heapq.heappop(self._heap)
                if self._runs.get(first.run_id) is first:
                    del self._runs[first.run_id]
                    if first.wall > wall + LATE:
                        self._push(first._replace(monotonic=now + AGAIN))
                        return first
        return None
