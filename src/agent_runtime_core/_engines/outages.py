"""The outages of a store, as this process notices them.

During an outage every run, claim and heartbeat fails again and again. The log contains one record with a traceback when
it begins, and one record when the store answers again. A disk that is almost full takes small writes and refuses
others: an outage that comes again soon is logged without a second traceback.
"""

from __future__ import annotations

import math
import threading
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

from .._core.clock import Clock
from .._core.log import log
from .._core.validation import type_name
from ..errors import StorageBusy, StorageFull, brief

#: What a store raises while it cannot be reached, or cannot write. It may answer later.
OUTAGE: Final = (StorageBusy, StorageFull)
_SOON: Final = 60.0  # seconds


class StoreOutage:
    """Whether one store is away.

    Args:
        name: Names the store in the log.
        clock: The clock of the store in this process.

    Attributes:
        since: Monotonic time at which the store was first found to be away; None while it answers.
        failed_at: Monotonic time of the last failure; -1 before the first.
        is_full: It is away because it is full: it answers reads, and is back after its next write.
        ended_at: Monotonic time at which the store was last found to answer again; -inf without an outage.
    """

    _of: ClassVar[WeakKeyDictionary[Any, StoreOutage]] = WeakKeyDictionary()
    _of_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, clock: Clock) -> None:
        self.since: float | None = None
        self.failed_at: float = -1.0
        self.is_full: bool = False
        self.ended_at: float = float("-inf")
        self._name, self._clock = name, clock
        self._lock = threading.Lock()

    @classmethod
    def of(cls, store: Any, clock: Clock, name: str | None = None) -> StoreOutage:
        """Return the outages of a store: an engine, or a backend without an engine. `name` replaces its location.

        All that use one engine share them: the engine itself, its backends, and what encodes their commits.
        """
        store = getattr(store, "engine", store)
        with cls._of_lock:
            found = cls._of.get(store)
            if found is None:
                name = name or brief(getattr(store, "location", None) or type_name(type(store)), 500)
                found = cls._of[store] = cls(name, clock)
            return found

    def noticed(self, error: Exception) -> None:
        """Note that the store failed with an error of `OUTAGE`, from any thread. The first failure is logged."""
        with self._lock:
            self.failed_at = self._clock.monotonic()
            self.is_full = self.is_full or isinstance(error, StorageFull)
            if self.since is not None:
                return
            self.since = self.failed_at
            again = self.since - self.ended_at < _SOON
        log.error(
            "store %s is not available%s, and its runs wait for it: %s",
            self._name,
            " again" if again else "",
            error,
            exc_info=None if again else (type(error), error, error.__traceback__),
        )

    def answered(self, *, wrote: bool = True, began: float = math.inf) -> None:
        """Note that the store answered, from any thread. The end of an outage is logged.

        Args:
            wrote: It wrote something. A full store answers reads all the time.
            began: When the request began, on the monotonic clock. What was asked before the last failure may have been
                answered before it, too.
        """
        if self.since is None:
            return
        with self._lock:
            if self.since is None or began < self.failed_at or (self.is_full and not wrote):
                return
            self.ended_at = self._clock.monotonic()
            seconds, self.since = self.ended_at - self.since, None
            self.is_full = False
        log.info("store %s answers again after %.1f s", self._name, seconds)
