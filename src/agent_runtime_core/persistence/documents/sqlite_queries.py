"""What is read of documents in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from . import sqlite_fts
from .base import Document, Query
from .sqlite_tables import COLUMNS, MATCHES, ONE, is_over, place_of, read

LAST = b""  # behind all numbers and texts
MOST = 2**63 - 1

_WHERE = (
    " WHERE d.kind = :kind AND d.rank >= :low AND d.rank < :high AND d.key >= :prefix AND d.key < :end"
    " AND (d.expires IS NULL OR d.expires > :now)"
)
_GROUPED = COLUMNS + "arc_documents d INDEXED BY arc_documents_group" + _WHERE + " AND d.grp = :group"
_RANKED = COLUMNS + "arc_documents d INDEXED BY arc_documents_rank" + _WHERE
_NAMED = COLUMNS + "arc_documents d INDEXED BY arc_documents_key" + _WHERE + " AND (:group IS NULL OR d.grp = :group)"
_UP = " ORDER BY d.rank, d.key LIMIT :limit OFFSET :offset"
_DOWN = " ORDER BY d.rank DESC, d.key DESC LIMIT :limit OFFSET :offset"
#: Which question it is: by (by what, whether downwards).
FIND = {
    ("group", False): _GROUPED + _UP,
    ("group", True): _GROUPED + _DOWN,
    ("rank", False): _RANKED + _UP,
    ("rank", True): _RANKED + _DOWN,
    ("key", False): _NAMED + _UP,
    ("key", True): _NAMED + _DOWN,
}


def get(view: sqlite3.Connection, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    place = place_of(view, space, kind)
    if place is None:
        return []
    rows = (view.execute(ONE, (place, key)).fetchone() for key in keys)
    found = [read(row).document for row in rows if row is not None]
    return [document for document in found if not is_over(document, now)]


def _all(found: sqlite3.Cursor) -> list[Document]:
    # Fetched before any is judged: a statement that an error leaves half-way keeps its connection in the past.
    return [read(row).document for row in found.fetchall()]


def find(view: sqlite3.Connection, query: Query) -> list[Document]:
    by = "group" if query.group is not None else "rank"
    if query.prefix and query.low is None and query.high is None:
        by = "key"
    place = place_of(view, query.space, query.kind)
    found = view.execute(
        FIND[by, query.descending],
        {
            "kind": place,
            "group": query.group,
            "low": float("-inf") if query.low is None else query.low,
            "high": LAST if query.high is None else query.high,
            "now": query.now,
            "prefix": query.prefix,
            "end": _end(query.prefix),
            "limit": _count(query.limit),
            "offset": _count(query.offset),
        },
    )
    return _all(found)


def _count(number: int | None) -> int:
    """As SQLite takes it: -1 for all, and nothing beyond what it counts to."""
    return -1 if number is None else min(number, MOST)


def _end(prefix: str) -> str | bytes:
    """What is behind all keys that begin so."""
    while prefix:
        last = ord(prefix[-1])
        if last < 0x10FFFF:
            # There are no characters in the place of surrogates.
            return prefix[:-1] + chr(0xE000 if last == 0xD7FF else last + 1)
        prefix = prefix[:-1]
    return LAST


def words_of_kind(view: sqlite3.Connection, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    return sqlite_fts.texts(view, place_of(view, space, kind), now)


class IndexDamaged(Exception):
    """The full-text index cannot be read."""


def search(
    view: sqlite3.Connection, space: str, kind: str, words: Sequence[str], limit: int | None, now: float
) -> list[Document] | None:
    if not sqlite_fts.complete(view):
        return None
    wanted = sqlite_fts.expression(place_of(view, space, kind), words)
    try:
        return _all(view.execute(MATCHES, {"words": wanted, "now": now, "limit": _count(limit)}))
    except sqlite3.DatabaseError as error:
        if sqlite_fts.is_damage(error):
            raise IndexDamaged from error
        raise
