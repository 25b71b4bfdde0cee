"""An event bus in the memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice
from typing import ClassVar

from .._engines.backend import MemoryBackend, OperationSets
from .._engines.base import READER_SECONDS, NotApplied, Op, OperationSet
from .._engines.memory import MemoryTx
from .._journal import memory as journal
from .._journal.record import Record
from .base import DELETE, PUBLISH, REWRITE, TRIM, EventBus
from .event import EventRows, StoredEvent, merged

_CLEAR = "events.clear"

Row = tuple[str, str, str, float]

_stored = tuple.__new__  # takes half the time of calling the class


def publish(tx: MemoryTx, run_id: str, rows: Sequence[Row]) -> list[int]:
    stored, ids = tx.dict_in(tx.tables["events"], run_id), tx.dict_in(tx.tables["event_ids"], run_id)
    add = tx.add
    first = next_ = journal.head(tx, run_id)
    sequences = []
    for event_id, event_type, payload, t in rows:
        sequence = ids.get(event_id)
        if sequence is None:
            sequence = next_
            next_ += 1
            add(ids, event_id, sequence)
            add(stored, sequence, _stored(StoredEvent, (sequence, event_type, payload, t, event_id)))
        sequences.append(sequence)
    if next_ > first:
        journal.take_sequence(tx, run_id, next_ - first)
        tx.notified.append("events")
    return sequences


def published(tx: MemoryTx, run_id: str, rows: Sequence[Row]) -> list[int]:
    ids = tx.tables["event_ids"].get(run_id, {})
    if not all(event_id in ids for event_id, *_ in rows):
        raise NotApplied
    return [ids[event_id] for event_id, *_ in rows]


def delete(tx: MemoryTx, run_id: str) -> None:
    tx.drop(tx.tables["events"], run_id)
    tx.drop(tx.tables["event_ids"], run_id)
    # The journal's records keep their sequence numbers.
    if run_id not in tx.tables["journal"]:
        tx.drop(tx.tables["head"], run_id)


def trim(tx: MemoryTx, run_id: str, sequence: int) -> int:
    stored, ids = tx.dict_in(tx.tables["events"], run_id), tx.dict_in(tx.tables["event_ids"], run_id)
    last = max(stored, default=0)
    gone = [number for number in stored if number < min(sequence, last)]
    for number in gone:
        tx.drop(ids, stored[number].event_id)
        tx.drop(stored, number)
    return len(gone)


def rewrite(tx: MemoryTx, run_id: str, changes: Sequence[tuple[StoredEvent, StoredEvent]]) -> list[bool]:
    """Replace events by the same data in another encoding; return for each pair whether the old data is stored."""
    of_run: dict[int, StoredEvent] = tx.tables["events"].get(run_id, {})
    done = [of_run.get(old.sequence) == old for old, _ in changes]
    for _, new in compress(changes, done):
        tx.put(of_run, new.sequence, new)
    return done


def clear(tx: MemoryTx) -> None:
    for run_id in [*tx.tables["events"]]:
        delete(tx, run_id)


def rows(tx: MemoryTx, run_id: str, since: int, limit: int) -> EventRows:
    records = journal.boundaries(tx, run_id, since, limit)
    end = records[-1].ev + records[-1].nev if len(records) == limit else None
    of_run: dict[int, StoredEvent] = tx.tables["events"].get(run_id, {})
    head = journal.head(tx, run_id) if end is None else end
    # Rows of any size may be listed, because this copies none of them.
    stored = list(islice(filter(None, map(of_run.get, range(since, head))), limit))
    if len(stored) == limit:
        end = stored[-1].sequence + 1
    return merged(stored, records, limit, end)


CONCERN = OperationSet(
    "events",
    {PUBLISH: publish, DELETE: delete, TRIM: trim, REWRITE: rewrite, _CLEAR: clear},
    {PUBLISH: published},
    tables=("events", "event_ids"),
)


class InMemoryEventBus(MemoryBackend, EventBus):
    """An event bus in the memory of this process. Its events are lost when the process ends."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    derives = True
    bounds_pages = True
    stores_readers = True

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[StoredEvent | Record]:
        found: EventRows = await self.engine.read(rows, run_id, since, limit)
        return found

    async def _head(self, run_id: str) -> int:
        next_: int = await self.engine.read(journal.head, run_id)
        return next_

    async def report_reader(self, run_id: str, reader: str, sequence: int | None) -> None:
        reports = self.engine.readers.setdefault(run_id, {})
        if sequence is not None:
            reports[reader] = (sequence, self.clock.boot())
        elif reports.pop(reader, None) and not reports:
            del self.engine.readers[run_id]

    async def readers(self, run_id: str) -> dict[str, int]:
        oldest, reports = self.clock.boot() - READER_SECONDS, self.engine.readers.get(run_id, {})
        return {reader: sequence for reader, (sequence, at) in reports.items() if at >= oldest}

    def clear(self) -> None:
        """Delete all published events."""
        self.engine.apply(None, [Op(_CLEAR)])
