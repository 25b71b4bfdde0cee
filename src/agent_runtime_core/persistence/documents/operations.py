"""The operations on documents, decided once for all technologies whose transactions run in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..._engines.base import NotApplied
from .base import Document, DocumentMissing, Entry, VersionConflict, touched


class DocumentWrites(ABC):
    """What the operations on one document need. A method finds what the operations before it wrote."""

    def sweep(self, now: float) -> None:  # noqa: B027 - not all sweep in this place
        """Delete a few expired documents."""

    @abstractmethod
    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        """The document, unless it has expired."""

    @abstractmethod
    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        """Whether the document that is stored comes from this very write."""

    @abstractmethod
    def next_rank(self, space: str, kind: str, group: str) -> float:
        """The rank of a document that is appended to the group."""

    @abstractmethod
    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        """Write a document that `get` looked for. `entry` None: it keeps its words and its mark."""


class DocumentTransaction(DocumentWrites):
    """What all operations need."""

    @abstractmethod
    def remove(self, space: str, kind: str, key: str) -> None: ...

    @abstractmethod
    def live_keys(self, space: str, kind: str, group: str | None, now: float) -> list[str]:
        """The keys of a group's documents; None: of all groups."""

    @abstractmethod
    def drop(self, space: str) -> None:
        """Remove all documents of a space. Ranks are counted from 1 again."""


def put(
    tx: DocumentWrites, space: str, kind: str, entry: Entry, expect: int | None, now: float
) -> tuple[int, float]:  # fmt: skip
    tx.sweep(now)
    there = tx.get(space, kind, entry.key, now)
    version = 0 if there is None else there.version
    if expect is not None and expect != version:
        if there is not None and version == expect + 1 and tx.is_applied(space, kind, entry):
            return version, there.rank
        raise VersionConflict
    rank = entry.rank
    if rank is None:
        same_group = there is not None and there.group == entry.group
        rank = there.rank if there is not None and same_group else tx.next_rank(space, kind, entry.group)
    document = Document(entry.key, entry.text, version + 1, float(rank), entry.group, entry.expires)
    tx.store(space, kind, document, entry)
    return document.version, document.rank


def add(tx: DocumentWrites, space: str, kind: str, entry: Entry, now: float) -> float | None:
    if tx.get(space, kind, entry.key, now) is not None:
        return None
    return put(tx, space, kind, entry, 0, now)[1]


def touch(
    tx: DocumentWrites, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    there = tx.get(space, kind, key, now)
    if there is None:
        raise DocumentMissing
    moved = touched(there, rank, expires)
    if moved != there:
        tx.store(space, kind, moved)


def delete(tx: DocumentTransaction, space: str, kind: str, key: str, now: float) -> bool:
    there = tx.get(space, kind, key, now)
    if there is not None:
        tx.remove(space, kind, key)
    return there is not None


def clear(tx: DocumentTransaction, space: str, kind: str, group: str | None, now: float) -> int:
    keys = tx.live_keys(space, kind, group, now)
    for key in keys:
        tx.remove(space, kind, key)
    return len(keys)


def drop(tx: DocumentTransaction, space: str, now: float) -> None:
    tx.drop(space)


def put_before(
    tx: DocumentWrites, space: str, kind: str, entry: Entry, expect: int | None, now: float
) -> tuple[int, float]:  # fmt: skip
    there = tx.get(space, kind, entry.key, now)
    if there is None or not tx.is_applied(space, kind, entry) or (expect is not None and there.version != expect + 1):
        raise NotApplied
    return there.version, there.rank


def added_before(tx: DocumentWrites, space: str, kind: str, entry: Entry, now: float) -> float:
    return put_before(tx, space, kind, entry, None, now)[1]


def touched_before(
    tx: DocumentWrites, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:  # fmt: skip
    there = tx.get(space, kind, key, now)
    if there is None or touched(there, rank, expires) != there:
        raise NotApplied


def deleted_before(tx: DocumentWrites, space: str, kind: str, key: str, now: float) -> bool:
    if tx.get(space, kind, key, now) is not None:
        raise NotApplied
    return True


Operations = Mapping[str, Callable[..., Any]]

OPS: Final[Operations] = {
    "documents.put": put,
    "documents.add": add,
    "documents.touch": touch,
    "documents.delete": delete,
    "documents.clear": clear,
    "documents.drop": drop,
}
APPLIED: Final[Operations] = {
    "documents.put": put_before,
    "documents.add": added_before,
    "documents.touch": touched_before,
    "documents.delete": deleted_before,
}


def on(transaction: Callable[[Any], DocumentWrites], operations: Operations) -> dict[str, Callable[..., Any]]:
    """The operations for the transactions of an engine."""

    def adapted(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tx, *args: operation(transaction(tx), *args)

    return {name: adapted(operation) for name, operation in operations.items()}
