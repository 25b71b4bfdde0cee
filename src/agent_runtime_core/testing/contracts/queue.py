"""What every queue must do; run each of `CASES` on your own with `await case(make)`.

`make(**options)` gives a new and empty queue each time, constructed with those options: `clock`, and
`max_retries` in some cases. A class that passes its keywords on to `RunQueue.__init__` will do. Where the
queue breaks the contract a case raises AssertionError, or the error that the queue raised and should not
have; `check(make)` runs them all, and `check(make, again=again)` those of `several` objects on one place too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .concurrency import QUEUE
from .queue_entering import CASES as ENTERING
from .queue_fixtures import Case, Make
from .queue_lanes import CASES as LANES
from .queue_leases import CASES as LEASES
from .queue_mail import CASES as MAIL
from .queue_reads import CASES as LOOKING
from .queue_take import CASES as DOORS

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*ENTERING, *LEASES, *MAIL, *DOORS, *LANES, *LOOKING], several=QUEUE)
check: Callable[..., Awaitable[None]] = CASES.check
