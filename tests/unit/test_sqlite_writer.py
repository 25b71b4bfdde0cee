"""Where a commit to SQLite is carried out: on the loop that asks for it, or by the writer thread."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from agent_runtime_core._engines.base import Op, OperationSet, always
from agent_runtime_core._engines.commit_request import CommitRequest, LoopBatch
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.liveness import CommitLock
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx
from agent_runtime_core._engines.sqlite.writer import GROUP, OPS_ON_LOOP, SHORT_FLUSH
from agent_runtime_core.errors import StorageError
from tests.support.runs import soon

SCHEMA = "CREATE TABLE arc_things (n INTEGER PRIMARY KEY AUTOINCREMENT, value, thread)"


def put(tx: SQLiteTx, value: Any) -> bool:
    """Whether it ran on the main thread, where the loop of these tests is."""
    here = threading.current_thread() is threading.main_thread()
    tx.execute("INSERT INTO arc_things (value, thread) VALUES (?, ?)", (value, "loop" if here else "thread"))
    tx.notify("things")
    return here


def interrupted(tx: SQLiteTx) -> None:
    tx.execute("INSERT INTO arc_things (value) VALUES ('half')")
    raise KeyboardInterrupt


def fail(tx: SQLiteTx) -> None:
    tx.execute("INSERT INTO arc_things (value) VALUES ('half')")
    raise ValueError("no")


def refused(tx: SQLiteTx, sql: str) -> None:
    tx.counters["things"] = 1
    tx.execute(sql)


THINGS = OperationSet(
    "things", {"put": put, "long": put, "interrupted": interrupted, "fail": fail, "refused": refused}, {}, (SCHEMA,),
    slow={"long": always},
)  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SQLiteEngine]:
    engine = SQLiteEngine.open(tmp_path / "a.db", durability="normal")
    engine.add(THINGS)
    yield engine
    engine.close_now()


async def where(engine: SQLiteEngine, name: str = "put", value: Any = 1) -> str:
    return "loop" if (await engine.commit(None, [Op(name, (value,))]))[0] else "thread"


def stored(engine: SQLiteEngine) -> list[Any]:
    conn = sqlite3.connect(engine.path)
    with contextlib.closing(conn):
        return [row[0] for row in conn.execute("SELECT value FROM arc_things ORDER BY n")]


async def test_a_caller_alone_is_served_on_its_loop_and_no_thread_is_started(engine: SQLiteEngine) -> None:
    assert [await where(engine) for _ in range(10)] == ["loop"] * 10
    assert engine.writer._thread is None


@pytest.mark.parametrize(
    ("sql", "error"),
    [("INSERT INTO arc_things (n) VALUES (1)", "UNIQUE"), ("INSERT INTO arc_nothing VALUES (1)", "no such table")],
)
async def test_a_statement_that_is_refused_is_its_callers_error(engine: SQLiteEngine, sql: str, error: str) -> None:
    await where(engine, value="kept")
    with pytest.raises(StorageError, match=error):
        await engine.commit(None, [Op("refused", (sql,))])
    assert not engine.writer.committer._cache.counters, "what was noted down for a write that failed is forgotten"
    assert await where(engine, value="too") == "loop"
    assert stored(engine) == ["kept", "too"]


async def test_what_may_take_long_goes_to_the_thread_and_the_next_comes_back(engine: SQLiteEngine) -> None:
    assert await where(engine, "long") == "thread"
    assert await where(engine) == "loop"
    many = await engine.commit(None, [Op("put", (n,)) for n in range(OPS_ON_LOOP + 1)])
    assert many == [False] * (OPS_ON_LOOP + 1)


async def test_many_callers_of_one_turn_are_one_group_of_the_thread(engine: SQLiteEngine) -> None:
    begun: list[str] = []
    engine.writer.committer.conn.set_trace_callback(lambda sql: begun.append(sql) if sql.startswith("BEGIN") else None)
    await where(engine)
    assert await asyncio.gather(*(where(engine, value=n) for n in range(50))) == ["thread"] * 50
    assert len(begun) == 2
    assert stored(engine)[1:] == [*range(50)]


class Hasty(SimpleQueue[Any]):
    """An inbox whose thread takes each entry before the next one can be there."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        while not self.empty():
            time.sleep(0.0001)


async def test_what_is_handed_over_together_is_one_group_however_soon_the_thread_looks(engine: SQLiteEngine) -> None:
    engine.writer.inbox = Hasty()
    begun: list[str] = []
    engine.writer.committer.conn.set_trace_callback(lambda sql: begun.append(sql) if sql.startswith("BEGIN") else None)
    engine.writer.enqueue([CommitRequest(None, [Op("put", (n,))]) for n in range(20)])
    await soon(lambda: not engine.writer._queued)
    assert len(begun) == 1
    assert stored(engine) == list(range(20))


async def test_a_few_callers_are_one_group_on_the_loop(engine: SQLiteEngine) -> None:
    begun: list[str] = []
    engine.writer.committer.conn.set_trace_callback(lambda sql: begun.append(sql) if sql.startswith("BEGIN") else None)
    assert await asyncio.gather(*(where(engine) for _ in range(3))) == ["loop"] * 3
    assert len(begun) == 1


async def test_the_loops_of_other_threads_end_while_a_new_one_is_met(engine: SQLiteEngine) -> None:
    table: dict[Any, Any] = engine.writer.batches

    class Ended:
        """A loop that is met by another thread, too, while this one looks whether it is closed."""

        def is_closed(self) -> bool:
            table.clear()
            table["of another thread"] = self
            return True

    table |= {Ended(): None, Ended(): None}
    assert await where(engine) == "loop"
    engine.writer.batches.clear()


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_disk_that_flushes_slowly_is_left_to_the_thread_until_it_is_fast(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = [SHORT_FLUSH * 20]
    now = [0.0]

    def perf_counter() -> float:
        now[0] += took[0]
        return now[0]

    monkeypatch.setattr("agent_runtime_core._engines.sqlite.group_commit.time.perf_counter", perf_counter)
    engine = SQLiteEngine.open(tmp_path / "slow.db", durability=durability)
    engine.add(THINGS)
    engine.log._look_after = 1_000_000  # looking after the log is the thread's
    flushes = durability == "full"
    # It is not known before the first.
    assert [await where(engine) for _ in range(4)] == (["loop"] + ["thread"] * 3 if flushes else ["loop"] * 4)
    took[0] = SHORT_FLUSH / 10
    places = [await where(engine) for _ in range(100)]
    assert places[-1] == "loop"
    assert places == sorted(places, reverse=True), "the thread first, then the loop"
    assert ("thread" in places) is flushes
    await engine.close()


async def test_where_another_process_commits_the_thread_waits_and_not_the_loop(engine: SQLiteEngine) -> None:
    # Another open file is another holder of the lock, as another process is.
    other = os.open(Path(f"{engine.path}.live") / "commit.lock", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    waiting = asyncio.ensure_future(where(engine))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    os.close(other)
    assert await waiting == "thread"
    assert await where(engine) == "loop"


async def test_where_another_program_writes_the_thread_waits_and_not_the_loop(engine: SQLiteEngine) -> None:
    other = sqlite3.connect(engine.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.ensure_future(where(engine))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    other.execute("COMMIT")
    other.close()
    assert await waiting == "thread"
    assert await where(engine) == "loop"


async def test_what_the_thread_has_is_not_overtaken(engine: SQLiteEngine) -> None:
    standing, go = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        go.wait(10)

    engine.writer.run_job(stand)
    assert standing.wait(10)
    engine.commit_nowait(None, [Op("put", ("first",))])
    later = asyncio.ensure_future(where(engine, value="second"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    go.set()
    assert await later == "thread"
    assert stored(engine) == ["first", "second"]


async def test_a_commit_nobody_waits_for_keeps_its_place_in_a_turn(engine: SQLiteEngine) -> None:
    await asyncio.gather(where(engine, value="a"), where(engine, value="b"))
    turn = asyncio.ensure_future(where(engine, value="c"))
    await asyncio.sleep(0)
    engine.commit_nowait(None, [Op("put", ("d",))])
    await turn
    await soon(lambda: "d" in stored(engine))  # with eager tasks the turn is over before, and the thread writes it
    assert stored(engine)[-2:] == ["c", "d"]


async def test_a_failure_on_the_loop_leaves_nothing_and_holds_nothing(engine: SQLiteEngine) -> None:
    with pytest.raises(ValueError, match="no"):
        await engine.commit(None, [Op("put", ("gone",)), Op("fail")])
    assert await where(engine, value="kept") == "loop"
    assert stored(engine) == ["kept"]


def test_an_interrupt_on_the_loop_leaves_nothing_and_holds_nothing(engine: SQLiteEngine) -> None:
    async def work() -> None:
        await engine.commit(None, [Op("interrupted")])

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert not engine.writer.committer.conn.in_transaction
    assert asyncio.run(where(engine, value="kept")) == "loop"
    assert stored(engine) == ["kept"]


@pytest.mark.parametrize("what", ["the turn", "the commit lock", "the commit lock let go"])
def test_an_interrupt_as_soon_as_a_lock_is_taken_or_let_go_keeps_none(engine: SQLiteEngine, what: str) -> None:
    """Ctrl-C may come between a call that takes a lock and whatever follows it, or as the one that lets go begins."""
    writer = engine.writer

    class Interrupted:
        """The turn to use the connection."""

        def __init__(self, real: Any) -> None:
            self.release = real.release
            self._real = real

        def acquire(self, *, blocking: bool) -> bool:
            assert self._real.acquire(blocking=blocking)
            raise KeyboardInterrupt

    take_now, let_go, times = writer._commit_lock.try_acquire, writer._commit_lock.release, iter([1])

    def taken() -> bool:
        assert take_now()
        raise KeyboardInterrupt

    def left() -> None:
        for _ in times:
            raise KeyboardInterrupt
        let_go()

    with pytest.MonkeyPatch.context() as patch:
        if what == "the turn":
            patch.setattr(writer, "_connection_lock", Interrupted(writer._connection_lock))
        elif what == "the commit lock":
            patch.setattr(writer._commit_lock, "try_acquire", taken)
        else:
            patch.setattr(writer._commit_lock, "release", left)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(where(engine))
    free: list[bool] = []

    def take() -> None:
        with contextlib.closing(CommitLock(Path(writer._commit_lock.path).parent)) as another:
            free.append(another.try_acquire())
        free.append(writer._connection_lock.acquire(blocking=False))
        writer._connection_lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert free == [True, True]
    assert asyncio.run(where(engine)) == "loop"


def test_a_turn_whose_end_was_interrupted_is_flushed_with_the_next(
    engine: SQLiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, times = LoopBatch.flush, iter([1])

    def interrupted(outbox: LoopBatch) -> None:
        for _ in times:
            raise KeyboardInterrupt
        flush(outbox)

    monkeypatch.setattr(LoopBatch, "flush", interrupted)
    loop = asyncio.new_event_loop()
    first = loop.create_task(where(engine, "long", "first"))
    with contextlib.closing(loop):
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(first)
        now = loop.time() + 1
        monkeypatch.setattr(loop, "time", lambda: now)
        assert loop.run_until_complete(where(engine, "long", "second")) == "thread"
        assert loop.run_until_complete(first) == "thread"
    assert stored(engine) == ["first", "second"]


async def test_a_cancelled_caller_of_a_group_on_the_loop_knows_the_outcome(engine: SQLiteEngine) -> None:
    await asyncio.gather(where(engine), where(engine))
    callers = [asyncio.ensure_future(where(engine, value=n)) for n in range(2)]
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    done, _ = await asyncio.wait(callers)
    assert all(caller.cancelled() for caller in done)
    assert stored(engine)[-2:] == [0, 1]


async def test_closing_carries_out_what_was_posted_in_this_turn(tmp_path: Path) -> None:
    engine = SQLiteEngine.open(tmp_path / "b.db", durability="normal")
    engine.add(THINGS)
    await asyncio.gather(where(engine), where(engine))
    last = asyncio.ensure_future(where(engine, value="last"))
    await asyncio.sleep(0)
    engine.commit_nowait(None, [Op("put", ("posted",))])
    await engine.close()
    await last
    assert stored(engine)[-2:] == ["last", "posted"]


async def test_a_batch_larger_than_a_group_is_several(engine: SQLiteEngine) -> None:
    requests = [CommitRequest(None, [Op("put", (n,))]) for n in range(GROUP + 10)]
    go = threading.Event()

    def stand() -> None:
        go.wait(10)

    engine.writer.run_job(stand)
    engine.writer.enqueue(requests)
    last = asyncio.ensure_future(where(engine))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    go.set()
    assert await last == "thread"
    assert len(stored(engine)) == GROUP + 11
