"""`ctx.transaction`: once, with its record, and in nobody else's way."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import (
    InvalidArgument,
    NotSupported,
    StepExecutionError,
    StorageBusy,
    UnserialisableResult,
)
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.ledger import BUSY_TRIES
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.state import SQLiteStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.unit.rig import Rig, Script, twice


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("gave_up", [False, True])
async def test_a_transaction_whose_outcome_was_not_heard_is_done_once_in_all_tries_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gave_up: bool, landed: bool
) -> None:
    tries: list[int] = []

    def pay(conn: Any) -> str:
        conn.execute("CREATE TABLE IF NOT EXISTS paid (n)")
        conn.execute("INSERT INTO paid VALUES (1)")
        return f"paid in try {len(tries)}"

    async def body(ctx: Any) -> Any:
        async def outer() -> Any:
            tries.append(len(tries))
            try:
                return await ctx.transaction("pay", pay)
            except asyncio.CancelledError:
                raise TimeoutError from None  # as a `timeout` of the step makes of it

        return await ctx.step("outer", outer, retries=2, retry_delay=0)

    async with Rig(tmp_path / "runs.db") as rig:
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def unheard(guard: Any, ops: Any) -> Any:
            if len(tries) == 1 and any(op.name == "journal.transact" for op in ops):
                if landed:
                    await commit(guard, ops)
                raise asyncio.CancelledError if gave_up else StorageBusy("did not answer")
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", unheard)
        assert await rig.value(body) == f"paid in try {1 if landed else 2}"
        assert [record.name for record in await rig.records() if record.kind == "done"] == ["pay", "outer"]
        numbers = [event.sequence for event in await rig.runner.event_bus.get_events("r")]
        assert numbers == list(range(len(numbers)))
        with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as db:
            assert db.execute("SELECT count(*) FROM paid").fetchone() == (1,)


# -- transactions


async def test_a_transaction_commits_with_its_record(tmp_path: Path) -> None:
    def pay(conn: Any, amount: int) -> int:
        conn.execute("CREATE TABLE IF NOT EXISTS money (amount INTEGER)")
        conn.execute("INSERT INTO money VALUES (?)", (amount,))
        conn.executemany("INSERT INTO money VALUES (?)", [(1,)])
        return int(conn.execute("SELECT sum(amount) FROM money").fetchone()[0])

    def fails(conn: Any) -> None:
        conn.execute("INSERT INTO money VALUES (1000)")
        raise ValueError("no")

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> Any:
            return [await ctx.transaction("pay", pay, 5), await ctx.transaction("again", pay, 0)]

        assert await twice(rig, body) == ([6, 7], [6, 7])

        async def failing(ctx: Any) -> int:
            with pytest.raises(StepExecutionError, match="no"):
                await ctx.transaction("fails", fails)
            return int(await ctx.transaction("pay", pay, 0))

        assert await rig.value(failing, "other") == 8


@pytest.mark.parametrize(
    "sql",
    ["DELETE FROM arc_journal", "SELECT * FROM arc_runs", "SELECT * FROM Arc_Runs", "CREATE TABLE ARC_mine (a)",
     "CREATE INDEX Arc_mine ON money (amount)", "ALTER TABLE money RENAME TO arc_mine",
     'ALTER TABLE money RENAME TO "ARC_mine"', "ALTER TABLE ARC_RUNS RENAME TO mine",
     "COMMIT", "PRAGMA journal_mode", "ATTACH ':memory:' AS x",
     "SAVEPOINT mine", "CREATE TEMP TABLE mine (x)", "CREATE TABLE temp.mine (x)", "CREATE TEMP VIEW mine AS SELECT 1",
     "CREATE TEMP TRIGGER mine INSERT ON money BEGIN SELECT 1; END",
     "CREATE VIRTUAL TABLE temp.mine USING fts5(x)"],
)  # fmt: skip
async def test_a_transaction_stays_off_our_tables_and_controls(tmp_path: Path, sql: str) -> None:
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> None:
            await ctx.transaction("money", lambda conn: bool(conn.execute("CREATE TABLE money (amount)")))
            with pytest.raises(StepExecutionError, match=r"not authorized|prohibited"):
                await ctx.transaction("t", lambda conn: conn.execute(sql).fetchall())
            assert await ctx.step("after", lambda: 1) == 1
            assert await ctx.transaction("look", lambda conn: conn.execute("SELECT amount FROM money").fetchall()) == []

        await rig.value(body)


async def test_a_transaction_may_change_tables_of_its_own(tmp_path: Path) -> None:
    def alter(conn: Any) -> int:
        conn.execute("CREATE TABLE money (amount)")
        conn.execute("ALTER TABLE money RENAME TO cash")
        conn.execute("ALTER TABLE cash ADD COLUMN note")
        conn.execute("ALTER TABLE cash RENAME COLUMN note TO arc_note")
        conn.execute("UPDATE cash SET arc_note = 1 WHERE arc_note IS NULL")
        conn.execute("ALTER TABLE cash DROP COLUMN amount")
        return int(conn.execute("SELECT count(*) FROM cash").fetchone()[0])

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> Any:
            return await ctx.transaction("alter", alter)

        assert await rig.value(body) == 0


async def test_a_transaction_is_stopped_after_its_time(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"

    class Ticking(VirtualClock):
        def boot(self) -> float:
            self.advance(0.05)
            return super().boot()

    async with Rig(tmp_path / "a.db", Ticking(), lease_ttl_seconds=1e6, run_timeout_seconds=1e6) as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match="interrupted"):
                await ctx.transaction("t", lambda conn: conn.execute(endless).fetchone())

        await rig.value(body)


MANY = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9) SELECT i, name FROM n, sqlite_master"


def first_of_many(conn: Any) -> Any:
    return conn.execute(MANY).fetchone()[0]


def fails_half_way(conn: Any) -> None:
    rows = conn.execute(MANY)
    raise ValueError(rows.fetchone())


def hands_out_its_rows(conn: Any) -> Any:
    return conn.execute(MANY)


@pytest.mark.parametrize("fn", [fails_half_way, hands_out_its_rows])
async def test_rows_that_a_transaction_did_not_read_hold_up_no_later_commit(tmp_path: Path, fn: Any) -> None:
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> int:
            with pytest.raises((StepExecutionError, UnserialisableResult)) as kept:
                await ctx.transaction("t", fn)
            other.execute("CREATE TABLE IF NOT EXISTS theirs (n)")  # as another process commits
            assert await ctx.step("after", lambda: 1) == 1, f"while {kept.value!r} is kept"
            return int(await ctx.transaction("again", first_of_many))

        assert await rig.value(body) == 1
    other.close()


@pytest.mark.parametrize(
    "end", [SystemExit("no more"), asyncio.CancelledError(), GeneratorExit()], ids=["exit", "cancelled", "closed"]
)
async def test_what_ends_a_program_in_a_transaction_is_its_callers_as_in_a_step(
    tmp_path: Path, end: BaseException
) -> None:
    def leaves(conn: Any) -> None:
        conn.execute("CREATE TABLE half (n)")
        raise end

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> int:
            with pytest.raises(type(end)):
                await ctx.transaction("t", leaves)
            return int(await ctx.transaction("after", first_of_many))

        assert await rig.value(body) == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as conn:
        assert not conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall()


def twice_the_same(conn: Any, after: str) -> None:
    conn.execute("CREATE TABLE once (n INTEGER PRIMARY KEY ON CONFLICT ROLLBACK)")
    conn.execute("CREATE TABLE notes (n)")
    conn.execute("INSERT INTO once VALUES (1)")
    if after == "nothing caught":
        conn.execute("INSERT INTO once VALUES (1)")
    with contextlib.suppress(sqlite3.IntegrityError):
        conn.execute("INSERT INTO once VALUES (1)")
    if after == "another error":
        raise ValueError("rolled back")
    if after == "writes":
        conn.execute("CREATE TABLE alone (n)")


@pytest.mark.parametrize("after", ["nothing", "nothing caught", "another error", "writes"])
async def test_what_comes_after_a_rollback_by_sqlite_does_not_stand_alone(tmp_path: Path, after: str) -> None:
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match=r"rolled back|UNIQUE"):
                await ctx.transaction("t", twice_the_same, after)
            assert await ctx.step("after", lambda: 1) == 1

        await rig.value(body)
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as conn:
        left = conn.execute("SELECT name FROM sqlite_master WHERE name IN ('once', 'notes', 'alone')").fetchall()
    assert left == []


async def test_a_transaction_needs_sqlite_and_a_plain_function(tmp_path: Path) -> None:
    async def later(conn: Any) -> None: ...

    async with Rig() as rig:

        async def memory(ctx: Any) -> None:
            with pytest.raises(NotSupported, match="SQLite"):
                await ctx.transaction("t", lambda conn: 1)

        await rig.value(memory)
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match=r"'t'.*cannot be a coroutine"):
                await ctx.transaction("t", later)
            with pytest.raises(UnserialisableResult):
                await ctx.transaction("u", lambda conn: object())

        await rig.value(body)


async def test_a_users_own_sql_error_fails_the_step_with_its_cause(tmp_path: Path) -> None:
    def twice(conn: Any) -> None:
        conn.execute("CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY)")
        conn.execute("INSERT INTO mine VALUES (1)")
        conn.execute("INSERT INTO mine VALUES (1)")

    async with open_run(tmp_path / "runs.db", "r") as ctx:
        with pytest.raises(StepExecutionError, match="UNIQUE") as caught:
            await ctx.transaction("twice", twice)
        assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
        assert await ctx.transaction("count", lambda conn: conn.execute("SELECT 1").fetchone()[0]) == 1


async def test_a_run_whose_first_transaction_fails_has_told_that_it_started(tmp_path: Path) -> None:
    def bad(conn: Any) -> None:
        raise ValueError("no")

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> str:
            with pytest.raises(StepExecutionError):
                await ctx.transaction("t", bad)
            return "went on"

        assert await rig.value(body) == "went on"
        kinds = [kind for kind, _ in await rig.told()]
        assert kinds == ["run.started", "step.failed", "run.succeeded"]


async def test_trace_sinks_hear_of_a_transaction_as_of_a_step(tmp_path: Path) -> None:
    heard: list[tuple[str, Any]] = []

    async def body(ctx: Any) -> Any:
        ctx.book.ledger.told = lambda kind, payload: heard.append((kind, payload.get("result")))
        return [await ctx.step("a", lambda: 1), await ctx.transaction("t", lambda conn: 2)]

    async with Rig(tmp_path / "a.db") as rig:
        assert await rig.value(body) == [1, 2]
        assert [kind for kind, _ in heard] == ["step.started", "step.completed", "step.completed", "run.succeeded"]
        del heard[:]
        assert await rig.value(body) == [1, 2]
        assert heard == []


@pytest.mark.parametrize("error", [StorageBusy("did not answer"), asyncio.CancelledError(), OSError("a bus of theirs")])
async def test_a_transaction_whose_event_was_not_published_is_done_once_and_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    done: list[str] = []
    errors = [error] * (1 + BUSY_TRIES if isinstance(error, StorageBusy) else 1)

    async def body(ctx: Any) -> Any:
        async def outer() -> Any:
            try:
                return await ctx.transaction("t", lambda conn: done.append("t"))
            except asyncio.CancelledError:
                raise TimeoutError from None  # as a `timeout` of the step makes of it

        return await ctx.step("outer", outer, retries=1, retry_delay=0)

    queue, state = SQLiteQueue(path=tmp_path / "a.db"), SQLiteStateStore(path=tmp_path / "a.db")
    bus = SQLiteEventBus(path=tmp_path / "events.db")
    commit = bus.commits.commit

    async def refusing(guard: Any, ops: Any) -> Any:
        if errors and done and any(op.name == "events.publish" for op in ops):
            raise errors.pop()
        return await commit(guard, ops)

    monkeypatch.setattr(bus.commits, "commit", refusing)
    async with AgentRunner(queue, bus, state) as runner:
        assert (await runner.execute(Script(body), "r")).status == RunStatus.SUCCEEDED
        assert done == ["t"]
        events = await bus.get_events("r")
        assert [e.payload["step_name"] for e in events if e.event_type == "step.completed"] == ["outer", "t"]


async def test_a_failed_transaction_fails_again_where_the_code_went_on_without_it(tmp_path: Path) -> None:
    tried: list[str] = []

    def bad(conn: Any) -> None:
        tried.append("t")
        raise ValueError("no")

    async with Rig(tmp_path / "a.db", max_retries=1) as rig:

        async def body(ctx: Any) -> str:
            try:
                await ctx.transaction("t", bad)
            except StepExecutionError:
                fallback: str = await ctx.step("b", lambda: "fallback")
            if len(tried) == 1:
                tried.append("again")
                raise RuntimeError("after the fallback")
            return fallback

        assert (await rig.go(body)).status == RunStatus.FAILED
        assert await rig.value(body) == "fallback"
        assert tried == ["t", "again"]
