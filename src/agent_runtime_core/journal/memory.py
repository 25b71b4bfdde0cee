"""The journal on dicts."""

from __future__ import annotations

from operator import itemgetter

from .._engines.base import Concern
from .._engines.memory import MemoryTx
from ..errors import LeaseLost
from .record import ENDED, Record, is_again, numbered

_SEQ = itemgetter(0)


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
    nobody's claim gives a generation."""
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
    if nev := record[18]:
        record = numbered(record, take_sequence(tx, run_id, nev))
        tx.rings.append("events")
    tx.put(journal, seq, record)
    return seq


def applied(tx: MemoryTx, run_id: str, record: Record) -> int:
    there = tx.tables["journal"].get(run_id, {}).get(record.seq)
    if there is None or (there.claim_id, there.kind, there.key) != (record.claim_id, record.kind, record.key):
        raise LeaseLost(run_id, record.claim_id)
    return record.seq


def delete(tx: MemoryTx, run_id: str) -> None:
    tx.drop(tx.tables["journal"], run_id)
    tx.drop(tx.tables["head"], run_id)


def records(tx: MemoryTx, run_id: str, after: int = -1) -> list[Record]:
    journal = tx.tables["journal"].get(run_id, {})
    # A write that came late stands behind later ones.
    return sorted((record for seq, record in journal.items() if seq > after), key=_SEQ)


def ending(tx: MemoryTx, run_id: str) -> Record | None:
    journal = reversed(tx.tables["journal"].get(run_id, {}).values())
    return next((record for record in journal if record.kind == ENDED), None)


def boundaries(tx: MemoryTx, run_id: str, since: int, limit: int) -> list[Record]:
    """Records that stand for events at or after `since`, in order."""
    found: list[Record] = []
    for record in reversed(tx.tables["journal"].get(run_id, {}).values()):
        if record.nev and record.ev + record.nev <= since:
            break
        if record.nev:
            found.append(record)
    found.reverse()
    return found[:limit]


CONCERN = Concern(
    "journal",
    {"journal.append": append, "journal.delete": delete},
    {"journal.append": applied},
    tables=("journal", "head"),
)
