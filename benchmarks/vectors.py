"""Exact cosine search over stored embeddings, without NumPy and with it, beside NumPy alone."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import random
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent_runtime_core.persistence import SQLiteKnowledgeStore, vectors
from agent_runtime_core.persistence.models import Embedding
from agent_runtime_core.persistence.vectors import VectorIndex

from .floor import Line, Size

DIMENSIONS = 384
NEAREST = 10
BAR = 60.0 if hasattr(math, "sumprod") else 250.0  # milliseconds


def _plain() -> vectors.VectorRows:
    return vectors.QuantizedRows() if hasattr(math, "sumprod") else vectors.PlainRows()


def _vector(chance: random.Random) -> list[float]:
    return [chance.gauss(0, 1) for _ in range(DIMENSIONS)]


async def _filled(path: Path, count: int) -> None:
    chance = random.Random(1)
    store = SQLiteKnowledgeStore(path=path, durability="normal")
    for start in range(0, count, 500):
        many = (Embedding(vector=_vector(chance), content=str(n)) for n in range(start, min(start + 500, count)))
        await asyncio.gather(*(store.save_embedding(each) for each in many))
    await store.close()


async def _searches(path: Path, rounds: int) -> tuple[float, float]:
    """Milliseconds of the first search of a new store, and the least of the ones after it."""
    chance, store = random.Random(2), SQLiteKnowledgeStore(path=path)
    times = []
    for _ in range(rounds + 1):
        query = _vector(chance)
        since = time.perf_counter()
        found = await store.search_similar(query, NEAREST)
        times.append((time.perf_counter() - since) * 1000)
        assert len(found) == NEAREST
    await store.close()
    return times[0], min(times[1:])


def _bytes_each(count: int) -> float:
    chance = random.Random(3)
    made = [array("d", _vector(chance)) for _ in range(count)]
    tracemalloc.start()
    index = VectorIndex()
    index.put_all((str(n), "text", float(n), each) for n, each in enumerate(made))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / count


def _numpy(count: int, rounds: int) -> float | None:
    """Milliseconds of the bare product and choice with NumPy."""
    if importlib.util.find_spec("numpy") is None:
        return None
    numpy: Any = importlib.import_module("numpy")
    chance = numpy.random.default_rng(1)
    matrix = chance.normal(size=(count, DIMENSIONS))
    matrix /= numpy.linalg.norm(matrix, axis=1)[:, None]

    def search() -> float:
        query = chance.normal(size=DIMENSIONS)
        since = time.perf_counter()
        scores = matrix @ (query / numpy.linalg.norm(query))
        best = numpy.argpartition(scores, -NEAREST)[-NEAREST:]
        best[numpy.argsort(-scores[best])].tolist()
        return (time.perf_counter() - since) * 1000

    return min(search() for _ in range(rounds + 1))


def _without_numpy(measure: Callable[[], Any]) -> Any:
    chosen, vectors.choose_rows = vectors.choose_rows, _plain
    try:
        return measure()
    finally:
        vectors.choose_rows = chosen


def rows(size: Size) -> Iterator[Line]:
    count, rounds = size.of(10_000, 50), size.rounds(9)
    bare = _numpy(count, rounds)
    what = f"of {count:,} vectors of {DIMENSIONS}"
    with size.file() as path:
        asyncio.run(_filled(path, count))
        cold, warm = _without_numpy(lambda: asyncio.run(_searches(path, rounds)))
        note = "beside: NumPy alone" if bare is not None else "NumPy is not installed here"
        yield Line(f"search {what}, without NumPy", warm, "ms", most=BAR, beside=bare, note=note)
        yield Line("the first search, which reads them from SQLite", cold, "ms", note="no bar")
        if bare is not None:
            cold, warm = asyncio.run(_searches(path, rounds))
            yield Line(f"search {what}, with NumPy", warm, "ms", beside=bare, note="no bar; beside: NumPy alone")
            yield Line("the first search, with NumPy", cold, "ms", note="no bar")
    each = _without_numpy(lambda: _bytes_each(min(count, 1000)))
    yield Line(f"memory of a vector of {DIMENSIONS}, without NumPy", each, "bytes", note="no bar")
