"""What every event bus must do; run each of `CASES` on your own with `await case(make)`.

`make()` gives a new and empty bus each time. Where the bus breaks the contract a case raises
AssertionError, or the error that the bus raised and should not have; `check(make)` runs them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .concurrency import EVENTS
from .events_claims import CASES as CLAIMS
from .events_fixtures import Case, Make
from .events_following import CASES as FOLLOWING
from .events_log import CASES as LOG

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*LOG, *CLAIMS, *FOLLOWING], several=EVENTS)
check: Callable[..., Awaitable[None]] = CASES.check
