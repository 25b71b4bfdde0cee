"""Store a run in the transaction that the application opened on its own connection to the same database."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

from .._engines.base import moved
from .._engines.postgres.caller import check_connection, fetch, fetch_sync, other_database
from .._engines.postgres.connection import PostgresConnection, named, restored, written
from ..errors import NotSupported, StorageBusy
from .payload_fields import decode_committed, encode_row
from .records import COLUMNS, QUEUED_BEHIND, RunRow, same_run
from .sqlite_find import ALL, checked_row

# A restarted server gets another identity, and no other server or database shares it.
_STORE: Final = (
    "concat_ws(' ', CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint),"
    " (SELECT oid FROM pg_database WHERE datname = current_database()), CAST(CAST('arc_runs' AS regclass) AS oid))"
)
_CELLS: Final = tuple(name for name in COLUMNS if name not in ("n", "due_at"))
# One statement, so that the run costs the transaction of the application one round trip. Reading `fences` makes a move
# of the store wait for that transaction. All values are texts and numbers, which each driver passes in the same way.
_INSERT: Final = (
    f"WITH store AS MATERIALIZED (SELECT {_STORE} AS id, (SELECT token FROM arc_fences WHERE key = 'moved') AS moved),"
    f" added AS (INSERT INTO arc_runs ({', '.join(_CELLS)}, due_at) SELECT {', '.join(f'r.{name}' for name in _CELLS)},"
    " coalesce(coalesce(CAST(:now AS float8), CAST(extract(epoch FROM clock_timestamp()) AS float8))"
    " + CAST(:delay AS float8), 0)"
    " FROM store, json_populate_record(CAST(NULL AS arc_runs), CAST(CAST(:cells AS text) AS json)) r"
    " WHERE store.id = CAST(:store AS text) AND store.moved IS NULL ON CONFLICT DO NOTHING RETURNING n)"
    " SELECT store.id, store.moved, added.n, CASE WHEN added.n IS NOT NULL THEN"
    " pg_notify(CAST(:channel AS text), 'submitted work') IS NULL END FROM store LEFT JOIN added ON TRUE"
)
_BY_ID: Final = f"SELECT {ALL} FROM arc_runs WHERE run_id = CAST(:run_id AS text)"
_BY_KEY: Final = (
    f"SELECT {ALL} FROM arc_runs WHERE idem_key = CAST(:idem_key AS text) AND tenant = CAST(:tenant AS text)"
)

Steps = Generator[tuple[str, dict[str, Any]] | None, Any, RunRow]


def store_id(view: PostgresConnection) -> str:
    """Return what identifies this database and schema until the server is restarted."""
    found: str = view.execute(f"SELECT {_STORE}").fetchone()[0]
    return found


class CallerInsert:
    """The insertion of a new run on a connection of the application.

    It neither commits nor repeats anything, and waits for another transaction only if that stores the same run.

    Args:
        queue: The `PostgresQueue`.
        row: The row.
        connection: The connection.
        store: The `store_id` of the queue, as last read.
        sync: Whether `run_sync` is called, not `run`.
    """

    def __init__(self, queue: Any, row: RunRow, connection: Any, store: str, *, sync: bool) -> None:
        check_connection(connection, sync=sync)
        self._queue, self._row, self._connection, self._store = queue, row, connection, store

    async def run(self) -> RunRow:
        """Return the stored row."""
        steps, found = self._steps(), None
        while True:
            try:
                asked = steps.send(found)
            except StopIteration as end:
                stored: RunRow = end.value
                return stored
            found = await (self._queue.store_id() if asked is None else fetch(self._connection, *asked))

    def run_sync(self, call: Callable[[Callable[[], Awaitable[str]]], str]) -> RunRow:
        """Do as `run` in this thread; `call` is `portal.call`."""
        steps, found = self._steps(), None
        while True:
            try:
                asked = steps.send(found)
            except StopIteration as end:
                stored: RunRow = end.value
                return stored
            found = call(self._queue.store_id) if asked is None else fetch_sync(self._connection, *asked)

    def _steps(self) -> Steps:
        """Yield statements and get their first rows. None asks for the `store_id`."""
        row, values = self._row, self._values()
        store, mark, arrival, _ = yield self._named(_INSERT), values
        if store != self._store:
            values["store"] = yield None  # the server was restarted since it was read
            if store != values["store"]:
                raise other_database("one to another server, database or schema")
            store, mark, arrival, _ = yield self._named(_INSERT), values
        if mark is not None:
            raise moved(self._queue.engine.location, mark)
        if arrival is not None:
            return row.with_values(arrival=arrival)
        found = yield self._named(_BY_ID), {"run_id": row.run_id}
        if found is None and row.idem_key is not None:
            found = yield self._named(_BY_KEY), {"idem_key": written(row.idem_key), "tenant": written(row.tenant)}
        if found is None:
            raise StorageBusy(
                f"run {row.run_key or row.run_id!r} was deleted while it was submitted. Repeat the transaction"
            )
        stored = decode_committed(self._queue.payloads, checked_row(restored(tuple(found))))
        same_run(row, stored)
        return stored

    def _named(self, statement: str) -> str:
        return named(statement, self._queue.engine.place.schema)

    def _values(self) -> dict[str, Any]:
        row, payloads, engine = self._row, self._queue.payloads, self._queue.engine
        if payloads is not None:
            if payloads.reads_only:
                raise NotSupported("cannot submit a run: this process opened the store only to show its contents")
            row = encode_row(payloads, row)
        delay = max(row.due_at - row.updated_at, 0.0) if row.due_at else None
        if row.concurrency_key is not None:
            # A claim places it behind or before the other runs of its key. Otherwise this transaction would lock the
            # key, and the end of a run that holds the key would wait for it.
            row, delay = row.with_values(blocked=QUEUED_BEHIND), delay or 0.0
        cells = {name: written(cell) for name, cell in zip(COLUMNS, row, strict=True) if name in _CELLS}
        return {
            "cells": json.dumps(cells, ensure_ascii=False),
            "now": None if engine.by_server else row.updated_at,
            "delay": delay,
            "store": self._store,
            "channel": engine.channel,
        }
