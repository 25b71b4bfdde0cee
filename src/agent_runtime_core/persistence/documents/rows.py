"""Documents, as they are stored, returned and looked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Document(NamedTuple):
    """A stored document.

    Attributes:
        key: Unique within its kind.
        text: The content.
        version: 1 at first, plus one for each put.
        rank: The position in its kind.
        group: The group, or an empty string.
        expires: The time at which it expires, in seconds since the epoch. None: it does not expire.
    """

    key: str
    text: str
    version: int = 1
    rank: float = 0.0
    group: str = ""
    expires: float | None = None


class Entry(NamedTuple):
    """A document to store.

    Attributes:
        key: Unique within its kind.
        text: The content.
        group: The group, or an empty string.
        rank: The position in its kind. None keeps the rank of a stored document of the same group. A new document gets
            a rank after all others of its group, from 1.
        expires: The time at which it expires, in seconds since the epoch. None: it does not expire.
        words: The text that a full-text search matches. An empty string is never found.
        mark: A random id of this write, which `Collection` sets. It identifies a repeated write.
    """

    key: str
    text: str
    group: str = ""
    rank: float | None = None
    expires: float | None = None
    words: str = ""
    mark: int = 0


class Query(NamedTuple):
    """A query for documents of a kind.

    Attributes:
        space: The space.
        kind: The kind.
        now: The current time, in seconds since the epoch.
        group: Only documents of this group. None: of all.
        prefix: Only documents whose key begins with it.
        low: The smallest rank, inclusive.
        high: The greatest rank, exclusive.
        descending: Return the documents in descending order.
        offset: Skip this many documents.
        limit: Return at most this many documents. None: all.
    """

    space: str
    kind: str
    now: float
    group: str | None = None
    prefix: str = ""
    low: float | None = None
    high: float | None = None
    descending: bool = False
    offset: int = 0
    limit: int | None = None

    def listed(self, documents: Iterable[Document]) -> list[Document]:
        """Return those of `documents`, all of this space and kind, that the query finds, in its order.

        For a store without indexes.
        """
        found = sorted(filter(self.admits, documents), key=lambda each: (each.rank, each.key), reverse=self.descending)
        return found[self.offset :][: self.limit]

    def admits(self, document: Document) -> bool:
        """Return whether a document has not expired, and has the group, the prefix and a rank of the query."""
        return (
            (document.expires is None or document.expires > self.now)
            and (self.group is None or document.group == self.group)
            and document.key.startswith(self.prefix)
            and (self.low is None or document.rank >= self.low)
            and (self.high is None or document.rank < self.high)
        )
