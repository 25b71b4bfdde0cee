"""The operations on documents, for all backends whose transactions are executed in Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..._engines.base import NotApplied
from .base import Document, DocumentMissing, Entry, VersionConflict, touched


class DocumentTransaction(ABC):
    """One transaction of a document store, which `document_operations` uses to apply operations.

    A subclass looks documents up and stores them. A method sees the writes of earlier operations. The subclass gets the
    caller's transaction as its only argument.
    """

    def sweep(self, now: float) -> None:  # noqa: B027 - some backends sweep at another time
        """Delete a few expired documents.

        Args:
            now: The current time, in seconds since the epoch.
        """

    @abstractmethod
    def get(self, space: str, kind: str, key: str, now: float) -> Document | None:
        """Return a document, or None if it does not exist or is expired.

        Args:
            space: The space.
            kind: The kind.
            key: The key of the document.
            now: The current time, in seconds since the epoch.
        """

    @abstractmethod
    def is_applied(self, space: str, kind: str, entry: Entry) -> bool:
        """Return whether this write stored the present document.

        Args:
            space: The space.
            kind: The kind.
            entry: The document to store, with the mark of its write.
        """

    @abstractmethod
    def next_rank(self, space: str, kind: str, group: str) -> float:
        """Return the rank for a document that is appended to a group.

        Args:
            space: The space.
            kind: The kind.
            group: The group.
        """

    @abstractmethod
    def store(self, space: str, kind: str, document: Document, entry: Entry | None = None) -> None:
        """Write a document after a call of `get` for its key. With `entry` None it keeps its words and its mark.

        Args:
            space: The space.
            kind: The kind.
            document: The document.
            entry: Contains its words and its mark. None keeps the stored words and mark.
        """

    @abstractmethod
    def remove(self, space: str, kind: str, key: str) -> None:
        """Remove a document.

        Args:
            space: The space.
            kind: The kind.
            key: The key of the document.
        """

    @abstractmethod
    def live_keys(self, space: str, kind: str, group: str | None, now: float) -> list[str]:
        """Return the keys of the documents of a group, or of all groups, that have not expired.

        Args:
            space: The space.
            kind: The kind.
            group: The group. If None, all groups.
            now: The current time, in seconds since the epoch.
        """

    @abstractmethod
    def drop(self, space: str) -> None:
        """Remove all documents of a space. New ranks begin at 1 again.

        Args:
            space: The space.
        """


def put(
    tx: DocumentTransaction, space: str, kind: str, entry: Entry, expect: int | None, now: float
) -> tuple[int, float]:
    """Store a document, and return its version and rank."""
    tx.sweep(now)
    stored = tx.get(space, kind, entry.key, now)
    version = 0 if stored is None else stored.version
    if expect is not None and expect != version:
        if stored is not None and version == expect + 1 and tx.is_applied(space, kind, entry):
            return version, stored.rank
        raise VersionConflict
    rank = entry.rank
    if rank is None:
        same_group = stored is not None and stored.group == entry.group
        rank = stored.rank if stored is not None and same_group else tx.next_rank(space, kind, entry.group)
    document = Document(entry.key, entry.text, version + 1, float(rank), entry.group, entry.expires)
    tx.store(space, kind, document, entry)
    return document.version, document.rank


def add(tx: DocumentTransaction, space: str, kind: str, entry: Entry, now: float) -> float | None:
    """Store a new document, and return its rank. None if the key exists; then nothing changes."""
    if tx.get(space, kind, entry.key, now) is not None:
        return None
    return put(tx, space, kind, entry, 0, now)[1]


def touch(
    tx: DocumentTransaction, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:
    """Raise the rank of a document to at least `rank`, and extend its lifetime."""
    stored = tx.get(space, kind, key, now)
    if stored is None:
        raise DocumentMissing
    changed = touched(stored, rank, expires)
    if changed != stored:
        tx.store(space, kind, changed)


def rewrite(
    tx: DocumentTransaction, space: str, kind: str, key: str, old: str, new: str, keeps_words: bool, now: float
) -> bool:
    """Replace a text by the same text in another encoding, and return whether the old text is stored.

    The document keeps everything else, including its version, so that no writer has a conflict. Without `keeps_words`
    the words for the search are deleted.
    """
    stored = tx.get(space, kind, key, now)
    if stored is None or stored.text != old:
        return False
    document = stored._replace(text=new)
    tx.store(space, kind, document, None if keeps_words else Entry(key, new, stored.group, expires=stored.expires))
    return True


def copy(tx: DocumentTransaction, space: str, kind: str, document: Document, words: str, now: float) -> None:
    """Store a document of another store with its version and its rank, unless it is stored."""
    if tx.get(space, kind, document.key, now) != document:
        tx.store(space, kind, document, Entry(document.key, document.text, words=words))


def delete(tx: DocumentTransaction, space: str, kind: str, key: str, now: float) -> bool:
    """Delete a document, and return whether it existed."""
    stored = tx.get(space, kind, key, now)
    if stored is not None:
        tx.remove(space, kind, key)
    return stored is not None


def clear(tx: DocumentTransaction, space: str, kind: str, group: str | None, now: float) -> int:
    """Delete the documents of a group, or of all groups, and return how many there were."""
    keys = tx.live_keys(space, kind, group, now)
    for key in keys:
        tx.remove(space, kind, key)
    return len(keys)


def drop(tx: DocumentTransaction, space: str, now: float) -> None:
    """Delete all documents of a space."""
    tx.drop(space)


# -- replays: the results of operations that an earlier attempt of the same commit applied


def put_replay(
    tx: DocumentTransaction, space: str, kind: str, entry: Entry, expect: int | None, now: float
) -> tuple[int, float]:
    stored = tx.get(space, kind, entry.key, now)
    if stored is None or not tx.is_applied(space, kind, entry) or (expect is not None and stored.version != expect + 1):
        raise NotApplied
    return stored.version, stored.rank


def add_replay(tx: DocumentTransaction, space: str, kind: str, entry: Entry, now: float) -> float:
    return put_replay(tx, space, kind, entry, None, now)[1]


def touch_replay(
    tx: DocumentTransaction, space: str, kind: str, key: str, rank: float, expires: float | None, now: float
) -> None:
    stored = tx.get(space, kind, key, now)
    if stored is None or touched(stored, rank, expires) != stored:
        raise NotApplied


def delete_replay(tx: DocumentTransaction, space: str, kind: str, key: str, now: float) -> bool:
    if tx.get(space, kind, key, now) is not None:
        raise NotApplied
    return True


Operations = Mapping[str, Callable[..., Any]]

OPS: Final[Operations] = {
    "documents.put": put,
    "documents.add": add,
    "documents.touch": touch,
    "documents.rewrite": rewrite,
    "documents.copy": copy,
    "documents.delete": delete,
    "documents.clear": clear,
    "documents.drop": drop,
}
APPLIED: Final[Operations] = {
    "documents.put": put_replay,
    "documents.add": add_replay,
    "documents.touch": touch_replay,
    "documents.delete": delete_replay,
}


def on(transaction: Callable[[Any], Any], operations: Operations) -> dict[str, Callable[..., Any]]:
    """Return the operations for the transactions of an engine. `transaction` wraps a transaction."""

    def adapted(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tx, *args: operation(transaction(tx), *args)

    return {name: adapted(operation) for name, operation in operations.items()}


def document_operations(transaction: Callable[[Any], DocumentTransaction]) -> dict[str, Callable[..., Any]]:
    """Return the functions of `documents.put`, `documents.add` and the others, by name.

    The first argument of each is your transaction, and the rest are the arguments of the operation.

    Args:
        transaction: A subclass of DocumentTransaction. It is called with your transaction.

    Returns:
        A dict by the name of the operation.
    """
    return on(transaction, OPS)


def document_replays(transaction: Callable[[Any], DocumentTransaction]) -> dict[str, Callable[..., Any]]:
    """Return functions that return the result of an operation that was applied before, by name.

    Use them for a commit whose guard does not match. They raise `NotApplied` if the operation was not applied. An
    operation without a function counts as not applied.

    Args:
        transaction: A subclass of DocumentTransaction. It is called with your transaction.

    Returns:
        A dict by the name of the operation.
    """
    return on(transaction, APPLIED)
