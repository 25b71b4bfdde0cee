"""Document store in a SQLite file."""

from __future__ import annotations

from typing import Any, ClassVar

from ..._engines.backend import OperationSets, Reads, SQLiteBackend
from ..._engines.base import Op, OperationSet, always
from ..._engines.sqlite.transaction import SQLiteTx
from . import sqlite_fts, sqlite_queries
from .base import Document, DocumentStore, Entry, next_rank
from .full_text import words_of
from .operations import APPLIED, OPS, on
from .sqlite_tables import (
    MIGRATIONS,
    ONE,
    Row,
    delete_kind,
    find_kind_id,
    has_expired,
    insert,
    last_rank,
    remove,
    require_kind_id,
    stored,
    sweep,
    update,
)

INDEX_TRIES = 4  # attempts to bring the index up to date. A writer without FTS5 may make it stale each time
LONG = 100_000  # characters of a text that is too slow to write on the event loop

_OF_GROUP = "SELECT id FROM arc_documents WHERE kind = ? AND grp = ?"
_LIVE = "(expires IS NULL OR expires > ?)"
_COUNT = "SELECT count(*) FROM arc_documents WHERE kind = ? AND " + _LIVE


class SQLiteWrites:
    """The document of one operation, in a transaction of a SQLite engine.

    It has the methods of `DocumentTransaction` that write one document. The other operations are statements of SQL.
    """

    def __init__(self, tx: SQLiteTx) -> None:
        self._tx = tx
        self._row: Row | None = None  # the document that `get` found, expired or not

    def sweep(self, now: float) -> None:
        sweep(self._tx, now)

    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        self._row = stored(self._tx, find_kind_id(self._tx, space, kind), key)
        return None if self._row is None or has_expired(self._row.document, now) else self._row.document

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        row = self._row
        return row is not None and (row.mark, row.document.text) == (entry.mark, entry.text)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        kind_id = find_kind_id(self._tx, space, kind)
        return next_rank(0.0 if kind_id is None else max(last_rank(self._tx, kind_id, group) or 0.0, 0.0))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        tx, row = self._tx, self._row
        if document.expires is not None:
            document = document._replace(expires=float(document.expires))
        mark = entry.mark if entry is not None else row.mark if row is not None else 0
        if row is not None:
            id_, kind_id = row.id, row.kind_id
            update(tx, row, document, mark)
        else:
            kind_id = require_kind_id(tx, space, kind)
            id_ = insert(tx, kind_id, document, mark)
        if entry is not None and (row is not None or entry.words):
            sqlite_fts.set_words(tx, id_, kind_id, entry.words)


def delete(tx: SQLiteTx, space: str, kind: str, key: str, now: float) -> bool:
    kind_id = find_kind_id(tx, space, kind)
    row = None if kind_id is None else tx.execute(ONE, (kind_id, key)).fetchone()
    # The checksum is not verified, so that a damaged document can be deleted.
    if kind_id is None or row is None or (row[7] is not None and row[7] <= now):
        return False
    remove(tx, row[0])
    return True


def clear(tx: SQLiteTx, space: str, kind: str, group: str | None, now: float) -> int:
    kind_id = find_kind_id(tx, space, kind)
    if kind_id is None:
        return 0
    if group is None:
        count = tx.execute(_COUNT, (kind_id, now)).fetchone()[0]
        sqlite_fts.clear(tx, kind_id)
        tx.execute("DELETE FROM arc_documents WHERE kind = ?", (kind_id,))
    else:
        count = tx.execute(_COUNT + " AND grp = ?", (kind_id, now, group)).fetchone()[0]
        for (id_,) in tx.execute(_OF_GROUP, (kind_id, group)).fetchall():
            remove(tx, id_)
    return int(count)


def drop(tx: SQLiteTx, space: str, now: float) -> None:
    for kind_id, kind in tx.execute("SELECT id, kind FROM arc_document_kinds WHERE space = ?", (space,)).fetchall():
        clear(tx, space, kind, None, now)
        delete_kind(tx, kind_id)


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
        "documents.rewrite": always,
        "documents.clear": always,
        "documents.drop": always,
        sqlite_fts.INDEX: always,
    },
)


class SQLiteDocuments(SQLiteBackend, DocumentStore):
    """Document store in a SQLite file, for all processes on the machine."""

    operation_sets: ClassVar[OperationSets] = (CONCERN,)
    reads: ClassVar[Reads] = {
        "get": sqlite_queries.get,
        "find": sqlite_queries.find,
        "words": sqlite_queries.words_of_kind,
        "kinds": sqlite_queries.kinds,
        "search": sqlite_queries.search,
    }

    async def search(self, space: str, kind: str, words: str, limit: int | None) -> list[Document]:
        wanted = words_of(words)
        if not wanted or not sqlite_fts.has_index():
            return await super().search(space, kind, words, limit)
        for _ in range(INDEX_TRIES):
            try:
                now = self.clock.wall()
                found: list[Document] | None = await self.read("search", space, kind, wanted, limit, now)
            except sqlite_queries.IndexDamaged:
                if self.engine.read_only:
                    break
                await self.commit(None, [Op(sqlite_fts.INDEX, (True,))])
                continue
            if found is not None:
                return found
            if self.engine.read_only:  # the index is out of date, and cannot be brought up to date
                break
            while not (await self.commit(None, [Op(sqlite_fts.INDEX, (False,))]))[0]:
                pass
        return await super().search(space, kind, words, limit)
