"""A state store in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .._engines.backed import OnSQLite
from .._engines.base import Concern, NotApplied, always
from .._engines.sqlite_tx import SQLiteTx
from ..journal import sqlite as journal
from .base import StateRow, StateStore, damaged

MIGRATIONS = (
    "CREATE TABLE arc_state (run_id TEXT PRIMARY KEY, status TEXT, checkpoint TEXT, mark TEXT, t REAL NOT NULL)"
    " WITHOUT ROWID",
)

_STATE = "SELECT status, checkpoint, mark, t FROM arc_state WHERE run_id = ?"


def checkpoint(tx: SQLiteTx, run_id: str, text: str, mark: str | None, now: float) -> None:
    tx.execute(
        "INSERT INTO arc_state VALUES (?, NULL, ?, ?, ?)"
        " ON CONFLICT (run_id) DO UPDATE SET checkpoint = excluded.checkpoint, mark = excluded.mark, t = excluded.t",
        (run_id, text, mark, now),
    )


def status(tx: SQLiteTx, run_id: str, text: str, now: float) -> None:
    tx.execute(
        "INSERT INTO arc_state VALUES (?, ?, NULL, NULL, ?)"
        " ON CONFLICT (run_id) DO UPDATE SET status = excluded.status, t = excluded.t",
        (run_id, text, now),
    )


def checkpointed(tx: SQLiteTx, run_id: str, text: str, mark: str | None, now: float) -> None:
    row = _state(tx, run_id)
    if (row.checkpoint, row.mark, row.t) != (text, mark, now):
        raise NotApplied


def stated(tx: SQLiteTx, run_id: str, text: str, now: float) -> None:
    row = _state(tx, run_id)
    if (row.status, row.t) != (text, now):
        raise NotApplied


def delete(tx: SQLiteTx, run_id: str) -> None:
    tx.execute("DELETE FROM arc_state WHERE run_id = ?", (run_id,))
    journal.delete(tx, run_id)


def _state(view: SQLiteTx | sqlite3.Connection, run_id: str) -> StateRow:
    row = view.execute(_STATE, (run_id,)).fetchone()
    if row is None:
        return StateRow()
    for column, value in zip(StateRow._fields, row, strict=True):
        if not isinstance(value, float if column == "t" else str | None):
            raise damaged(run_id, column, value)
    return StateRow(*row)


CONCERN = Concern(
    "state",
    {"state.checkpoint": checkpoint, "state.status": status, "state.delete": delete},
    {"state.checkpoint": checkpointed, "state.status": stated},
    migrations=MIGRATIONS,
    lengthy={"state.delete": always},
)


class SQLiteStateStore(OnSQLite, StateStore):
    """A state store in one SQLite file, shared by all processes on this machine."""

    concerns: ClassVar[Sequence[Concern]] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "state": _state,
        "records": journal.records,
        "ending": journal.ending,
    }
    transacts = True
