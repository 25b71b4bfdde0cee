"""The journal in dicts: for each run, its records and their first event sequence numbers by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._engines.base import OperationSet
from .._engines.memory import MemoryTx
from ..errors import LeaseLost
from .record import ENDED, Record, is_duplicate_end, numbered

Entry = tuple[int, Record]  # the first event sequence number, or -1 for a record without events; the record


def take_sequence(tx: MemoryTx, run_id: str, count: int) -> int:
    """Reserve `count` event sequence numbers of the run, and return the first number."""
    heads = tx.tables["head"]
    first: int = heads.get(run_id, 0)
    tx.put(heads, run_id, first + count)
    return first


def head(tx: MemoryTx, run_id: str) -> int:
    """Return the sequence number of the run's next event."""
    next_: int = tx.tables["head"].get(run_id, 0)
    return next_


def append(tx: MemoryTx, run_id: str, record: Record) -> int:
    """Append a record and return its position.

    A record at the same position by the same claim is the same record and is not appended again. Neither is a second
    end of a generation without a claim.
    """
    journal = tx.tables["journal"].get(run_id)
    if journal is None:  # a call less for every other record
        journal = tx.dict_in(tx.tables["journal"], run_id)
    seq = record[0]
    if seq < 0:
        if is_duplicate_end(record, last := ending(tx, run_id)):
            assert last is not None
            return last.seq
        seq = max(journal, default=-1) + 1
        record = record._replace(seq=seq)
    elif seq in journal:
        return applied(tx, run_id, record)
    ev = -1
    if nev := record[18]:
        ev = take_sequence(tx, run_id, nev)
        tx.notified.append("events")
    tx.add(journal, seq, (ev, record))
    return seq


def applied(tx: MemoryTx, run_id: str, record: Record) -> int:
    """Return the position of a record that was appended before.

    Raises:
        LeaseLost: if there is no record at that position, or one of another claim.
    """
    entry: Entry | None = tx.tables["journal"].get(run_id, {}).get(record.seq)
    stored = None if entry is None else entry[1]
    if stored is None or (stored.claim_id, stored.kind, stored.key) != (record.claim_id, record.kind, record.key):
        raise LeaseLost(run_id, record.claim_id)
    return record.seq


def rewrite(tx: MemoryTx, run_id: str, changes: Sequence[tuple[Record, Record]]) -> list[bool]:
    """Replace records by the same data in another encoding; return for each pair whether the old data is stored."""
    journal: dict[int, Entry] = tx.tables["journal"].get(run_id, {})
    done = []
    for old, new in changes:
        entry = journal.get(old.seq)
        done.append(entry is not None and _read(entry) == old)
        if entry is not None and done[-1]:
            tx.put(journal, old.seq, (entry[0], new))
    return done


def delete(tx: MemoryTx, run_id: str) -> None:
    tx.drop(tx.tables["journal"], run_id)
    if run_id not in tx.tables.get("events", {}):  # remaining published events keep their sequence numbers
        tx.drop(tx.tables["head"], run_id)


def records(tx: MemoryTx, run_id: str, after: int = -1) -> list[Record]:
    journal: dict[int, Entry] = tx.tables["journal"].get(run_id, {})
    # A record that was appended late is in the dict after records of greater positions.
    return [_read(journal[seq]) for seq in sorted(journal) if seq > after]


def _read(entry: Entry) -> Record:
    ev, record = entry
    return numbered(record, ev) if ev >= 0 else record


def ending(tx: MemoryTx, run_id: str) -> Record | None:
    journal: dict[int, Entry] = tx.tables["journal"].get(run_id, {})
    return next((_read(entry) for entry in reversed(journal.values()) if entry[1].kind == ENDED), None)


def endings(tx: MemoryTx, run_ids: Sequence[str]) -> dict[str, Record]:
    return {run_id: end for run_id in run_ids if (end := ending(tx, run_id)) is not None}


def boundaries(tx: MemoryTx, run_id: str, since: int, limit: int) -> list[Record]:
    """Return at most `limit` records that have events at or after `since`, in order."""
    journal: dict[int, Entry] = tx.tables["journal"].get(run_id, {})
    found: list[Entry] = []
    for ev, record in reversed(journal.values()):
        if record.nev and ev + record.nev <= since:
            break
        if record.nev:
            found.append((ev, record))
    found.reverse()
    return [_read(entry) for entry in found[:limit]]


#: What a state store reads of the journal.
READS: dict[str, Any] = {"records": records, "ending": ending, "endings": endings}

CONCERN = OperationSet(
    "journal",
    {"journal.append": append, "journal.delete": delete, "journal.rewrite": rewrite},
    {"journal.append": applied},
    tables=("journal", "head"),
)
