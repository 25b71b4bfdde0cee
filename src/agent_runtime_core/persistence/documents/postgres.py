"""Document store in a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar
from zlib import crc32

from ..._engines.backend import OperationSets, Reads
from ..._engines.base import OperationSet
from ..._engines.postgres.connection import PostgresConnection
from ..._engines.postgres.engine import PostgresBackend, PostgresTx
from ...errors import StorageCorrupt, brief
from .base import Document, DocumentStore, Entry, Query, best, next_rank, words_of
from .operations import DocumentTransaction, document_operations, document_replays

SWEPT = 8  # expired documents that a write deletes, at most
LONGEST_WORD, MOST_WORDS = 500, 20_000  # the index takes no longer words, and no more; such documents are all read

_COLUMNS = "key, text, version, rank, grp, expires, mark, crc"
_OF_KIND = "space = ? AND kind = ?"
_LIVE = "(expires IS NULL OR expires > ?)"
_ONE = f"SELECT {_COLUMNS} FROM arc_documents WHERE {_OF_KIND} AND key = ?"
_PUT = (
    "INSERT INTO arc_documents (space, kind, key, text, version, rank, grp, expires, mark, crc)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (space, kind, key) DO UPDATE SET text = excluded.text,"
    " version = excluded.version, rank = excluded.rank, grp = excluded.grp, expires = excluded.expires,"
    " mark = excluded.mark, crc = excluded.crc"
)
_SET_WORDS = (
    "UPDATE arc_documents SET words = ?, lexemes = array_to_tsvector(?::text[])"
    f" WHERE {_OF_KIND} AND key = ? AND words <> ?"
)
_LOCK_GROUP = "SELECT pg_advisory_xact_lock(hashtextextended(concat_ws(chr(2), ?::text, ?::text, ?::text), 5))"
_LAST_RANK = f"SELECT max(rank) FROM arc_documents WHERE {_OF_KIND} AND grp = ?"
_SWEEP = (
    "DELETE FROM arc_documents WHERE id IN"
    " (SELECT id FROM arc_documents WHERE expires <= ? LIMIT ? FOR UPDATE SKIP LOCKED)"
)
_WORDS = f"SELECT key, rank, words FROM arc_documents WHERE {_OF_KIND} AND {_LIVE} AND words <> ''"

_SEARCH = f"{_WORDS} AND (lexemes @@ ?::tsquery OR lexemes IS NULL)"
_GET = f"SELECT {_COLUMNS} FROM arc_documents WHERE {_OF_KIND} AND key = ANY(?) AND {_LIVE}"
_DELETE = f"DELETE FROM arc_documents WHERE {_OF_KIND} AND key = ? AND {_LIVE}"
_CLEAR = f"DELETE FROM arc_documents WHERE {_OF_KIND} RETURNING {_LIVE}"
_CLEAR_GROUP = f"DELETE FROM arc_documents WHERE {_OF_KIND} AND grp = ? RETURNING {_LIVE}"


@lru_cache(256)
def _select(columns: str, *conditions: str, end: str = "") -> str:
    """Return a statement. All parts of it are texts of this module."""
    return f"SELECT {columns} FROM arc_documents WHERE {' AND '.join(conditions)} {end}"


def _crc(space: str, kind: str, document: Document) -> int:
    key, text, version, rank, group, expires = document
    fields = f"{space}\0{kind}\0{key}\0{version}\0{rank!r}\0{group}\0{expires!r}"
    return crc32(text.encode(), crc32(fields.encode()))


def _read(space: str, kind: str, row: Sequence[Any]) -> Document:
    """Return the document of a row.

    Raises:
        StorageCorrupt: The checksum does not match.
    """
    document = Document(*row[:6])
    if _crc(space, kind, document) != row[7]:
        raise StorageCorrupt(
            f"document {brief(row[0])} does not match its checksum. It was not modified. Restore a backup, or delete "
            "it."
        )
    return document


def _lexemes(words: str) -> list[str] | None:
    """Return the words for the index, None if it does not take them."""
    found = list(dict.fromkeys(words.split(" "))) if words else []
    return None if len(found) > MOST_WORDS or any(len(each) > LONGEST_WORD for each in found) else found


class PostgresDocumentTransaction(DocumentTransaction):
    """The documents in a transaction. A document that is read here is locked."""

    def __init__(self, tx: PostgresTx) -> None:
        self._tx = tx
        self._mark: int | None = None  # of the document that `get` found
        self._text = ""

    def sweep(self, now: float) -> None:
        self._tx.execute(_SWEEP, (now, SWEPT))

    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        row = self._tx.execute(f"{_ONE} FOR UPDATE", (space, kind, key)).fetchone()
        self._mark = None
        if row is None:
            return None
        document = _read(space, kind, row)
        self._mark, self._text = row[6], document.text
        return None if document.expires is not None and document.expires <= now else document

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        return (self._mark, self._text) == (entry.mark, entry.text)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        self._tx.execute(_LOCK_GROUP, (space, kind, group))
        return next_rank(max(self._tx.execute(_LAST_RANK, (space, kind, group)).fetchone()[0] or 0.0, 0.0))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        if document.expires is not None:
            document = document._replace(expires=float(document.expires))
        document = document._replace(rank=float(document.rank))
        mark = entry.mark if entry is not None else self._mark or 0
        self._tx.execute(_PUT, (space, kind, *document, mark, _crc(space, kind, document)))
        if entry is not None:
            values = (entry.words, _lexemes(entry.words), space, kind, entry.key, entry.words)
            self._tx.execute(_SET_WORDS, values)

    def remove(self, space: str, kind: str, key: str) -> None:
        self._tx.execute(f"DELETE FROM arc_documents WHERE {_OF_KIND} AND key = ?", (space, kind, key))

    def live_keys(self, space: str, kind: str, group: str | None, now: float) -> list[str]:
        of_group, values = ((), ()) if group is None else (("grp = ?",), (group,))
        rows = self._tx.execute(_select("key", _OF_KIND, _LIVE, *of_group), (space, kind, now, *values))
        return [key for (key,) in rows]

    def drop(self, space: str) -> None:
        self._tx.execute("DELETE FROM arc_documents WHERE space = ?", (space,))


def _delete(tx: PostgresTx, space: str, kind: str, key: str, now: float) -> bool:
    # The checksum is not verified, so that a damaged document can be deleted.
    return bool(tx.execute(_DELETE, (space, kind, key, now)).rowcount)


def _clear(tx: PostgresTx, space: str, kind: str, group: str | None, now: float) -> int:
    # A parameter of RETURNING comes after the parameters of WHERE.
    if group is None:
        return sum(live for (live,) in tx.execute(_CLEAR, (space, kind, now)))
    return sum(live for (live,) in tx.execute(_CLEAR_GROUP, (space, kind, group, now)))


def _get(view: PostgresConnection, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    """Return the existing documents with these keys, in their order."""
    found = {row[0]: _read(space, kind, row) for row in view.execute(_GET, (space, kind, [*keys], now))}
    return [found[key] for key in keys if key in found]


def _find(view: PostgresConnection, query: Query) -> list[Document]:
    given: list[tuple[str, Any]] = [("space = ?", query.space), ("kind = ?", query.kind), (_LIVE, query.now)]
    if query.group is not None:
        given.append(("grp = ?", query.group))
    if query.prefix:
        given.append(("starts_with(key, ?)", query.prefix))
    if query.low is not None:
        given.append(("rank >= ?", query.low))
    if query.high is not None:
        given.append(("rank < ?", query.high))
    down = " DESC" if query.descending else ""
    statement = _select(_COLUMNS, *(text for text, _ in given), end=f"ORDER BY rank{down}, key{down} LIMIT ? OFFSET ?")
    limits = (None if query.limit is None else min(query.limit, 2**62), min(query.offset or 0, 2**62))
    rows = view.execute(statement, (*(value for _, value in given), *limits))
    return [_read(query.space, query.kind, row) for row in rows]


def _words(view: PostgresConnection, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    """Return (key, rank, words) of each document with words."""
    return view.execute(_WORDS, (space, kind, now)).fetchall()


def _search(
    view: PostgresConnection, space: str, kind: str, words: Sequence[str], limit: int | None, now: float
) -> list[Document]:
    """Return the documents that contain all words; the last word also matches words that begin with it."""
    parts = [f"'{word}'" for word in dict.fromkeys(words[:-1])] + [f"'{words[-1]}':*"]
    found = view.execute(_SEARCH, (space, kind, now, " & ".join(parts))).fetchall()
    return _get(view, space, kind, best(words, found, limit), now)


def _kinds(view: PostgresConnection) -> list[tuple[str, str]]:
    """Return (space, kind) of all documents."""
    return view.execute("SELECT DISTINCT space, kind FROM arc_documents ORDER BY 1, 2").fetchall()


CONCERN = OperationSet(
    "documents",
    {**document_operations(PostgresDocumentTransaction), "documents.delete": _delete, "documents.clear": _clear},
    document_replays(PostgresDocumentTransaction),
    one_statement=frozenset({_get, _find, _words, _kinds}),
)


class PostgresDocuments(PostgresBackend, DocumentStore):
    """Document store in a PostgreSQL database, which all processes that reach it share."""

    operation_sets: ClassVar[OperationSets] = (CONCERN,)
    reads: ClassVar[Reads] = {"get": _get, "find": _find, "words": _words, "kinds": _kinds, "search": _search}

    async def search(self, space: str, kind: str, words: str, limit: int | None) -> list[Document]:
        wanted = words_of(words)
        if not wanted or any(len(word) > LONGEST_WORD for word in wanted):
            return await super().search(space, kind, words, limit)
        found: list[Document] = await self.read("search", space, kind, wanted, limit, self.clock.wall())
        return found
