"""Which documents of a kind were changed, so that who keeps an index of them reads only those again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, cast

from ..._engines.base import Op
from ..documents.base import Document, Entry, Table
from ..models import new_id
from .pages import pages

KEPT = 500  # notes that are kept: who is further behind reads everything again
PART = 1000  # keys in one note


class Mark(NamedTuple):
    """The last note that was read."""

    rank: float
    key: str


class Feed:
    """Notes about a table's documents, written with each change of them, as the last operations of its commit.

    They are documents of the kind `<kind>_change` of ranks that the store counts, deleted as new ones come.
    """

    def __init__(self, table: Table) -> None:
        self._notes = replace(table, kind=f"{table.kind}_change")
        self._mine: set[float] = set()  # ranks of notes about what is known here already

    def note(self, keys: Iterable[str]) -> list[Op]:
        """To be written behind the changes of those documents."""
        all_ = list(keys)
        parts = [all_[start : start + PART] for start in range(0, len(all_), PART)]
        return [self._notes.add(Entry(new_id().hex, json.dumps(part))) for part in parts]

    def known(self, ranks: Iterable[float], mark: Mark | None) -> None:
        """These answers to `note` are of changes that need not be read."""
        self._mine.update(rank for rank in ranks if mark is not None and rank > mark.rank)

    async def trim(self, ranks: Iterable[float]) -> None:
        """Delete old notes where one of these answers to `note` is a round number."""
        for rank in ranks:
            if rank % KEPT == 0 and rank > KEPT:
                async for page in pages(self._notes, high=rank - KEPT):
                    await self._notes.write(*(self._notes.delete(each.key) for each in page))

    async def last(self) -> Mark | None:
        """For whoever reads everything: what was known is forgotten, as its ranks may be counted anew."""
        self._mine.clear()
        found = await self._notes.find(descending=True, limit=1)
        return _mark(found[0]) if found else None

    async def since(self, mark: Mark | None) -> tuple[set[str], Mark | None] | None:
        """The keys changed since then, and the last note now; None where that cannot be told any more."""
        if mark is None:
            return None if await self._notes.find(limit=1) else (set(), None)
        found = await self._notes.find(low=mark.rank)
        if not found or _mark(found[0]) != mark:
            return None
        new = [each for each in found[1:] if each.rank not in self._mine]
        self._mine = {rank for rank in self._mine if rank > found[-1].rank}
        return {key for each in new for key in cast("list[str]", json.loads(each.text))}, _mark(found[-1])


def _mark(document: Document) -> Mark:
    return Mark(document.rank, document.key)
