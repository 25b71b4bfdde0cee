"""`ctx.transaction`: once, with its record, and in nobody else's way."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.claim_writer import BUSY_ATTEMPTS
from agent_runtime_core.errors import (
    InvalidArgument,
    NotSupported,
    StepExecutionError,
    StorageBusy,
    StorageError,
    UnserialisableResult,
)
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.state import SQLiteStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.cases import for_each
from tests.support.runs import Rig, Script, soon, twice
from tests.unit.test_engine_sqlite import held


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


RESERVED = "names starting with arc_ are reserved for the tables of this library"
ENDS = "may not begin, commit or roll back"
TEMPORARY = "may not create temporary tables, views or triggers"

DENIED: dict[str, str] = {
    "DELETE FROM arc_journal": "may not use table 'arc_journal': " + RESERVED,
    "SELECT * FROM arc_runs": "may not use table 'arc_runs': " + RESERVED,
    "SELECT * FROM Arc_Runs": RESERVED,
    "INSERT INTO money SELECT n FROM arc_runs": RESERVED,
    "CREATE TABLE copied AS SELECT * FROM arc_runs": RESERVED,
    "CREATE TABLE ARC_mine (a)": "may not use table 'ARC_mine'",
    "CREATE INDEX Arc_mine ON money (amount)": RESERVED,
    "CREATE INDEX mine ON arc_runs (status)": "may not use table 'arc_runs'",
    "DROP INDEX arc_runs_ready": RESERVED,
    "DROP TABLE arc_mail": RESERVED,
    "ALTER TABLE money RENAME TO arc_mine": RESERVED,
    'ALTER TABLE money RENAME TO "ARC_mine"': RESERVED,
    "ALTER TABLE ARC_RUNS RENAME TO mine": RESERVED,
    "ALTER TABLE arc_runs ADD COLUMN mine": RESERVED,
    "CREATE TABLE jobs (id, state REFERENCES arc_runs(status))": "may not use table 'arc_runs' in table 'jobs'",
    "CREATE TABLE jobs (id, state REFERENCES [Arc_Runs] (status))": RESERVED,
    "CREATE TABLE jobs (id, n, FOREIGN KEY (n) REFERENCES arc_mail DEFERRABLE INITIALLY DEFERRED)": RESERVED,
    "ALTER TABLE money ADD COLUMN run REFERENCES arc_runs (run_id)": "may not use table 'arc_runs' in table 'money'",
    "CREATE VIEW mine AS SELECT amount FROM money, 'arc_runs'": "may not use table 'arc_runs' in view 'mine'",
    "CREATE TRIGGER mine AFTER INSERT ON money BEGIN DELETE FROM arc_mail; END": "in trigger 'mine'",
    "CREATE TRIGGER mine AFTER INSERT ON arc_runs BEGIN SELECT 1; END": RESERVED,
    "CREATE TEMP TRIGGER mine AFTER INSERT ON arc_runs BEGIN SELECT 1; END": TEMPORARY,
    "ANALYZE": RESERVED,
    "REINDEX": RESERVED,
    "DELETE FROM sqlite_sequence": "may not write sqlite_sequence",
    "UPDATE sqlite_sequence SET seq = 0": "may not write sqlite_sequence",
    "UPDATE sqlite_master SET sql = ''": "may not be modified",
    "BEGIN": ENDS,
    "COMMIT": ENDS,
    "ROLLBACK": ENDS,
    "SAVEPOINT mine": ENDS,
    "RELEASE arc_user": ENDS,
    "ROLLBACK TO arc_user": ENDS,
    "PRAGMA journal_mode": "may not use PRAGMA journal_mode",
    "PRAGMA writable_schema = ON": "may not use PRAGMA writable_schema",
    "PRAGMA foreign_keys = OFF": "may not use PRAGMA foreign_keys",
    "PRAGMA defer_foreign_keys = ON": "may not use PRAGMA defer_foreign_keys",
    "PRAGMA user_version = 7": "may not use PRAGMA user_version",
    "ATTACH ':memory:' AS x": "may not attach another database",
    "DETACH main": "may not detach",
    "VACUUM": "VACUUM",
    "CREATE TEMP TABLE mine (x)": TEMPORARY,
    "CREATE TABLE temp.mine (x)": TEMPORARY,
    "CREATE TEMP VIEW mine AS SELECT 1": TEMPORARY,
    "CREATE TEMP TRIGGER mine INSERT ON money BEGIN SELECT 1; END": TEMPORARY,
    "CREATE VIRTUAL TABLE temp.mine USING fts5(x)": TEMPORARY,
}


@for_each("sql", DENIED)
async def test_a_transaction_stays_off_our_tables_and_controls(tmp_path: Path, sql: str) -> None:
    schema = "SELECT type, name, tbl_name, sql FROM sqlite_master"

    def caught(conn: Any) -> None:
        with contextlib.suppress(sqlite3.Error):
            conn.execute(sql).fetchall()

    async with Rig(tmp_path / "a.db") as rig:
        look = rig.runner.queue.engine.read  # type: ignore[attr-defined]

        async def body(ctx: Any) -> None:
            await ctx.transaction("money", lambda conn: bool(conn.execute("CREATE TABLE money (amount)")))
            before = await look(lambda conn: conn.execute(schema).fetchall())
            with pytest.raises(StepExecutionError, match=DENIED[sql]) as refused:
                await ctx.transaction("t", lambda conn: conn.execute(sql).fetchall())
            assert isinstance(refused.value.__cause__, sqlite3.Error)
            with contextlib.suppress(StepExecutionError):
                await ctx.transaction("caught", caught)
            assert await look(lambda conn: conn.execute(schema).fetchall()) == before
            assert await ctx.step("after", lambda: 1) == 1
            assert await ctx.transaction("look", lambda conn: conn.execute("SELECT amount FROM money").fetchall()) == []

        await rig.value(body)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("CREATE VIEW seen AS SELECT status FROM arc_runs", "SELECT * FROM seen"),
        ("CREATE TRIGGER t AFTER INSERT ON money BEGIN DELETE FROM arc_mail; END", "INSERT INTO money VALUES (1)"),
    ],
)
async def test_a_transaction_does_not_reach_our_tables_through_what_others_made(
    tmp_path: Path, made: str, used: str
) -> None:
    async with Rig(tmp_path / "a.db") as rig:
        await rig.value(
            lambda ctx: ctx.transaction("m", lambda conn: bool(conn.execute("CREATE TABLE money (n)"))), "m"
        )
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as other, other:
            other.execute(made)

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match=r"may not use table 'arc_\w+' in '(seen|t)': "):
                await ctx.transaction("t", lambda conn: conn.execute(used).fetchall())

        await rig.value(body)


async def test_numbers_of_a_table_of_its_own_are_kept_and_dropped_by_sqlite(tmp_path: Path) -> None:
    def numbered(conn: Any) -> Any:
        conn.execute("CREATE TABLE bills (id INTEGER PRIMARY KEY AUTOINCREMENT, n)")
        conn.execute("INSERT INTO bills (n) VALUES (1)")
        conn.execute("ALTER TABLE bills RENAME TO invoices")
        number = conn.execute("INSERT INTO invoices (n) VALUES (2)").lastrowid
        conn.execute("DROP TABLE invoices")
        return number

    async with Rig(tmp_path / "a.db") as rig:
        assert await rig.value(lambda ctx: ctx.transaction("t", numbered)) == 2


KEPT: list[Any] = []


def keeps(what: Any) -> Any:
    def fn(conn: Any) -> None:
        conn.execute("CREATE TABLE IF NOT EXISTS money (amount)")
        KEPT.append(what(conn))

    return fn


@for_each(
    ("what", "use"),
    [(lambda conn: conn, lambda conn: conn.execute("INSERT INTO money VALUES (1)")),
     (lambda conn: conn, lambda conn: conn.executemany("INSERT INTO money VALUES (?)", [(1,)])),
     (lambda conn: conn.execute("SELECT 1").connection, lambda conn: conn.execute("UPDATE arc_runs SET agent = 'x'")),
     (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.execute("INSERT INTO money VALUES (1)")),
     (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.executemany("DELETE FROM money", [()])),
     (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.connection.execute("DELETE FROM arc_runs")),
     (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.fetchone()),
     (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.fetchmany()),
     (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.fetchall()),
     (lambda conn: iter(conn.execute("SELECT 1")), next),
     (lambda conn: (row for row in conn.execute("SELECT 1")), next),
     (lambda conn: conn.execute, lambda execute: execute("INSERT INTO money VALUES (1)"))],
)  # fmt: skip
@for_each("where", ["task", "thread"])
async def test_what_a_transaction_was_given_is_refused_after_it(
    tmp_path: Path, what: Any, use: Any, where: str
) -> None:
    KEPT.clear()
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> Any:
            await ctx.transaction("keeps", keeps(what))
            with pytest.raises(sqlite3.ProgrammingError, match="'keeps' must not be used after its function returned"):
                use(KEPT[0]) if where == "task" else await asyncio.to_thread(use, KEPT[0])
            return await ctx.transaction("look", lambda conn: conn.execute("SELECT amount FROM money").fetchall())

        assert await rig.value(body) == []


async def test_another_thread_does_not_use_a_transaction_while_it_runs(tmp_path: Path) -> None:
    def fn(conn: Any) -> str:
        cursor = conn.execute("CREATE TABLE money (n)")
        said = []
        for use in (conn.execute, cursor.execute):
            with ThreadPoolExecutor(1) as pool:
                said.append(str(pool.submit(use, "INSERT INTO money VALUES (1)").exception()))
        return said[0] if said[0] == said[1] else "different"

    async with Rig(tmp_path / "a.db") as rig:
        assert "'t' must not be used in another thread" in await rig.value(lambda ctx: ctx.transaction("t", fn))


@for_each("call", ["commit", "rollback", "close", "cursor", "executescript", "set_authorizer", "blobopen"])
@for_each("of", ["connection", "cursor.connection"])
async def test_a_transaction_is_not_ended_by_its_function(tmp_path: Path, call: str, of: str) -> None:
    def fn(conn: Any) -> None:
        getattr(conn if of == "connection" else conn.execute("SELECT 1").connection, call)()

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> int:
            with pytest.raises(StepExecutionError, match=f"ctx.transaction has no '{call}': use execute"):
                await ctx.transaction("t", fn)
            return int(await ctx.transaction("after", first_of_many))

        assert await rig.value(body) == 1


@pytest.mark.parametrize(
    ("sql", "parameters", "error"),
    [("SELECT ?", (), sqlite3.ProgrammingError), ("SELECT 1; SELECT 2", (), sqlite3.Warning),
     ("SELECT", (), sqlite3.OperationalError), ("SELECT ?", (object(),), sqlite3.Error)],
)  # fmt: skip
async def test_an_error_of_the_driver_stays_what_it_is(
    tmp_path: Path, sql: str, parameters: Any, error: type[Exception]
) -> None:
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError) as failed:
                await ctx.transaction("t", lambda conn: conn.execute(sql, parameters).fetchall())
            assert isinstance(failed.value.__cause__, error | sqlite3.ProgrammingError)

        await rig.value(body)


async def test_rows_come_in_each_way(tmp_path: Path) -> None:
    def fn(conn: Any) -> Any:
        cursor = conn.execute(MANY)
        return [cursor.fetchone()[0], len(cursor.fetchmany(2)), len(cursor.fetchmany(size=3)), len(list(cursor)) > 0]

    async with Rig(tmp_path / "a.db") as rig:
        assert await rig.value(lambda ctx: ctx.transaction("t", fn)) == [1, 2, 3, True]


async def test_a_cursor_runs_no_script_and_may_be_closed(tmp_path: Path) -> None:
    def fn(conn: Any) -> None:
        conn.execute("SELECT 1").close()
        conn.execute("SELECT 1").executescript("CREATE TABLE a (b); COMMIT;")

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> int:
            with pytest.raises(StepExecutionError, match="one statement at a time"):
                await ctx.transaction("t", fn)
            return int(await ctx.transaction("after", first_of_many))

        assert await rig.value(body) == 1


async def test_a_thread_that_tries_a_kept_connection_all_the_time_changes_nothing(tmp_path: Path) -> None:
    over, refused = threading.Event(), threading.Event()

    def later() -> None:
        while not over.is_set():
            try:
                KEPT[0].execute("UPDATE arc_runs SET agent = 'hacked'")
            except sqlite3.ProgrammingError:
                refused.set()

    KEPT.clear()
    async with Rig(tmp_path / "a.db") as rig:
        await rig.value(lambda ctx: ctx.transaction("keeps", keeps(lambda conn: conn)), "keeps")
        thread = threading.Thread(target=later)
        thread.start()
        try:
            for n in range(50):
                await rig.value(lambda ctx: ctx.step("s", lambda: 1), f"r{n}")
            assert await asyncio.to_thread(refused.wait, 10)
        finally:
            over.set()
            thread.join()
        assert "hacked" not in {info.agent_key for info in await rig.runner.runs()}


@pytest.mark.parametrize("deferred", ["", " DEFERRABLE INITIALLY DEFERRED"], ids=["immediate", "deferred"])
async def test_a_broken_foreign_key_is_the_error_of_its_step_alone(tmp_path: Path, deferred: str) -> None:
    def order(conn: Any, customer: int) -> int:
        conn.execute("CREATE TABLE IF NOT EXISTS customer (id PRIMARY KEY)")
        conn.execute(f"CREATE TABLE IF NOT EXISTS orders (customer REFERENCES customer (id){deferred})")
        if customer == 1:
            conn.execute("INSERT INTO customer VALUES (1)")
        conn.execute("INSERT INTO orders VALUES (?)", (customer,))
        return customer

    async with Rig(tmp_path / "a.db") as rig:
        engine = rig.runner.queue.engine  # type: ignore[attr-defined]

        async def body(ctx: Any) -> Any:
            async def one(n: int) -> Any:
                try:
                    return await ctx.transaction(f"t{n}", order, n)
                except StepExecutionError as error:
                    return type(error.__cause__).__name__, str(error.__cause__)

            async def step(n: int) -> Any:
                return await ctx.step(f"s{n}", lambda: n)

            with held(engine):  # what is sent meanwhile is one group
                tasks = [asyncio.ensure_future(each) for each in (step(5), one(1), one(99), step(6))]
                await soon(lambda: engine.writer._queued > 3)
            return await asyncio.gather(*tasks)

        broken = ["IntegrityError", "FOREIGN KEY constraint failed"]
        assert [list(x) if isinstance(x, tuple) else x for x in await rig.value(body)] == [5, 1, broken, 6]
        look = await engine.read(lambda conn: conn.execute("SELECT customer FROM orders").fetchall())
        assert look == [(1,)]


async def test_a_broken_deferred_key_of_a_commit_without_a_function_is_an_error_of_the_file(tmp_path: Path) -> None:
    """It is of a foreign key to our tables that another program has made: no step has done it."""
    async with Rig(tmp_path / "a.db") as rig:
        await rig.value(lambda ctx: ctx.step("s", lambda: 1), "one")
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as other, other:
            other.execute("CREATE TABLE mine (run REFERENCES arc_runs (run_id) DEFERRABLE INITIALLY DEFERRED)")
            other.execute("INSERT INTO mine SELECT run_id FROM arc_runs")
        with pytest.raises(StorageError, match="FOREIGN KEY constraint failed"):
            await rig.runner.discard("one")


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


async def test_a_transaction_may_have_a_full_text_index(tmp_path: Path) -> None:
    def index(db: Any) -> list[str]:
        try:
            db.execute("CREATE VIRTUAL TABLE notes USING fts5(said)")
        except sqlite3.OperationalError as error:
            if "no such module" in str(error):
                return ["a train to Bern"]
            raise
        db.execute("INSERT INTO notes VALUES ('a train to Bern'), ('a bus to Ulm')")
        return [said for (said,) in db.execute("SELECT said FROM notes WHERE notes MATCH 'bern'")]

    async with Rig(tmp_path / "runs.db") as rig:
        assert await rig.value(lambda ctx: ctx.transaction("index", index)) == ["a train to Bern"]


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
            with pytest.raises(InvalidArgument, match="It runs in the writer's thread"):
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
        ctx.journal.writer.on_events = lambda make: heard.extend((kind, about.get("result")) for kind, about in make())
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
    errors = [error] * (1 + BUSY_ATTEMPTS if isinstance(error, StorageBusy) else 1)

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
