"""Conformance tests for runs on a queue, an event bus and a state store together.

Run one of `CASES` with `await case(make)`, or all with `await check(make)`. `make(clock=clock)` returns a new and
empty queue, bus and store with this clock. A failing case raises AssertionError, or the unexpected error of a backend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .runs_attempts import CASES as ATTEMPTS
from .runs_control import CASES as OTHERS
from .runs_finished import CASES as AFTERWARDS
from .runs_fixtures import Case, Make

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*ATTEMPTS, *OTHERS, *AFTERWARDS])
check: Callable[[Make], Awaitable[None]] = CASES.check
