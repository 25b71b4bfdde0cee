"""The rows of documents and kinds in a SQLite file."""

from __future__ import annotations

import sqlite3
from typing import Any, NamedTuple
from zlib import crc32

from ..._engines.sqlite.transaction import SQLiteTx
from ...errors import StorageCorrupt, brief
from . import sqlite_fts
from .base import Document

SWEPT = 8  # expired documents that a write deletes, at most

# Only version 0.6.0 uses `stamp`, to count the changes of a kind. The text is the last column, because SQLite reads the
# other columns faster if they come before a long column.
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
    """A document with its row id, the id of its kind and its mark."""

    id: int
    kind_id: int
    mark: int
    document: Document


def _crc(kind_id: int, document: Document) -> int:
    key, text, version, rank, group, expires = document
    return crc32(text.encode(), crc32(f"{kind_id}\0{key}\0{version}\0{rank!r}\0{group}\0{expires!r}".encode()))


def read(row: tuple[Any, ...]) -> Row:
    """Decode a row of `COLUMNS`.

    Raises:
        StorageCorrupt: The checksum does not match.
    """
    id_, kind_id, mark, key, group, rank, version, expires, crc, text = row
    document: Document = tuple.__new__(Document, (key, text, version, rank, group, expires))
    if type(id_) is not int or not isinstance(text, str) or _crc(kind_id, document) != crc:
        raise StorageCorrupt(
            f"document {brief(key)} (row {id_}) does not match its checksum. It was not modified. Restore a backup, "
            "or delete it."
        )
    return Row(id_, kind_id, mark, document)


def kind_id_of(tx: SQLiteTx | sqlite3.Connection, space: str, kind: str) -> int | None:
    """Return the id of a kind, or None if there is none."""
    row = tx.execute(_KIND, (space, kind)).fetchone()
    return None if row is None else int(row[0])


def find_kind_id(tx: SQLiteTx, space: str, kind: str) -> int | None:
    """Return the id of a kind, or None if there is none. The writing connection caches it."""
    name = f"documents:{space}\0{kind}"
    kind_id = tx.counters.get(name)
    if kind_id is None:
        kind_id = kind_id_of(tx, space, kind)
        if kind_id is not None:
            tx.counters[name] = kind_id
    return kind_id


def require_kind_id(tx: SQLiteTx, space: str, kind: str) -> int:
    """Return the id of a kind. A new kind is inserted."""
    kind_id = find_kind_id(tx, space, kind)
    if kind_id is None:
        tx.execute("INSERT INTO arc_document_kinds (space, kind) VALUES (?, ?)", (space, kind))
        kind_id = find_kind_id(tx, space, kind)
        assert kind_id is not None
    return kind_id


def stored(tx: SQLiteTx, kind_id: int | None, key: str) -> Row | None:
    """Return the row of a document, expired or not, or None if there is none."""
    row = None if kind_id is None else tx.execute(ONE, (kind_id, key)).fetchone()
    return None if row is None else read(row)


def has_expired(document: Document, now: float) -> bool:
    """Return whether a document is expired."""
    return document.expires is not None and document.expires <= now


def last_rank(tx: SQLiteTx, kind_id: int, group: str) -> float | None:
    """Return the highest rank in a group, or None if it is empty."""
    rank: float | None = tx.execute(_LAST, (kind_id, group)).fetchone()[0]
    return rank


def remove(tx: SQLiteTx, id_: int) -> None:
    """Delete a document and its words."""
    sqlite_fts.set_words(tx, id_, 0, "")
    tx.execute("DELETE FROM arc_documents WHERE id = ?", (id_,))


def sweep(tx: SQLiteTx, now: float) -> None:
    """Delete a few expired documents, and the kinds that have no document left."""
    expired = [
        row for row in tx.execute(_EXPIRED, (now, SWEPT)) if set(map(type, row)) == {int}
    ]  # a damaged row is skipped
    for id_, _ in expired:
        remove(tx, id_)
    for kind_id in {kind_id for _, kind_id in expired}:
        if tx.execute(_ANY, (kind_id,)).fetchone() is None:
            delete_kind(tx, kind_id)


def delete_kind(tx: SQLiteTx, kind_id: int) -> None:
    """Delete a kind without documents."""
    space, kind = tx.execute("SELECT space, kind FROM arc_document_kinds WHERE id = ?", (kind_id,)).fetchone()
    tx.execute("DELETE FROM arc_document_kinds WHERE id = ?", (kind_id,))
    tx.counters.pop(f"documents:{space}\0{kind}", None)


def update(tx: SQLiteTx, row: Row, document: Document, mark: int) -> None:
    """Replace the document of a row."""
    _, text, version, rank, group, expires = document
    tx.execute(_UPDATE, (mark, group, rank, version, expires, _crc(row.kind_id, document), text, row.id))


def insert(tx: SQLiteTx, kind_id: int, document: Document, mark: int) -> int:
    """Insert a document, and return its row id."""
    key, text, version, rank, group, expires = document
    crc = _crc(kind_id, document)
    id_ = tx.execute(_INSERT, (kind_id, mark, key, group, rank, version, expires, crc, text)).lastrowid
    assert id_ is not None
    return id_
