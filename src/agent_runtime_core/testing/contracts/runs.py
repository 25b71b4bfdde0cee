"""What a run must do over any queue, event bus and state store together; `await case(make)` for each of `CASES`.

`make(clock=clock)` gives a queue, a bus and a store, new and empty each time, on that clock. Where the three
break the contract a case raises AssertionError, or the error that they raised and should not have;
`check(make)` runs them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .runs_afterwards import CASES as AFTERWARDS
from .runs_attempts import CASES as ATTEMPTS
from .runs_fixtures import Case, Make
from .runs_others import CASES as OTHERS

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*ATTEMPTS, *OTHERS, *AFTERWARDS])
check: Callable[[Make], Awaitable[None]] = CASES.check
