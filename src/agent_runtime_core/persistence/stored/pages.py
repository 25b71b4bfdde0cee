"""Documents of a kind in parts, none missed and none given twice while others write."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from ..documents.base import Document, Table

PAGE = 500


async def pages(
    table: Table, group: str | None = None, *, low: float | None = None, high: float | None = None,
    descending: bool = False, size: int = PAGE,
) -> AsyncIterator[list[Document]]:  # fmt: skip
    """Documents in order of rank, about `size` at a time.

    A part begins at the rank where the one before it ended, and not at a number: that would move with each write.
    """
    edge: set[str] = set()  # keys of the last rank that were given already
    while True:
        limit = size + len(edge)
        found = await table.find(group, low=low, high=high, descending=descending, limit=limit)
        if fresh := [each for each in found if each.key not in edge]:
            yield fresh
        if len(found) < limit:
            return
        rank = found[-1].rank
        edge = {each.key for each in found if each.rank == rank}
        low, high = (low, math.nextafter(rank, math.inf)) if descending else (rank, high)
