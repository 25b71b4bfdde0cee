"""A commit in the call that requests it: each condition of `LoopBatch.commit_now`, and what stays as it was."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import open_run
from agent_runtime_core._engines import commit_request
from agent_runtime_core._engines.base import Op, OperationSet, always
from agent_runtime_core._engines.commit_request import MOST_NOW, CommitRequest
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx
from agent_runtime_core._engines.sqlite.writer import OPS_ON_LOOP, SHORT_FLUSH
from agent_runtime_core.errors import StorageClosed


def put(tx: SQLiteTx, value: Any) -> None:
    tx.execute("INSERT INTO arc_things (value) VALUES (?)", (value,))


def fail(tx: SQLiteTx, error: type[BaseException]) -> None:
    put(tx, "half")
    raise error("no")


THINGS = OperationSet(
    "things", {"put": put, "slow": put, "fail": fail}, {},
    ("CREATE TABLE arc_things (n INTEGER PRIMARY KEY AUTOINCREMENT, value)",), slow={"slow": always},
)  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SQLiteEngine]:
    # The tests of the time limit set it again: how long a commit takes is no matter of the others.
    monkeypatch.setattr(commit_request, "NOW_SECONDS", 3600.0)
    engine = SQLiteEngine.open(tmp_path / "a.db", durability="normal")
    engine.add(THINGS)
    yield engine
    engine.close_now()


async def in_call(engine: SQLiteEngine, *ops: Op) -> bool:
    """Commit, and return whether the loop had no iteration while the commit was awaited."""
    others: list[bool] = []
    handle = asyncio.get_running_loop().call_soon(others.append, True)
    await engine.commit(None, ops or [Op("put", (1,))])
    handle.cancel()
    return not others


def stored(engine: SQLiteEngine) -> list[Any]:
    with contextlib.closing(sqlite3.connect(engine.path)) as conn:
        return [row[0] for row in conn.execute("SELECT value FROM arc_things ORDER BY n")]


async def test_the_second_commit_of_a_task_is_made_in_its_call(engine: SQLiteEngine) -> None:
    assert [await in_call(engine) for _ in range(4)] == [False, True, True, True]
    assert stored(engine) == [1] * 4
    assert engine.writer._thread is None


# -- the same task requested the last commit


async def test_the_commit_after_one_of_another_task_waits_for_the_end_of_the_iteration(engine: SQLiteEngine) -> None:
    await in_call(engine)
    assert await in_call(engine)
    assert not await asyncio.ensure_future(in_call(engine))
    assert not await in_call(engine)
    assert await in_call(engine)


async def test_tasks_that_commit_at_the_same_time_share_their_transactions(engine: SQLiteEngine) -> None:
    async def commits() -> None:
        for n in range(20):
            await engine.commit(None, [Op("put", (n,))])

    begun: list[str] = []
    engine.writer.committer.conn.set_trace_callback(lambda sql: begun.append(sql) if sql.startswith("BEGIN") else None)
    await asyncio.gather(commits(), commits(), commits())
    assert len(begun) == 20


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are of Python 3.12")
async def test_eager_tasks_share_a_transaction(engine: SQLiteEngine) -> None:
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    await in_call(engine)
    assert await in_call(engine)
    assert await asyncio.gather(*(in_call(engine) for _ in range(3))) == [False] * 3


async def test_the_task_is_not_kept_alive(engine: SQLiteEngine) -> None:
    async def commits() -> None:
        await engine.commit(None, [Op("put", (1,))])

    task = asyncio.ensure_future(commits())
    await task
    gone = weakref.ref(task)
    del task
    await asyncio.sleep(0)  # the callback that woke this test has the task
    gc.collect()
    assert gone() is None


# -- no other commit of the loop is open


async def test_a_commit_does_not_overtake_one_of_the_same_iteration(engine: SQLiteEngine) -> None:
    await in_call(engine)
    engine.writer.batches[asyncio.get_running_loop()].send(CommitRequest(None, [Op("put", ("first",))]))
    assert not await in_call(engine, Op("put", ("second",)))
    assert stored(engine) == [1, "first", "second"]


async def test_a_commit_is_not_made_in_its_call_while_a_caller_waits(engine: SQLiteEngine) -> None:
    await in_call(engine)
    waiting, other = engine.writer.batches[asyncio.get_running_loop()].pending.waiting, CommitRequest(None, [])
    waiting[other] = 0.0
    assert not await in_call(engine)
    del waiting[other]
    assert await in_call(engine)


async def test_a_commit_does_not_overtake_one_that_nobody_waits_for(engine: SQLiteEngine) -> None:
    await in_call(engine)
    free = threading.Event()

    def held() -> None:
        free.wait(10)

    engine.writer.run_job(held)
    engine.commit_nowait(None, [Op("put", ("first",))])
    asyncio.get_running_loop().call_soon(free.set)
    assert not await in_call(engine, Op("put", ("second",)))
    assert stored(engine) == [1, "first", "second"]


# -- the loop has its turn


async def test_a_task_that_only_commits_lets_others_run_after_a_number_of_commits(engine: SQLiteEngine) -> None:
    found = [await in_call(engine) for _ in range(2 * MOST_NOW + 2)]
    assert found == [False, *[True] * MOST_NOW] * 2


async def test_a_task_that_only_commits_lets_others_run_after_a_millisecond(
    engine: SQLiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_request, "NOW_SECONDS", 0.001)
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    await in_call(engine)
    now += 0.0009
    assert await in_call(engine)
    now += 0.0002
    assert not await in_call(engine)
    assert await in_call(engine)


async def test_steps_that_never_pause_let_the_rest_of_the_program_run(tmp_path: Path) -> None:
    going, done = True, 0

    async def stops() -> None:
        nonlocal going
        going = False

    async def value() -> int:
        return 1

    async with open_run(tmp_path / "a.db") as ctx:
        other = asyncio.ensure_future(stops())
        while going:
            await ctx.step("step", value)
            done += 1
    await other
    assert 0 < done <= 2 * MOST_NOW


# -- the commit is short, and nobody else writes


@contextlib.contextmanager
def locked_by_a_process(engine: SQLiteEngine) -> Any:
    fd = os.open(f"{engine.path}.live/commit.lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def unlock() -> None:
        if engine.writer._thread is None:
            loop.call_soon(unlock)
        else:
            os.close(fd)

    loop = asyncio.get_running_loop()
    unlock()
    yield


@contextlib.contextmanager
def slow_disk(engine: SQLiteEngine) -> Any:
    engine.writer.committer.flush_seconds = 2 * SHORT_FLUSH
    yield


@pytest.mark.parametrize("obstacle", [locked_by_a_process, slow_disk])
async def test_the_thread_commits_what_would_block_the_loop(
    engine: SQLiteEngine, obstacle: Callable[[SQLiteEngine], Any]
) -> None:
    await in_call(engine)
    with obstacle(engine):
        assert not await in_call(engine)
    assert engine.writer._thread is not None
    assert stored(engine) == [1, 1]


@pytest.mark.parametrize("ops", [[Op("slow", (1,))], [Op("put", (1,))] * (OPS_ON_LOOP + 1)])
async def test_the_thread_makes_a_long_commit(engine: SQLiteEngine, ops: list[Op]) -> None:
    await in_call(engine)
    assert not await in_call(engine, *ops)
    assert engine.writer._thread is not None


# -- what a caller gets


async def test_a_cancellation_is_raised_when_the_outcome_is_known(engine: SQLiteEngine) -> None:
    committed = list[Any]()

    async def commits() -> None:
        for n in range(3 * MOST_NOW):
            if n == 3:
                task.cancel()
            await engine.commit(None, [Op("put", (n,))])
            committed.append(n)

    task = asyncio.ensure_future(commits())
    with pytest.raises(asyncio.CancelledError):
        await task
    # Raised by the first commit that waits: that is applied, and its caller does not continue.
    assert len(committed) <= MOST_NOW + 2
    assert stored(engine) == [*committed, len(committed)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
async def test_a_commit_that_fails_in_its_call_leaves_nothing(engine: SQLiteEngine, error: type[BaseException]) -> None:
    await in_call(engine)
    with pytest.raises(error):
        await in_call(engine, Op("put", (2,)), Op("fail", (error,)))
    assert not engine.writer.committer.conn.in_transaction
    assert await in_call(engine)
    assert stored(engine) == [1, 1]


async def test_a_closed_engine_refuses_a_commit_in_its_call(tmp_path: Path) -> None:
    engine = SQLiteEngine.open(tmp_path / "b.db", durability="normal")
    engine.add(THINGS)
    await in_call(engine)
    await engine.close()
    with pytest.raises(StorageClosed):
        await in_call(engine)
