"""The journal in SQLite tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any
from zlib import compress, crc32, decompress
from zlib import error as PackError

from .._engines.base import NotApplied, OperationSet, always
from .._engines.sqlite.transaction import SQLiteTx
from .._engines.sqlite.user_transaction import run
from ..errors import LeaseLost, StorageCorrupt, brief
from .record import ENDED, Record, is_again

SHORTEST_PACKED, LONGEST_PACKED = 800, 32_000  # characters of a result

# A column costs time in every record that is written or read. Those that SQL asks for have one of their own, and so
# has the result, which may be large; the others share `body`.
MIGRATIONS = (
    """CREATE TABLE arc_journal (
    run_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, result TEXT,
    body TEXT NOT NULL, ev INTEGER NOT NULL, nev INTEGER NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY (run_id, seq)) WITHOUT ROWID;
CREATE TABLE arc_events (
    run_id TEXT NOT NULL, seq INTEGER NOT NULL, type TEXT NOT NULL, payload TEXT NOT NULL, t REAL NOT NULL,
    event_id TEXT NOT NULL, PRIMARY KEY (run_id, seq)) WITHOUT ROWID;
CREATE UNIQUE INDEX arc_events_id ON arc_events (run_id, event_id)""",
)

# The next event sequence number of a run. Nothing is stored for it: a counter would be one more page to
# write with every record. Quiet records hold the number too, so the last record always tells.
_AFTER_EVENTS = "SELECT seq + 1 FROM arc_events WHERE run_id = ? ORDER BY seq DESC LIMIT 1"
_AFTER_RECORDS = "SELECT ev + nev FROM arc_journal WHERE run_id = ? ORDER BY seq DESC LIMIT 1"
_AFTER_LAST = "SELECT seq + 1 FROM arc_journal WHERE run_id = ? ORDER BY seq DESC LIMIT 1"
_INSERT = "INSERT INTO arc_journal VALUES (?,?,?,?,?,?,?,?,?)"
_COLUMNS = "SELECT seq, kind, name, result, body, ev, nev, crc FROM arc_journal WHERE run_id = ?"
_RECORDS = _COLUMNS + " AND seq > ? ORDER BY seq"
_RESULT = "SELECT result FROM arc_journal WHERE run_id = ? AND seq = ?"
_LAST = _COLUMNS + " ORDER BY seq DESC LIMIT 1"
_ENDING = _COLUMNS + " AND kind = 'ended' ORDER BY seq DESC LIMIT 1"
# Sequence numbers and positions grow together: looking back from the end, where a follower is, finds the start.
_BOUNDARIES = _COLUMNS + (
    " AND seq >= coalesce((SELECT seq FROM arc_journal WHERE run_id = ? AND nev > 0 AND ev <= ?"
    " ORDER BY seq DESC LIMIT 1), 0)"
    " AND nev > 0 AND ev + nev > ? ORDER BY seq LIMIT ?"
)


def head(tx: SQLiteTx | sqlite3.Connection, run_id: str) -> int:
    """The sequence number that the run's next event gets."""
    return max(_number(run_id, tx.execute(_AFTER_RECORDS, (run_id,)).fetchone()), _behind_events(tx, run_id))


def next_sequence(tx: SQLiteTx, run_id: str) -> int:
    """`head`, which the writing connection remembers; whoever takes numbers moves `tx.counters` on."""
    known = tx.counters.get(run_id)
    if known is None:
        known = tx.counters[run_id] = head(tx, run_id)
    return known


def _behind_events(tx: SQLiteTx | sqlite3.Connection, run_id: str) -> int:
    """`head` where no record is yet."""
    return _number(run_id, tx.execute(_AFTER_EVENTS, (run_id,)).fetchone())


def _number(run_id: str, row: tuple[Any, ...] | None) -> int:
    """What is to follow, 0 where nothing is there; StorageCorrupt where what is there has no number."""
    number = row[0] if row else 0
    if type(number) is not int:
        raise StorageCorrupt(
            f"run {run_id}: its last record or event has no number, as {brief(number)} follows it; restore a backup"
        )
    return number


def _crc(run_id: str, seq: int, kind: str, name: str, result: str | bytes | None, body: str, nev: int) -> int:
    about = f"{run_id}\0{seq}\0{kind}\0{name}\0{nev}\0{result is None}\0{body}"
    if result is None:
        return crc32(about.encode())
    if isinstance(result, str):
        if len(result) < SHORTEST_PACKED:
            return crc32(f"{about}{result}".encode())
        result = result.encode()  # by itself: it may be large, and need not be copied once more
    # Anything else is no checksum: the column was damaged.
    return crc32(result, crc32(about.encode())) if isinstance(result, bytes) else -1


def _packed(kind: str, result: str | None) -> str | bytes | None:
    """A result as it is stored. A row of more than a quarter of a page takes a page more, so those of a few
    kilobytes, texts of models most of all, are worth compressing. Larger ones would take too long, but for
    that of the run, which tells a whole conversation once more.
    """
    if result is None or len(result) < SHORTEST_PACKED or (len(result) > LONGEST_PACKED and kind != ENDED):
        return result
    packed = compress(result.encode(), 1)
    return packed if len(packed) < len(result) * 0.8 else result


def _is_long(run_id: str, record: Record) -> bool:
    return record.kind == ENDED and record.result is not None and len(record.result) > LONGEST_PACKED


def _unpacked(result: str | bytes | None) -> str | None:
    return decompress(result).decode() if isinstance(result, bytes) else result


def append(tx: SQLiteTx, run_id: str, record: Record) -> int:
    """Append; the journal position. The same position by the same claim is the same record, and so is the end that
    nobody's claim gives a generation.
    """
    if record.seq < 0:
        if is_again(record, there := ending(tx, run_id)):
            assert there is not None
            return there.seq
        record = record._replace(seq=_number(run_id, tx.execute(_AFTER_LAST, (run_id,)).fetchone()))
    (
        seq, kind, name, key, attempt, claim_id, t, text, error, state, pos, total, tries, ms, info, next_, digest, _,
        nev,
    ) = record  # fmt: skip
    ev = tx.counters.get(run_id)
    if ev is None:
        ev = head(tx, run_id) if seq else _behind_events(tx, run_id)
    # All that has no column of its own. No JSON text and no id has a control character in it; the key, last, may.
    body = (
        f"{attempt}\t{claim_id}\t{t!r}\t{pos}\t{total}\t{tries}\t{ms}\t{error or ''}\t{state or ''}\t{info or ''}"
        f"\t{next_ or ''}\t{digest or ''}\t{key}"
    )
    if text is not None and len(text) < SHORTEST_PACKED:  # as _packed() and _crc() have it, for most at once
        result: str | bytes | None = text
        crc = crc32(f"{run_id}\0{seq}\0{kind}\0{name}\0{nev}\0False\0{body}{text}".encode())
    else:
        result = _packed(kind, text)
        crc = _crc(run_id, seq, kind, name, result, body, nev)
    try:
        tx.execute(_INSERT, (run_id, seq, kind, name, result, body, ev, nev, crc))
    except sqlite3.IntegrityError:
        return applied(tx, run_id, record)
    if kind == ENDED:
        tx.counters.pop(run_id, None)  # mostly the last number that is asked for
    else:
        tx.counters[run_id] = ev + nev
    if nev:
        tx.notified.add("events")
    return seq


def applied(tx: SQLiteTx, run_id: str, record: Record) -> int:
    there = _one(run_id, tx.execute(_COLUMNS + " AND seq = ?", (run_id, record.seq)))
    if there is None or (there.claim_id, there.kind, there.key) != (record.claim_id, record.kind, record.key):
        raise LeaseLost(run_id, record.claim_id)
    return record.seq


def transact(
    tx: SQLiteTx,
    run_id: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    place: Record,
    seal: Callable[[Any], Record],
) -> str | None:
    """Run a user's function and append `seal(its result)` at `place` in the same transaction; the recorded result."""
    there = tx.execute(_RESULT, (run_id, place.seq)).fetchone()
    if there is not None:
        # An earlier try landed and its answer was lost: the function has run.
        applied(tx, run_id, place)
        return _unpacked(there[0])
    record = seal(run(tx, place.name, fn, args))
    append(tx, run_id, record)
    return record.result


def transacted(tx: SQLiteTx, run_id: str, *_: Any) -> str | None:
    raise NotApplied


def delete(tx: SQLiteTx, run_id: str) -> None:
    tx.counters.pop(run_id, None)
    tx.execute("DELETE FROM arc_journal WHERE run_id = ?", (run_id,))


class _Numbers(dict[str, int]):
    """The numbers of texts: in one journal, the same few come up again and again."""

    def __missing__(self, text: str) -> int:
        number = self[text] = int(text)
        return number


def _read(run_id: str, rows: Iterable[tuple[Any, ...]]) -> list[Record]:
    """The records in these rows; StorageCorrupt for one that is not as it was written."""
    records: list[Record] = []
    number, new = _Numbers(), tuple.__new__
    of_run = crc32(f"{run_id}\0".encode())
    for seq, kind, name, result, body, ev, nev, crc in rows:
        if type(result) is str and len(result) < SHORTEST_PACKED:  # as _crc() has it, for most at once
            found = crc32(f"{seq}\0{kind}\0{name}\0{nev}\0False\0{body}{result}".encode(), of_run)
        else:
            found = _crc(run_id, seq, kind, name, result, body, nev)
        if found != crc:
            raise _damaged(run_id, seq, kind, name, "does not match its checksum")
        if type(ev) is not int:  # which is not under the checksum
            raise _damaged(run_id, seq, kind, name, f"has no number of an event, but {brief(ev)}")
        if type(result) is bytes:
            try:
                result = _unpacked(result)
            except (PackError, ValueError) as wrong:  # it was text, which its checksum does not tell from bytes
                raise _damaged(run_id, seq, kind, name, "has a result that cannot be unpacked") from wrong
        attempt, claim_id, t, pos, total, tries, ms, error, state, info, next_, digest, key = body.split("\t", 12)
        # As a NamedTuple itself makes one, only faster.
        record: Record = new(
            Record,
            (
                seq, kind, name, key, number[attempt], claim_id, float(t), result, error or None, state or None,
                int(pos), number[total], number[tries], number[ms], info or None, next_ or None, digest or None, ev,
                nev,
            ),
        )  # fmt: skip
        records.append(record)
    return records


def _damaged(run_id: str, seq: int, kind: object, name: object, what: str) -> StorageCorrupt:
    return StorageCorrupt(f"run {run_id}: journal record {seq} ({kind} {name!r}) {what}; restore a backup")


def records(view: sqlite3.Connection, run_id: str, after: int = -1) -> list[Record]:
    return _read(run_id, view.execute(_RECORDS, (run_id, after)).fetchall())


def _one(run_id: str, rows: sqlite3.Cursor) -> Record | None:
    found = _read(run_id, rows)
    return found[0] if found else None


def ending(view: SQLiteTx | sqlite3.Connection, run_id: str) -> Record | None:
    # Read whatever it says it is: a damaged end would not be found by its kind.
    last = _one(run_id, view.execute(_LAST, (run_id,)))
    if last is None or last.kind == ENDED:
        return last
    return _one(run_id, view.execute(_ENDING, (run_id,)))


def boundaries(view: sqlite3.Connection, run_id: str, since: int, limit: int) -> list[Record]:
    """Records that stand for events at or after `since`, in order."""
    return _read(run_id, view.execute(_BOUNDARIES, (run_id, run_id, since, since, limit)))


CONCERN = OperationSet(
    "journal",
    {"journal.append": append, "journal.transact": transact, "journal.delete": delete},
    {"journal.append": applied, "journal.transact": transacted},
    MIGRATIONS,
    not_repeatable=frozenset({"journal.transact"}),
    slow={"journal.append": _is_long, "journal.delete": always},
)
