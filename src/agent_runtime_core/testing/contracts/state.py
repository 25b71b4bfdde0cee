"""What every state store must do; run each of `CASES` on your own with `await case(make)`.

`make(**options)` gives a new and empty store each time, constructed with those options (`clock`). Where the
store breaks the contract a case raises AssertionError, or the error that the store raised and should not
have; `check(make)` runs them all.
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
