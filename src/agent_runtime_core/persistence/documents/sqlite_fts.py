"""The full-text index of documents in a SQLite file. The first search creates it, and later writes update it.

The words are in a table, and the index (FTS5) is built from that table. If `upto` is ALL, the index contains all rows.
If it is another number, it contains the rows up to that id. If it is STALE, the index must be rebuilt. A process whose
SQLite lacks FTS5 writes words too. It marks the index as stale, and its searches read all words. A damaged index is
marked as stale too, because it can be rebuilt from the words.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Sequence

from ..._engines.sqlite.transaction import SQLiteTx

INDEX, DISCARD = "documents.index", "documents.discard_index"
ALL = 2**62
STALE = -1
CHUNK = 1_000_000  # characters that one commit indexes

SCHEMA = f"""CREATE TABLE arc_document_words (id INTEGER PRIMARY KEY, place INTEGER NOT NULL, words TEXT NOT NULL);
CREATE TABLE arc_document_index_state (one INTEGER PRIMARY KEY CHECK (one = 1), upto INTEGER NOT NULL);
INSERT INTO arc_document_index_state VALUES (1, {STALE})"""

# The words are split and folded already. The tokenizer `ascii` treats every other character as part of a word.
_CREATE = (
    "CREATE VIRTUAL TABLE arc_document_index USING fts5"
    " (place, words, content = 'arc_document_words', content_rowid = 'id', tokenize = 'ascii')"
)
_ADD = "INSERT INTO arc_document_index (rowid, place, words) VALUES (?, ?, ?)"
_REMOVE = "INSERT INTO arc_document_index (arc_document_index, rowid, place, words) VALUES ('delete', ?, ?, ?)"
_WORDS_OF = "SELECT id, place, words FROM arc_document_words WHERE id = ?"
_UPTO = "SELECT upto FROM arc_document_index_state"

_OF_KIND = "SELECT w.id FROM arc_document_words w JOIN arc_documents d ON d.id = w.id WHERE d.kind = ?"
_TEXTS = (
    "SELECT d.key, d.rank, w.words FROM arc_document_words w JOIN arc_documents d ON d.id = w.id"
    " WHERE d.kind = ? AND (d.expires IS NULL OR d.expires > ?)"
)


@functools.cache
def has_index() -> bool:
    """Return whether the SQLite library of this process includes FTS5."""
    conn = sqlite3.connect(":memory:")
    try:
        conn.execute("CREATE VIRTUAL TABLE probe USING fts5 (words)")
    except sqlite3.OperationalError:
        return False
    finally:
        conn.close()
    return True


def expression(kind_id: int | None, words: Sequence[str]) -> str:
    """Return the FTS5 query for documents of a kind that contain all words.

    The last word also matches words that begin with it. Words contain no quotes.
    """
    each = " ".join(f'"{word}"' for word in dict.fromkeys(words[:-1]))
    return f'place : "{kind_id}" AND words : ({each} "{words[-1]}" *)'


def complete(view: sqlite3.Connection) -> bool:
    """Return whether the index contains all documents."""
    return _stored_upto(view) == ALL


def _stored_upto(view: SQLiteTx | sqlite3.Connection) -> int:
    row = view.execute(_UPTO).fetchone()
    return row[0] if row and type(row[0]) is int else STALE  # a damaged row: rebuild the index


def texts(view: sqlite3.Connection, kind_id: int | None, now: float) -> list[tuple[str, float, str]]:
    """Return (key, rank, words) of the documents of a kind."""
    return view.execute(_TEXTS, (kind_id, now)).fetchall()


def set_words(tx: SQLiteTx, id_: int, kind_id: int, words: str) -> None:
    """Set the words of a document. An empty string removes them."""
    stored = tx.execute(_WORDS_OF, (id_,)).fetchone()
    if (stored[2] if stored else "") == words:
        return
    if stored:
        _index(tx, _REMOVE, stored)
        tx.execute("DELETE FROM arc_document_words WHERE id = ?", (id_,))
    if words:
        tx.execute("INSERT INTO arc_document_words VALUES (?, ?, ?)", (id_, kind_id, words))
        _index(tx, _ADD, (id_, kind_id, words))


def clear(tx: SQLiteTx, kind_id: int) -> None:
    """Remove the words of all documents of a kind."""
    for (id_,) in tx.execute(_OF_KIND, (kind_id,)).fetchall():
        set_words(tx, id_, 0, "")


def _index(tx: SQLiteTx, statement: str, row: tuple[int, int, str]) -> None:
    if _indexed(tx, row[0]):
        try:
            tx.execute(statement, row)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            _set_upto(tx, STALE)


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether only the index is damaged."""
    return (
        getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT_VTAB
    )  # an error of the Python driver contains no code


def _indexed(tx: SQLiteTx, id_: int) -> bool:
    """Return whether the index contains the document, so that a change of its words must be written to the index."""
    upto = tx.counters.get("documents.upto")
    if upto is None:
        upto = tx.counters["documents.upto"] = _stored_upto(tx)
    if id_ > upto:
        return False
    if has_index():
        return True
    _set_upto(tx, STALE)
    return False


def _set_upto(tx: SQLiteTx, upto: int) -> None:
    tx.execute("INSERT OR REPLACE INTO arc_document_index_state VALUES (1, ?)", (upto,))
    tx.counters["documents.upto"] = upto


def discard(tx: SQLiteTx) -> None:
    """Delete the index, whose parts have the words of deleted documents until they are merged."""
    if has_index():
        tx.execute("DROP TABLE IF EXISTS arc_document_index")
    _set_upto(tx, STALE)


def index(tx: SQLiteTx, rebuild: bool) -> bool:
    """Index the next documents. With `rebuild`, start again if all are indexed. Return whether all are indexed."""
    upto = _stored_upto(tx)
    if upto == STALE or (rebuild and upto == ALL):
        tx.execute("DROP TABLE IF EXISTS arc_document_index")
        tx.execute(_CREATE)
        upto = 0
    size = 0
    for row in tx.execute("SELECT * FROM arc_document_words WHERE id > ? ORDER BY id", (upto,)):
        if size > CHUNK:
            break
        tx.execute(_ADD, row)
        upto, size = row[0], size + len(row[2])
    else:
        upto = ALL
    _set_upto(tx, upto)
    return upto == ALL
