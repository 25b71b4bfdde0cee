"""Documents in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..._engines.backed import OnSQLite
from ..._engines.base import Concern, NotApplied, Op, always
from ..._engines.sqlite_tx import SQLiteTx
from ..documents import sqlite_reads, sqlite_words
from .base import Absent, Changed, Document, DocumentStore, Entry, behind, touched
from .sqlite_rows import (
    MIGRATIONS,
    ONE,
    Row,
    forget,
    insert,
    is_over,
    known_place,
    last_rank,
    live,
    made_place,
    remove,
    stamp,
    stored,
    sweep,
    update,
)
from .words import words_of

INDEX_TRIES = 4  # a program whose SQLite has no FTS5 may be writing all the time
LONG = 100_000  # characters of a text that take more than a moment

_OF_GROUP = "SELECT id FROM arc_documents WHERE kind = ? AND grp = ?"
_LIVE = "(expires IS NULL OR expires > ?)"
_COUNT = "SELECT count(*) FROM arc_documents WHERE kind = ? AND " + _LIVE


def _landed(row: Row, entry: Entry) -> bool:
    return row.mark == entry.mark and row.document.text == entry.text


def put(tx: SQLiteTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    sweep(tx, now)
    place = made_place(tx, space, kind)
    row = stored(tx, place, entry.key)
    there = None if row is None or is_over(row.document, now) else row.document
    version = 0 if there is None else there.version
    if expect is not None and expect != version:
        if row is not None and version == expect + 1 and _landed(row, entry):
            return version, row.document.rank
        raise Changed
    rank = entry.rank
    if rank is None and there is not None and there.group == entry.group:
        rank = there.rank
    if rank is None:
        rank = behind(max(last_rank(tx, place, entry.group) or 0.0, 0.0))
    expires = None if entry.expires is None else float(entry.expires)
    document = Document(entry.key, entry.text, version + 1, float(rank), entry.group, expires)
    if row is None:
        id_ = insert(tx, place, document, entry.mark)
    else:
        id_ = row.id
        update(tx, row, document, entry.mark)
    if row is not None or entry.words:
        sqlite_words.keep(tx, id_, place, entry.words)
    return document.version, document.rank


def add(tx: SQLiteTx, space: str, kind: str, entry: Entry, now: float) -> float | None:
    if live(tx, known_place(tx, space, kind), entry.key, now) is not None:
        return None
    return put(tx, space, kind, entry, 0, now)[1]


def touch(
    tx: SQLiteTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    row = live(tx, known_place(tx, space, kind), key, now)
    if row is None:
        raise Absent
    moved = touched(row.document, rank, expires)
    if moved != row.document:
        update(tx, row, moved, row.mark)


def delete(tx: SQLiteTx, space: str, kind: str, key: str, now: float) -> bool:
    place = known_place(tx, space, kind)
    row = None if place is None else tx.execute(ONE, (place, key)).fetchone()
    # Also one that cannot be read any more: there has to be a way to be rid of it.
    if place is None or row is None or (row[7] is not None and row[7] <= now):
        return False
    remove(tx, row[0])
    stamp(tx, place)
    return True


def clear(tx: SQLiteTx, space: str, kind: str, group: str | None, now: float) -> int:
    place = known_place(tx, space, kind)
    if place is None:
        return 0
    if group is None:
        count = tx.execute(_COUNT, (place, now)).fetchone()[0]
        sqlite_words.clear(tx, place)
        tx.execute("DELETE FROM arc_documents WHERE kind = ?", (place,))
    else:
        count = tx.execute(_COUNT + " AND grp = ?", (place, now, group)).fetchone()[0]
        for (id_,) in tx.execute(_OF_GROUP, (place, group)).fetchall():
            remove(tx, id_)
    if count:
        stamp(tx, place)
    return int(count)


def drop(tx: SQLiteTx, space: str, now: float) -> None:
    for place, kind in tx.execute("SELECT id, kind FROM arc_document_kinds WHERE space = ?", (space,)).fetchall():
        clear(tx, space, kind, None, now)
        forget(tx, place)


# -- what landed before


def was_put(tx: SQLiteTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    row = live(tx, known_place(tx, space, kind), entry.key, now)
    if row is None or not _landed(row, entry) or (expect is not None and row.document.version != expect + 1):
        raise NotApplied
    return row.document.version, row.document.rank


def was_added(tx: SQLiteTx, space: str, kind: str, entry: Entry, now: float) -> float:
    return was_put(tx, space, kind, entry, None, now)[1]


def was_touched(
    tx: SQLiteTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    row = live(tx, known_place(tx, space, kind), key, now)
    if row is None or touched(row.document, rank, expires) != row.document:
        raise NotApplied


def was_deleted(tx: SQLiteTx, space: str, kind: str, key: str, now: float) -> bool:
    if live(tx, known_place(tx, space, kind), key, now) is not None:
        raise NotApplied
    return True


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
        "get": sqlite_reads.get,
        "find": sqlite_reads.find,
        "stamp": sqlite_reads.stamped,
        "words": sqlite_reads.words_of_kind,
        "search": sqlite_reads.search,
    }

    async def search(self, space: str, kind: str, words: str, limit: int | None) -> list[Document]:
        wanted = words_of(words)
        if not wanted or not sqlite_words.has_index():
            return await super().search(space, kind, words, limit)
        for _ in range(INDEX_TRIES):
            try:
                now = self.clock.wall()
                found: list[Document] | None = await self.read("search", space, kind, wanted, limit, now)
            except sqlite_reads.IndexDamaged:
                await self.commit(None, [Op(sqlite_words.INDEX, (True,))])
                continue
            if found is not None:
                return found
            while not (await self.commit(None, [Op(sqlite_words.INDEX, (False,))]))[0]:
                pass
        return await super().search(space, kind, words, limit)
