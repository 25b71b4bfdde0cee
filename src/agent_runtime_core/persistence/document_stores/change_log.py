"""A log of changed documents, so that an index in memory reads only those again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from ..._engines.base import Op
from ..documents.base import Collection, Document, Entry
from ..models import new_id

KEPT = 500  # entries that are kept. A reader that has not read for longer loads all documents again
PART = 1000  # keys in one entry, and documents in one page of a load


class LogCursor(NamedTuple):
    """The last entry that was read."""

    rank: float
    key: str


class ChangeLog:
    """Entries with the keys of changed documents. An entry is written in the same commit as its change.

    Entries are documents of the kind `<kind>_change`. The store assigns their ranks. Old entries are deleted as new
    ones are written.
    """

    def __init__(self, table: Collection) -> None:
        self._entries = replace(table, kind=f"{table.kind}_change")

    def note(self, keys: Iterable[str]) -> list[Op]:
        """Return operations that log the change of documents. They must be the last operations of the same commit."""
        changed = list(keys)
        parts = [changed[start : start + PART] for start in range(0, len(changed), PART)]
        return [self._entries.add(Entry(new_id().hex, json.dumps(part))) for part in parts]

    async def trim(self, ranks: Iterable[float]) -> None:
        """Delete old entries at every `KEPT`-th entry. `ranks` are the results of the operations of `note`."""
        for rank in ranks:
            if rank % KEPT == 0 and rank > KEPT:
                async for page in self._entries.pages(high=rank - KEPT):
                    await self._entries.write(*(self._entries.delete(each.key) for each in page))

    async def last(self) -> LogCursor | None:
        """Return the last entry, or None if there is none."""
        found = await self._entries.find(descending=True, limit=1)
        return _cursor(found[0]) if found else None

    async def since(self, cursor: LogCursor | None) -> tuple[set[str], LogCursor | None] | None:
        """Return the keys that changed after `cursor`, and the last entry. None: those entries were deleted."""
        if cursor is None:
            return None if await self._entries.find(limit=1) else (set(), None)
        found = await self._entries.find(low=cursor.rank)
        if not found or _cursor(found[0]) != cursor:
            return None
        keys = {key for each in found[1:] for key in cast("list[str]", json.loads(each.text))}
        return keys, _cursor(found[-1])


def _cursor(document: Document) -> LogCursor:
    return LogCursor(document.rank, document.key)


class DocumentIndex(Protocol):
    """An index in memory of documents."""

    async def load(self, documents: Sequence[Document]) -> None:
        """Add documents to a new index that no other task uses yet."""

    async def add(self, documents: Sequence[Document]) -> None:
        """Add documents, or replace those with the same keys."""

    def drop(self, key: str) -> None: ...


I = TypeVar("I", bound=DocumentIndex)  # noqa: E741 - an index


class TrackedIndex(Generic[I]):
    """An index in memory of all documents of a table. It is loaded once, then updated from the change log."""

    def __init__(self, table: Collection, log: ChangeLog, new: Callable[[], I]) -> None:
        self._table, self._log, self._new = table, log, new
        self.index: I | None = None
        self._cursor: LogCursor | None = None

    async def current(self) -> I:
        """Return the index with all changes that were committed before this call."""
        index = self.index
        changes = None if index is None else await self._log.since(self._cursor)
        if index is None or changes is None:
            cursor, index = await self._log.last(), self._new()
            async for page in self._table.pages(size=PART):
                await index.load(page)
            self.index, self._cursor = index, cursor
            return index
        keys, cursor = changes
        await self.read(index, keys)
        if index is self.index:
            self._cursor = cursor
        return index

    async def read(self, index: I, keys: set[str]) -> None:
        """Read documents again, and update the index."""
        found = await self._table.many(sorted(keys))
        for key in keys - {each.key for each in found}:
            index.drop(key)
        await index.add(found)
