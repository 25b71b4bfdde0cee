"""Documents in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

from ..._engines.backed import OnSQLite
from ..._engines.base import Concern, NotApplied, Op, always
from ..._engines.sqlite_tx import SQLiteTx
from ...errors import StorageCorrupt
from ..documents import sqlite_words
from .base import Absent, Changed, Document, DocumentStore, Entry, Query, behind, touched
from .words import words_of

SWEPT = 8  # expired documents that a write takes away at most
INDEX_TRIES = 4  # a program whose SQLite has no FTS5 may be writing all the time
LAST = b""  # behind all numbers and texts
LONG = 100_000  # characters of a text that take more than a moment

# Numbers of kinds are never used again (AUTOINCREMENT), so that a stamp is none that was seen before. The text stands
# last: what is before it is read without it.
MIGRATIONS = (
    """CREATE TABLE arc_document_kinds (
    id INTEGER PRIMARY KEY AUTOINCREMENT, space TEXT NOT NULL, kind TEXT NOT NULL, stamp INTEGER NOT NULL DEFAULT 0,
    UNIQUE (space, kind));
CREATE TABLE arc_documents (
    id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, key TEXT NOT NULL, grp TEXT NOT NULL, rank REAL NOT NULL,
    version INTEGER NOT NULL, expires REAL, mark INTEGER NOT NULL, crc INTEGER NOT NULL, text TEXT NOT NULL);
CREATE UNIQUE INDEX arc_documents_key ON arc_documents (kind, key);
CREATE INDEX arc_documents_group ON arc_documents (kind, grp, rank, key);
CREATE INDEX arc_documents_rank ON arc_documents (kind, rank, key);
CREATE INDEX arc_documents_end ON arc_documents (expires) WHERE expires IS NOT NULL;
"""
    + sqlite_words.SCHEMA,
)

_KIND = "SELECT id FROM arc_document_kinds WHERE space = ? AND kind = ?"
_COLUMNS = "SELECT d.id, d.kind, d.mark, d.key, d.grp, d.rank, d.version, d.expires, d.crc, d.text FROM "
_ONE = _COLUMNS + "arc_documents d INDEXED BY arc_documents_key WHERE kind = ? AND key = ?"
_LAST = "SELECT max(rank) FROM arc_documents INDEXED BY arc_documents_group WHERE kind = ? AND grp = ?"
_INSERT = (
    "INSERT INTO arc_documents (kind, mark, key, grp, rank, version, expires, crc, text)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_UPDATE = (
    "UPDATE arc_documents SET mark = ?, grp = ?, rank = ?, version = ?, expires = ?, crc = ?, text = ? WHERE id = ?"
)
_EXPIRED = "SELECT id, kind FROM arc_documents INDEXED BY arc_documents_end WHERE expires <= ? LIMIT ?"

_WHERE = (
    " WHERE d.kind = :kind AND d.rank >= :low AND d.rank < :high AND d.key >= :prefix AND d.key < :end"
    " AND (d.expires IS NULL OR d.expires > :now)"
)
_GROUPED = _COLUMNS + "arc_documents d INDEXED BY arc_documents_group" + _WHERE + " AND d.grp = :group"
_RANKED = _COLUMNS + "arc_documents d INDEXED BY arc_documents_rank" + _WHERE
_NAMED = _COLUMNS + "arc_documents d INDEXED BY arc_documents_key" + _WHERE + " AND (:group IS NULL OR d.grp = :group)"
_UP = " ORDER BY d.rank, d.key LIMIT :limit OFFSET :offset"
_DOWN = " ORDER BY d.rank DESC, d.key DESC LIMIT :limit OFFSET :offset"
#: Which question it is: by (by what, whether downwards).
_FIND = {
    ("group", False): _GROUPED + _UP,
    ("group", True): _GROUPED + _DOWN,
    ("rank", False): _RANKED + _UP,
    ("rank", True): _RANKED + _DOWN,
    ("key", False): _NAMED + _UP,
    ("key", True): _NAMED + _DOWN,
}

_MATCHES = (
    _COLUMNS + "arc_document_index JOIN arc_documents d ON d.id = arc_document_index.rowid"
    " WHERE arc_document_index MATCH :words AND (d.expires IS NULL OR d.expires > :now)"
    " ORDER BY bm25(arc_document_index, 0.0, 1.0), d.rank DESC, d.key LIMIT :limit"
)

_LIVE = "(expires IS NULL OR expires > ?)"
_COUNT = "SELECT count(*) FROM arc_documents WHERE kind = ? AND " + _LIVE
_IDS = "SELECT id FROM arc_documents WHERE kind = ?"


class Row(NamedTuple):
    """A document and where it is stored."""

    id: int
    place: int
    mark: int
    document: Document


def _crc(place: int, document: Document) -> int:
    key, text, version, rank, group, expires = document
    return crc32(text.encode(), crc32(f"{place}\0{key}\0{version}\0{rank!r}\0{group}\0{expires!r}".encode()))


def _read(row: tuple[Any, ...]) -> Row:
    id_, place, mark, key, group, rank, version, expires, crc, text = row
    document: Document = tuple.__new__(Document, (key, text, version, rank, group, expires))
    if not isinstance(text, str) or _crc(place, document) != crc:
        raise StorageCorrupt(f"document {key!r:.80} (row {id_}) does not match its checksum; it is left as it is")
    return Row(id_, place, mark, document)


# -- writing


def _place(tx: SQLiteTx | sqlite3.Connection, space: str, kind: str) -> int | None:
    row = tx.execute(_KIND, (space, kind)).fetchone()
    return None if row is None else int(row[0])


def _known(tx: SQLiteTx, space: str, kind: str) -> int | None:
    """The number of a kind, which the writing connection remembers."""
    name = f"documents:{space}\0{kind}"
    place = tx.counters.get(name)
    if place is None:
        place = _place(tx, space, kind)
        if place is not None:
            tx.counters[name] = place
    return place


def _made(tx: SQLiteTx, space: str, kind: str) -> int:
    place = _known(tx, space, kind)
    if place is None:
        tx.execute("INSERT INTO arc_document_kinds (space, kind) VALUES (?, ?)", (space, kind))
        place = _known(tx, space, kind)
        assert place is not None
    return place


def _stored(tx: SQLiteTx, place: int | None, key: str) -> Row | None:
    row = None if place is None else tx.execute(_ONE, (place, key)).fetchone()
    return None if row is None else _read(row)


def _one(tx: SQLiteTx, place: int | None, key: str, now: float) -> Row | None:
    row = _stored(tx, place, key)
    return None if row is None or _over(row.document, now) else row


def _over(document: Document, now: float) -> bool:
    return document.expires is not None and document.expires <= now


def _stamp(tx: SQLiteTx, place: int) -> None:
    tx.execute("UPDATE arc_document_kinds SET stamp = stamp + 1 WHERE id = ?", (place,))


def _remove(tx: SQLiteTx, id_: int) -> None:
    sqlite_words.keep(tx, id_, 0, "")
    tx.execute("DELETE FROM arc_documents WHERE id = ?", (id_,))


def _sweep(tx: SQLiteTx, now: float) -> None:
    """Take away a few of those that have expired, and kinds that have no other."""
    gone = tx.execute(_EXPIRED, (now, SWEPT)).fetchall()
    for id_, _ in gone:
        _remove(tx, id_)
    for place in {place for _, place in gone}:
        if tx.execute(_IDS + " LIMIT 1", (place,)).fetchone() is None:
            _forget(tx, place)


def _forget(tx: SQLiteTx, place: int) -> None:
    space, kind = tx.execute("SELECT space, kind FROM arc_document_kinds WHERE id = ?", (place,)).fetchone()
    tx.execute("DELETE FROM arc_document_kinds WHERE id = ?", (place,))
    tx.counters.pop(f"documents:{space}\0{kind}", None)


def _update(tx: SQLiteTx, row: Row, document: Document, mark: int) -> None:
    _, text, version, rank, group, expires = document
    tx.execute(_UPDATE, (mark, group, rank, version, expires, _crc(row.place, document), text, row.id))
    _stamp(tx, row.place)


def _insert(tx: SQLiteTx, place: int, document: Document, mark: int) -> int:
    key, text, version, rank, group, expires = document
    crc = _crc(place, document)
    id_ = tx.execute(_INSERT, (place, mark, key, group, rank, version, expires, crc, text)).lastrowid
    assert id_ is not None
    _stamp(tx, place)
    return id_


def _landed(row: Row, entry: Entry) -> bool:
    return row.mark == entry.mark and row.document.text == entry.text


def put(tx: SQLiteTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    _sweep(tx, now)
    place = _made(tx, space, kind)
    row = _stored(tx, place, entry.key)
    there = None if row is None or _over(row.document, now) else row.document
    version = 0 if there is None else there.version
    if expect is not None and expect != version:
        if row is not None and version == expect + 1 and _landed(row, entry):
            return version, row.document.rank
        raise Changed
    rank = entry.rank
    if rank is None and there is not None and there.group == entry.group:
        rank = there.rank
    if rank is None:
        rank = behind(max(tx.execute(_LAST, (place, entry.group)).fetchone()[0] or 0.0, 0.0))
    expires = None if entry.expires is None else float(entry.expires)
    document = Document(entry.key, entry.text, version + 1, float(rank), entry.group, expires)
    if row is None:
        id_ = _insert(tx, place, document, entry.mark)
    else:
        id_ = row.id
        _update(tx, row, document, entry.mark)
    if row is not None or entry.words:
        sqlite_words.keep(tx, id_, place, entry.words)
    return document.version, document.rank


def add(tx: SQLiteTx, space: str, kind: str, entry: Entry, now: float) -> float | None:
    if _one(tx, _known(tx, space, kind), entry.key, now) is not None:
        return None
    return put(tx, space, kind, entry, 0, now)[1]


def touch(
    tx: SQLiteTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    row = _one(tx, _known(tx, space, kind), key, now)
    if row is None:
        raise Absent
    moved = touched(row.document, rank, expires)
    if moved != row.document:
        _update(tx, row, moved, row.mark)


def delete(tx: SQLiteTx, space: str, kind: str, key: str, now: float) -> bool:
    place = _known(tx, space, kind)
    row = None if place is None else tx.execute(_ONE, (place, key)).fetchone()
    # Also one that cannot be read any more: there has to be a way to be rid of it.
    if place is None or row is None or (row[7] is not None and row[7] <= now):
        return False
    _remove(tx, row[0])
    _stamp(tx, place)
    return True


def clear(tx: SQLiteTx, space: str, kind: str, group: str | None, now: float) -> int:
    place = _known(tx, space, kind)
    if place is None:
        return 0
    if group is None:
        count = tx.execute(_COUNT, (place, now)).fetchone()[0]
        sqlite_words.clear(tx, place)
        tx.execute("DELETE FROM arc_documents WHERE kind = ?", (place,))
    else:
        count = tx.execute(_COUNT + " AND grp = ?", (place, now, group)).fetchone()[0]
        for (id_,) in tx.execute(_IDS + " AND grp = ?", (place, group)).fetchall():
            _remove(tx, id_)
    if count:
        _stamp(tx, place)
    return int(count)


def drop(tx: SQLiteTx, space: str, now: float) -> None:
    for place, kind in tx.execute("SELECT id, kind FROM arc_document_kinds WHERE space = ?", (space,)).fetchall():
        clear(tx, space, kind, None, now)
        _forget(tx, place)


# -- what landed before


def was_put(tx: SQLiteTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    row = _one(tx, _known(tx, space, kind), entry.key, now)
    if row is None or not _landed(row, entry) or (expect is not None and row.document.version != expect + 1):
        raise NotApplied
    return row.document.version, row.document.rank


def was_added(tx: SQLiteTx, space: str, kind: str, entry: Entry, now: float) -> float:
    return was_put(tx, space, kind, entry, None, now)[1]


def was_touched(
    tx: SQLiteTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    row = _one(tx, _known(tx, space, kind), key, now)
    if row is None or touched(row.document, rank, expires) != row.document:
        raise NotApplied


def was_deleted(tx: SQLiteTx, space: str, kind: str, key: str, now: float) -> bool:
    if _one(tx, _known(tx, space, kind), key, now) is not None:
        raise NotApplied
    return True


# -- reading


def _get(view: sqlite3.Connection, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    place = _place(view, space, kind)
    if place is None:
        return []
    rows = (view.execute(_ONE, (place, key)).fetchone() for key in keys)
    found = [_read(row).document for row in rows if row is not None]
    return [document for document in found if not _over(document, now)]


def _all(found: sqlite3.Cursor) -> list[Document]:
    # Fetched before any is judged: a statement that an error leaves half-way keeps its connection in the past.
    return [_read(row).document for row in found.fetchall()]


def _find(view: sqlite3.Connection, query: Query) -> list[Document]:
    by = "group" if query.group is not None else "rank"
    if query.prefix and query.low is None and query.high is None:
        by = "key"
    place = _place(view, query.space, query.kind)
    found = view.execute(
        _FIND[by, query.descending],
        {
            "kind": place,
            "group": query.group,
            "low": float("-inf") if query.low is None else query.low,
            "high": LAST if query.high is None else query.high,
            "now": query.now,
            "prefix": query.prefix,
            "end": _end(query.prefix),
            "limit": -1 if query.limit is None else query.limit,
            "offset": query.offset,
        },
    )
    return _all(found)


def _end(prefix: str) -> str | bytes:
    """What is behind all keys that begin so."""
    while prefix:
        last = ord(prefix[-1])
        if last < 0x10FFFF:
            # There are no characters in the place of surrogates.
            return prefix[:-1] + chr(0xE000 if last == 0xD7FF else last + 1)
        prefix = prefix[:-1]
    return LAST


def _stamped(view: sqlite3.Connection, space: str, kind: str) -> str:
    row = view.execute(
        "SELECT id, stamp FROM arc_document_kinds WHERE space = ? AND kind = ?", (space, kind)
    ).fetchone()
    return "0" if row is None else f"{row[0]}.{row[1]}"


def _words(view: sqlite3.Connection, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    return sqlite_words.texts(view, _place(view, space, kind), now)


class IndexDamaged(Exception):
    """The full-text index cannot be read."""


def _search(
    view: sqlite3.Connection, space: str, kind: str, words: Sequence[str], limit: int, now: float
) -> list[Document] | None:
    if not sqlite_words.complete(view):
        return None
    wanted = sqlite_words.expression(_place(view, space, kind), words)
    try:
        return _all(view.execute(_MATCHES, {"words": wanted, "now": now, "limit": limit}))
    except sqlite3.DatabaseError as error:
        if sqlite_words.is_damage(error):
            raise IndexDamaged from error
        raise


def _is_long(space: str, kind: str, entry: Entry, *_: Any) -> bool:
    return len(entry.text) > LONG or len(entry.words) > LONG // 10


CONCERN = Concern(
    "documents",
    {
        "documents.put": put,
        "documents.add": add,
        "documents.touch": touch,
        "documents.delete": delete,
        "documents.clear": clear,
        "documents.drop": drop,
        sqlite_words.INDEX: sqlite_words.index,
    },
    {
        "documents.put": was_put,
        "documents.add": was_added,
        "documents.touch": was_touched,
        "documents.delete": was_deleted,
    },
    MIGRATIONS,
    lengthy={
        "documents.put": _is_long,
        "documents.add": _is_long,
        "documents.clear": always,
        "documents.drop": always,
        sqlite_words.INDEX: always,
    },
)


class SQLiteDocuments(OnSQLite, DocumentStore):
    """Documents in one SQLite file, shared by all processes on this machine."""

    concerns: ClassVar[Sequence[Concern]] = (CONCERN,)
    reads: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "get": _get,
        "find": _find,
        "stamp": _stamped,
        "words": _words,
        "search": _search,
    }

    async def search(self, space: str, kind: str, words: str, limit: int) -> list[Document]:
        wanted = words_of(words)
        if not wanted or not sqlite_words.has_index():
            return await super().search(space, kind, words, limit)
        for _ in range(INDEX_TRIES):
            try:
                now = self.clock.wall()
                found: list[Document] | None = await self.read("search", space, kind, wanted, limit, now)
            except IndexDamaged:
                await self.commit(None, [Op(sqlite_words.INDEX, (True,))])
                continue
            if found is not None:
                return found
            while not (await self.commit(None, [Op(sqlite_words.INDEX, (False,))]))[0]:
                pass
        return await super().search(space, kind, words, limit)
