"""On SQLite, the row of a run numbers its journal and has its status, also where there was no row at first."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.base import Op
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.errors import StorageCorrupt, StorageTooNew
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.queue.records import COLUMNS, RunFilter, RunRow
from agent_runtime_core.queue.sqlite import MIGRATIONS
from agent_runtime_core.queue.sqlite_find import BATCH
from agent_runtime_core.registry import Registry
from agent_runtime_core.state import SQLiteStateStore
from tests.support.runs import Script

RUN, OTHER = str(UUID(int=1)), str(UUID(int=2))


async def steps(ctx: Any) -> int:
    await ctx.checkpoint({"n": 1})
    return int(await ctx.step("one", lambda: 1))


def opened(*paths: Path) -> AgentRunner:
    """A runner on one file, or with each component in a separate file."""
    registry = Registry()
    registry.register(Script(steps))
    if len(paths) == 1:
        return AgentRunner.open(paths[0], registry=registry)
    queue, bus, state = paths
    return AgentRunner(SQLiteQueue(queue), SQLiteEventBus(bus), SQLiteStateStore(state), registry=registry)


def rows(path: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        return conn.execute(query).fetchall()


async def test_a_run_of_one_file_has_no_copy_of_its_status_and_no_number_but_that_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with opened(path) as runner:
        await runner.submit("script", {}, run_id="r")
        row = await runner.queue.require("r")
        assert await runner.state_store.get_run_status(row.run_id) == "pending"
        await runner.run_once()
        assert await runner.state_store.get_run_status(row.run_id) == "succeeded"
        assert await runner.state_store.get_checkpoint(row.run_id) == {"n": 1}
    assert rows(path, "SELECT status FROM arc_state") == [(None,)]
    assert rows(path, "SELECT * FROM arc_journal_numbers") == []
    assert rows(path, "SELECT DISTINCT id >> 32 FROM arc_journal") == [(row.arrival + (1 << 30),)]
    alone = SQLiteStateStore(path)  # without a queue in this process
    assert await alone.get_run_status(row.run_id) == "succeeded"
    assert [record.name for record in await alone.records(row.run_id) if record.kind == DONE] == ["one"]
    await alone.close()


async def test_a_run_with_its_queue_in_another_file_has_both(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.db" for name in ("queue", "bus", "state")]
    async with opened(*paths) as runner:
        await runner.submit("script", {}, run_id="r")
        await runner.run_once()
        row = await runner.queue.require("r")
        assert await runner.state_store.get_run_status(row.run_id) == "succeeded"
        assert len(await runner.state_store.records(row.run_id)) > 1
    assert rows(paths[2], "SELECT run_id, status FROM arc_state") == [(row.run_id, "succeeded")]
    assert rows(paths[2], "SELECT run_id FROM arc_journal_numbers") == [(row.run_id,)]


async def test_the_status_that_was_saved_last_is_found(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with opened(path) as runner:
        await runner.submit("script", {}, run_id="r")
        run_id, store = (await runner.queue.require("r")).run_id, runner.state_store
        await store.update_run_status(run_id, "mine")
        assert await store.get_run_status(run_id) == "mine"
        await runner.run_once()
        assert await store.get_run_status(run_id) == "succeeded"
        await store.update_run_status(run_id, "mine again")
        assert await store.get_run_status(run_id) == "mine again"
        # A copy of an older release has no time.
        rows(path, "UPDATE arc_state SET status = 'running', status_t = NULL")
        assert await store.get_run_status(run_id) == "succeeded"
        rows(path, "UPDATE arc_runs SET status = x'00'")
        with pytest.raises(StorageCorrupt, match="status"):
            await store.get_run_status(run_id)


async def test_a_journal_that_is_older_than_the_row_of_its_run_keeps_its_number(tmp_path: Path) -> None:
    store = SQLiteStateStore(tmp_path / "runs.db")
    for run_id in (OTHER, RUN):
        await store.commits.commit(None, [Op("journal.append", (run_id, Record(0, DONE, f"of {run_id}")))])
    queue = SQLiteQueue(tmp_path / "runs.db")
    for run_id in (RUN, OTHER):
        await queue.commits.commit(None, [Op("queue.insert", (RunRow(run_id, "agent"),))])
    for forgets in (False, True):
        for run_id in (RUN, OTHER):
            if forgets:
                store.engine.known.forget()
            await store.commits.commit(None, [Op("journal.append", (run_id, Record(-1, DONE, f"of {run_id}")))])
    for run_id in (RUN, OTHER):
        assert [record.name for record in await store.records(run_id)] == [f"of {run_id}"] * 3
    await store.close()
    await queue.close()


async def test_no_journal_is_left_by_a_deleted_run_or_found_by_the_next_run_with_its_id(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with opened(path) as runner:
        numbers = []
        for _ in range(3):
            await runner.submit("script", {}, run_id="r")
            await runner.run_once()
            row = await runner.queue.require("r")
            assert [record.name for record in await runner.state_store.records(row.run_id)][-2:] == ["one", "succeeded"]
            numbers.append(row.arrival)
            assert await runner.vacuum({"succeeded": 0}) == 1
            assert rows(path, "SELECT count(*) FROM arc_journal") == [(0,)]
            assert await runner.queue.find(RunFilter()) == []
        assert numbers == [1, 2, 3]


async def test_a_library_that_numbers_journals_in_a_table_cannot_use_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with opened(path):
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            rows(path, "SELECT number FROM arc_journal_runs")
        assert dict(rows(path, "SELECT concern, version FROM arc_schema"))["journal"] == 3
    rows(path, "UPDATE arc_schema SET version = 4 WHERE concern = 'journal'")
    with pytest.raises(StorageTooNew, match="this library knows 3"):
        opened(path)


async def insert(queue: SQLiteQueue, number: int) -> int:
    row: RunRow = (await queue.commits.commit(None, [Op("queue.insert", (RunRow(str(UUID(int=number)), "a"),))]))[0]
    return row.arrival


async def delete(queue: SQLiteQueue, number: int) -> None:
    row = await queue.require(str(UUID(int=number)))
    ends = Op("queue.end", (row.run_id, ("pending",), "cancelled", 1.0, "cancel"))
    await queue.commits.commit(None, [ends, Op("queue.delete", (row.run_id, row.generation, row.arrival))])


@pytest.mark.parametrize("reopens", [False, True])
async def test_the_number_of_a_deleted_run_does_not_come_again(tmp_path: Path, reopens: bool) -> None:
    queue, path = SQLiteQueue(tmp_path / "runs.db"), tmp_path / "runs.db"
    seen = [await insert(queue, number) for number in (1, 2, 3)]
    for number, gone in ((4, [3]), (5, [4, 2]), (6, [1, 5]), (7, [6])):
        for each in gone:
            await delete(queue, each)
        if reopens:
            await queue.close()
            rows(path, "VACUUM")
            queue = SQLiteQueue(path)
        seen.append(await insert(queue, number))
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    await queue.close()


OF_BEFORE = 6  # the last version of the schema whose numbers came from AUTOINCREMENT


async def test_a_file_of_before_keeps_its_numbers_and_lists_its_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with opened(path) as runner:
        for n in range(3):
            await runner.submit("script", {"n": n}, run_id=f"r{n}")
        await runner.run_once()
        before = await runner.queue.find(RunFilter())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        for table in ("arc_runs", "arc_mail", "arc_processes", "arc_last_run", "arc_shared"):
            conn.execute(f"DROP TABLE {table}")
        for script in MIGRATIONS[:OF_BEFORE]:
            conn.executescript(script)
        # The library of that version names no column.
        columns = COLUMNS[:40]
        insert = f"INSERT INTO arc_runs VALUES ({', '.join('?' * len(columns))})"
        last = before[0]._replace(run_id=RUN, run_key="gone", arrival=9)
        conn.executemany(insert, [row[: len(columns)] for row in (*before, last)])
        conn.execute("DELETE FROM arc_runs WHERE run_id = ?", (RUN,))
        conn.execute("UPDATE arc_schema SET version = ? WHERE concern = 'queue'", (OF_BEFORE,))
    async with opened(path) as runner:
        assert await runner.queue.find(RunFilter()) == before
        for key in ("r0", "r2"):
            assert [row.run_key for row in await runner.queue.find(RunFilter(prefix=key))] == [key]
        assert (await runner.queue.find(RunFilter(statuses=("succeeded",))))[0].run_key == "r0"
        while await runner.run_once():
            pass
        assert (await runner.queue.counts()).runs == {("succeeded", "script"): 3}
        await runner.submit("script", {}, run_id="new")
        assert (await runner.queue.require("new")).arrival == 10
        with contextlib.closing(sqlite3.connect(path)) as other, pytest.raises(sqlite3.OperationalError, match="44"):
            other.execute(insert, before[0])  # as a library of that version that still has the file open


@pytest.mark.parametrize("newest_first", [False, True])
async def test_runs_are_listed_with_the_next_of_them(tmp_path: Path, newest_first: bool) -> None:
    queue, path = SQLiteQueue(tmp_path / "runs.db"), tmp_path / "runs.db"
    for number in range(1, 2 * BATCH + 2):
        await insert(queue, number)
        assert rows(path, "SELECT coalesce(max(n), 0) FROM arc_runs WHERE listed") == [(number // BATCH * BATCH,)]
        if number % BATCH in (0, 1, BATCH - 1):
            found = await queue.find(RunFilter(agent="a", newest_first=newest_first))
            numbers = [row.arrival for row in found]
            assert numbers == sorted(range(1, number + 1), reverse=newest_first)
            assert (await queue.counts()).runs == {("pending", "a"): number}
    await queue.close()


async def test_only_indexes_that_are_not_of_lists_have_a_run_that_is_not_listed(tmp_path: Path) -> None:
    async with opened(tmp_path / "runs.db") as runner:
        await runner.execute(Script(steps), "r")
        assert len(await runner.queue.find(RunFilter(run_key="r", statuses=("succeeded",)))) == 1
    assert rows(tmp_path / "runs.db", "SELECT run_key, listed FROM arc_runs") == [("r", 0)]
    complete = rows(
        tmp_path / "runs.db",
        "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE % ON arc_runs %' AND sql NOT LIKE '%listed = 1'",
    )
    # What claims and lookups read. A test of the lists reads each of the others.
    assert sorted(name.removeprefix("arc_runs_") for (name,) in complete) == [
        "behind", "due", "expired", "head", "idem", "lapsed", "limited", "owner", "parent", "ready", "turns",
    ]  # fmt: skip
