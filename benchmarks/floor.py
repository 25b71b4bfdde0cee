"""What every row stands beside: a bare commit, a group commit, and how two things are measured in turns."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

SMALL = '{"ok":true,"n":1}'  # the record of a small step
_TABLE = "CREATE TABLE IF NOT EXISTS record (run TEXT, n INTEGER, result TEXT, PRIMARY KEY (run, n)) WITHOUT ROWID"
_INSERT = "INSERT INTO record VALUES (?, ?, ?)"


@dataclass(frozen=True)
class Line:
    """One measured figure. The bar is on `ours / floor` where there is a floor, else on `ours` itself."""

    row: str
    ours: float
    unit: str
    floor: float | None = None
    most: float | None = None
    least: float | None = None
    beside: float | None = None  # a floor to look at, which no bar is set against
    note: str = ""

    @property
    def figure(self) -> float:
        return self.ours / self.floor if self.floor else self.ours

    def holds(self, slack: float = 1.0) -> bool:
        """Whether the bar is kept, when it is `slack` times as wide."""
        if self.most is not None and self.figure > self.most * slack:
            return False
        return self.least is None or self.figure * slack >= self.least

    def as_dict(self) -> dict[str, Any]:
        known = {"row": self.row, "ours": self.ours, "unit": self.unit, "figure": self.figure, "held": self.holds()}
        rest = {name: getattr(self, name) for name in ("floor", "most", "least", "beside", "note")}
        return known | {name: value for name, value in rest.items() if value not in (None, "")}


@dataclass(frozen=True)
class Size:
    """How much is measured, and where files go; `tiny` only shows that a row works."""

    where: Path
    tiny: bool = False
    _made: list[int] = field(default_factory=list)

    def of(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def rounds(self, full: int) -> int:
        return 1 if self.tiny else full

    def bar(self, limit: float) -> float | None:
        """Return a bar, or None for a tiny row, whose figure means nothing."""
        return None if self.tiny else limit

    @contextmanager
    def file(self) -> Iterator[Path]:
        """A database file of one's own, gone afterwards."""
        with tempfile.TemporaryDirectory(dir=self.where) as folder:
            yield Path(folder) / "bench.db"


def in_turns(rounds: int, *measures: Callable[[], float]) -> list[float]:
    """The median of each measure, taken in turns so that all meet the same machine; the order changes each round."""
    taken: list[list[float]] = [[] for _ in measures]
    frozen = gc.get_freeze_count()  # a process of pytest has frozen all that it imported, and that stays
    for number in range(rounds):
        for index in range(len(measures)):
            index = (index + number) % len(measures)
            # Otherwise what earlier rounds left behind is swept again in the middle of this one.
            gc.collect()
            gc.freeze()
            try:
                taken[index].append(measures[index]())
            finally:
                if not frozen:
                    gc.unfreeze()
    return [statistics.median(each) for each in taken]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    """A bare connection in WAL mode, with a table for records."""
    conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    conn.execute("PRAGMA journal_mode=WAL")
    conn.execute(f"PRAGMA synchronous={synchronous}")
    conn.execute(_TABLE)
    return conn


def bare_commits(
    path: Path, synchronous: str, count: int, result: Callable[[], str] = lambda: SMALL, pause: float = 0.0
) -> float:
    """Seconds for `count` commits of one record each, on this thread, not counting a `pause` after each."""
    conn = connect(path, synchronous)
    try:
        since = time.perf_counter()
        for n in range(count):
            conn.execute(_INSERT, ("run", n, result()))
            if pause:
                until = time.perf_counter() + pause
                while time.perf_counter() < until:
                    pass
        return time.perf_counter() - since - count * pause
    finally:
        conn.close()


class GroupCommit:
    """The least that commits for many tasks at once: one thread, one transaction per batch, one wake per batch."""

    def __init__(self, path: Path, synchronous: str) -> None:
        self._conn = connect(path, synchronous)
        self._inbox: SimpleQueue[tuple[asyncio.Future[Any], str, tuple[Any, ...]] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    async def insert(self, run: str, n: int, result: str) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put((future, _INSERT, (run, n, result)))
        await future

    async def execute(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row that it returns, once it is committed."""
        future: asyncio.Future[tuple[Any, ...] | None] = self._loop.create_future()
        self._inbox.put((future, sql, values))
        return await future

    def _write(self) -> None:
        inbox, conn = self._inbox, self._conn
        while (item := inbox.get()) is not None:
            batch = [item]
            while not inbox.empty():
                more = inbox.get()
                if more is None:
                    inbox.put(None)
                    break
                batch.append(more)
            conn.execute("BEGIN")
            told = [(future, conn.execute(sql, values).fetchone()) for future, sql, values in batch]
            conn.execute("COMMIT")
            self._loop.call_soon_threadsafe(_settle, told)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._conn.close()


def _settle(told: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, row in told:
        if not future.done():
            future.set_result(row)


class Hold:
    """The longest time in seconds that this loop was late for a tick it was asked for."""

    EVERY = 0.001

    def __init__(self) -> None:
        self.longest = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Hold:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + self.EVERY
            await asyncio.sleep(self.EVERY)
            self.longest = max(self.longest, time.perf_counter() - due)


def size_on_disk(path: Path) -> int:
    """Bytes of a database and its log."""
    return sum(os.path.getsize(each) for each in path.parent.glob(path.name + "*") if each.is_file())
