"""Conformance tests for state stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make(**options)` returns a new and empty store with these options (`clock`). A failing case raises AssertionError, or
the unexpected error of the store. `check(make, again=again)` also runs the cases with several objects on one store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .checks import Cases
from .concurrency import STATE
from .state_checkpoints import CASES as CHECKPOINTS
from .state_claims import CASES as CLAIMS
from .state_effects import CASES as EFFECTS
from .state_fixtures import Case, Make
from .state_journal import CASES as JOURNAL

__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*CHECKPOINTS, *JOURNAL, *CLAIMS, *EFFECTS], several=STATE)
check: Callable[..., Awaitable[None]] = CASES.check
