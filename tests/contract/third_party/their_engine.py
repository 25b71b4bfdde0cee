"""A storage engine as somebody else would write it, over a driver whose calls block: `sqlite3`, used naively."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from agent_runtime_core.engines import EngineBackend, ThreadedEngine, ThreadedTx
from agent_runtime_core.queue import MailboxMessage, RunRow
from agent_runtime_core.state import Record

T = TypeVar("T")

TABLES = f"""
CREATE TABLE IF NOT EXISTS fences (key PRIMARY KEY, token);
CREATE TABLE IF NOT EXISTS runs ({", ".join(RunRow._fields)}, PRIMARY KEY (arrival), UNIQUE (run_id));
CREATE UNIQUE INDEX IF NOT EXISTS runs_of_keys ON runs (idem_key, tenant) WHERE idem_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS runs_of_statuses ON runs (status);
CREATE INDEX IF NOT EXISTS runs_of_groups ON runs (concurrency_key) WHERE concurrency_key IS NOT NULL;
CREATE TABLE IF NOT EXISTS arrivals (n INTEGER PRIMARY KEY AUTOINCREMENT);
CREATE TABLE IF NOT EXISTS mail (run_id, {", ".join(MailboxMessage._fields)}, PRIMARY KEY (run_id, msg_id));
CREATE TABLE IF NOT EXISTS events (run_id, sequence, type, payload, t, event_id, PRIMARY KEY (run_id, event_id));
CREATE TABLE IF NOT EXISTS journal (run_id, {", ".join(Record._fields)}, PRIMARY KEY (run_id, seq));
CREATE TABLE IF NOT EXISTS states (run_id PRIMARY KEY, status, checkpoint, mark, t);
CREATE TABLE IF NOT EXISTS effects (origin, key, digest, run_id, status, result, t, arrival);
CREATE INDEX IF NOT EXISTS effects_of_keys ON effects (origin, key);
"""


class TheirEngine(ThreadedEngine):
    driver_errors = (sqlite3.Error,)

    def connect(self, *, writes: bool) -> sqlite3.Connection:
        conn = sqlite3.connect(self.place, timeout=1.0, isolation_level=None)
        conn.executescript(f"PRAGMA journal_mode = WAL; BEGIN IMMEDIATE; {TABLES} COMMIT")
        return conn

    def begin(self, conn: sqlite3.Connection, *, writes: bool) -> None:
        conn.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    def stored_fence(self, conn: sqlite3.Connection, key: str, *, lock: bool) -> str | None:
        row = conn.execute("SELECT token FROM fences WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def store_fence(self, tx: ThreadedTx, key: str, token: str | None) -> None:
        tx.conn.execute("DELETE FROM fences WHERE key = ?", (key,))
        if token is not None:
            tx.conn.execute("INSERT INTO fences VALUES (?, ?)", (key, token))

    def is_lost(self, error: BaseException) -> bool:
        return False  # there is no server

    def is_conflict(self, error: BaseException) -> bool:
        return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


class TheirBackend(EngineBackend):
    engine_class = TheirEngine


def rows(source: Any, kind: Callable[..., T], query: str, *values: Any) -> list[T]:
    """Return the rows of a query as named tuples; `source` is a connection or a transaction."""
    conn = getattr(source, "conn", source)
    return [kind(*row) for row in conn.execute(query, values)]
