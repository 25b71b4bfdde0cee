"""Safeguards of the library that can be taken away, to see that the simulation misses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from agent_runtime_core._engines.memory import MemoryTx
from agent_runtime_core.book import Book
from agent_runtime_core.journal.record import Record
from agent_runtime_core.queue import rows
from agent_runtime_core.queue.memory import MemoryRows
from agent_runtime_core.queue.row import ClaimRequest, RunRow, Settle
from agent_runtime_core.queue.rows import Rows
from agent_runtime_core.queue.sqlite import SQLiteRows

Patch = tuple[Any, str, Any]


def _fence() -> list[Patch]:
    """Any claim may write: the engines of the simulation leave the guard out."""
    return []


def _match() -> list[Patch]:
    """An imperative step is whatever was recorded at its place."""

    def recorded(self: Book, name: str, key: str) -> Record | None:
        if key.startswith("s:"):
            return self._ordered[self._next] if self._next < len(self._ordered) else None
        return self.done.get((name, key))

    def match(self: Book, name: str, record: Record | None) -> None:
        self._next += 1

    return [(Book, "recorded", recorded), (Book, "match", match)]


def _count() -> list[Patch]:
    """Taking a run from a dead worker does not count as a crash."""
    counted: Callable[..., RunRow] = vars(rows)["claimed"]

    def claimed(row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        return counted(row, ticket, want)._replace(crashes=row.crashes, stalls=row.stalls)

    return [(rows, "claimed", claimed)]


def _cursor() -> list[Patch]:
    """A run parks whatever came between its last look and the commit."""
    settled: Callable[..., Any] = Rows.settle

    def settle(self: Rows, run_id: str, how: Settle) -> Any:
        return settled(self, run_id, how._replace(cursor=-1))

    return [(Rows, "settle", settle)]


def _rollback() -> list[Patch]:
    """What a commit wrote before its process died stays; the SQLite engine of the simulation does the same."""
    return [(MemoryTx, "rollback", lambda self: None)]


def _resume() -> list[Patch]:
    """Records are written and never looked up."""
    return [(Book, "recorded", lambda self, name, key: None), (Book, "match", lambda self, name, record: None)]


def _once() -> list[Patch]:
    """A message that comes twice is two messages."""
    return [(MemoryRows, "mailed", lambda self, run_id, msg_id: None)]


def _liveness() -> list[Patch]:
    """Nobody looks whether the process that holds a run still lives; its lease has to run out."""
    return [(SQLiteRows, "_free_the_dead", lambda self, now: None)]


SAFEGUARDS: dict[str, Callable[[], list[Patch]]] = {
    "fence": _fence,
    "match": _match,
    "count": _count,
    "cursor": _cursor,
    "rollback": _rollback,
    "resume": _resume,
    "once": _once,
    "liveness": _liveness,
}


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Run the block with these safeguards taken away."""
    patches = [patch for name in names for patch in SAFEGUARDS[name]()]
    kept = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, replacement in patches:
        setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        for owner, attribute, original in reversed(kept):
            setattr(owner, attribute, original)
