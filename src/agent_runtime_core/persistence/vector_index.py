"""The vectors of one scope, held in memory to be searched."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .._core.threads import in_thread
from ..errors import InvalidArgument
from .vectors import ALIKE, NumpyRows, VectorRows, new_rows, unit

AT_ONCE = 200_000  # components that are searched on the event loop; more of them in a thread


class VectorGroup:
    """Vectors of one length and content type, with the keys and ages of their documents."""

    def __init__(self) -> None:
        self.rows: VectorRows = new_rows()
        self.keys: list[str] = []
        self.ages: list[float] = []

    def drop(self, number: int) -> str:
        """Take one out; the key of the one that has its number now."""
        self.rows.drop(number)
        self.keys[number], self.ages[number] = self.keys[-1], self.ages[-1]
        self.keys.pop()
        self.ages.pop()
        return self.keys[number] if number < len(self.keys) else ""

    async def nearest(self, vector: array[float], count: int) -> list[tuple[float, float, str]]:
        """(-cosine, age, key) of the nearest."""
        rows, keys, ages = self.rows.frozen(), self.keys, self.ages
        if isinstance(rows, NumpyRows) or len(rows) * len(vector) <= AT_ONCE:
            found = rows.nearest(vector, count)
        else:
            keys, ages = list(keys), list(ages)
            found = await in_thread(rows.nearest, vector, count)
        return [(-round(score / ALIKE) * ALIKE, ages[number], keys[number]) for score, number in found]


class VectorIndex:
    """Vectors by the keys of their documents."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[int, str], VectorGroup] = {}
        self._where: dict[str, tuple[VectorGroup, int]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def put(self, key: str, content_type: str, age: float, vector: array[float]) -> None:
        self.drop(key)
        shelf = self._shelves.setdefault((len(vector), content_type), VectorGroup())
        shelf.rows.append(unit(vector))
        shelf.keys.append(key)
        shelf.ages.append(age)
        self._where[key] = (shelf, len(shelf.keys) - 1)

    def put_all(self, items: Iterable[tuple[str, str, float, array[float]]]) -> None:
        for item in items:
            self.put(*item)

    def drop(self, key: str) -> None:
        if key in self._where:
            shelf, number = self._where.pop(key)
            if moved := shelf.drop(number):
                self._where[moved] = (shelf, number)

    async def search(self, vector: array[float], count: int, content_type: str | None) -> list[str]:
        """Keys of the nearest, the nearest first, of equally near ones the oldest.

        InvalidArgument: there are vectors, and none of that length.
        """
        shelves = {at: shelf for at, shelf in self._shelves.items() if shelf.keys}
        mine = [shelf for (length, _), shelf in shelves.items() if length == len(vector)]
        if shelves and not mine:
            lengths = ", ".join(str(length) for length in sorted({length for length, _ in shelves}))
            raise InvalidArgument(f"query_vector has {len(vector)} components, those stored here have {lengths}")
        if content_type is not None:
            mine = [shelves[at] for at in [(len(vector), content_type)] if at in shelves]
        found = [each for shelf in mine for each in await shelf.nearest(unit(vector), count)]
        return [key for _, _, key in sorted(found)[:count]]
