"""Documents on SQLite and Redis: an append costs the same at any length, and what a search among many takes."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator

from agent_runtime_core.persistence.documents.base import Collection, DocumentStore, Entry
from agent_runtime_core.persistence.documents.redis import RedisDocuments
from agent_runtime_core.persistence.documents.sqlite import SQLiteDocuments

from .floor import Line, Size
from .peers.server import NoServer, started

FLAT = 1.5
EARLY, LATE = 10, 10_000  # places in a group
SAMPLES = 200
TEXT = '{"role":"user","content":"' + "words of a message " * 15 + '"}'


@contextlib.asynccontextmanager
async def _table(documents: DocumentStore) -> AsyncIterator[Collection]:
    try:
        yield Collection(documents, "project", "message")
    finally:
        await documents.close()


async def _fill(table: Collection, group: str, count: int, words: str = "") -> None:
    for start in range(0, count, 500):
        entries = (
            Entry(f"{group}-{n:06}", TEXT, group, words=words and f"{words} n{n}")
            for n in range(start, min(count, start + 500))
        )
        await table.write(*(table.add(entry) for entry in entries))


async def _appends(small: DocumentStore, large: DocumentStore, late: int, samples: int) -> tuple[float, float]:
    """Median microseconds of an append, a commit each, to groups of nine and to a long one, in turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    async with _table(small) as short, _table(large) as long:
        for sample in range(samples):
            await _fill(short, f"g{sample}", EARLY - 1)
        await _fill(long, "g", late - 1)
        for sample in range(samples):
            for table, group, times in ((short, f"g{sample}", taken[0]), (long, "g", taken[1])):
                since = time.perf_counter()
                await table.write(table.add(Entry(f"late-{sample}", TEXT, group)))
                times.append((time.perf_counter() - since) * 1e6)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _flat(what: str, size: Size, early: float, late: float) -> Line:
    bar = None if size.tiny else FLAT
    return Line(f"append {LATE:,} of a group, {what}, against the {EARLY}th", late, "µs", early, most=bar)


async def _searched(documents: DocumentStore, count: int, samples: int) -> tuple[float, float]:
    """Milliseconds of a search by the index and of one that looks through all words."""
    async with _table(documents) as table:
        await _fill(table, "g", count, "some more words of it")
        await table.search("first")
        taken: list[list[float]] = [[], []]
        for sample in range(samples):
            for search, times in zip((documents.search, super(type(documents), documents).search), taken, strict=True):  # type: ignore[misc]
                since = time.perf_counter()
                found = await search("project", "message", f"words n{sample * 7}", 20)
                times.append((time.perf_counter() - since) * 1000)
                if not found:
                    raise AssertionError(f"n{sample * 7} was not found")
    return statistics.median(taken[0]), statistics.median(taken[1])


def rows(size: Size) -> Iterator[Line]:
    samples, late = size.of(SAMPLES, 4), size.of(LATE, 20)
    with size.file() as one, size.file() as other:
        early, last = asyncio.run(_appends(SQLiteDocuments(one), SQLiteDocuments(other), late, samples))
    yield _flat("SQLite FULL", size, early, last)
    with contextlib.suppress(NoServer), started() as url:
        one_, other_ = (RedisDocuments(f"{url}?prefix={name}") for name in ("one", "other"))
        early, last = asyncio.run(_appends(one_, other_, late, samples))
        yield _flat("Redis", size, early, last)
    with size.file() as path:
        count = size.of(10_000, 40)
        indexed, looked = asyncio.run(_searched(SQLiteDocuments(path, durability="normal"), count, size.of(20, 3)))
    yield Line(f"search among {count:,} documents, SQLite", indexed, "ms", beside=looked, note="beside: without FTS5")
