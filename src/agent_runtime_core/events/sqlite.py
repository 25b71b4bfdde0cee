"""An event bus in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

from .._engines.backend import OperationSets, Reads, SQLiteBackend
from .._engines.base import NotApplied, OperationSet, always
from .._engines.os_errors import storage_errors
from .._engines.sqlite.live_directory import ReaderFiles
from .._engines.sqlite.transaction import SQLiteTx
from .._journal import sqlite as journal
from .._journal.record import Record
from ..errors import StorageCorrupt, brief_kind
from .base import COPY, DELETE, PUBLISH, REWRITE, TRIM, EventBus
from .event import PAGE_BYTES, EventRows, StoredEvent, merged

_INSERT = "INSERT INTO arc_events VALUES (?,?,?,?,?,?)"
_FIND = "SELECT seq FROM arc_events WHERE run_id = ? AND event_id = ?"
_ROWS = "SELECT seq, type, payload, t, event_id FROM arc_events WHERE run_id = ? AND seq >= ? ORDER BY seq LIMIT ?"
_REWRITE = "UPDATE arc_events SET payload = ? WHERE run_id = ? AND seq = ? AND event_id = ? AND payload = ?"

# The last event is kept, as the next sequence number follows from it.
_TRIM = (
    "DELETE FROM arc_events WHERE run_id = ? AND seq < ? AND seq < (SELECT max(seq) FROM arc_events WHERE run_id = ?)"
)

_KINDS = (int, str, str, float, str)  # types of the columns of _ROWS
_as_event: Callable[[tuple[Any, ...]], StoredEvent] = partial(tuple.__new__, StoredEvent)

Row = tuple[str, str, str, float]


def publish(tx: SQLiteTx, run_id: str, rows: Sequence[Row]) -> list[int]:
    sequences = []
    for event_id, event_type, payload, t in rows:
        there = tx.execute(_FIND, (run_id, event_id)).fetchone()
        if there is None:
            sequence = journal.next_sequence(tx, run_id)
            tx.counters[run_id] = sequence + 1
            tx.execute(_INSERT, (run_id, sequence, event_type, payload, t, event_id))
            tx.notify("events")
        sequences.append(sequence if there is None else there[0])
    return sequences


def published(tx: SQLiteTx, run_id: str, rows: Sequence[Row]) -> list[int]:
    found = [tx.execute(_FIND, (run_id, event_id)).fetchone() for event_id, *_ in rows]
    if None in found:
        raise NotApplied
    return [sequence for (sequence,) in found]


def delete(tx: SQLiteTx, run_id: str) -> None:
    tx.counters.pop(run_id, None)
    tx.execute("DELETE FROM arc_events WHERE run_id = ?", (run_id,))


def trim(tx: SQLiteTx, run_id: str, sequence: int) -> int:
    return tx.execute(_TRIM, (run_id, sequence, run_id)).rowcount


def rewrite(tx: SQLiteTx, run_id: str, changes: Sequence[tuple[StoredEvent, StoredEvent]]) -> list[bool]:
    """Replace events by the same data in another encoding; return for each pair whether the old data is stored."""
    return [
        tx.execute(_REWRITE, (new.payload, run_id, old.sequence, old.event_id, old.payload)).rowcount == 1
        for old, new in changes
    ]


def copy(tx: SQLiteTx, run_id: str, events: Sequence[StoredEvent]) -> None:
    """Store events of another store with their sequence numbers, unless they are stored."""
    tx.counters.pop(run_id, None)
    for sequence, *event in events:
        tx.execute(f"{_INSERT} ON CONFLICT DO NOTHING", (run_id, sequence, *event))


def ids(view: sqlite3.Connection) -> list[str]:
    """Return the runs and topics that have events."""
    return [run_id for (run_id,) in view.execute("SELECT DISTINCT run_id FROM arc_events ORDER BY run_id")]


def _stored(run_id: str, rows: Sequence[tuple[Any, ...]]) -> list[StoredEvent]:
    """Return rows of _ROWS.

    Raises:
        StorageCorrupt: if a column contains a value that is never written there.
    """
    kinds = [set(map(type, column)) for column in zip(*rows, strict=True)]  # a check of each row takes twice as long
    for n, kind in enumerate(_KINDS[: len(kinds)]):
        if kinds[n] != {kind}:
            wrong = next(row for row in rows if type(row[n]) is not kind)
            raise StorageCorrupt(
                f"run {run_id}: {StoredEvent._fields[n]} of event {brief_kind(wrong[0])} is not what was written, got "
                f"{brief_kind(wrong[n])}. Restore a backup"
            )
    return list(map(_as_event, rows))


def rows(view: sqlite3.Connection, run_id: str, since: int, limit: int) -> EventRows:
    found: list[tuple[Any, ...]] = []
    left = PAGE_BYTES
    with contextlib.closing(view.execute(_ROWS, (run_id, since, limit))) as cursor:
        for row in cursor:
            found.append(row)
            left = left - len(row[2]) if type(row[2]) is str else 0  # `_stored` reports a row without text
            if left <= 0:
                break  # rows of any length may follow
    stored = _stored(run_id, found)
    records, end = journal.boundaries(view, run_id, since, limit, PAGE_BYTES)
    if stored and (left <= 0 or len(stored) == limit):
        after = stored[-1].sequence + 1
        end = after if end is None else min(after, end)
    return merged(stored, records, limit, end)


def heads(view: sqlite3.Connection, run_ids: Sequence[str]) -> list[int]:
    return [journal.head(view, run_id) for run_id in run_ids]


CONCERN = OperationSet(
    "events",
    {PUBLISH: publish, DELETE: delete, TRIM: trim, REWRITE: rewrite, COPY: copy},
    {PUBLISH: published},
    slow=dict.fromkeys((DELETE, TRIM, REWRITE, COPY), always),
)


class SQLiteEventBus(SQLiteBackend, EventBus):
    """An event bus in one SQLite file, shared by all processes on this machine."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {"ids": ids}
    derives = True
    bounds_pages = True
    stores_readers = True

    @cached_property
    def _readers(self) -> ReaderFiles:
        return ReaderFiles(self.engine.path, self.clock)

    async def close(self) -> None:
        self._readers.close()
        await super().close()

    async def report_reader(self, run_id: str, reader: str, sequence: int | None) -> None:
        if sequence is None:
            self._readers.withdraw(run_id, reader)
        elif not self.engine.read_only:
            with storage_errors(self.engine.path):
                self._readers.report(run_id, reader, sequence)

    async def readers(self, run_id: str) -> dict[str, int]:
        return self._readers.read(run_id)

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[StoredEvent | Record]:
        found: EventRows = await self.engine.read(rows, run_id, since, limit)
        return found

    async def _head(self, run_id: str) -> int:
        next_: int = await self.engine.read(journal.head, run_id)
        return next_

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        found: list[int] = await self.engine.read(heads, run_ids)
        return found
