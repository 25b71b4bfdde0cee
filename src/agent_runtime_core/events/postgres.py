"""An event bus in a PostgreSQL database, shared by all processes that reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .._engines.backend import OperationSets, Reads
from .._engines.base import READER_SECONDS, NotApplied, Op, OperationSet
from .._engines.commit_request import CommitRequest
from .._engines.postgres.connection import PostgresConnection
from .._engines.postgres.engine import PostgresBackend, PostgresTx
from .._journal import postgres as journal
from .._journal.record import Record
from .base import COPY, DELETE, PUBLISH, REWRITE, TRIM, EventBus
from .event import PAGE_BYTES, EventRows, StoredEvent, merged
from .sqlite import Row, copy, delete, ids, rewrite, trim

_ROWS = (
    journal.PAGE.format(
        columns="seq, type, payload, t, event_id",
        size="octet_length(payload)",
        rows="SELECT * FROM arc_events WHERE run_id = ? AND seq >= ? ORDER BY seq LIMIT ?",
    )
    + " WHERE before < ? ORDER BY seq"
)
_SEQUENCES = "SELECT event_id, seq FROM arc_events WHERE run_id = ? AND event_id = ANY(?)"
_INSERT = "INSERT INTO arc_events VALUES (?,?,?,?,?,?)"
# A step of the run's claim may wait for this transaction. It reads the row again then, and no other table.
_KEEP_NEXT = "UPDATE arc_runs SET next_event = ? WHERE run_id = ?"
_REPORT = "events.report"


def publish(tx: PostgresTx, run_id: str, rows: Sequence[Row]) -> list[int]:
    sequence = journal.next_sequence(tx, run_id)
    known = dict(tx.execute(_SEQUENCES, (run_id, [row[0] for row in rows])).fetchall())
    sequences = []
    for event_id, event_type, payload, t in rows:
        if event_id not in known:
            known[event_id] = sequence
            tx.execute(_INSERT, (run_id, sequence, event_type, payload, t, event_id))
            sequence += 1
        sequences.append(known[event_id])
    if sequence != tx.counters[run_id]:
        tx.counters[run_id] = sequence
        tx.execute(_KEEP_NEXT, (sequence, run_id))
        tx.notify("events")
    return sequences


def published(tx: PostgresTx, run_id: str, rows: Sequence[Row]) -> list[int]:
    known = dict(tx.execute(_SEQUENCES, (run_id, [row[0] for row in rows])).fetchall())
    if any(row[0] not in known for row in rows):
        raise NotApplied
    return [known[row[0]] for row in rows]


def report(tx: PostgresTx, run_id: str, reader: str, sequence: int | None) -> None:
    """Note how far a reader of events is; None if it ended."""
    tx.execute("DELETE FROM arc_readers WHERE run_id = ? AND reader = ? OR t < ?", (run_id, reader, tx.now - 3600))
    if sequence is not None:
        tx.execute("INSERT INTO arc_readers VALUES (?,?,?,?)", (run_id, reader, sequence, tx.now))


def readers(view: PostgresConnection, run_id: str) -> dict[str, int]:
    found = view.execute(
        "SELECT reader, seq FROM arc_readers WHERE run_id = ? AND t > extract(epoch FROM clock_timestamp()) - ?",
        (run_id, READER_SECONDS),
    )
    return {reader: int(sequence) for reader, sequence in found}


def rows(view: PostgresConnection, run_id: str, since: int, limit: int) -> EventRows:
    stored = [StoredEvent(*row) for row in view.execute(_ROWS, (run_id, since, limit, PAGE_BYTES))]
    records, end = journal.boundaries(view, run_id, since, limit, PAGE_BYTES)
    if stored and (len(stored) == limit or sum(len(each.payload) for each in stored) >= PAGE_BYTES // 4):
        after = stored[-1].sequence + 1
        end = after if end is None else min(after, end)
    return merged(stored, records, limit, end)


def heads(view: PostgresConnection, run_ids: Sequence[str]) -> list[int]:
    return [journal.head(view, run_id) for run_id in run_ids]


def _lock(tx: PostgresTx, requests: Sequence[CommitRequest]) -> None:
    if "queue.insert" not in tx.engine.operations:  # else the queue locks the logs after the rows of runs
        tx.lock_logs(requests)


def _any(function: Any) -> Any:
    """Return a function of the SQLite bus, whose statements are the same here."""
    return function


CONCERN = OperationSet(
    "events",
    {
        PUBLISH: publish, DELETE: _any(delete), TRIM: _any(trim), REWRITE: _any(rewrite),
        COPY: _any(copy), _REPORT: report,
    },
    {PUBLISH: published},
    lock=_lock,
    one_statement=frozenset({readers, ids}),
)  # fmt: skip


class PostgresEventBus(PostgresBackend, EventBus):
    """An event bus in a PostgreSQL database, shared by all processes that reach it."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {"ids": ids}
    derives = True
    bounds_pages = True
    stores_readers = True

    async def report_reader(self, run_id: str, reader: str, sequence: int | None) -> None:
        await self.engine.commit(None, [Op(_REPORT, (run_id, reader, sequence))])

    async def readers(self, run_id: str) -> dict[str, int]:
        found: dict[str, int] = await self.engine.read(readers, run_id)
        return found

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[StoredEvent | Record]:
        found: EventRows = await self.engine.read(rows, run_id, since, limit)
        return found

    async def _head(self, run_id: str) -> int:
        return (await self._heads([run_id]))[0]

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        found: list[int] = await self.engine.read(heads, run_ids)
        return found
