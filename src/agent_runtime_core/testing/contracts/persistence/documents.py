"""Conformance tests for document stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make(**options)` returns a new and empty document store with those options, such as `clock`. A failing case raises
AssertionError, or the unexpected error of the store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..checks import Cases
from .documents_claims import CASES as CLAIMS
from .documents_claims import rejects_a_stale_worker
from .documents_commits import CASES as COMMITS
from .documents_fixtures import Case, Make
from .documents_reads import CASES as READS
from .documents_writes import CASES as WRITES

__all__ = ["CASES", "Case", "Make", "check", "rejects_a_stale_worker"]

CASES: Cases[Case] = Cases([*WRITES, *READS, *COMMITS, *CLAIMS])
check: Callable[[Make], Awaitable[None]] = CASES.check
