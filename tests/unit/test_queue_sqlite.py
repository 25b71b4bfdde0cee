"""Rows that the writing connection remembers while their runs are claimed: never other than what the file holds."""

from __future__ import annotations

import asyncio
import copy
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core.errors import LeaseLost, StorageCorrupt, StorageTooNew, UnserialisableResult
from agent_runtime_core.queue import SQLiteQueue, sqlite
from agent_runtime_core.queue.records import COLUMNS, RowChanged, RunFilter, RunRow, RunUpdate
from agent_runtime_core.queue.sqlite import LARGEST_KEPT
from agent_runtime_core.queue.transitions import operation_set
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.runs import Script


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SQLiteQueue]:
    queue = SQLiteQueue(tmp_path / "runs.db")
    yield queue
    queue.engine.close_now()


async def claimed(queue: SQLiteQueue, run_id: str = "r", text: str = "") -> RunRow:
    await queue.enqueue(run_id, "agent", {"text": text})
    (row,) = await queue.claim_rows("worker")
    return row


def left(row: RunRow, status: str, **values: Any) -> RunUpdate:
    return RunUpdate(row.claim_id, status, 50.0, **values)


def known(queue: SQLiteQueue) -> list[str]:
    return [*queue.engine.known.rows]


async def test_of_many_runs_that_are_due_at_once_the_greatest_priorities_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "DUE_AT_ONCE", 3)
    clock = VirtualClock()
    queue = SQLiteQueue(tmp_path / "due.db", clock=clock)
    try:
        for n, priority in enumerate([0, 0, 1, -1, 9, 0, 1]):
            await queue.enqueue(str(n), "agent", {}, priority=priority, delay=5)
        clock.advance(10)
        first = await queue.claim("w", 60)
        assert first.priority == 9
        assert len([row for row in await queue.find(RunFilter()) if row.due_at]) == 4
        assert [(await queue.claim("w", 60)).row.run_key for _ in range(6)] == ["2", "6", "0", "1", "5", "3"]
    finally:
        await queue.close()


async def test_a_run_is_remembered_while_it_is_claimed(queue: SQLiteQueue) -> None:
    row = await claimed(queue)
    assert known(queue) == [row.run_id]
    assert queue.engine.known.rows[row.run_id] == await queue.row(row.run_id)
    after = await queue.settle(row.run_id, left(row, "running", crashes_in_row=2))
    assert queue.engine.known.rows[row.run_id] == after == await queue.row(row.run_id)
    ended = await queue.settle(row.run_id, left(row, "succeeded", output='{"a":1}'))
    assert (known(queue), ended) == ([], await queue.row(row.run_id))


async def test_one_that_was_stored_claimed_too(queue: SQLiteQueue) -> None:
    row = queue.new_row("r", "agent", {}, origin="inline")
    outcome, there = await queue.take(row, "worker", 60, insert=True, reopen=True)
    assert outcome == "claimed"
    assert there == await queue.row("r") == queue.engine.known.rows[row.run_id]


async def test_a_large_one_is_not(queue: SQLiteQueue) -> None:
    row = await claimed(queue, text="x" * LARGEST_KEPT)
    assert known(queue) == []
    await queue.settle(row.run_id, left(row, "succeeded"))
    there = await queue.row(row.run_id)
    assert there is not None
    assert (there.status, there.ended_at, there.lease_until) == ("succeeded", 50.0, 0.0)


async def test_what_another_program_wrote_is_seen(queue: SQLiteQueue, tmp_path: Path) -> None:
    row = await claimed(queue)
    other = sqlite3.connect(tmp_path / "runs.db")
    other.execute("UPDATE arc_runs SET cancel_at = 7")
    other.commit()
    other.close()
    with pytest.raises(RowChanged):
        await queue.settle(row.run_id, left(row, "waiting"))
    ended = await queue.settle(row.run_id, left(row, "cancelled"))
    assert ended.cancel_at == 7


async def test_a_lease_that_was_extended_stays_so(queue: SQLiteQueue) -> None:
    row = await claimed(queue)
    later = row.lease_until + 1000
    await queue.commits.commit(None, [Op("queue.beat", (((row.run_id, row.claim_id),), later))])
    after = await queue.settle(row.run_id, left(row, "running", crashes_in_row=1))
    assert after.lease_until == later
    assert after == await queue.row(row.run_id)


async def test_one_whose_process_is_dead_is_not_remembered_as_it_was(tmp_path: Path) -> None:
    clock = VirtualClock()
    queue = SQLiteQueue(tmp_path / "dead.db", clock=clock)
    try:
        await queue.enqueue("r", "agent", {})
        want = queue.claim_request("worker", 60, None)._replace(holder="gone")
        [[row]] = await queue.commit(None, [Op("queue.claim", (want,))])
        assert known(queue) == [row.run_id]
        clock.advance(10)
        (again,) = await queue.claim_rows("worker", 50)
        assert again.crashes == 1
        stored = await queue.row("r")
        assert stored is not None
        assert stored.lease_until == again.lease_until == row.lease_until, "where it has not changed it is written too"
        assert await queue.claim_rows("worker", 50) == []
    finally:
        await queue.close()


async def test_a_message_counts(queue: SQLiteQueue) -> None:
    row = await claimed(queue)
    await queue.post(row.run_id, "signal", "go", "1")
    with pytest.raises(RowChanged):
        await queue.settle(row.run_id, left(row, "waiting", cursor=0))
    waiting = await queue.settle(row.run_id, left(row, "waiting", cursor=1))
    assert waiting == await queue.row(row.run_id)


async def test_what_was_rolled_back_is_forgotten(queue: SQLiteQueue) -> None:
    row = await claimed(queue)
    end = Op("queue.settle", (row.run_id, left(row, "succeeded")))
    with pytest.raises(RowChanged):
        await queue.commits.commit(Guard(row.run_id, row.claim_id), [end, end])
    assert await queue.row(row.run_id) == row
    await queue.settle(row.run_id, left(row, "failed"))
    with pytest.raises(LeaseLost):
        await queue.settle(row.run_id, left(row, "succeeded"))


async def test_the_fence_of_a_run_is_what_its_row_says(queue: SQLiteQueue, tmp_path: Path) -> None:
    row = await claimed(queue)
    guard = Guard(row.run_id, row.claim_id)
    beat = Op("queue.beat", (((row.run_id, row.claim_id),), row.lease_until))
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    assert other.execute("SELECT count(*) FROM arc_carried").fetchone() == (0,)
    await queue.engine.commit(guard, [beat])
    for change in ("claim_id = 'Z'", "claim_id = '', status = 'pending'"):
        other.execute(f"UPDATE arc_runs SET {change}")  # as another process would, without ours hearing of it
        with pytest.raises(LeaseLost):
            await queue.engine.commit(guard, [beat])
    other.execute("UPDATE arc_runs SET claim_id = ?, status = 'running'", (row.claim_id,))
    other.close()
    await queue.engine.commit(guard, [beat])
    await queue.settle(row.run_id, left(row, "succeeded"))
    with pytest.raises(LeaseLost):
        await queue.engine.commit(guard, [beat])


async def test_a_run_that_the_queue_has_not_stored_may_have_a_fence_all_the_same(queue: SQLiteQueue) -> None:
    await queue.engine.commit(None, [Op("fence.install", ("elsewhere", "01B"))])
    with pytest.raises(LeaseLost):
        await queue.engine.commit(None, [Op("fence.install", ("elsewhere", "01A"))])
    await queue.engine.commit(Guard("elsewhere", "01B"), [Op("fence.forget", ("elsewhere",))])
    with pytest.raises(LeaseLost):
        await queue.engine.commit(Guard("elsewhere", "01B"), [Op("fence.forget", ("elsewhere",))])


async def test_what_is_carried_here_does_not_stand_before_what_the_row_says(queue: SQLiteQueue) -> None:
    row = await claimed(queue)
    beat = Op("queue.beat", (((row.run_id, row.claim_id),), row.lease_until))
    await queue.engine.commit(None, [Op("fence.install", (row.run_id, "7" + "Z" * 25))])
    for _ in range(2):
        await queue.engine.commit(Guard(row.run_id, row.claim_id), [beat])
        queue.engine.known.forget()  # and so it is when the file is asked again


def as_before(old: sqlite3.Connection, version: int) -> None:
    """Give the table of runs the columns and indexes that it had at this version of the schema, from 1 to 3."""
    old.execute("DROP TABLE arc_processes")
    old.execute("DROP TABLE arc_last_run")
    old.execute("DROP TABLE arc_shared")
    kept = COLUMNS[:37]
    runs = old.execute(f"SELECT {', '.join(kept)} FROM arc_runs").fetchall()
    old.execute("DROP TABLE arc_runs")
    for statement in ";\n".join(sqlite.MIGRATIONS[:version]).split(";\n"):
        if "arc_runs" in statement and "arc_carried" not in statement:
            old.execute(statement)
    old.executemany(f"INSERT INTO arc_runs ({', '.join(kept)}) VALUES ({', '.join('?' * len(kept))})", runs)
    old.execute("UPDATE arc_schema SET version = ? WHERE concern = 'queue'", (version,))


async def test_a_claim_of_a_file_of_before_goes_on_and_a_library_of_before_does_not(tmp_path: Path) -> None:
    path = tmp_path / "before.db"
    before = SQLiteQueue(path)
    row = await claimed(before)
    await before.close()
    old = sqlite3.connect(path, isolation_level=None)
    # As it was when the fences of all runs stood in a table, by which that library goes while it has the file open.
    old.execute("ALTER TABLE arc_carried RENAME TO arc_fence")
    old.execute("INSERT INTO arc_fence VALUES (?, ?), ('elsewhere', '01B')", (row.run_id, row.claim_id))
    as_before(old, 1)
    old.execute("UPDATE arc_schema SET version = 1 WHERE concern = 'fence'")
    queue = SQLiteQueue(path)
    beat = Op("queue.beat", (((row.run_id, row.claim_id),), row.lease_until))
    await queue.engine.commit(Guard(row.run_id, row.claim_id), [beat])
    await queue.engine.commit(Guard("elsewhere", "01B"), [beat])
    assert old.execute("SELECT key FROM arc_carried").fetchall() == [("elsewhere",)]
    for theirs in ("SELECT token FROM arc_fence", "INSERT OR REPLACE INTO arc_fence VALUES ('x', 'y')"):
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            old.execute(theirs)
    old.close()
    await queue.close()


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_the_runs_of_a_file_of_before_get_conversations_and_are_listed(tmp_path: Path, version: int) -> None:
    path, talk = tmp_path / "before.db", UUID(int=7)
    before = SQLiteQueue(path)
    asked: list[Any] = ["talk", str(talk).upper(), talk, "", None, 7, {"a": 1}]
    for n, conversation in enumerate(asked):
        await before.enqueue(f"r{n}", "agent", {"conversation_id": conversation})
    await before.enqueue("other", "agent", {"text": '"conversation_id"', "more": {"conversation_id": "talk"}})
    await before.close()
    old = sqlite3.connect(path, isolation_level=None)
    as_before(old, version)
    old.execute("UPDATE arc_runs SET input = 'not JSON \"conversation_id\"' WHERE run_key = 'r5'")
    old.close()
    queue = SQLiteQueue(path)
    every = await queue.find(RunFilter())
    assert {row.run_key: row.conversation for row in every if row.conversation} == {
        "r0": "talk",
        "r1": str(talk),
        "r2": str(talk),
    }
    assert {row.questions for row in every} == {""}
    for wanted, keys in (
        (RunFilter(newest_first=True, conversation=str(talk)), ["r2", "r1"]),
        (RunFilter(newest_first=True, prefix="o"), ["other"]),
        (RunFilter(newest_first=True, limit=1), ["other"]),
    ):
        assert [row.run_key for row in await queue.find(wanted)] == keys
    assert (await queue.counts()).runs == {("pending", "agent"): len(every)}
    await queue.close()


async def test_a_library_with_an_older_schema_rejects_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SQLiteQueue(tmp_path / "runs.db")
    await queue.close()
    older = operation_set(sqlite.SQLiteTransitions, sqlite.MIGRATIONS[:-1])
    monkeypatch.setattr(SQLiteQueue, "operation_sets", (older,))
    with pytest.raises(StorageTooNew, match=r"schema has version 8, written by .*, this library knows 7\. Upgrade"):
        SQLiteQueue(tmp_path / "runs.db")


async def nothing(ctx: Any) -> None: ...


def opened(path: Path) -> AgentRunner:
    registry = Registry()
    registry.register(Script(nothing))
    return AgentRunner.open(path, registry=registry)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("run_id", "lfd5049a62e95669ae4b09903360b839"),
        ("run_id", "3ff5:a65078253ae9df61dc4b80633fd"),
        ("status", "succeedef"),
        ("priority", "high"),
        ("lease_until", b"12"),
        ("created_at", "yesterday"),
        ("error", b"{}"),
    ],
)
async def test_a_row_that_was_damaged_is_told_by_whoever_reads_it(tmp_path: Path, column: str, value: object) -> None:
    async with opened(tmp_path / "runs.db") as runner:
        run_id = str(await runner.submit("script", {}, run_id="x"))
    conn = sqlite3.connect(tmp_path / "runs.db")
    conn.execute(f"UPDATE arc_runs SET {column} = ?", (value,))
    conn.commit()
    conn.close()
    async with opened(tmp_path / "runs.db") as runner:
        asks: list[Callable[[], Awaitable[Any]]] = [runner.runs]
        if column != "status":  # such a one is not looked for
            asks.append(runner.run_once)
        if column != "run_id":  # nor found
            asks += [partial(each, "x") for each in (runner.get_run, runner.wait, runner.cancel)]
            asks.append(partial(runner.execute, "script", "x"))
        for ask in asks:
            with pytest.raises(StorageCorrupt, match=f"{value if column == 'run_id' else run_id}.*: {column} .*backup"):
                async with asyncio.timeout(20):
                    await ask()


async def test_what_killed_processes_left_costs_later_claims_nothing(
    queue: SQLiteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in place waits for its caller, and one that is free already for a worker that knows its agent."""
    with monkeypatch.context() as killed:
        killed.setattr(queue.engine, "process_id", "0" * 26)
        alone = queue.new_row("alone", "agent", {}, origin="inline")
        laned = queue.new_row("laned", "agent", {}, origin="inline", concurrency_key="lane")
        for row in (alone, laned):
            assert (await queue.take(row, "killed", 60, insert=True, reopen=True))[0] == "claimed"
        await queue.enqueue("theirs", "another", {})
        assert await queue.claim_rows("killed")
    asked: list[list[str]] = []
    dead_holders = queue.engine.dead_holders

    def heard(holders: Any) -> Any:
        asked.append(list(holders))
        return dead_holders(holders)

    monkeypatch.setattr(queue.engine, "dead_holders", heard)
    conn = queue.engine.file.writing
    for n in range(3):
        queue.engine.dead_looked_at = -1.0
        before = conn.total_changes
        assert await queue.claim_rows("worker", agent_keys=["agent"]) == []
        assert (n == 0) == (conn.total_changes > before)
    assert asked == [["0" * 26], [], []]
    again = await queue.take(alone, "worker", 60, insert=True, reopen=True)
    assert again[0] == "claimed", "whoever asks for a run in place looks at its holder"
    assert [row.run_key for row in await queue.claim_rows("worker", agent_keys=["another"])] == ["theirs"]


async def test_a_run_that_cannot_be_read_here_does_not_take_those_along_that_are_claimed_with_it(
    queue: SQLiteQueue,
) -> None:
    theirs = queue.new_row("theirs", "agent", {}).with_values(input='{"money":{"$":"theirs.Money","v":{"cents":5}}}')
    await queue.enqueue("one", "agent", {"n": 1})
    await queue.commits.commit(None, [Op("queue.insert", (theirs,))])
    await queue.enqueue("two", "agent", {"n": 2}, {"by": "me"})
    one, unread, two = await queue.claim("worker", limit=3)
    assert [(run.input, run.metadata) for run in (one, two)] == [({"n": 1}, {}), ({"n": 2}, {"by": "me"})]
    assert one.input is one.input
    assert copy.deepcopy(two) == two
    assert not hasattr(two, "nothing")
    for _ in range(2):
        with pytest.raises(UnserialisableResult, match=r"register_type\(Money\)"):
            _ = unread.input
    assert await queue.requeue_for_retry(unread.run_id, "worker", "not for us")


async def test_the_dead_are_looked_for_after_a_clock_that_went_back(
    queue: SQLiteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boot time begins anew where the machine does."""
    with monkeypatch.context() as killed:
        killed.setattr(queue.engine, "process_id", "0" * 26)
        await queue.enqueue("theirs", "agent", {})
        assert await queue.claim_rows("killed")
    queue.engine.dead_looked_at = queue.lease_now() + 1e6
    assert [row.run_key for row in await queue.claim_rows("worker")] == ["theirs"]
