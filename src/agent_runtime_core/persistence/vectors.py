"""Vectors held for exact cosine search, with the standard library alone; with NumPy where there is one."""

from __future__ import annotations

import heapq
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from .._core.lazy_import import load
from ..errors import InvalidArgument, MissingDependency, brief

_sumprod = getattr(math, "sumprod", None)
_STEPS = 127
_STEP = [float(step) for step in (*range(_STEPS + 1), *range(-_STEPS, 0))]  # by number, the negative ones from its end
ALIKE = 1e-12  # cosines closer than that are the same but for rounding


def floats(vector: Iterable[float], what: str) -> array[float]:
    """The vector as doubles. InvalidArgument: it is empty, all zeros, or holds what is no finite number."""
    try:
        values = array("d", vector)
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"{what} is a sequence of numbers: {error}") from error
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise InvalidArgument(f"{what} holds {brief(value)} at {index}: every component is a finite number")
    if not any(values):
        zeros = f"has {len(values)} components, all 0" if values else "is empty"
        raise InvalidArgument(f"{what} {zeros}: it has no direction to compare")
    return values


def unit(vector: array[float]) -> array[float]:
    """The vector of length 1 in that direction."""
    largest = max(max(vector), -min(vector))
    scaled = [value / largest for value in vector]  # whose length can neither overflow nor vanish
    length = math.hypot(*scaled)
    return array("d", [value / length for value in scaled])


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two vectors of length 1."""
    total = _sumprod(one, other) if _sumprod is not None else math.fsum(map(operator.mul, one, other))
    return min(1.0, max(-1.0, total))


class VectorRows(Protocol):
    """Vectors of length 1, numbered from 0."""

    def __len__(self) -> int: ...

    def append(self, vector: array[float]) -> None: ...

    def drop(self, number: int) -> None:
        """The last one takes the place of that one."""

    def frozen(self) -> VectorRows:
        """These as they are now, to be searched in another thread."""

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        """Cosines and numbers of the `count` nearest, in no order, and of all that are as near as the last of them."""


class PlainRows:
    """Doubles in arrays, summed one row at a time."""

    def __init__(self, rows: Sequence[array[float]] = ()) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, vector: array[float]) -> None:
        self._rows.append(vector)

    def drop(self, number: int) -> None:
        self._rows[number] = self._rows[-1]
        self._rows.pop()

    def frozen(self) -> VectorRows:
        return PlainRows(self._rows)

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        other = vector.tolist()
        return _nearest(enumerate(sum(map(operator.mul, row, other)) for row in self._rows), count)


class QuantizedRows(PlainRows):
    """Doubles, and beside them each row in 255 steps, whose floats are a few that all rows share.

    math.sumprod is through with a tuple of these in less than half the time that it takes for an array, where each
    float has to be made. A row is scale * steps, and `error` the length of what that leaves out: by Cauchy and Schwarz
    a product with a vector of length 1 is off by that at most. What cannot be told apart so is left to the doubles.
    """

    def __init__(
        self, rows: Sequence[array[float]] = (), coarse: Sequence[tuple[float, ...]] = (),
        scales: Sequence[float] = (), errors: Sequence[float] = (),
    ) -> None:  # fmt: skip
        super().__init__(rows)
        self._coarse = list(coarse)
        self._scales, self._errors = array("d", scales), array("d", errors)

    def append(self, vector: array[float]) -> None:
        scale = max(max(vector), -min(vector)) / _STEPS
        steps = tuple([_STEP[round(value / scale)] for value in vector])
        self._coarse.append(steps)
        self._scales.append(scale)
        self._errors.append(math.dist(vector, [step * scale for step in steps]) + ALIKE)
        super().append(vector)

    def drop(self, number: int) -> None:
        super().drop(number)
        self._coarse[number], self._scales[number], self._errors[number] = (
            self._coarse[-1],
            self._scales[-1],
            self._errors[-1],
        )
        for column in (self._coarse, self._scales, self._errors):
            column.pop()

    def frozen(self) -> VectorRows:
        return QuantizedRows(self._rows, self._coarse, self._scales, self._errors)

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        assert _sumprod is not None
        other = tuple(vector)
        about = list(map(operator.mul, [_sumprod(row, other) for row in self._coarse], self._scales))
        worst = -math.inf
        if count < len(about):
            worst = heapq.nlargest(count, map(operator.sub, about, self._errors))[-1] - ALIKE
        most = map(operator.add, about, self._errors)
        maybe = [number for number, each in enumerate(most) if each >= worst]
        return _nearest(((number, _sumprod(self._rows[number], other)) for number in maybe), count)


class NumpyRows:
    """A matrix that grows by doubling."""

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

    def drop(self, number: int) -> None:
        self._count -= 1
        self._matrix[number] = self._matrix[self._count]

    def frozen(self) -> VectorRows:
        return self  # it is fast enough to be searched where it is

    def nearest(self, vector: array[float], count: int) -> list[tuple[float, int]]:
        scores = self._matrix[: self._count] @ self._numpy.frombuffer(vector)
        worst = -math.inf
        if count < self._count:
            worst = float(self._numpy.partition(scores, self._count - count)[self._count - count]) - ALIKE
        found = self._numpy.flatnonzero(scores >= worst)
        return list(zip(scores[found].tolist(), found.tolist(), strict=True))


def _nearest(scores: Iterable[tuple[int, float]], count: int) -> list[tuple[float, int]]:
    known = [(score, number) for number, score in scores]
    if count >= len(known):
        return known
    worst = heapq.nlargest(count, known)[-1][0] - ALIKE
    return [each for each in known if each[0] >= worst]


def _fastest() -> VectorRows:
    try:
        return NumpyRows(load("numpy"))
    except MissingDependency:
        return PlainRows() if _sumprod is None else QuantizedRows()


#: What holds vectors: the fastest there is here. A benchmark or a test may put another one in its place.
choose_rows: Callable[[], VectorRows] = _fastest


def new_rows() -> VectorRows:
    return choose_rows()
