"""The journal in a PostgreSQL table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._engines.base import FunctionFailed, NotApplied, OperationSet
from .._engines.postgres.connection import PostgresConnection
from .._engines.postgres.engine import PostgresTx
from .._engines.postgres.user_transaction import AppliedMeanwhile, run
from ..errors import LeaseLost
from .record import Record, has_outcome, is_duplicate_end

_COLUMNS = ", ".join(Record._fields)
_OF_RUN = "FROM arc_journal WHERE run_id = ?"
_NEWEST = f"SELECT coalesce(max(seq), -1) {_OF_RUN}"
_ENDING = f"SELECT {_COLUMNS} {_OF_RUN} AND kind = 'ended' ORDER BY seq DESC LIMIT 1"
_RECORD = f"SELECT {_COLUMNS} {_OF_RUN} AND seq = ?"
_RECORDS = f"SELECT {_COLUMNS} {_OF_RUN} AND seq > ? ORDER BY seq"
_HEAD = (
    f"SELECT greatest(coalesce((SELECT ev + nev {_OF_RUN} ORDER BY seq DESC LIMIT 1), 0),"
    " coalesce((SELECT seq + 1 FROM arc_events WHERE run_id = ? ORDER BY seq DESC LIMIT 1), 0))"
)
_INSERT = f"INSERT INTO arc_journal VALUES (?{', ?' * len(Record._fields)}) ON CONFLICT (run_id, seq) DO NOTHING"
# The concurrency key of a run is locked before its row; see `queue/postgres.py`.
_LOCK = (
    "WITH of_group AS MATERIALIZED (SELECT CASE WHEN lane IS NOT NULL THEN"
    " pg_advisory_xact_lock(hashtextextended(lane || chr(2) || tenant, 2))::text END FROM arc_runs WHERE run_id = ?)"
    " SELECT 1 FROM of_group, arc_runs r WHERE r.run_id = ? FOR NO KEY UPDATE OF r"
)
_LOCK_NO_ROW = "SELECT pg_advisory_xact_lock(hashtextextended(?, 3))"
_REWRITE = (
    "UPDATE arc_journal SET result = ?, error = ?, state = ?, info = ?, next = ?, digest = ?"
    " WHERE run_id = ? AND seq = ?"
)
#: A page of rows up to the first row with which they contain so many characters.
PAGE = "SELECT {columns} FROM (SELECT *, sum({size}) OVER (ORDER BY seq) - ({size}) AS before FROM ({rows}) p) q"
_SIZE = (
    "coalesce(octet_length(result), 0) + coalesce(octet_length(error), 0) + coalesce(octet_length(state), 0)"
    " + coalesce(octet_length(info), 0) + coalesce(octet_length(next), 0) + 64"
)
_BOUNDARIES = (
    PAGE.format(
        columns=_COLUMNS,
        size=_SIZE,
        rows=f"SELECT * {_OF_RUN} AND nev > 0 AND ev + nev > ? AND seq >= coalesce((SELECT seq {_OF_RUN}"
        " AND nev > 0 AND ev <= ? ORDER BY seq DESC LIMIT 1), 0) ORDER BY seq LIMIT ?",
    )
    + " WHERE before < ? ORDER BY seq"
)


def _one(rows: Any) -> Record | None:
    row = rows.fetchone()
    return None if row is None else Record._make(row)


def lock_log(tx: PostgresTx, run_id: str) -> None:
    """Keep other transactions from giving event numbers of this run, or topic, before this transaction ends."""
    if run_id in tx.logs or tx.rows.get(run_id) is not None:
        return
    if tx.execute(_LOCK, (run_id, run_id)).fetchone() is None:
        tx.execute(_LOCK_NO_ROW, (run_id,))
    tx.logs.add(run_id)


def head(view: Any, run_id: str) -> int:
    """Return the sequence number of the run's next event."""
    return int(view.execute(_HEAD, (run_id, run_id)).fetchone()[0])


def next_sequence(tx: PostgresTx, run_id: str) -> int:
    """Return `head`, which the transaction keeps; the caller increases it there."""
    lock_log(tx, run_id)
    if run_id not in tx.counters:
        tx.counters[run_id] = head(tx, run_id)
    return tx.counters[run_id]


def append(tx: PostgresTx, run_id: str, record: Record) -> int:
    """Append a record and return its position; see the operation of SQLite."""
    ev = next_sequence(tx, run_id)
    if record.seq < 0 and is_duplicate_end(record, last := ending(tx, run_id)):
        assert last is not None
        return last.seq
    if record.seq < 0:
        record = record._replace(seq=tx.execute(_NEWEST, (run_id,)).fetchone()[0] + 1)
    if not tx.execute(_INSERT, (run_id, *record[:17], ev, record.nev)).rowcount:
        return applied(tx, run_id, record)
    tx.counters[run_id] = ev + record.nev
    if record.nev:
        tx.notify("events")
    return record.seq


def applied(tx: PostgresTx, run_id: str, record: Record) -> int:
    """Return the position of a record that was appended before.

    Raises:
        LeaseLost: if there is no record at that position, or one of another claim.
    """
    stored = _one(tx.execute(_RECORD, (run_id, record.seq)))
    if stored is None or (stored.claim_id, stored.kind, stored.key) != (record.claim_id, record.kind, record.key):
        raise LeaseLost(run_id, record.claim_id)
    return record.seq


def transact(
    tx: PostgresTx,
    run_id: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    draft: Record,
    make_record: Callable[[Any], Record],
) -> Callable[[], str | None]:
    """Call a user's function, and return what appends the record of its result; see the operation of SQLite.

    What it returns is called under the fence of the run.
    """
    stored = _one(tx.execute(_RECORD, (run_id, draft.seq)))
    if stored is not None:
        applied(tx, run_id, draft)
        return lambda: stored.result
    value = run(tx, draft.name, fn, args)
    try:
        record = make_record(value)
    except Exception as error:
        raise FunctionFailed(error) from error

    def finish() -> str | None:
        lock_log(tx, run_id)
        if _one(tx.execute(_RECORD, (run_id, draft.seq))) is not None:
            raise AppliedMeanwhile
        append(tx, run_id, record)
        return record.result

    return finish


def transacted(tx: PostgresTx, run_id: str, *_: Any) -> str | None:
    raise NotApplied


def rewrite(tx: PostgresTx, run_id: str, changes: Sequence[tuple[Record, Record]]) -> list[bool]:
    """Replace records by the same data in another encoding; return for each pair whether the old data is stored."""
    done = []
    for old, new in changes:
        done.append(_one(tx.execute(_RECORD, (run_id, old.seq))) == old)
        if done[-1]:
            tx.execute(_REWRITE, (new.result, new.error, new.state, new.info, new.next, new.digest, run_id, new.seq))
    return done


def copy(tx: PostgresTx, run_id: str, records: Sequence[Record]) -> None:
    """Append records of another store, with their positions and event numbers, unless they are stored."""
    tx.counters.pop(run_id, None)
    for record in records:
        tx.execute(_INSERT, (run_id, *record))


def delete(tx: PostgresTx, run_id: str) -> None:
    tx.counters.pop(run_id, None)
    tx.execute("DELETE FROM arc_journal WHERE run_id = ?", (run_id,))


def records(view: PostgresConnection, run_id: str, after: int = -1) -> list[Record]:
    return list(map(Record._make, view.execute(_RECORDS, (run_id, after)).fetchall()))


def ending(view: Any, run_id: str) -> Record | None:
    return _one(view.execute(_ENDING, (run_id,)))


def endings(view: PostgresConnection, run_ids: Sequence[str]) -> dict[str, Record]:
    """Return the last end of each of these runs, if there is any; without the result if `info` contains its outcome."""
    ends = (
        "SELECT DISTINCT ON (run_id) run_id, seq, kind, name, attempt, info FROM arc_journal"
        " WHERE run_id = ANY(?) AND kind = 'ended' ORDER BY run_id, seq DESC"
    )
    found = {}
    for run_id, seq, kind, name, attempt, info in view.execute(ends, ([*run_ids],)):
        result = None
        if not has_outcome(info or ""):
            result = view.execute(f"SELECT result {_OF_RUN} AND seq = ?", (run_id, seq)).fetchone()[0]
        found[run_id] = Record(seq, kind, name, attempt=attempt, result=result, info=info)
    return found


def boundaries(
    view: PostgresConnection, run_id: str, since: int, limit: int, enough: int
) -> tuple[list[Record], int | None]:
    """Return records that have events at or after `since`, in order; see the function of SQLite."""
    values = (run_id, since, run_id, since, limit, enough)
    found = list(map(Record._make, view.execute(_BOUNDARIES, values).fetchall()))
    size = sum(len(text or "") for record in found for text in (record.result, record.error, record.state))
    is_cut = len(found) == limit or size + 64 * len(found) >= enough // 4
    return found, found[-1].ev + found[-1].nev if found and is_cut else None


#: What a state store reads of the journal.
READS: dict[str, Any] = {"records": records, "ending": ending, "endings": endings}

CONCERN = OperationSet(
    "journal",
    {
        "journal.append": append, "journal.transact": transact, "journal.delete": delete, "journal.rewrite": rewrite,
        "journal.copy": copy,
    },
    {"journal.append": applied, "journal.transact": transacted},
    not_repeatable=frozenset({"journal.transact"}),
)  # fmt: skip
