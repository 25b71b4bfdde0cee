"""A state store on `TheirEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agent_runtime_core.state import (
    EffectRow,
    JournalOperations,
    Record,
    StateOperations,
    StateRow,
    StateStore,
    same_digest,
)
from tests.contract.third_party.their_engine import TheirBackend, rows
from tests.contract.third_party.their_sql_bus import head

FIELDS = ", ".join(Record._fields)
ENDED = "kind = 'ended' ORDER BY seq DESC LIMIT 1"


def records(view: Any, run_id: str, after: int) -> list[Record]:
    return rows(view, Record, f"SELECT {FIELDS} FROM journal WHERE run_id = ? AND seq > ? ORDER BY seq", run_id, after)


def record(source: Any, run_id: str, seq: int) -> Record | None:
    found = rows(source, Record, f"SELECT {FIELDS} FROM journal WHERE run_id = ? AND seq = ?", run_id, seq)
    return next(iter(found), None)


def newest(tx: Any, run_id: str) -> int:
    [seq] = rows(tx, int, "SELECT coalesce(max(seq), -1) FROM journal WHERE run_id = ?", run_id)
    return seq


def ending(source: Any, run_id: str) -> Record | None:
    found = rows(source, Record, f"SELECT {FIELDS} FROM journal WHERE run_id = ? AND {ENDED}", run_id)
    return next(iter(found), None)


def endings(view: Any, run_ids: Sequence[str]) -> dict[str, Record]:
    return {run_id: end for run_id in run_ids if (end := ending(view, run_id)) is not None}


def insert(tx: Any, run_id: str, new: Record) -> None:
    tx.conn.execute(f"INSERT INTO journal VALUES (?{', ?' * len(new)})", (run_id, *new))


def state_of(source: Any, run_id: str) -> StateRow:
    found = rows(source, StateRow, "SELECT status, checkpoint, mark, t FROM states WHERE run_id = ?", run_id)
    return next(iter(found), StateRow())


def checkpoint(tx: Any, run_id: str, text: str, mark: str | None, now: float) -> None:
    save(tx, run_id, state_of(tx, run_id)._replace(checkpoint=text, mark=mark, t=now))


def status(tx: Any, run_id: str, text: str, now: float) -> None:
    save(tx, run_id, state_of(tx, run_id)._replace(status=text, t=now))


def save(tx: Any, run_id: str, row: StateRow) -> None:
    tx.conn.execute("REPLACE INTO states VALUES (?, ?, ?, ?, ?)", (run_id, *row))


def delete(tx: Any, run_id: str) -> None:
    for table in ("states", "journal"):
        tx.conn.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))


def effects(source: Any, origin: str, key: str, digests: Sequence[str]) -> list[EffectRow]:
    found = rows(source, EffectRow, "SELECT * FROM effects WHERE origin = ? AND key = ?", origin, key)
    return [row for row in found if same_digest(row.digest, digests)]


def drop(tx: Any, row: EffectRow, others: Sequence[str] = ()) -> None:
    of_run = "origin = ? AND key = ? AND run_id = ? AND arrival = ? AND digest = ?"
    for digest in (row.digest, *others):
        values = (row.origin, row.key, row.run_id, row.arrival, digest)
        tx.conn.execute(f"DELETE FROM effects WHERE {of_run}", values)


def put(tx: Any, row: EffectRow, others: Sequence[str] = ()) -> None:
    drop(tx, row, others)
    tx.conn.execute("INSERT INTO effects VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def drop_lineage(tx: Any, origin: str) -> None:
    tx.conn.execute("DELETE FROM effects WHERE origin = ?", (origin,))


JOURNAL = JournalOperations(record, newest, ending, insert, head)
STATE = StateOperations(state_of, effects, put, drop, drop_lineage)


class TheirSQLStore(TheirBackend, StateStore):
    operation_sets = (
        JOURNAL.operation_set(),
        STATE.operation_set({"state.checkpoint": checkpoint, "state.status": status, "state.delete": delete}),
    )
    reads: ClassVar[Any] = {
        "records": records,
        "ending": ending,
        "endings": endings,
        "state": state_of,
        "effects": effects,
    }
    transacts = True
