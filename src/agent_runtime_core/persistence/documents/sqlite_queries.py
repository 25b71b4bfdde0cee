"""Reads of documents in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from . import sqlite_fts
from .base import Document, Query
from .sqlite_tables import COLUMNS, MATCHES, ONE, has_expired, kind_id_of, read

LAST = b""  # SQLite sorts a blob after all numbers and texts
MAX_INTEGER = 2**63 - 1

_WHERE = (
    " WHERE d.kind = :kind AND d.rank >= :low AND d.rank < :high AND d.key >= :prefix AND d.key < :end"
    " AND (d.expires IS NULL OR d.expires > :now)"
)
_GROUPED = COLUMNS + "arc_documents d INDEXED BY arc_documents_group" + _WHERE + " AND d.grp = :group"
_RANKED = COLUMNS + "arc_documents d INDEXED BY arc_documents_rank" + _WHERE
_NAMED = COLUMNS + "arc_documents d INDEXED BY arc_documents_key" + _WHERE + " AND (:group IS NULL OR d.grp = :group)"
_UP = " ORDER BY d.rank, d.key LIMIT :limit OFFSET :offset"
_DOWN = " ORDER BY d.rank DESC, d.key DESC LIMIT :limit OFFSET :offset"
#: The statement, by (index, whether descending).
FIND = {
    ("group", False): _GROUPED + _UP,
    ("group", True): _GROUPED + _DOWN,
    ("rank", False): _RANKED + _UP,
    ("rank", True): _RANKED + _DOWN,
    ("key", False): _NAMED + _UP,
    ("key", True): _NAMED + _DOWN,
}


def get(view: sqlite3.Connection, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    """Return the existing documents with these keys, in their order."""
    kind_id = kind_id_of(view, space, kind)
    if kind_id is None:
        return []
    rows = (view.execute(ONE, (kind_id, key)).fetchone() for key in keys)
    found = [read(row).document for row in rows if row is not None]
    return [document for document in found if not has_expired(document, now)]


def _documents(found: sqlite3.Cursor) -> list[Document]:
    # All rows are fetched before one is decoded. If decoding raised with rows left, the connection would stay in its
    # read transaction, and later reads would see old data.
    return [read(row).document for row in found.fetchall()]


def find(view: sqlite3.Connection, query: Query) -> list[Document]:
    """Return the documents of a query."""
    index = "group" if query.group is not None else "rank"
    if query.prefix and query.low is None and query.high is None:
        index = "key"
    kind_id = kind_id_of(view, query.space, query.kind)
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
    """Return (key, rank, words) of each document that has words."""
    return sqlite_fts.texts(view, kind_id_of(view, space, kind), now)


def kinds(view: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return (space, kind) of all documents."""
    return view.execute("SELECT space, kind FROM arc_document_kinds ORDER BY id").fetchall()


class IndexDamaged(Exception):
    """The full-text index cannot be read."""


def search(
    view: sqlite3.Connection, space: str, kind: str, words: Sequence[str], limit: int | None, now: float
) -> list[Document] | None:
    """Return the documents that contain all words. None: the index does not contain all documents.

    Raises:
        IndexDamaged: The index cannot be read.
    """
    if not sqlite_fts.complete(view):
        return None
    expression = sqlite_fts.expression(kind_id_of(view, space, kind), words)
    try:
        return _documents(view.execute(MATCHES, {"words": expression, "now": now, "limit": _sqlite_count(limit)}))
    except sqlite3.DatabaseError as error:
        if sqlite_fts.is_damage(error):
            raise IndexDamaged from error
        raise
