"""Document store in the memory of this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

from ..._engines.backend import MemoryBackend, OperationSets, Reads
from ..._engines.base import OperationSet
from ..._engines.memory import MemoryTx
from .base import Document, DocumentStore, Entry, Query, next_rank
from .operations import APPLIED, OPS, DocumentTransaction, on

Kind = tuple[str, str]

SWEPT = 2  # expiring documents that a write checks


def _live(tx: MemoryTx, kind_key: Kind, now: float) -> dict[str, Document]:
    stored: dict[str, Document] = tx.tables["documents"].get(kind_key, {})
    return {key: each for key, each in stored.items() if each.expires is None or each.expires > now}


def _one(tx: MemoryTx, kind_key: Kind, key: str, now: float) -> Document | None:
    each: Document | None = tx.tables["documents"].get(kind_key, {}).get(key)
    return None if each is None or (each.expires is not None and each.expires <= now) else each


class MemoryTransaction(DocumentTransaction):
    """The documents in a transaction of a memory engine."""

    def __init__(self, tx: MemoryTx) -> None:
        self._tx = tx

    def sweep(self, now: float) -> None:
        """Check the next few expiring documents, and delete those that have expired."""
        ends = self._tx.tables["document_ends"]
        for position in list(itertools.islice(ends, SWEPT)):
            expires = ends[position]
            self._tx.drop(ends, position)
            if expires > now:
                self._tx.put(ends, position, expires)
            else:
                self.remove(*position)

    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        return _one(self._tx, (space, kind), key, now)

    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        stored = self._tx.tables["documents"][space, kind][entry.key]
        _, mark = self._tx.tables["document_notes"][space, kind][entry.key]
        return (stored.text, mark) == (entry.text, entry.mark)

    def next_rank(self, space: str, kind: str, group: str) -> float:
        return next_rank(self._tx.tables["document_ranks"].get((space, kind, group), 0.0))

    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        tx, kind_key, ranks = self._tx, (space, kind), self._tx.tables["document_ranks"]
        self._put("documents", kind_key, document.key, document)
        if entry is not None:
            self._put("document_notes", kind_key, entry.key, (entry.words, entry.mark))
        if document.expires is not None:
            tx.put(tx.tables["document_ends"], (*kind_key, document.key), document.expires)
        else:
            tx.drop(tx.tables["document_ends"], (*kind_key, document.key))
        if document.rank > ranks.get((*kind_key, document.group), 0.0):
            tx.put(ranks, (*kind_key, document.group), document.rank)

    def _put(self, table: str, kind_key: Kind, key: str, value: Any) -> None:
        self._tx.put(self._tx.dict_in(self._tx.tables[table], kind_key), key, value)

    def remove(self, space: str, kind: str, key: str) -> None:
        tx = self._tx
        tx.drop(tx.tables["documents"][space, kind], key)
        tx.drop(tx.tables["document_notes"][space, kind], key)
        tx.drop(tx.tables["document_ends"], (space, kind, key))

    def live_keys(self, space: str, kind: str, group: str | None, now: float) -> list[str]:
        stored = _live(self._tx, (space, kind), now).values()
        return [each.key for each in stored if group is None or each.group == group]

    def drop(self, space: str) -> None:
        for name in ("documents", "document_notes", "document_ends", "document_ranks"):
            table = self._tx.tables[name]
            for position in [position for position in table if position[0] == space]:
                self._tx.drop(table, position)


def _get(tx: MemoryTx, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    found = (_one(tx, (space, kind), key, now) for key in keys)
    return [each for each in found if each is not None]


def _find(tx: MemoryTx, query: Query) -> list[Document]:
    return query.listed(_live(tx, (query.space, query.kind), query.now).values())


def _words(tx: MemoryTx, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    notes = tx.tables["document_notes"].get((space, kind), {})
    stored = _live(tx, (space, kind), now)
    return [(key, each.rank, notes[key][0]) for key, each in stored.items() if notes[key][0]]


def _kinds(tx: MemoryTx) -> list[Kind]:
    return [*tx.tables["documents"]]


CONCERN = OperationSet(
    "documents",
    on(MemoryTransaction, OPS),
    on(MemoryTransaction, APPLIED),
    tables=("documents", "document_notes", "document_ends", "document_ranks"),
)


class MemoryDocuments(MemoryBackend, DocumentStore):
    """Document store in the memory of this process. The documents are lost when the process ends."""

    operation_sets: ClassVar[OperationSets] = (CONCERN,)
    reads: ClassVar[Reads] = {"get": _get, "find": _find, "words": _words, "kinds": _kinds}
