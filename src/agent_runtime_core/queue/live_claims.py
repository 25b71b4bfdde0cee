"""The claims that this process executes on one store, and whether its machine was suspended a moment ago.

A lease runs out while its machine is suspended, although the code under its claim goes on afterwards. Two rules keep
such a claim:

* A claim call extends the leases of all live claims of its own queue object first, so it takes none of them over.
* A process that sees that the machine was suspended takes over no lease that was valid before, for one more heartbeat
  interval, in which other processes, and other queue objects of this process, extend their claims.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, ref

from .._core.clock import Clock
from .records import RunUpdate

INTERVAL = 30.0  # heartbeat interval of processes on this store, if this process has no runner
DEFERRED_INTERVALS = 1.25  # a heartbeat that waited for a whole interval needs some time for its commit
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
    """

    _of: ClassVar[WeakKeyDictionary[Any, LiveClaims]] = WeakKeyDictionary()
    _of_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders: tuple[ref[ClaimHolder], ...] = ()  # replaced as a whole: each claim reads it, in any thread
        self._lock = threading.Lock()
        self._boot, self._monotonic = clock.boot(), clock.monotonic()  # of the last comparison that found no suspend
        self._before, self._until = 0.0, float("-inf")  # boot time before the suspend; end of the deferral

    @classmethod
    def of(cls, store: Any, clock: Clock) -> LiveClaims:
        """Return the live claims of a store, which all queues on one engine share."""
        with cls._of_lock:
            found = cls._of.get(store)
            if found is None:
                found = cls._of[store] = cls(clock)
            return found

    def add(self, holder: ClaimHolder) -> None:
        """Ask this holder too, as long as it exists."""
        with self._lock:
            self._holders = (*(each for each in self._holders if each() is not None), ref(holder))

    def _all(self) -> list[ClaimHolder]:
        return [holder for each in self._holders if (holder := each()) is not None]

    def suspended(self) -> float:
        """Compare the clocks, and return the seconds that do not count against leases at this moment.

        They are those since the suspend began, or at most one heartbeat interval more: it is not known when it began.
        """
        boot, now = self._clock.boot(), self._clock.monotonic()
        if (boot - self._boot) - (now - self._monotonic) < _SAME and now >= self._until:
            return 0.0
        interval = max((holder.interval for holder in self._all()), default=INTERVAL)
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
        return [claim for holder in self._all() for claim in holder.abandoned(run_id)]
