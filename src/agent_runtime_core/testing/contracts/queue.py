"""Conformance tests for queues. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make(**options)` returns a new and empty queue with these options: `clock`, and in some cases `max_retries`. A class
that passes its keyword arguments to `RunQueue.__init__` can be used as `make`. A failing case raises AssertionError,
or the unexpected error of the queue. `check(make, again=again)` also runs the cases with several objects on one store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .queue_concurrency_keys import CASES as LANES
from .queue_enqueue import CASES as ENTERING
from .queue_fixtures import Case, Make
from .queue_leases import CASES as LEASES
from .queue_limits import CASES as LIMITS
from .queue_lists import CASES as LISTS
from .queue_mailbox import CASES as MAIL
from .queue_reads import CASES as READS
from .races import QUEUE

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*ENTERING, *LEASES, *MAIL, *LANES, *LIMITS, *READS, *LISTS], several=QUEUE)
check: Callable[..., Awaitable[None]] = CASES.check
