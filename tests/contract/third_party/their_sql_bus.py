"""An event bus on `TheirEngine`, which derives the events of the journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_runtime_core.engines import NotApplied, OperationSet
from agent_runtime_core.events import EventBus, Record, StoredEvent
from tests.contract.third_party.their_engine import TheirBackend, rows

Row = tuple[str, str, str, float]


def sequences(source: Any, run_id: str) -> dict[str, int]:
    return dict(rows(source, lambda *row: row, "SELECT event_id, sequence FROM events WHERE run_id = ?", run_id))


def head(source: Any, run_id: str) -> int:
    """Return the sequence of the next event, published or derived."""
    last = "SELECT max(sequence) + 1 FROM events WHERE run_id = ? UNION ALL SELECT max(ev + nev) FROM journal"
    return max(rows(source, lambda n: int(n or 0), f"{last} WHERE run_id = ?", run_id, run_id))


def publish(tx: Any, run_id: str, new: Sequence[Row]) -> list[int]:
    there, following = sequences(tx, run_id), head(tx, run_id)
    for event_id, event_type, payload, t in new:
        if event_id not in there:
            there[event_id], following = following, following + 1
            event = (run_id, there[event_id], event_type, payload, t, event_id)
            tx.conn.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", event)
            tx.notify("events")
    return [there[event_id] for event_id, *_ in new]


def published(tx: Any, run_id: str, new: Sequence[Row]) -> list[int]:
    there = sequences(tx, run_id)
    if any(event_id not in there for event_id, *_ in new):
        raise NotApplied
    return [there[event_id] for event_id, *_ in new]


def delete(tx: Any, run_id: str) -> None:
    tx.conn.execute("DELETE FROM events WHERE run_id = ?", (run_id,))


def trim(tx: Any, run_id: str, sequence: int) -> int:
    last = "(SELECT max(sequence) FROM events WHERE run_id = ?)"
    query = f"DELETE FROM events WHERE run_id = ? AND sequence < min(?, {last})"
    return int(tx.conn.execute(query, (run_id, sequence, run_id)).rowcount)


def page(view: Any, run_id: str, since: int, limit: int) -> list[StoredEvent | Record]:
    """Return published events and the records with events, in the order of their sequences."""
    of_run = "WHERE run_id = ? AND"
    columns = "sequence, type, payload, t, event_id"
    query = f"SELECT {columns} FROM events {of_run} sequence >= ? ORDER BY sequence LIMIT ?"
    found: list[StoredEvent | Record] = [*rows(view, StoredEvent, query, run_id, since, limit)]
    query = f"SELECT {', '.join(Record._fields)} FROM journal {of_run} nev > 0 AND ev + nev > ? ORDER BY ev LIMIT ?"
    found += rows(view, Record, query, run_id, since, limit)
    return sorted(found, key=lambda row: row.ev if isinstance(row, Record) else row.sequence)[:limit]


class TheirSQLBus(TheirBackend, EventBus):
    operation_sets = (
        OperationSet(
            "events",
            {"events.publish": publish, "events.delete": delete, "events.trim": trim},
            {"events.publish": published},
        ),
    )
    derives = True

    def __init__(self, place: Any = None, **options: Any) -> None:
        super().__init__(place, **{"poll_interval": 0.005, **options})

    async def _rows(self, run_id: str, since: int, limit: int) -> list[StoredEvent | Record]:
        found: list[StoredEvent | Record] = await self.engine.read(page, run_id, since, limit)
        return found

    async def _head(self, run_id: str) -> int:
        return int(await self.engine.read(head, run_id))
