"""Exact cosine search over vectors in memory, with NumPy if it is installed, else with the standard library."""

from __future__ import annotations

import heapq
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from .._core.lazy_import import load
from .._core.threads import in_thread
from .._core.validation import Shown, must
from ..errors import MissingDependency, brief

_sumprod = getattr(math, "sumprod", None)
_MAX_STEP = 127
_STEP_VALUES = [
    float(step) for step in (*range(_MAX_STEP + 1), *range(-_MAX_STEP, 0))
]  # indexed by the step; negative steps count from the end
ALIKE = 1e-12  # cosines with a smaller difference are equal except for rounding


def floats(vector: Iterable[float], what: str) -> array[float]:
    """Return a vector as doubles.

    Raises:
        InvalidArgument: It is empty, contains only zeros, or contains a component that is not a finite number.
    """
    try:
        values = array("d", vector)
    except (TypeError, OverflowError) as error:
        raise must(what, "be a sequence of numbers", Shown(f"{brief(vector)}: {error}")) from error
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise must(f"every component of {what}", "be a finite number", Shown(f"{value} at index {index}"))
    if not any(values):
        got = f"{len(values)} zeros" if values else "an empty sequence"
        raise must(what, "have a component other than 0", Shown(got))
    return values


def unit(vector: array[float]) -> array[float]:
    """Return the vector of length 1 in the same direction."""
    largest = max(max(vector), -min(vector))
    scaled = [value / largest for value in vector]  # the length of the vector itself may overflow or underflow
    length = math.hypot(*scaled)
    return array("d", [value / length for value in scaled])


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors of length 1."""
    total = _sumprod(one, other) if _sumprod is not None else math.fsum(map(operator.mul, one, other))
    return min(1.0, max(-1.0, total))


class VectorRows(Protocol):
    """Vectors of length 1, indexed from 0."""

    def __len__(self) -> int: ...

    def append(self, vector: array[float]) -> None:
        """Add a row."""

    def drop(self, index: int) -> None:
        """Remove a row. The last row moves to its index."""

    def frozen(self) -> VectorRows:
        """Return a copy that another thread can search while rows are added and removed here."""

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        """Return (cosine, index) of the `count` nearest rows, and of all rows that are as near as the last of them.

        They are not sorted.
        """


class PlainRows:
    """Rows as arrays of doubles, without any library."""

    def __init__(self, rows: Sequence[array[float]] = ()) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, vector: array[float]) -> None:
        self._rows.append(vector)

    def drop(self, index: int) -> None:
        self._rows[index] = self._rows[-1]
        self._rows.pop()

    def frozen(self) -> VectorRows:
        return PlainRows(self._rows)

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        other = vector.tolist()
        return _nearest(enumerate(sum(map(operator.mul, row, other)) for row in self._rows), count)


class QuantizedRows(PlainRows):
    """Rows as arrays of doubles, and as quantized rows for a faster first pass.

    A quantized row is a scale times a tuple of 255 possible steps. All rows share the float objects of these steps.
    math.sumprod needs less than half the time for such a tuple as for an array, which creates each float. `error` is
    the length of the difference between a row and its quantized row. By the Cauchy-Schwarz inequality, the product with
    a vector of length 1 is inexact by at most `error`. Rows that this cannot exclude are compared by their doubles.
    """

    def __init__(
        self, rows: Sequence[array[float]] = (), coarse: Sequence[tuple[float, ...]] = (),
        scales: Sequence[float] = (), errors: Sequence[float] = (),
    ) -> None:  # fmt: skip
        super().__init__(rows)
        self._quantized = list(coarse)
        self._scales, self._errors = array("d", scales), array("d", errors)

    def append(self, vector: array[float]) -> None:
        scale = max(max(vector), -min(vector)) / _MAX_STEP
        steps = tuple([_STEP_VALUES[round(value / scale)] for value in vector])
        self._quantized.append(steps)
        self._scales.append(scale)
        self._errors.append(math.dist(vector, [step * scale for step in steps]) + ALIKE)
        super().append(vector)

    def drop(self, index: int) -> None:
        super().drop(index)
        self._quantized[index], self._scales[index], self._errors[index] = (
            self._quantized[-1],
            self._scales[-1],
            self._errors[-1],
        )
        for column in (self._quantized, self._scales, self._errors):
            column.pop()

    def frozen(self) -> VectorRows:
        return QuantizedRows(self._rows, self._quantized, self._scales, self._errors)

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        assert _sumprod is not None
        other = tuple(vector)
        estimates = list(map(operator.mul, [_sumprod(row, other) for row in self._quantized], self._scales))
        worst = -math.inf
        if count < len(estimates):
            worst = heapq.nlargest(count, map(operator.sub, estimates, self._errors))[-1] - ALIKE
        upper_bounds = map(operator.add, estimates, self._errors)
        candidates = [index for index, each in enumerate(upper_bounds) if each >= worst]
        return _nearest(((index, _sumprod(self._rows[index], other)) for index in candidates), count)


class NumpyRows:
    """Rows of a NumPy matrix that grows by doubling."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self._matrix: Any = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, vector: array[float]) -> None:
        if self._matrix is None:
            self._matrix = self._numpy.empty((8, len(vector)))
        if self._count == len(self._matrix):
            larger = self._numpy.empty((2 * self._count, len(vector)))
            larger[: self._count] = self._matrix
            self._matrix = larger
        self._matrix[self._count] = self._numpy.frombuffer(vector)
        self._count += 1

    def drop(self, index: int) -> None:
        self._count -= 1
        self._matrix[index] = self._matrix[self._count]

    def frozen(self) -> VectorRows:
        return self  # the search is fast enough for the event loop, so no thread reads it

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        scores = self._matrix[: self._count] @ self._numpy.frombuffer(vector)
        worst = -math.inf
        if count < self._count:
            worst = float(self._numpy.partition(scores, self._count - count)[self._count - count]) - ALIKE
        found = self._numpy.flatnonzero(scores >= worst)
        return list(zip(scores[found].tolist(), found.tolist(), strict=True))


def _nearest(scores: Iterable[tuple[int, float]], count: int) -> list[tuple[float, int]]:
    known = [(score, index) for index, score in scores]
    if count >= len(known):
        return known
    worst = heapq.nlargest(count, known)[-1][0] - ALIKE
    return [each for each in known if each[0] >= worst]


def _fastest() -> VectorRows:
    try:
        return NumpyRows(load("numpy"))
    except MissingDependency:
        return PlainRows() if _sumprod is None else QuantizedRows()


#: Creates rows: by default the fastest kind that is available. Benchmarks and tests replace it.
choose_rows: Callable[[], VectorRows] = _fastest


def new_rows() -> VectorRows:
    """Return empty rows of the kind that `choose_rows` selects."""
    return choose_rows()


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
        """Add a vector, or replace the vector of the same key."""
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
        """Remove the vector of a key, if any."""
        if key in self._positions:
            group, index = self._positions.pop(key)
            if moved := group.drop(index):
                self._positions[moved] = (group, index)

    async def search(self, vector: array[float], count: int, content_type: str | None) -> list[str]:
        """Return the keys of the nearest vectors, the nearest first. Of equally near vectors the oldest is first.

        Raises:
            InvalidArgument: The index contains vectors, but none of that length.
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
