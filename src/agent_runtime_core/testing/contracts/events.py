"""Conformance tests for event buses. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make()` returns a new and empty bus. A failing case raises AssertionError, or the unexpected error of the bus.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .concurrency import EVENTS
from .events_claims import CASES as CLAIMS
from .events_fixtures import Case, Make
from .events_log import CASES as LOG
from .events_subscriptions import CASES as FOLLOWING

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*LOG, *CLAIMS, *FOLLOWING], several=EVENTS)
check: Callable[..., Awaitable[None]] = CASES.check
