"""Documents in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..._core.clock import SYSTEM, Clock
from ..._engines.backend import known_options, sqlite_store
from ..._engines.base import Op, OperationSet, always, engine_close, engine_commit, engine_read
from ..._engines.sqlite.engine import SQLiteEngine
from ..._engines.sqlite.transaction import SQLiteTx
from . import sqlite_fts, sqlite_queries
from .base import Document, DocumentStore, Entry, next_rank
from .full_text import words_of
from .operations import APPLIED, OPS, DocumentWrites, on
from .sqlite_tables import (
    MIGRATIONS,
    ONE,
    Row,
    forget,
    insert,
    is_over,
    known_place,
    last_rank,
    made_place,
    remove,
    stored,
    sweep,
    update,
)

INDEX_TRIES = 4  # a program whose SQLite has no FTS5 may be writing all the time
LONG = 100_000  # characters of a text that take more than a moment

_OF_GROUP = "SELECT id FROM arc_documents WHERE kind = ? AND grp = ?"
_LIVE = "(expires IS NULL OR expires > ?)"
_COUNT = "SELECT count(*) FROM arc_documents WHERE kind = ? AND " + _LIVE


class SQLiteWrites(DocumentWrites):
    """The document of one operation in the transaction of a SQLite engine."""

    def __init__(self, tx: SQLiteTx) -> None:
        self._tx = tx
        self._row: Row | None = None  # what `get` found, expired or not

    def sweep(self, now: float) -> None:
        sweep(self._tx, now)

    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        self._row = stored(self._tx, known_place(self._tx, space, kind), key)
        return None if self._row is None or is_over(self._row.document, now) else self._row.document

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        row = self._row
        return row is not None and (row.mark, row.document.text) == (entry.mark, entry.text)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        place = known_place(self._tx, space, kind)
        return next_rank(0.0 if place is None else max(last_rank(self._tx, place, group) or 0.0, 0.0))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        tx, row = self._tx, self._row
        if document.expires is not None:
            document = document._replace(expires=float(document.expires))
        mark = entry.mark if entry is not None else row.mark if row is not None else 0
        if row is not None:
            id_, place = row.id, row.place
            update(tx, row, document, mark)
        else:
            place = made_place(tx, space, kind)
            id_ = insert(tx, place, document, mark)
        if entry is not None and (row is not None or entry.words):
            sqlite_fts.keep(tx, id_, place, entry.words)


def delete(tx: SQLiteTx, space: str, kind: str, key: str, now: float) -> bool:
    place = known_place(tx, space, kind)
    row = None if place is None else tx.execute(ONE, (place, key)).fetchone()
    # Also one that cannot be read any more: there has to be a way to be rid of it.
    if place is None or row is None or (row[7] is not None and row[7] <= now):
        return False
    remove(tx, row[0])
    return True


def clear(tx: SQLiteTx, space: str, kind: str, group: str | None, now: float) -> int:
    place = known_place(tx, space, kind)
    if place is None:
        return 0
    if group is None:
        count = tx.execute(_COUNT, (place, now)).fetchone()[0]
        sqlite_fts.clear(tx, place)
        tx.execute("DELETE FROM arc_documents WHERE kind = ?", (place,))
    else:
        count = tx.execute(_COUNT + " AND grp = ?", (place, now, group)).fetchone()[0]
        for (id_,) in tx.execute(_OF_GROUP, (place, group)).fetchall():
            remove(tx, id_)
    return int(count)


def drop(tx: SQLiteTx, space: str, now: float) -> None:
    for place, kind in tx.execute("SELECT id, kind FROM arc_document_kinds WHERE space = ?", (space,)).fetchall():
        clear(tx, space, kind, None, now)
        forget(tx, place)


def _is_long(space: str, kind: str, entry: Entry, *_: Any) -> bool:
    return len(entry.text) > LONG or len(entry.words) > LONG // 10


CONCERN = OperationSet(
    "documents",
    {
        **on(SQLiteWrites, OPS),
        "documents.delete": delete,
        "documents.clear": clear,
        "documents.drop": drop,
        sqlite_fts.INDEX: sqlite_fts.index,
    },
    on(SQLiteWrites, APPLIED),
    MIGRATIONS,
    slow={
        "documents.put": _is_long,
        "documents.add": _is_long,
        "documents.clear": always,
        "documents.drop": always,
        sqlite_fts.INDEX: always,
    },
)


class SQLiteDocuments(DocumentStore):
    """Documents in one SQLite file, shared by all processes on this machine."""

    operation_sets: ClassVar[Sequence[OperationSet]] = (CONCERN,)
    reads: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "get": sqlite_queries.get,
        "find": sqlite_queries.find,
        "words": sqlite_queries.words_of_kind,
        "search": sqlite_queries.search,
    }

    commit = engine_commit
    read = engine_read
    close = engine_close

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, db_path: str | os.PathLike[str] | None = None,
        durability: str = "full", engine: SQLiteEngine | None = None, clock: Clock = SYSTEM, **options: Any,
    ) -> None:  # fmt: skip
        with known_options(type(self), options):
            super().__init__(clock=getattr(engine, "clock", clock), **options)
        self._engine_store = sqlite_store(
            self.operation_sets, self.reads, path, db_path=db_path, durability=durability, engine=engine, clock=clock
        )
        self.engine: SQLiteEngine = self._engine_store.engine

    async def search(self, space: str, kind: str, words: str, limit: int | None) -> list[Document]:
        wanted = words_of(words)
        if not wanted or not sqlite_fts.has_index():
            return await super().search(space, kind, words, limit)
        for _ in range(INDEX_TRIES):
            try:
                now = self.clock.wall()
                found: list[Document] | None = await self.read("search", space, kind, wanted, limit, now)
            except sqlite_queries.IndexDamaged:
                await self.commit(None, [Op(sqlite_fts.INDEX, (True,))])
                continue
            if found is not None:
                return found
            while not (await self.commit(None, [Op(sqlite_fts.INDEX, (False,))]))[0]:
                pass
        return await super().search(space, kind, words, limit)
