"""Document store in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, ClassVar

from ..._engines.backend import OperationSets, Reads, SQLiteBackend
from ..._engines.base import Op, OperationSet, always
from ..._engines.sqlite.transaction import SQLiteTx
from . import sqlite_fts
from . import sqlite_tables as tables
from .base import Document, DocumentStore, Entry, Query, next_rank, words_of
from .operations import APPLIED, OPS, on

INDEX_TRIES = 4  # attempts to bring the index up to date. A writer without FTS5 may make it stale each time
LONG = 100_000  # characters of a text that is too slow to write on the event loop

_OF_GROUP = "SELECT id FROM arc_documents WHERE kind = ? AND grp = ?"
_LIVE = "(expires IS NULL OR expires > ?)"
_COUNT = "SELECT count(*) FROM arc_documents WHERE kind = ? AND " + _LIVE


class SQLiteWrites:
    """The document of one operation, in a transaction of a SQLite engine.

    It implements the methods of `DocumentTransaction` that write one document. The other operations are SQL statements.
    """

    def __init__(self, tx: SQLiteTx) -> None:
        self._tx = tx
        self._row: tables.Row | None = None  # the document that `get` found, expired or not

    def sweep(self, now: float) -> None:
        tables.sweep(self._tx, now)

    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        self._row = tables.stored(self._tx, tables.find_kind_id(self._tx, space, kind), key)
        return None if self._row is None or tables.has_expired(self._row.document, now) else self._row.document

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        row = self._row
        return row is not None and (row.mark, row.document.text) == (entry.mark, entry.text)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        kind_id = tables.find_kind_id(self._tx, space, kind)
        return next_rank(0.0 if kind_id is None else max(tables.last_rank(self._tx, kind_id, group) or 0.0, 0.0))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        tx, row = self._tx, self._row
        if document.expires is not None:
            document = document._replace(expires=float(document.expires))
        mark = entry.mark if entry is not None else row.mark if row is not None else 0
        if row is not None:
            id_, kind_id = row.id, row.kind_id
            tables.update(tx, row, document, mark)
        else:
            kind_id = tables.require_kind_id(tx, space, kind)
            id_ = tables.insert(tx, kind_id, document, mark)
        if entry is not None and (row is not None or entry.words):
            sqlite_fts.set_words(tx, id_, kind_id, entry.words)


def delete(tx: SQLiteTx, space: str, kind: str, key: str, now: float) -> bool:
    kind_id = tables.find_kind_id(tx, space, kind)
    row = None if kind_id is None else tx.execute(tables.ONE, (kind_id, key)).fetchone()
    # The checksum is not verified, so that a damaged document can be deleted.
    if kind_id is None or row is None or (row[7] is not None and row[7] <= now):
        return False
    tables.remove(tx, row[0])
    return True


def clear(tx: SQLiteTx, space: str, kind: str, group: str | None, now: float) -> int:
    kind_id = tables.find_kind_id(tx, space, kind)
    if kind_id is None:
        return 0
    if group is None:
        count = tx.execute(_COUNT, (kind_id, now)).fetchone()[0]
        sqlite_fts.clear(tx, kind_id)
        tx.execute("DELETE FROM arc_documents WHERE kind = ?", (kind_id,))
    else:
        count = tx.execute(_COUNT + " AND grp = ?", (kind_id, now, group)).fetchone()[0]
        for (id_,) in tx.execute(_OF_GROUP, (kind_id, group)).fetchall():
            tables.remove(tx, id_)
    return int(count)


def drop(tx: SQLiteTx, space: str, now: float) -> None:
    for kind_id, kind in tx.execute("SELECT id, kind FROM arc_document_kinds WHERE space = ?", (space,)).fetchall():
        clear(tx, space, kind, None, now)
        tables.delete_kind(tx, kind_id)


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
        sqlite_fts.DISCARD: sqlite_fts.discard,
    },
    on(SQLiteWrites, APPLIED),
    tables.MIGRATIONS,
    slow={
        "documents.put": _is_long,
        "documents.add": _is_long,
        "documents.rewrite": always,
        "documents.copy": always,
        "documents.clear": always,
        "documents.drop": always,
        sqlite_fts.INDEX: always,
        sqlite_fts.DISCARD: always,
    },
)


LAST = b""  # SQLite sorts a blob after all numbers and texts
MAX_INTEGER = 2**63 - 1

_WHERE = (
    " WHERE d.kind = :kind AND d.rank >= :low AND d.rank < :high AND d.key >= :prefix AND d.key < :end"
    " AND (d.expires IS NULL OR d.expires > :now)"
)
_INDEXED = tables.COLUMNS + "arc_documents d INDEXED BY arc_documents_"
_GROUPED = _INDEXED + "group" + _WHERE + " AND d.grp = :group"
_RANKED = _INDEXED + "rank" + _WHERE
_NAMED = (
    tables.COLUMNS + "arc_documents d INDEXED BY arc_documents_key" + _WHERE + " AND (:group IS NULL OR d.grp = :group)"
)
_UP = " ORDER BY d.rank, d.key LIMIT :limit OFFSET :offset"
_DOWN = " ORDER BY d.rank DESC, d.key DESC LIMIT :limit OFFSET :offset"
#: The statement, by (index, whether descending).
FIND = {
    (index, descending): rows + order
    for index, rows in (("group", _GROUPED), ("rank", _RANKED), ("key", _NAMED))
    for descending, order in ((False, _UP), (True, _DOWN))
}


def get(view: sqlite3.Connection, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    """Return the existing documents with these keys, in their order."""
    kind_id = tables.kind_id_of(view, space, kind)
    if kind_id is None:
        return []
    rows = (view.execute(tables.ONE, (kind_id, key)).fetchone() for key in keys)
    found = [tables.read(row).document for row in rows if row is not None]
    return [document for document in found if not tables.has_expired(document, now)]


def _documents(found: sqlite3.Cursor) -> list[Document]:
    # All rows are fetched before a row is decoded. If decoding raised with rows left, the connection would stay in its
    # read transaction, and later reads would see old data.
    return [tables.read(row).document for row in found.fetchall()]


def find(view: sqlite3.Connection, query: Query) -> list[Document]:
    """Return the documents of a query."""
    index = "group" if query.group is not None else "rank"
    if query.prefix and query.low is None and query.high is None:
        index = "key"
    kind_id = tables.kind_id_of(view, query.space, query.kind)
    found = view.execute(
        FIND[index, query.descending],
        {
            "kind": kind_id,
            "group": query.group,
            "low": float("-inf") if query.low is None else query.low,
            "high": LAST if query.high is None else query.high,
            "now": query.now,
            "prefix": query.prefix,
            "end": _prefix_end(query.prefix),
            "limit": _sqlite_count(query.limit),
            "offset": _sqlite_count(query.offset),
        },
    )
    return _documents(found)


def _sqlite_count(number: int | None) -> int:
    """Return a limit or an offset for SQLite: -1 for all, and at most the largest integer of SQLite."""
    return -1 if number is None else min(number, MAX_INTEGER)


def _prefix_end(prefix: str) -> str | bytes:
    """Return the smallest value after all keys with this prefix."""
    while prefix:
        last = ord(prefix[-1])
        if last < 0x10FFFF:
            # The code points of surrogates are skipped, because SQLite cannot store them.
            return prefix[:-1] + chr(0xE000 if last == 0xD7FF else last + 1)
        prefix = prefix[:-1]
    return LAST


def words_of_kind(view: sqlite3.Connection, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    """Return (key, rank, words) of each document with words."""
    return sqlite_fts.texts(view, tables.kind_id_of(view, space, kind), now)


def kinds(view: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return (space, kind) of all documents."""
    return view.execute("SELECT space, kind FROM arc_document_kinds ORDER BY id").fetchall()


class IndexDamaged(Exception):
    """The full-text index cannot be read."""


def search(
    view: sqlite3.Connection, space: str, kind: str, words: Sequence[str], limit: int | None, now: float
) -> list[Document] | None:
    """Return the documents that contain all words. None if the index does not contain all documents.

    Raises:
        IndexDamaged: The index cannot be read.
    """
    if not sqlite_fts.complete(view):
        return None
    expression = sqlite_fts.expression(tables.kind_id_of(view, space, kind), words)
    try:
        return _documents(
            view.execute(tables.MATCHES, {"words": expression, "now": now, "limit": _sqlite_count(limit)})
        )
    except sqlite3.DatabaseError as error:
        if sqlite_fts.is_damage(error):
            raise IndexDamaged from error
        raise


class SQLiteDocuments(SQLiteBackend, DocumentStore):
    """Document store in a SQLite file, for all processes on the machine."""

    operation_sets: ClassVar[OperationSets] = (CONCERN,)
    reads: ClassVar[Reads] = {"get": get, "find": find, "words": words_of_kind, "kinds": kinds, "search": search}

    async def discard_index(self) -> None:
        """Delete the full-text index. The next search makes a new index."""
        await self.commit(None, [Op(sqlite_fts.DISCARD)])

    async def search(self, space: str, kind: str, words: str, limit: int | None) -> list[Document]:
        wanted = words_of(words)
        if not wanted or not sqlite_fts.has_index():
            return await super().search(space, kind, words, limit)
        for _ in range(INDEX_TRIES):
            try:
                now = self.clock.wall()
                found: list[Document] | None = await self.read("search", space, kind, wanted, limit, now)
            except IndexDamaged:
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
