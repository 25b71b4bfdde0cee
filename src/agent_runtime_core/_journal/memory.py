"""The journal on dicts: each record beside its first event sequence number, by its place in the run."""

from __future__ import annotations

from .._engines.base import OperationSet
from .._engines.memory import MemoryTx
from ..errors import LeaseLost
from .record import ENDED, Record, is_again, numbered

Entry = tuple[int, Record]  # the first event sequence number of a record that stands for events, and the record


def take_sequence(tx: MemoryTx, run_id: str, count: int) -> int:
    """The first of `count` new event sequence numbers of the run."""
    heads = tx.tables["head"]
    first: int = heads.get(run_id, 0)
    tx.put(heads, run_id, first + count)
    return first


def head(tx: MemoryTx, run_id: str) -> int:
    next_: int = tx.tables["head"].get(run_id, 0)
    return next_


def append(tx: MemoryTx, run_id: str, record: Record) -> int:
    """Append; the journal position. The same position by the same claim is the same record, and so is the end that
    nobody's claim gives a generation.
    """
    journal = tx.tables["journal"].get(run_id)
    if journal is None:
        journal = {}
        tx.put(tx.tables["journal"], run_id, journal)
    seq = record[0]
    if seq < 0:
        if is_again(record, last := ending(tx, run_id)):
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
    entry: Entry | None = tx.tables["journal"].get(run_id, {}).get(record.seq)
    there = None if entry is None else entry[1]
    if there is None or (there.claim_id, there.kind, there.key) != (record.claim_id, record.kind, record.key):
        raise LeaseLost(run_id, record.claim_id)
    return record.seq


def delete(tx: MemoryTx, run_id: str) -> None:
    tx.drop(tx.tables["journal"], run_id)
    if run_id not in tx.tables.get("events", {}):  # which keep their numbers
        tx.drop(tx.tables["head"], run_id)


def records(tx: MemoryTx, run_id: str, after: int = -1) -> list[Record]:
    journal: dict[int, Entry] = tx.tables["journal"].get(run_id, {})
    # A write that came late stands behind later ones.
    return [_read(journal[seq]) for seq in sorted(journal) if seq > after]


def _read(entry: Entry) -> Record:
    ev, record = entry
    return numbered(record, ev) if ev >= 0 else record


def ending(tx: MemoryTx, run_id: str) -> Record | None:
    journal: dict[int, Entry] = tx.tables["journal"].get(run_id, {})
    return next((_read(entry) for entry in reversed(journal.values()) if entry[1].kind == ENDED), None)


def boundaries(tx: MemoryTx, run_id: str, since: int, limit: int) -> list[Record]:
    """Records that stand for events at or after `since`, in order."""
    journal: dict[int, Entry] = tx.tables["journal"].get(run_id, {})
    found: list[Entry] = []
    for ev, record in reversed(journal.values()):
        if record.nev and ev + record.nev <= since:
            break
        if record.nev:
            found.append((ev, record))
    found.reverse()
    return [_read(entry) for entry in found[:limit]]


CONCERN = OperationSet(
    "journal",
    {"journal.append": append, "journal.delete": delete},
    {"journal.append": applied},
    tables=("journal", "head"),
)
