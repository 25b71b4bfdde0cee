"""An index in memory of the vectors of one scope."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .._core.threads import in_thread
from .._core.validation import Shown, must
from .vectors import ALIKE, NumpyRows, VectorRows, new_rows, unit

AT_ONCE = 200_000  # components that are searched on the event loop. A larger group is searched in a thread


class VectorGroup:
    """Vectors of one length and content type, with the keys and ranks of their documents."""

    def __init__(self) -> None:
        self.rows: VectorRows = new_rows()
        self.keys: list[str] = []
        self.ranks: list[float] = []

    def drop(self, index: int) -> str:
        """Remove a row. Return the key of the row that moved to its index, or an empty string."""
        self.rows.drop(index)
        self.keys[index], self.ranks[index] = self.keys[-1], self.ranks[-1]
        self.keys.pop()
        self.ranks.pop()
        return self.keys[index] if index < len(self.keys) else ""

    async def nearest(self, vector: array[float], count: int) -> list[tuple[float, float, str]]:
        """Return (-cosine, rank, key) of the nearest vectors."""
        rows, keys, ranks = self.rows.frozen(), self.keys, self.ranks
        if isinstance(rows, NumpyRows) or len(rows) * len(vector) <= AT_ONCE:
            found = rows.nearest(vector, count)
        else:
            keys, ranks = list(keys), list(ranks)
            found = await in_thread(rows.nearest, vector, count)
        return [(-round(score / ALIKE) * ALIKE, ranks[index], keys[index]) for score, index in found]


class VectorIndex:
    """Vectors by the keys of their documents, grouped by length and content type."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], VectorGroup] = {}
        self._positions: dict[str, tuple[VectorGroup, int]] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def put(self, key: str, content_type: str, rank: float, vector: array[float]) -> None:
        """Add a vector, or replace that of the same key."""
        self.drop(key)
        group = self._groups.setdefault((len(vector), content_type), VectorGroup())
        group.rows.append(unit(vector))
        group.keys.append(key)
        group.ranks.append(rank)
        self._positions[key] = (group, len(group.keys) - 1)

    def put_all(self, items: Iterable[tuple[str, str, float, array[float]]]) -> None:
        """Add vectors, each as (key, content type, rank, vector)."""
        for item in items:
            self.put(*item)

    def drop(self, key: str) -> None:
        """Remove the vector of a key, if there is one."""
        if key in self._positions:
            group, index = self._positions.pop(key)
            if moved := group.drop(index):
                self._positions[moved] = (group, index)

    async def search(self, vector: array[float], count: int, content_type: str | None) -> list[str]:
        """Return the keys of the nearest vectors, the nearest first. Of equally near vectors the oldest is first.

        Raises:
            InvalidArgument: The index has vectors, but none of that length.
        """
        groups = {name: group for name, group in self._groups.items() if group.keys}
        searched = [group for (length, _), group in groups.items() if length == len(vector)]
        if groups and not searched:
            lengths = ", ".join(str(length) for length in sorted({length for length, _ in groups}))
            raise must(
                "query_vector", f"have the length of the stored vectors ({lengths})", Shown(f"{len(vector)} components")
            )
        if content_type is not None:
            searched = [groups[name] for name in [(len(vector), content_type)] if name in groups]
        found = [each for group in searched for each in await group.nearest(unit(vector), count)]
        return [key for _, _, key in sorted(found)[:count]]
