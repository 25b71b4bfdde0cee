"""The journal in SQLite tables."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from zlib import compress, crc32, decompress
from zlib import error as PackError

from .._core.codec.json_slices import LARGE
from .._core.payload_codec import MARK
from .._engines.base import NotApplied, OperationSet, always
from .._engines.sqlite.transaction import SQLiteTx
from .._engines.sqlite.user_transaction import run
from ..errors import LeaseLost, StorageCorrupt, brief
from .record import ENDED, Record, has_outcome, is_duplicate_end

SHORTEST_PACKED, LONGEST_PACKED = 800, 32_000  # results of these lengths are compressed; characters
PACKING = 4  # about how many times as long a result is as its compressed form

# Each column costs time for every record that is written or read. The fields that SQL queries read are separate
# columns, and so is the result, which may be large. All other fields share `body`.
#
# A record's key is one integer, made of the number of its run and its position. So the records of a run are together,
# as a resumed run reads them; the key takes 5 bytes instead of 40; and only a row of more than 4 KB needs overflow
# pages, which in a table WITHOUT ROWID are needed from 1 KB on. Measured: a chain of steps writes 0.6 times as many
# bytes, groups of records of many runs 0.2 to 0.8 times.
_POSITIONS = 1 << 32  # of a run
MIGRATIONS = (
    """CREATE TABLE arc_journal (
    run_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, result TEXT,
    body TEXT NOT NULL, ev INTEGER NOT NULL, nev INTEGER NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY (run_id, seq)) WITHOUT ROWID;
CREATE TABLE arc_events (
    run_id TEXT NOT NULL, seq INTEGER NOT NULL, type TEXT NOT NULL, payload TEXT NOT NULL, t REAL NOT NULL,
    event_id TEXT NOT NULL, PRIMARY KEY (run_id, seq)) WITHOUT ROWID;
CREATE UNIQUE INDEX arc_events_id ON arc_events (run_id, event_id)""",
    f"""CREATE TABLE arc_journal_runs (number INTEGER PRIMARY KEY, run_id TEXT NOT NULL UNIQUE);
INSERT INTO arc_journal_runs (run_id) SELECT DISTINCT run_id FROM arc_journal;
ALTER TABLE arc_journal RENAME TO arc_journal_1;
CREATE TABLE arc_journal (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, result TEXT, body TEXT NOT NULL,
    ev INTEGER NOT NULL, nev INTEGER NOT NULL, crc INTEGER NOT NULL);
INSERT INTO arc_journal SELECT number * {_POSITIONS} + seq, kind, name, result, body, ev, nev, crc
    FROM arc_journal_runs CROSS JOIN arc_journal_1 USING (run_id) ORDER BY number, seq;
DROP TABLE arc_journal_1""",
    # Since the number of a run's row is the number of its journal, this table contains only journals that are older, or
    # that belong to no row in this file. Renamed, because an older library that still uses the file must fail: it would
    # find no records of a run, and execute its steps again.
    "ALTER TABLE arc_journal_runs RENAME TO arc_journal_numbers",
)

# Above each number of `arc_journal_numbers`, so no two journals share a number. A file contains fewer runs in its life.
_OF_ROWS = 1 << 30
_GIVEN = "SELECT number FROM arc_journal_numbers WHERE run_id = ?"
_NUMBER = f"SELECT coalesce(({_GIVEN}), (SELECT n + {_OF_ROWS} FROM arc_runs WHERE run_id = ?))"
_NEW_NUMBER = "INSERT INTO arc_journal_numbers (run_id) VALUES (?)"
# The next event sequence number of a run is not stored: a counter would be one more page to write with every record.
# It follows from the last record, as records without events have the number too.
_AFTER_EVENTS = "SELECT seq + 1 FROM arc_events WHERE run_id = ? ORDER BY seq DESC LIMIT 1"
_OF_RUN = "FROM arc_journal WHERE id >= ? AND id < ?"  # the results of `_span`
_LAST_FIRST = " ORDER BY id DESC LIMIT 1"
_AFTER_RECORDS = f"SELECT ev + nev {_OF_RUN}{_LAST_FIRST}"
_LAST_ID = f"SELECT id {_OF_RUN}{_LAST_FIRST}"
_INSERT = "INSERT INTO arc_journal VALUES (?,?,?,?,?,?,?,?)"
_INSERT_COPIED = f"{_INSERT} ON CONFLICT (id) DO NOTHING"
# The first record of most runs, whose row is known: one statement instead of one for each number.
_INSERT_FIRST = (
    f"INSERT INTO arc_journal SELECT coalesce(({_GIVEN}), ? + {_OF_ROWS}) * {_POSITIONS}, ?, ?, ?, ?,"
    f" coalesce(({_AFTER_EVENTS}), 0), ?, ? RETURNING id, ev"
)
_REWRITE = "UPDATE arc_journal SET result = ?, body = ?, crc = ? WHERE id = ?"
_COLUMNS = f"SELECT id & {_POSITIONS - 1}, kind, name, result, body, ev, nev, crc"
_RECORDS = f"{_COLUMNS} {_OF_RUN} ORDER BY id"
_RECORD = f"{_COLUMNS} FROM arc_journal WHERE id = ?"
_RESULT = "SELECT result FROM arc_journal WHERE id = ?"
_LAST = f"{_COLUMNS} {_OF_RUN}{_LAST_FIRST}"
_ENDING = f"{_COLUMNS} {_OF_RUN} AND kind = 'ended'{_LAST_FIRST}"
# Without the result, which may have megabytes. The checksum covers the result, so it is not checked.
_LIGHT = f"SELECT id, kind, name, body {_OF_RUN}"
_LIGHT_LAST = _LIGHT + _LAST_FIRST
_LIGHT_ENDING = f"{_LIGHT} AND kind = 'ended'{_LAST_FIRST}"
# Sequence numbers and positions grow together. The search for the first record begins at the end of the journal, as
# subscribers mostly read there.
_BOUNDARIES = (
    f"{_COLUMNS} FROM arc_journal"
    f" WHERE id >= coalesce((SELECT id {_OF_RUN} AND nev > 0 AND ev <= ?{_LAST_FIRST}), ?) AND id < ?"
    " AND nev > 0 AND ev + nev > ? ORDER BY id LIMIT ?"
)


def _span(view: SQLiteTx | sqlite3.Connection, run_id: str) -> tuple[int, int]:
    """Return the key of the run's first record, and the key after its last possible key; of an unknown run, none."""
    number = _number_of(view, run_id)
    return (0, 0) if number is None else (number * _POSITIONS, (number + 1) * _POSITIONS)


def _number_of(view: SQLiteTx | sqlite3.Connection, run_id: str) -> int | None:
    """Return the number of a run's journal, None if the run has neither a number nor a row."""
    try:
        row = view.execute(_NUMBER, (run_id, run_id)).fetchone()
    except sqlite3.OperationalError as error:
        if not has_no_queue(error):
            raise
        row = view.execute(_GIVEN, (run_id,)).fetchone()
    number: int | None = row[0] if row else None
    return number


def has_no_queue(error: sqlite3.OperationalError) -> bool:
    """Whether a statement failed because the tables of the queue are not in the file."""
    return str(error) == "no such table: arc_runs"


def _first_id(tx: SQLiteTx, run_id: str) -> int:
    """Return the key of the run's first record, of which the writing connection keeps a copy."""
    first = tx.journals.get(run_id)
    if first is None:
        number: Any = _number_of(tx, run_id)
        if number is None:
            number = tx.execute(_NEW_NUMBER, (run_id,)).lastrowid
        first = tx.journals[run_id] = number * _POSITIONS
    return first


def head(tx: SQLiteTx | sqlite3.Connection, run_id: str) -> int:
    """Return the sequence number of the run's next event."""
    after_records = _number(run_id, tx.execute(_AFTER_RECORDS, _span(tx, run_id)).fetchone())
    return max(after_records, _after_events(tx, run_id))


def next_sequence(tx: SQLiteTx, run_id: str) -> int:
    """Return `head`, which the writing connection caches in `tx.counters`; the caller increases it there."""
    known = tx.counters.get(run_id)
    if known is None:
        known = tx.counters[run_id] = head(tx, run_id)
    return known


def _after_events(tx: SQLiteTx | sqlite3.Connection, run_id: str) -> int:
    """Return the sequence number after the last published event: `head` of a run without records."""
    return _number(run_id, tx.execute(_AFTER_EVENTS, (run_id,)).fetchone())


def _number(run_id: str, row: tuple[Any, ...] | None) -> int:
    """Return the next number in a query's row, 0 if there is no row.

    Raises:
        StorageCorrupt: if it is no integer.
    """
    number = row[0] if row else 0
    if type(number) is not int:
        raise StorageCorrupt(
            f"run {run_id}: the number after its last record or event must be an integer, got {brief(number)}. "
            "Restore a backup"
        )
    return number


def _crc(run_id: str, seq: int, kind: str, name: str, result: str | bytes | None, body: str, nev: int) -> int:
    fields = f"{run_id}\0{seq}\0{kind}\0{name}\0{nev}\0{result is None}\0{body}"
    if result is None:
        return crc32(fields.encode())
    if isinstance(result, str):
        if len(result) < SHORTEST_PACKED:
            return crc32(f"{fields}{result}".encode())
        result = result.encode()  # a large result is not copied into one string with the other fields
    # A damaged column of another type gets -1, which no checksum equals.
    return crc32(result, crc32(fields.encode())) if isinstance(result, bytes) else -1


def _packed(kind: str, result: str | None) -> str | bytes | None:
    """Return a result as it is stored, compressed if that pays.

    A row of more than a quarter of a page needs another page, so results of a few kilobytes are compressed, such as
    answers of models. Compressing larger results takes too long. The exception is the result of the run, which repeats
    a whole conversation.
    """
    if result is None or len(result) < SHORTEST_PACKED or (len(result) > LONGEST_PACKED and kind != ENDED):
        return result
    if result.startswith(MARK):  # the codec compressed it
        return result
    packed = compress(result.encode(), 1)
    return packed if len(packed) < len(result) * 0.8 else result


def _is_long(run_id: str, record: Record) -> bool:
    most = LONGEST_PACKED if record.kind == ENDED else LARGE
    return record.result is not None and len(record.result) > most


def _unpacked(result: str | bytes | None) -> str | None:
    return decompress(result).decode() if isinstance(result, bytes) else result


def append(tx: SQLiteTx, run_id: str, record: Record) -> int:
    """Append a record and return its position.

    A record at the same position by the same claim is the same record and is not appended again. Neither is a second
    end of a generation without a claim.
    """
    if record.seq < 0:
        if is_duplicate_end(record, last := ending(tx, run_id)):
            assert last is not None
            return last.seq
        last_id = tx.execute(_LAST_ID, _span(tx, run_id)).fetchone()
        record = record._replace(seq=0 if last_id is None else last_id[0] % _POSITIONS + 1)
    (
        seq, kind, name, key, attempt, claim_id, t, text, error, state, pos, total, tries, ms, info, next_, digest, _,
        nev,
    ) = record  # fmt: skip
    ev: Any = tx.counters.get(run_id)
    row = tx.rows.get(run_id) if ev is None and seq == 0 else None
    if ev is None and row is None:
        ev = head(tx, run_id) if seq else _after_events(tx, run_id)
    # JSON and ids contain no control characters, so a tab separates the fields. The key may contain one and is last.
    body = (
        f"{attempt}\t{claim_id}\t{t!r}\t{pos}\t{total}\t{tries}\t{ms}\t{error or ''}\t{state or ''}\t{info or ''}"
        f"\t{next_ or ''}\t{digest or ''}\t{key}"
    )
    if text is not None and len(text) < SHORTEST_PACKED:  # most results: _packed() and _crc() inlined
        result: str | bytes | None = text
        crc = crc32(f"{run_id}\0{seq}\0{kind}\0{name}\0{nev}\0False\0{body}{text}".encode())
    else:
        result = _packed(kind, text)
        crc = _crc(run_id, seq, kind, name, result, body, nev)
    try:
        if row is not None:
            values = run_id, row.arrival, kind, name, result, body, run_id, nev, crc
            tx.journals[run_id], ev = tx.execute(_INSERT_FIRST, values).fetchone()
        else:
            tx.execute(_INSERT, (_first_id(tx, run_id) + seq, kind, name, result, body, ev, nev, crc))
    except sqlite3.IntegrityError:
        return applied(tx, run_id, record)
    if kind == ENDED:
        tx.counters.pop(run_id, None)  # a run that ended rarely needs another number
        tx.journals.pop(run_id, None)
    else:
        tx.counters[run_id] = ev + nev
    if nev:
        tx.notified.add("events")
    return seq


def applied(tx: SQLiteTx, run_id: str, record: Record) -> int:
    """Return the position of a record that was appended before.

    Raises:
        LeaseLost: if there is no record at that position, or one of another claim.
    """
    stored = _one(run_id, tx.execute(_RECORD, (_span(tx, run_id)[0] + record.seq,)))
    if stored is None or (stored.claim_id, stored.kind, stored.key) != (record.claim_id, record.kind, record.key):
        raise LeaseLost(run_id, record.claim_id)
    return record.seq


def transact(
    tx: SQLiteTx,
    run_id: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    draft: Record,
    make_record: Callable[[Any], Record],
) -> str | None:
    """Call a user's function and append the record of its result, in one transaction.

    Args:
        tx: The transaction.
        run_id: The id of the run.
        fn: The function. Its first argument is the connection.
        args: The other arguments.
        draft: The record without a result; its `seq` is the position.
        make_record: Returns the record for the function's result.

    Returns:
        The recorded result. If the record was committed before, the function is not called again.
    """
    stored = tx.execute(_RESULT, (_span(tx, run_id)[0] + draft.seq,)).fetchone()
    if stored is not None:
        # An earlier commit was applied and its reply was lost: the function was called.
        applied(tx, run_id, draft)
        return _unpacked(stored[0])
    record = make_record(run(tx, draft.name, fn, args))
    append(tx, run_id, record)
    return record.result


def transacted(tx: SQLiteTx, run_id: str, *_: Any) -> str | None:
    raise NotApplied


def rewrite(tx: SQLiteTx, run_id: str, changes: Sequence[tuple[Record, Record]]) -> list[bool]:
    """Replace records by the same data in another encoding; return for each pair whether the old data is stored."""
    first, done = _span(tx, run_id)[0], []
    for old, new in changes:
        row = tx.execute(_RECORD, (first + old.seq,)).fetchone()
        done.append(row is not None and _read(run_id, [row]) == [old])
        if done[-1]:
            fields = row[4].split("\t", 12)
            fields[7:12] = [text or "" for text in (new.error, new.state, new.info, new.next, new.digest)]
            body, result = "\t".join(fields), _packed(new.kind, new.result)
            crc = _crc(run_id, new.seq, new.kind, new.name, result, body, new.nev)
            tx.execute(_REWRITE, (result, body, crc, first + new.seq))
    return done


def copy(tx: SQLiteTx, run_id: str, records: Sequence[Record]) -> None:
    """Append records of another store, with their positions and event numbers, unless they are stored."""
    tx.counters.pop(run_id, None)
    first = _first_id(tx, run_id)
    for record in records:
        texts = (text or "" for text in record[8:10] + record[14:17])
        error, state, info, next_, digest = texts
        body = (
            f"{record.attempt}\t{record.claim_id}\t{record.t!r}\t{record.pos}\t{record.total}\t{record.tries}"
            f"\t{record.ms}\t{error}\t{state}\t{info}\t{next_}\t{digest}\t{record.key}"
        )
        seq, kind, name, result = record.seq, record.kind, record.name, _packed(record.kind, record.result)
        crc = _crc(run_id, seq, kind, name, result, body, record.nev)
        tx.execute(_INSERT_COPIED, (first + seq, kind, name, result, body, record.ev, record.nev, crc))


def delete(tx: SQLiteTx, run_id: str) -> None:
    tx.counters.pop(run_id, None)
    tx.journals.pop(run_id, None)
    tx.execute(f"DELETE {_OF_RUN}", _span(tx, run_id))
    tx.execute("DELETE FROM arc_journal_numbers WHERE run_id = ?", (run_id,))


class _Numbers(dict[str, int]):
    """A cache of `int(text)`: the same few numbers occur in most records of a journal."""

    def __missing__(self, text: str) -> int:
        number = self[text] = int(text)
        return number


def _read(run_id: str, rows: Iterable[tuple[Any, ...]]) -> list[Record]:
    """Return the records in these rows.

    Raises:
        StorageCorrupt: if a row is not as it was written.
    """
    records: list[Record] = []
    number, new = _Numbers(), tuple.__new__
    of_run = crc32(f"{run_id}\0".encode())
    for seq, kind, name, result, body, ev, nev, crc in rows:
        if type(result) is str and len(result) < SHORTEST_PACKED:  # most results: _crc() inlined
            found = crc32(f"{seq}\0{kind}\0{name}\0{nev}\0False\0{body}{result}".encode(), of_run)
        else:
            found = _crc(run_id, seq, kind, name, result, body, nev)
        if found != crc:
            raise _damaged(run_id, seq, kind, name, "does not match its checksum")
        if type(ev) is not int:  # the checksum does not cover it
            raise _damaged(run_id, seq, kind, name, f"has event number {brief(ev)}, which is no integer")
        if type(result) is bytes:
            try:
                result = _unpacked(result)
            except (PackError, ValueError) as wrong:  # damage turned a string into bytes with the same checksum
                raise _damaged(run_id, seq, kind, name, "has a result that cannot be decompressed") from wrong
        attempt, claim_id, t, pos, total, tries, ms, error, state, info, next_, digest, key = body.split("\t", 12)
        # Faster than calling the class.
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
    return StorageCorrupt(f"run {run_id}: journal record {seq} ({kind} {name!r}) {what}. Restore a backup")


def records(view: sqlite3.Connection, run_id: str, after: int = -1) -> list[Record]:
    first, end = _span(view, run_id)
    return _read(run_id, view.execute(_RECORDS, (first + after + 1, end)).fetchall())


def _one(run_id: str, rows: sqlite3.Cursor) -> Record | None:
    found = _read(run_id, rows)
    return found[0] if found else None


def ending(view: SQLiteTx | sqlite3.Connection, run_id: str) -> Record | None:
    # The last record is read whatever its kind is: an end with a damaged kind would not be found by its kind.
    span = _span(view, run_id)
    last = _one(run_id, view.execute(_LAST, span))
    if last is None or last.kind == ENDED:
        return last
    return _one(run_id, view.execute(_ENDING, span))


def endings(view: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, Record]:
    """Return the last end of each of these runs, if there is any; without the result if `info` contains its outcome."""
    found = {}
    for run_id in run_ids:
        span = _span(view, run_id)
        row = view.execute(_LIGHT_LAST, span).fetchone()
        if row is not None and row[1] != ENDED:
            row = view.execute(_LIGHT_ENDING, span).fetchone()
        if row is not None:
            found[run_id] = _light(view, run_id, *row)
    return found


def _light(view: sqlite3.Connection, run_id: str, id_: int, kind: str, name: str, body: str) -> Record:
    seq = id_ % _POSITIONS
    try:
        attempt, *_, info, _, _, _ = body.split("\t", 12)
        result = None
        if not has_outcome(info):
            result = _unpacked(view.execute(_RESULT, (id_,)).fetchone()[0])
        return Record(seq, kind, name, attempt=int(attempt), result=result, info=info or None)
    except (ValueError, TypeError, LookupError, AttributeError, PackError) as wrong:
        raise _damaged(run_id, seq, kind, name, "is not what was written") from wrong


def boundaries(
    view: sqlite3.Connection, run_id: str, since: int, limit: int, enough: int
) -> tuple[list[Record], int | None]:
    """Return records that have events at or after `since`, in order.

    Args:
        view: The connection.
        run_id: The run.
        since: A sequence number.
        limit: The largest number of records.
        enough: Bytes after which no more records are read.

    Returns:
        The records, and the sequence number after them if there may be more.
    """
    is_cut = False

    def rows() -> Iterator[tuple[Any, ...]]:
        nonlocal is_cut
        size = 0
        first, end = _span(view, run_id)
        with contextlib.closing(view.execute(_BOUNDARIES, (first, end, since, first, end, since, limit))) as cursor:
            for n, row in enumerate(cursor, 1):
                yield row  # its types are checked before the next row is read
                result = row[3] or ""
                size += len(row[4]) + len(result) * (PACKING if isinstance(result, bytes) else 1)
                is_cut = size >= enough or n == limit
                if is_cut:
                    return

    records = _read(run_id, rows())
    return records, records[-1].ev + records[-1].nev if is_cut else None


#: What a state store reads of the journal.
READS: dict[str, Any] = {"records": records, "ending": ending, "endings": endings}

CONCERN = OperationSet(
    "journal",
    {
        "journal.append": append, "journal.transact": transact, "journal.delete": delete, "journal.rewrite": rewrite,
        "journal.copy": copy,
    },
    {"journal.append": applied, "journal.transact": transacted},
    MIGRATIONS,
    not_repeatable=frozenset({"journal.transact"}),
    slow={"journal.append": _is_long, **dict.fromkeys(("journal.delete", "journal.rewrite", "journal.copy"), always)},
)  # fmt: skip
