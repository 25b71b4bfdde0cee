"""Rows of documents in a SQLite file, and the kinds they belong to."""

from __future__ import annotations

import sqlite3
from typing import Any, NamedTuple
from zlib import crc32

from ..._engines.sqlite.transaction import SQLiteTx
from ...errors import StorageCorrupt, brief
from . import sqlite_fts
from .base import Document

SWEPT = 8  # expired documents that a write takes away at most

# Version 0.6.0 counted the changes of a kind in `stamp`. The text is last: other columns are read without it.
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
    + sqlite_fts.SCHEMA,
)

_KIND = "SELECT id FROM arc_document_kinds WHERE space = ? AND kind = ?"
COLUMNS = "SELECT d.id, d.kind, d.mark, d.key, d.grp, d.rank, d.version, d.expires, d.crc, d.text FROM "
ONE = COLUMNS + "arc_documents d INDEXED BY arc_documents_key WHERE kind = ? AND key = ?"
_LAST = "SELECT max(rank) FROM arc_documents INDEXED BY arc_documents_group WHERE kind = ? AND grp = ?"
_INSERT = (
    "INSERT INTO arc_documents (kind, mark, key, grp, rank, version, expires, crc, text)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_UPDATE = (
    "UPDATE arc_documents SET mark = ?, grp = ?, rank = ?, version = ?, expires = ?, crc = ?, text = ? WHERE id = ?"
)
MATCHES = (
    COLUMNS + "arc_document_index JOIN arc_documents d ON d.id = arc_document_index.rowid"
    " WHERE arc_document_index MATCH :words AND (d.expires IS NULL OR d.expires > :now)"
    " ORDER BY bm25(arc_document_index, 0.0, 1.0), d.rank DESC, d.key LIMIT :limit"
)
_EXPIRED = "SELECT id, kind FROM arc_documents INDEXED BY arc_documents_end WHERE expires <= ? LIMIT ?"
_ANY = "SELECT id FROM arc_documents WHERE kind = ? LIMIT 1"


class Row(NamedTuple):
    """A document and where it is stored."""

    id: int
    place: int
    mark: int
    document: Document


def _crc(place: int, document: Document) -> int:
    key, text, version, rank, group, expires = document
    return crc32(text.encode(), crc32(f"{place}\0{key}\0{version}\0{rank!r}\0{group}\0{expires!r}".encode()))


def read(row: tuple[Any, ...]) -> Row:
    id_, place, mark, key, group, rank, version, expires, crc, text = row
    document: Document = tuple.__new__(Document, (key, text, version, rank, group, expires))
    if type(id_) is not int or not isinstance(text, str) or _crc(place, document) != crc:
        raise StorageCorrupt(f"document {brief(key)} (row {id_}) does not match its checksum; it is left as it is")
    return Row(id_, place, mark, document)


def place_of(tx: SQLiteTx | sqlite3.Connection, space: str, kind: str) -> int | None:
    row = tx.execute(_KIND, (space, kind)).fetchone()
    return None if row is None else int(row[0])


def known_place(tx: SQLiteTx, space: str, kind: str) -> int | None:
    """The number of a kind, which the writing connection remembers."""
    name = f"documents:{space}\0{kind}"
    place = tx.counters.get(name)
    if place is None:
        place = place_of(tx, space, kind)
        if place is not None:
            tx.counters[name] = place
    return place


def made_place(tx: SQLiteTx, space: str, kind: str) -> int:
    place = known_place(tx, space, kind)
    if place is None:
        tx.execute("INSERT INTO arc_document_kinds (space, kind) VALUES (?, ?)", (space, kind))
        place = known_place(tx, space, kind)
        assert place is not None
    return place


def stored(tx: SQLiteTx, place: int | None, key: str) -> Row | None:
    row = None if place is None else tx.execute(ONE, (place, key)).fetchone()
    return None if row is None else read(row)


def is_over(document: Document, now: float) -> bool:
    return document.expires is not None and document.expires <= now


def last_rank(tx: SQLiteTx, place: int, group: str) -> float | None:
    """The greatest rank in a group."""
    rank: float | None = tx.execute(_LAST, (place, group)).fetchone()[0]
    return rank


def remove(tx: SQLiteTx, id_: int) -> None:
    sqlite_fts.keep(tx, id_, 0, "")
    tx.execute("DELETE FROM arc_documents WHERE id = ?", (id_,))


def sweep(tx: SQLiteTx, now: float) -> None:
    """Take away a few of those that have expired, and kinds that have no other."""
    gone = [row for row in tx.execute(_EXPIRED, (now, SWEPT)) if set(map(type, row)) == {int}]  # else damaged
    for id_, _ in gone:
        remove(tx, id_)
    for place in {place for _, place in gone}:
        if tx.execute(_ANY, (place,)).fetchone() is None:
            forget(tx, place)


def forget(tx: SQLiteTx, place: int) -> None:
    space, kind = tx.execute("SELECT space, kind FROM arc_document_kinds WHERE id = ?", (place,)).fetchone()
    tx.execute("DELETE FROM arc_document_kinds WHERE id = ?", (place,))
    tx.counters.pop(f"documents:{space}\0{kind}", None)


def update(tx: SQLiteTx, row: Row, document: Document, mark: int) -> None:
    _, text, version, rank, group, expires = document
    tx.execute(_UPDATE, (mark, group, rank, version, expires, _crc(row.place, document), text, row.id))


def insert(tx: SQLiteTx, place: int, document: Document, mark: int) -> int:
    key, text, version, rank, group, expires = document
    crc = _crc(place, document)
    id_ = tx.execute(_INSERT, (place, mark, key, group, rank, version, expires, crc, text)).lastrowid
    assert id_ is not None
    return id_
