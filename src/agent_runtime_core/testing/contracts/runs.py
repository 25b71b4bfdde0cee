"""Conformance tests for runs on a queue, an event bus and a state store together.

Run one of `CASES` with `await case(make)`, or all with `await check(make)`. `make(clock=clock)` returns a new and
empty queue, bus and store with this clock. A failing case raises AssertionError, or the unexpected error of a backend.

With `again`, a function that opens three other objects on the store of a queue, bus and store, runs of several
processes, and on objects that were opened one by one, are checked too: `await check(make, again=again)`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .runs_attempts import CASES as ATTEMPTS
from .runs_control import CASES as OTHERS
from .runs_finished import CASES as AFTERWARDS
from .runs_fixtures import Case, Make
from .runs_processes import PROCESSES
from .runs_separate import CASES as SEPARATE

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*ATTEMPTS, *OTHERS, *AFTERWARDS], several=[*SEPARATE, *PROCESSES])
check: Callable[..., Awaitable[None]] = CASES.check
