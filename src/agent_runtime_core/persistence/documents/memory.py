"""Documents in this process, gone when it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..._engines.backed import OnMemory
from ..._engines.base import Concern, NotApplied
from ..._engines.memory import MemoryTx
from .base import Absent, Changed, Document, DocumentStore, Entry, Query, behind, touched

Kind = tuple[str, str]

SWEPT = 2  # documents with an end that a write looks at


def _live(tx: MemoryTx, at: Kind, now: float) -> dict[str, Document]:
    there: dict[str, Document] = tx.tables["documents"].get(at, {})
    return {key: each for key, each in there.items() if each.expires is None or each.expires > now}


def _one(tx: MemoryTx, at: Kind, key: str, now: float) -> Document | None:
    each: Document | None = tx.tables["documents"].get(at, {}).get(key)
    return None if each is None or (each.expires is not None and each.expires <= now) else each


def _sweep(tx: MemoryTx, now: float) -> None:
    """Take away the expired among a few of those with an end, each write the next few in turn."""
    ends = tx.tables["document_ends"]
    for where in list(itertools.islice(ends, SWEPT)):
        space, kind, key = where
        end = ends[where]
        tx.drop(ends, where)
        if end > now:
            tx.put(ends, where, end)
        else:
            _take(tx, (space, kind), key)


def _take(tx: MemoryTx, at: Kind, key: str) -> None:
    tx.drop(tx.tables["documents"][at], key)
    tx.drop(tx.tables["document_notes"][at], key)
    tx.drop(tx.tables["document_ends"], (*at, key))


def _keep(tx: MemoryTx, at: Kind, document: Document) -> None:
    tables = tx.tables["documents"]
    if at not in tables:
        tx.put(tables, at, {})
    tx.put(tables[at], document.key, document)
    if document.expires is not None:
        tx.put(tx.tables["document_ends"], (*at, document.key), document.expires)
    else:
        tx.drop(tx.tables["document_ends"], (*at, document.key))
    if document.rank > tx.tables["document_ranks"].get((*at, document.group), 0.0):
        tx.put(tx.tables["document_ranks"], (*at, document.group), document.rank)
    _stamp(tx, at)


def _stamp(tx: MemoryTx, at: Kind) -> None:
    stamps = tx.tables["document_stamps"]
    last = stamps.get(None, 0) + 1  # counted together, so that none is ever seen again
    tx.put(stamps, None, last)
    tx.put(stamps, at, last)


def _behind(tx: MemoryTx, at: Kind, group: str) -> float:
    last: float = tx.tables["document_ranks"].get((*at, group), 0.0)
    return behind(last)


def _landed(tx: MemoryTx, at: Kind, there: Document, entry: Entry) -> bool:
    mark: int = tx.tables["document_notes"][at][entry.key][1]
    return there.text == entry.text and mark == entry.mark


def put(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    at = (space, kind)
    _sweep(tx, now)
    there = _one(tx, at, entry.key, now)
    version = 0 if there is None else there.version
    if expect is not None and expect != version:
        if there is not None and version == expect + 1 and _landed(tx, at, there, entry):
            return version, there.rank
        raise Changed
    rank = entry.rank
    if rank is None:
        rank = there.rank if there is not None and there.group == entry.group else _behind(tx, at, entry.group)
    rank = float(rank)
    _keep(tx, at, Document(entry.key, entry.text, version + 1, rank, entry.group, entry.expires))
    tx.put(tx.tables["document_notes"].setdefault(at, {}), entry.key, (entry.words, entry.mark))
    return version + 1, rank


def add(tx: MemoryTx, space: str, kind: str, entry: Entry, now: float) -> float | None:
    if _one(tx, (space, kind), entry.key, now) is not None:
        return None
    return put(tx, space, kind, entry, 0, now)[1]


def touch(
    tx: MemoryTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    there = _one(tx, (space, kind), key, now)
    if there is None:
        raise Absent
    moved = touched(there, rank, expires)
    if moved != there:
        _keep(tx, (space, kind), moved)


def delete(tx: MemoryTx, space: str, kind: str, key: str, now: float) -> bool:
    at = (space, kind)
    there = _one(tx, at, key, now)
    if there is not None:
        _take(tx, at, key)
        _stamp(tx, at)
    return there is not None


def clear(tx: MemoryTx, space: str, kind: str, group: str | None, now: float) -> int:
    gone = [each.key for each in _live(tx, (space, kind), now).values() if group is None or each.group == group]
    for key in gone:
        delete(tx, space, kind, key, now)
    return len(gone)


def drop(tx: MemoryTx, space: str, now: float) -> None:
    for at in [at for at in tx.tables["documents"] if at[0] == space]:
        for key in list(tx.tables["documents"][at]):
            _take(tx, at, key)
        for table in ("documents", "document_notes", "document_stamps"):
            tx.drop(tx.tables[table], at)
    for group in [group for group in tx.tables["document_ranks"] if group[0] == space]:
        tx.drop(tx.tables["document_ranks"], group)


def was_put(tx: MemoryTx, space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[int, float]:
    at = (space, kind)
    there = _one(tx, at, entry.key, now)
    if there is None or not _landed(tx, at, there, entry) or (expect is not None and there.version != expect + 1):
        raise NotApplied
    return there.version, there.rank


def was_added(tx: MemoryTx, space: str, kind: str, entry: Entry, now: float) -> float:
    return was_put(tx, space, kind, entry, None, now)[1]


def was_touched(
    tx: MemoryTx, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    there = _one(tx, (space, kind), key, now)
    if there is None or touched(there, rank, expires) != there:
        raise NotApplied


def was_deleted(tx: MemoryTx, space: str, kind: str, key: str, now: float) -> bool:
    if _one(tx, (space, kind), key, now) is not None:
        raise NotApplied
    return True


def _get(tx: MemoryTx, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    found = (_one(tx, (space, kind), key, now) for key in keys)
    return [each for each in found if each is not None]


def _find(tx: MemoryTx, query: Query) -> list[Document]:
    found = [
        each
        for each in _live(tx, (query.space, query.kind), query.now).values()
        if (query.group is None or each.group == query.group)
        and each.key.startswith(query.prefix)
        and (query.low is None or each.rank >= query.low)
        and (query.high is None or each.rank < query.high)
    ]
    found.sort(key=lambda each: (each.rank, each.key), reverse=query.descending)
    return found[query.offset :][: query.limit]


def _words(tx: MemoryTx, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    notes = tx.tables["document_notes"].get((space, kind), {})
    there = _live(tx, (space, kind), now)
    return [(key, each.rank, notes[key][0]) for key, each in there.items() if notes[key][0]]


def _stamped(tx: MemoryTx, space: str, kind: str) -> str:
    return str(tx.tables["document_stamps"].get((space, kind), 0))


CONCERN = Concern(
    "documents",
    {
        "documents.put": put,
        "documents.add": add,
        "documents.touch": touch,
        "documents.delete": delete,
        "documents.clear": clear,
        "documents.drop": drop,
    },
    {
        "documents.put": was_put,
        "documents.add": was_added,
        "documents.touch": was_touched,
        "documents.delete": was_deleted,
    },
    tables=("documents", "document_notes", "document_ends", "document_ranks", "document_stamps"),
)


class MemoryDocuments(OnMemory, DocumentStore):
    """Documents in this process, gone when it ends."""

    concerns: ClassVar[Sequence[Concern]] = (CONCERN,)
    reads: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "get": _get,
        "find": _find,
        "stamp": _stamped,
        "words": _words,
    }
