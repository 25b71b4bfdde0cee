"""A state store in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import ClassVar

from .._engines.backend import OperationSets, Reads, SQLiteBackend
from .._engines.base import always
from .._engines.payloads import unknown_digests
from .._engines.sqlite.transaction import SQLiteTx
from .._journal import sqlite as journal
from .base import EffectRow, StateOperations, StateRow, StateStore, damaged, erased_key

MIGRATIONS = (
    "CREATE TABLE arc_state (run_id TEXT PRIMARY KEY, status TEXT, checkpoint TEXT, mark TEXT, t REAL NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE arc_effects (origin TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, run_id TEXT NOT NULL,"
    " status TEXT NOT NULL, result TEXT, t REAL NOT NULL, PRIMARY KEY (origin, key, digest, run_id)) WITHOUT ROWID",
    # The columns of the key come first: otherwise `PRAGMA integrity_check` of SQLite 3.40 reports NULL values.
    "CREATE TABLE arc_effects_of_runs (origin TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL,"
    " run_id TEXT NOT NULL, n INTEGER NOT NULL, status TEXT NOT NULL, result TEXT, t REAL NOT NULL,"
    " PRIMARY KEY (origin, key, digest, run_id, n)) WITHOUT ROWID;\n"
    "INSERT INTO arc_effects_of_runs SELECT origin, key, digest, run_id, 0, status, result, t FROM arc_effects;\n"
    "DROP TABLE arc_effects;\n"
    "ALTER TABLE arc_effects_of_runs RENAME TO arc_effects",
    # A status that was saved before contains no time: the row of its run is newer, if there is a row.
    "ALTER TABLE arc_state ADD COLUMN status_t REAL",
)

_EFFECT = "origin, key, digest, run_id, status, result, t, n"  # the fields of an EffectRow
_PUT = (
    f"INSERT INTO arc_effects ({_EFFECT}) VALUES (?,?,?,?,?,?,?,?) ON CONFLICT (origin, key, digest, run_id, n)"
    " DO UPDATE SET status = excluded.status, result = excluded.result, t = excluded.t"
)
_OF_KEY = "FROM arc_effects WHERE origin = ? AND key IN (?, ?)"  # also the form after its run was erased
_SAME_DIGEST = f"SELECT {_EFFECT} {_OF_KEY} AND digest = ?"
_UNKNOWN_DIGEST = f"SELECT {_EFFECT} {_OF_KEY} AND digest >= ? AND digest < ?"
_OF_RUN = f"{_OF_KEY} AND digest = ? AND run_id = ? AND n = ?"
_STATE = "SELECT status, checkpoint, mark, t FROM arc_state WHERE run_id = ?"
_IDS = (
    "SELECT run_id FROM arc_state UNION SELECT run_id FROM arc_journal_numbers UNION SELECT origin FROM arc_effects"
    " ORDER BY 1"
)
_STATUS_OF_ROW = (
    "SELECT status FROM arc_runs WHERE run_id = ?"
    " AND NOT EXISTS (SELECT 1 FROM arc_state WHERE run_id = ? AND status_t >= updated_at)"
)


def checkpoint(tx: SQLiteTx, run_id: str, text: str, mark: str | None, now: float) -> None:
    tx.execute(
        "INSERT INTO arc_state (run_id, checkpoint, mark, t) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (run_id) DO UPDATE SET checkpoint = excluded.checkpoint, mark = excluded.mark, t = excluded.t",
        (run_id, text, mark, now),
    )


def status(tx: SQLiteTx, run_id: str, text: str, now: float) -> None:
    tx.execute(
        "INSERT INTO arc_state (run_id, status, t, status_t) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (run_id) DO UPDATE SET status = excluded.status, t = excluded.t, status_t = excluded.status_t",
        (run_id, text, now, now),
    )


def copy(tx: SQLiteTx, run_id: str, row: StateRow) -> None:
    """Store the state of a run of another store. Its status is older than the status in a row of the run."""
    tx.execute(
        "INSERT INTO arc_state (run_id, status, checkpoint, mark, t) VALUES (?, ?, ?, ?, ?) ON CONFLICT (run_id)"
        " DO UPDATE SET status = excluded.status, checkpoint = excluded.checkpoint, mark = excluded.mark,"
        " t = excluded.t, status_t = NULL",
        (run_id, *row),
    )


def put(tx: SQLiteTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    _delete(tx, row, others)
    tx.execute(_PUT, row)


def drop(tx: SQLiteTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    _delete(tx, row, (row.digest, *others))


def _delete(tx: SQLiteTx, row: EffectRow, digests: Sequence[str]) -> None:
    for digest in digests:
        tx.execute(f"DELETE {_OF_RUN}", (row.origin, *_keys(row.key), digest, row.run_id, row.arrival))


def _keys(key: str) -> tuple[str, str]:
    return key, erased_key(key)


def _drop_lineage(tx: SQLiteTx, origin: str) -> None:
    tx.execute("DELETE FROM arc_effects WHERE origin = ?", (origin,))


def effects(view: SQLiteTx | sqlite3.Connection, origin: str, key: str, digests: Sequence[str]) -> list[EffectRow]:
    # By ranges of the primary key: one key of a loop may have a row for each of many calls.
    found = [view.execute(_SAME_DIGEST, (origin, *_keys(key), each)) for each in digests]
    found += [view.execute(_UNKNOWN_DIGEST, (origin, *_keys(key), *limits)) for limits in unknown_digests(digests)]
    return [EffectRow(*row) for rows in found for row in rows]


def effect_keys(view: SQLiteTx | sqlite3.Connection, origin: str) -> list[tuple[str, str]]:
    return view.execute("SELECT DISTINCT key, digest FROM arc_effects WHERE origin = ?", (origin,)).fetchall()


def rewrite(tx: SQLiteTx, run_id: str, old: str, new: str) -> bool:
    update = "UPDATE arc_state SET checkpoint = ? WHERE run_id = ? AND checkpoint = ?"
    return tx.execute(update, (new, run_id, old)).rowcount == 1


def delete(tx: SQLiteTx, run_id: str) -> None:
    tx.execute("DELETE FROM arc_state WHERE run_id = ?", (run_id,))
    journal.delete(tx, run_id)


def ids(view: sqlite3.Connection) -> list[str]:
    """Return the ids that may have a state, effects, or a journal without a row of a run in this file."""
    return [run_id for (run_id,) in view.execute(_IDS)]


def _state(view: SQLiteTx | sqlite3.Connection, run_id: str) -> StateRow:
    row = view.execute(_STATE, (run_id,)).fetchone()
    if row is None:
        return StateRow()
    for column, value in zip(StateRow._fields, row, strict=True):
        if not isinstance(value, float if column == "t" else str | None):
            raise damaged(run_id, column, value)
    return StateRow(*row)


def _newest(view: sqlite3.Connection, run_id: str) -> StateRow:
    """Return the state of a run, with the status of its row in this file unless a newer status was saved."""
    state = _state(view, run_id)
    try:
        row = view.execute(_STATUS_OF_ROW, (run_id, run_id)).fetchone()
    except sqlite3.OperationalError as error:
        if not journal.has_no_queue(error):
            raise
        return state
    if row is not None and not isinstance(row[0], str):
        raise damaged(run_id, "status", row[0])
    return state if row is None else state._replace(status=row[0])


CONCERN = StateOperations(_state, effects, put, drop, _drop_lineage).operation_set(
    {
        "state.checkpoint": checkpoint, "state.status": status, "state.delete": delete, "state.rewrite": rewrite,
        "state.copy": copy,
    },
    migrations=MIGRATIONS,
    slow=dict.fromkeys(("state.delete", "effect.leave", "state.rewrite", "effect.rewrite", "state.copy"), always),
)  # fmt: skip


class SQLiteStateStore(SQLiteBackend, StateStore):
    """A state store in one SQLite file, shared by all processes on this machine."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {
        **journal.READS,
        "state": _newest,
        "effects": effects,
        "effect_keys": effect_keys,
        "ids": ids,
    }
    transacts = True
    reads_rows = "arc_runs"
