"""The full-text index of documents in a SQLite file, made by the first search and kept up by writes from then on.

The words are in a table of their own, and the index (FTS5) is made of that: all of it where `upto` is MOST, else of the
rows up to that number, and where it is STALE of nothing that counts. A program whose SQLite has no FTS5 writes words
too; it says that the index is stale, and looks through the words itself. An index that is damaged is stale as well:
all that is in it can be made anew.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Sequence

from ..._engines.sqlite.transaction import SQLiteTx

INDEX = "documents.index"
MOST = 2**62
STALE = -1
CHUNK = 1_000_000  # characters that are indexed in one commit

SCHEMA = f"""CREATE TABLE arc_document_words (id INTEGER PRIMARY KEY, place INTEGER NOT NULL, words TEXT NOT NULL);
CREATE TABLE arc_document_index_state (one INTEGER PRIMARY KEY CHECK (one = 1), upto INTEGER NOT NULL);
INSERT INTO arc_document_index_state VALUES (1, {STALE})"""

# Whoever splits texts into words has folded them too, so all that is not ASCII is part of a word here.
_CREATE = (
    "CREATE VIRTUAL TABLE arc_document_index USING fts5"
    " (place, words, content = 'arc_document_words', content_rowid = 'id', tokenize = 'ascii')"
)
_ADD = "INSERT INTO arc_document_index (rowid, place, words) VALUES (?, ?, ?)"
_TAKE = "INSERT INTO arc_document_index (arc_document_index, rowid, place, words) VALUES ('delete', ?, ?, ?)"
_ONE = "SELECT id, place, words FROM arc_document_words WHERE id = ?"
_UPTO = "SELECT upto FROM arc_document_index_state"

_OF_KIND = "SELECT w.id FROM arc_document_words w JOIN arc_documents d ON d.id = w.id WHERE d.kind = ?"
_TEXTS = (
    "SELECT d.key, d.rank, w.words FROM arc_document_words w JOIN arc_documents d ON d.id = w.id"
    " WHERE d.kind = ? AND (d.expires IS NULL OR d.expires > ?)"
)


@functools.cache
def has_index() -> bool:
    """Whether the SQLite that is linked here has FTS5."""
    conn = sqlite3.connect(":memory:")
    try:
        conn.execute("CREATE VIRTUAL TABLE probe USING fts5 (words)")
    except sqlite3.OperationalError:
        return False
    finally:
        conn.close()
    return True


def expression(place: int | None, words: Sequence[str]) -> str:
    """Documents of that kind with all of the words, the last one perhaps the start of another; words have no quotes."""
    each = " ".join(f'"{word}"' for word in dict.fromkeys(words[:-1]))
    return f'place : "{place}" AND words : ({each} "{words[-1]}" *)'


def complete(view: sqlite3.Connection) -> bool:
    return _stored_upto(view) == MOST


def _stored_upto(view: SQLiteTx | sqlite3.Connection) -> int:
    row = view.execute(_UPTO).fetchone()
    return row[0] if row and type(row[0]) is int else STALE  # damaged: all that is in the index is made anew


def texts(view: sqlite3.Connection, place: int | None, now: float) -> list[tuple[str, float, str]]:
    return view.execute(_TEXTS, (place, now)).fetchall()


def keep(tx: SQLiteTx, id_: int, place: int, words: str) -> None:
    """These are the words of that document from now on; "" none."""
    was = tx.execute(_ONE, (id_,)).fetchone()
    if (was[2] if was else "") == words:
        return
    if was:
        _index(tx, _TAKE, was)
        tx.execute("DELETE FROM arc_document_words WHERE id = ?", (id_,))
    if words:
        tx.execute("INSERT INTO arc_document_words VALUES (?, ?, ?)", (id_, place, words))
        _index(tx, _ADD, (id_, place, words))


def clear(tx: SQLiteTx, place: int) -> None:
    """None of the documents of that kind has words any more."""
    for (id_,) in tx.execute(_OF_KIND, (place,)).fetchall():
        keep(tx, id_, 0, "")


def _index(tx: SQLiteTx, how: str, row: tuple[int, int, str]) -> None:
    if _indexed(tx, row[0]):
        try:
            tx.execute(how, row)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            _set(tx, STALE)


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether it is the index that is damaged, and nothing else."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT_VTAB  # one of the driver's own has none


def _indexed(tx: SQLiteTx, id_: int) -> bool:
    """Whether what is written of that document is to be written to the index too."""
    upto = tx.counters.get("documents.upto")
    if upto is None:
        upto = tx.counters["documents.upto"] = _stored_upto(tx)
    if id_ > upto:
        return False
    if has_index():
        return True
    _set(tx, STALE)
    return False


def _set(tx: SQLiteTx, upto: int) -> None:
    tx.execute("INSERT OR REPLACE INTO arc_document_index_state VALUES (1, ?)", (upto,))
    tx.counters["documents.upto"] = upto


def index(tx: SQLiteTx, anew: bool) -> bool:
    """Index some more of the documents, or all `anew` where all were; True where all are."""
    upto = _stored_upto(tx)
    if upto == STALE or (anew and upto == MOST):
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
        upto = MOST
    _set(tx, upto)
    return upto == MOST
