"""`ctx.transaction` on PostgreSQL: once, with its record, and in nobody else's way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunResult
from agent_runtime_core._engines.base import Op
from agent_runtime_core.errors import RunFailed, StepExecutionError, UnserialisableResult
from agent_runtime_core.portal import call
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig
from tests.support.cases import for_each
from tests.support.postgres_servers import PostgresServer
from tests.support.runs import Body, Script

pytestmark = pytest.mark.postgres
psycopg = pytest.importorskip("psycopg")


class Bench:
    """A runner on a schema, and tables next to it."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self.server, self.url, self.schema = server, url, url.partition("schema=")[2]
        config = RunnerConfig(max_retries=1)
        self.runner = AgentRunner.open(url, config=config, registry=Registry())
        server.ask("DROP SCHEMA IF EXISTS shop CASCADE")
        server.ask("CREATE SCHEMA shop")
        server.ask("CREATE TABLE shop.paid (n int PRIMARY KEY)")

    @property
    def engine(self) -> Any:
        return self.runner.queue.engine  # type: ignore[attr-defined]

    async def go(self, body: Body, run_id: str = "r") -> RunResult:
        return await self.runner.execute(Script(body), run_id)

    async def value(self, body: Body, run_id: str = "r") -> Any:
        return (await self.go(body, run_id)).raise_for_status().final_output["value"]

    def paid(self) -> list[int]:
        return [n for (n,) in self.server.ask("SELECT n FROM shop.paid ORDER BY n")]

    async def records(self, run_id: str = "r") -> list[str]:
        row = await self.runner.get_run(run_id)
        return [each.name for each in await self.runner.state_store.records(str(row.run_id)) if each.kind == "done"]


@pytest.fixture
def bench(postgres_server: PostgresServer, postgres_url: str) -> Iterator[Bench]:
    bench = Bench(postgres_server, postgres_url)
    yield bench
    call(bench.runner.close)


def pay(conn: Any, n: int = 1) -> int:
    conn.execute("INSERT INTO shop.paid VALUES (%s)", (n,))
    conn.executemany("INSERT INTO shop.paid VALUES (%s)", [(n + 100,), (n + 200,)])
    with conn.cursor() as cursor:
        return int(cursor.execute("SELECT count(*) FROM shop.paid").fetchone()[0])


async def test_a_transaction_commits_with_its_record(bench: Bench) -> None:
    def fails(conn: Any) -> None:
        pay(conn, 7)
        raise ValueError("no")

    async def body(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError, match="no"):
            await ctx.transaction("fails", fails)
        return [await ctx.transaction("pay", pay, 1), await ctx.transaction("again", pay, 2)]

    assert await bench.value(body) == [3, 6]
    assert await bench.value(body) == [3, 6]
    assert bench.paid() == [1, 2, 101, 102, 201, 202]
    assert await bench.records() == ["pay", "again"]


async def test_what_was_saved_is_returned_by_the_next_attempt(bench: Bench) -> None:
    async def body(ctx: Any) -> Any:
        value = await ctx.transaction("pay", pay, 1)
        if bench.paid() and not failed:
            failed.append(True)
            raise ValueError("once")
        return value

    failed: list[bool] = []
    with pytest.raises(RunFailed):
        await bench.value(body)
    assert await bench.value(body) == 3
    assert bench.paid() == [1, 101, 201]


RESERVED = r"may not use table \w+\.\w+: the schema \w+ is reserved for the tables of this library"
ENDS = "may not begin, commit or roll back: the library commits"
DENIED: dict[str, str] = {
    "DELETE FROM {s}.journal": RESERVED,
    "SELECT * FROM {s}.runs": RESERVED,
    'SELECT * FROM "{s}"."fences"': RESERVED,
    "SELECT * FROM {S} . runs": RESERVED,
    "INSERT INTO shop.paid SELECT n FROM {s}.runs": RESERVED,
    "CREATE VIEW shop.mine AS SELECT * FROM {s}.runs": RESERVED,
    "CREATE TABLE shop.mine (run text REFERENCES {s}.runs (run_id))": RESERVED,
    "CREATE TABLE {s}.mine (a int)": RESERVED,
    "BEGIN": ENDS,
    "commit": ENDS,
    "/* why */ COMMIT": ENDS,
    "-- why\nROLLBACK": ENDS,
    "START TRANSACTION": ENDS,
    "END": ENDS,
    "PREPARE TRANSACTION 'x'": ENDS,
    "SELECT 1; COMMIT": "one at a time",
    "SELECT 1; SELECT 2": "one at a time",
    "SET search_path = {s}": "may not use SET",
    "RESET ALL": "may not use RESET",
    "DISCARD ALL": "may not use DISCARD",
    "LISTEN mine": "may not use LISTEN",
    "CREATE TEMP TABLE mine (a int)": "may not create temporary tables",
    "CREATE LOCAL TEMPORARY TABLE mine (a int)": "may not create temporary tables",
}


@for_each("sql", DENIED)
async def test_a_transaction_stays_off_our_tables_and_controls(bench: Bench, sql: str) -> None:
    statement = sql.format(s=bench.schema, S=bench.schema.upper())

    def caught(conn: Any) -> None:
        with contextlib.suppress(psycopg.Error):
            conn.execute(statement)

    async def body(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError, match=DENIED[sql]) as refused:
            await ctx.transaction("t", lambda conn: conn.execute(statement).fetchall())
        assert isinstance(refused.value.__cause__, psycopg.Error)
        await ctx.transaction("caught", caught)
        return await ctx.transaction("after", pay)

    assert await bench.value(body) == 3


ALLOWED = [
    "SELECT 'BEGIN; COMMIT; t.runs'", "SELECT $$;$$, $a$ ; $a$, E'it\\'s; ', \"n\" FROM shop.paid -- ; COMMIT",
    "SET LOCAL work_mem = '8MB'", "CREATE TEMP TABLE mine (a int) ON COMMIT DROP", "SAVEPOINT mine", "SELECT 1;",
    "SET CONSTRAINTS ALL DEFERRED", "WITH a AS (SELECT 1) SELECT * FROM a",
]  # fmt: skip


@for_each("sql", ALLOWED)
async def test_other_statements_are_allowed(bench: Bench, sql: str) -> None:
    def fn(conn: Any) -> bool:
        conn.execute(sql)
        conn.execute(psycopg.sql.SQL("SELECT {}").format(1))
        conn.execute(b"SELECT 1")
        return True

    async def body(ctx: Any) -> list[bool]:
        return [await ctx.transaction("t", fn), await ctx.transaction("again", fn)]

    assert await bench.value(body) == [True, True]


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("CREATE VIEW shop.seen AS SELECT status FROM {s}.runs", "SELECT * FROM shop.seen"),
        (
            "CREATE FUNCTION shop.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN DELETE FROM {s}.mail;"
            " RETURN NEW; END';"
            " CREATE TRIGGER t AFTER INSERT ON shop.paid FOR EACH ROW EXECUTE FUNCTION shop.f()",
            "INSERT INTO shop.paid VALUES (5)",
        ),
    ],
    ids=["view", "trigger"],
)
async def test_a_transaction_does_not_reach_our_tables_through_what_others_made(
    bench: Bench, made: str, used: str
) -> None:
    assert await bench.runner.runs() == []  # the tables are there
    bench.server.ask(made.format(s=bench.schema))

    async def body(ctx: Any) -> None:
        with pytest.raises(StepExecutionError, match=RESERVED):
            await ctx.transaction("t", lambda conn: bool(conn.execute(used).rowcount))

    await bench.value(body)
    assert bench.paid() == []


@for_each(
    ("what", "use"),
    [
        (lambda conn: conn, lambda conn: conn.execute("SELECT 1")),
        (lambda conn: conn, lambda conn: conn.executemany("INSERT INTO shop.paid VALUES (%s)", [(1,)])),
        (lambda conn: conn, lambda conn: conn.cursor()),
        (lambda conn: conn, lambda conn: conn.transaction().__enter__()),
        (lambda conn: conn, lambda conn: conn.commit()),
        (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.execute("INSERT INTO shop.paid VALUES (1)")),
        (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.connection.execute("SELECT 1")),
        (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.fetchone()),
        (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.fetchmany()),
        (lambda conn: conn.execute("SELECT 1"), lambda cursor: cursor.fetchall()),
    ],
)
async def test_what_a_transaction_was_given_is_refused_after_it(
    bench: Bench, what: Callable[[Any], Any], use: Callable[[Any], Any]
) -> None:
    kept: list[Any] = []

    async def body(ctx: Any) -> Any:
        await ctx.transaction("keeps", lambda conn: kept.append(what(conn)))
        with pytest.raises(psycopg.ProgrammingError, match="'keeps' must not be used after its function returned"):
            use(kept[0])
        return await ctx.transaction("after", pay)

    assert await bench.value(body) == 3


async def test_another_thread_does_not_use_a_transaction_while_it_runs(bench: Bench) -> None:
    def fn(conn: Any) -> str:
        with ThreadPoolExecutor(1) as pool:
            return str(pool.submit(conn.execute, "INSERT INTO shop.paid VALUES (1)").exception())

    assert "'t' must not be used in another thread" in await bench.value(lambda ctx: ctx.transaction("t", fn))


@for_each("name", ["commit", "rollback", "close", "cancel", "pipeline", "tpc_begin", "__enter__"])
async def test_a_transaction_is_not_ended_by_its_function(bench: Bench, name: str) -> None:
    def fn(conn: Any) -> None:
        pay(conn)
        getattr(conn, name)()

    async def body(ctx: Any) -> int:
        with pytest.raises(StepExecutionError, match=ENDS):
            await ctx.transaction("t", fn)
        return int(await ctx.transaction("after", pay))

    assert await bench.value(body) == 3


async def test_part_of_a_transaction_can_be_rolled_back(bench: Bench) -> None:
    def fn(conn: Any) -> str:
        pay(conn, 1)
        try:
            with conn.transaction():
                pay(conn, 2)
                conn.execute("INSERT INTO shop.paid VALUES (1)")
        except psycopg.errors.UniqueViolation:
            return "twice"
        return "once"

    assert await bench.value(lambda ctx: ctx.transaction("t", fn)) == "twice"
    assert bench.paid() == [1, 101, 201]


async def test_an_error_that_a_function_swallows_is_the_steps(bench: Bench) -> None:
    def fn(conn: Any) -> None:
        pay(conn)
        with contextlib.suppress(psycopg.Error):
            conn.execute("SELECT 1 / 0")

    async def body(ctx: Any) -> None:
        with pytest.raises(StepExecutionError, match="a statement of transaction 't' failed"):
            await ctx.transaction("t", fn)

    await bench.value(body)
    assert bench.paid() == []


@pytest.mark.parametrize("deferred", ["", " DEFERRABLE INITIALLY DEFERRED"], ids=["immediate", "deferred"])
async def test_a_broken_constraint_is_the_steps_error(bench: Bench, deferred: str) -> None:
    bench.server.ask(f"CREATE TABLE shop.orders (n int REFERENCES shop.paid (n){deferred})")

    async def body(ctx: Any) -> int:
        with pytest.raises(StepExecutionError) as broken:
            await ctx.transaction("t", lambda conn: bool(conn.execute("INSERT INTO shop.orders VALUES (9)").rowcount))
        assert isinstance(broken.value.__cause__, psycopg.errors.ForeignKeyViolation)
        return int(await ctx.transaction("after", pay))

    assert await bench.value(body) == 3


async def test_a_result_that_cannot_be_saved_stores_nothing(bench: Bench) -> None:
    async def body(ctx: Any) -> None:
        with pytest.raises(UnserialisableResult):
            await ctx.transaction("t", lambda conn: (pay(conn), object()))

    await bench.value(body)
    assert bench.paid() == []


@pytest.mark.parametrize(
    "end", [SystemExit("no more"), asyncio.CancelledError(), GeneratorExit()], ids=["exit", "cancelled", "closed"]
)
async def test_what_ends_a_program_in_a_transaction_is_its_callers(bench: Bench, end: BaseException) -> None:
    def leaves(conn: Any) -> None:
        pay(conn)
        raise end

    async def body(ctx: Any) -> int:
        with pytest.raises(type(end)):
            await ctx.transaction("t", leaves)
        return int(await ctx.transaction("after", pay))

    assert await bench.value(body) == 3


# -- once


def of_function() -> bool:
    """Whether this thread commits functions: the others read, and commit the rest of the run."""
    return threading.current_thread().name == "agent-runtime-transaction"


@pytest.mark.parametrize("landed", [False, True], ids=["not-landed", "landed"])
async def test_a_commit_whose_reply_is_lost_is_done_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    calls: list[int] = []
    end, cut = bench.engine.end, threading.Event()

    def lost(conn: Any) -> None:
        if of_function() and not cut.is_set():
            cut.set()
            if landed:
                end(conn)
            conn.raw.close()
            raise psycopg.OperationalError("the connection is lost")
        end(conn)

    def fn(conn: Any) -> int:
        calls.append(1)
        return pay(conn, 1)

    monkeypatch.setattr(bench.engine, "end", lost)
    assert await bench.value(lambda ctx: ctx.transaction("pay", fn)) == 3
    assert cut.is_set()
    assert len(calls) == (1 if landed else 2)
    assert bench.paid() == [1, 101, 201]
    assert await bench.records() == ["pay"]


async def test_a_commit_that_is_still_under_way_when_it_is_repeated_is_done_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost, and the server commits only when the function was called for the second time."""
    bench.server.ask("CREATE TABLE shop.free (n int)")
    calls: list[int] = []
    end = bench.engine.end
    open_: list[Any] = []

    def late(conn: Any) -> None:
        if of_function() and not open_:
            open_.append(conn.raw)
            raise psycopg.OperationalError("the connection is lost")
        end(conn)

    def fn(conn: Any) -> int:
        calls.append(1)
        conn.execute("INSERT INTO shop.free VALUES (1)")
        if len(calls) == 2:
            open_[0].execute("COMMIT")
        return len(calls)

    def keep(conn: Any) -> None:
        if conn.raw not in open_:
            disconnect(conn)

    def roll_back(conn: Any) -> None:
        if conn.raw not in open_:
            undo(conn)

    disconnect, undo = bench.engine.disconnect, bench.engine.roll_back
    monkeypatch.setattr(bench.engine, "end", late)
    monkeypatch.setattr(bench.engine, "disconnect", keep)
    monkeypatch.setattr(bench.engine, "roll_back", roll_back)
    assert await bench.value(lambda ctx: ctx.transaction("t", fn)) == 1
    assert len(calls) == 2
    assert bench.server.ask("SELECT count(*) FROM shop.free") == [(1,)]
    open_[0].close()


async def test_a_server_process_that_is_terminated_during_the_function_calls_it_again(bench: Bench) -> None:
    calls: list[int] = []

    def fn(conn: Any) -> int:
        calls.append(pay(conn))
        if len(calls) == 1:
            bench.server.ask(f"SELECT pg_terminate_backend({conn.info.backend_pid}, 5000)")
            conn.execute("SELECT 1")
        return len(calls)

    assert await bench.value(lambda ctx: ctx.transaction("t", fn)) == 2
    assert bench.paid() == [1, 101, 201]


async def test_a_deadlock_of_the_function_calls_it_again(bench: Bench) -> None:
    calls: list[int] = []

    def fn(conn: Any) -> int:
        calls.append(pay(conn))
        if len(calls) == 1:
            raise psycopg.errors.DeadlockDetected("deadlock detected")
        return len(calls)

    assert await bench.value(lambda ctx: ctx.transaction("t", fn)) == 2
    assert bench.paid() == [1, 101, 201]


async def test_a_superseded_claim_commits_nothing(bench: Bench) -> None:
    update = f"UPDATE {bench.schema}.runs SET claim_id = %s"
    claims: list[str] = []

    def fn(conn: Any) -> int:
        claims.append(bench.server.ask(f"SELECT claim_id FROM {bench.schema}.runs")[0][0])
        bench.server.ask(update, f"7{claims[0][1:]}")
        return pay(conn)

    ended, errors = asyncio.Event(), list[str]()

    async def body(ctx: Any) -> Any:
        try:
            await ctx.transaction("t", fn)
        except BaseException as error:
            errors.append(type(error).__name__)
            raise
        finally:
            ended.set()

    # The run itself has no claim any more, so nobody ends it.
    task = asyncio.ensure_future(bench.value(body))
    await ended.wait()
    task.cancel()
    await asyncio.wait({task})
    # The run may have noticed the other claim first, and have stopped its code.
    assert errors in (["LeaseLost"], ["CancelledError"])
    assert bench.paid() == []


KILLED = """
    import os, signal, sys
    from agent_runtime_core import open_run_sync

    def pay(conn):
        conn.execute("INSERT INTO shop.paid VALUES (1)")
        os.kill(os.getpid(), signal.SIGKILL)

    with open_run_sync(sys.argv[1], run_id="killed") as run:
        run.sync_ctx.transaction("pay", pay)
"""


async def test_a_process_that_is_killed_in_its_function_has_written_nothing(bench: Bench) -> None:
    arguments = [sys.executable, "-c", textwrap.dedent(KILLED), bench.url]
    done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert bench.paid() == []


# -- in nobody else's way


async def test_a_slow_function_delays_no_other_run_and_no_heartbeat(bench: Bench) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(conn: Any) -> str:
        pay(conn)
        inside.set()
        assert go_on.wait(30)
        return "slow"

    async def quick(ctx: Any) -> Any:
        return [await ctx.step("s", lambda: 1), await ctx.transaction("other", lambda conn: 2)]

    first = asyncio.ensure_future(bench.value(lambda ctx: ctx.transaction("slow", slow), "slow"))
    assert await asyncio.to_thread(inside.wait, 30)
    assert await bench.value(quick, "quick") == [1, 2]
    row = await bench.runner.queue.require("slow")
    assert (await bench.engine.commit(None, [Op("queue.beat", ([(row.run_id, row.claim_id)], 77.0))]))[0] == [
        (True, False)
    ]
    assert not first.done()
    go_on.set()
    assert await first == "slow"
    assert bench.paid() == [1, 101, 201]


async def test_later_commits_of_the_run_come_after_its_function(bench: Bench) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(conn: Any) -> str:
        inside.set()
        assert go_on.wait(30)
        return "slow"

    async def body(ctx: Any) -> Any:
        first = asyncio.ensure_future(ctx.transaction("slow", slow))
        assert await asyncio.to_thread(inside.wait, 30)
        others = [asyncio.ensure_future(ctx.step(f"s{n}", lambda n=n: n)) for n in range(3)]
        others.append(asyncio.ensure_future(ctx.transaction("second", lambda conn: 3)))
        await bench.runner.event_bus.head("r")
        assert await bench.records() == []
        go_on.set()
        return [await first, *[await each for each in others]]

    assert await bench.value(body) == ["slow", 0, 1, 2, 3]
    names = await bench.records()
    assert names[0] == "slow"
    assert sorted(names) == ["s0", "s1", "s2", "second", "slow"]
    events = await bench.runner.event_bus.get_events("r")
    assert [each.sequence for each in events] == list(range(len(events)))


async def test_more_functions_than_connections_have_their_turn(bench: Bench) -> None:
    async def one(n: int) -> Any:
        return await bench.value(lambda ctx: ctx.transaction("t", lambda conn: bool(pay(conn, n)) and n), f"r{n}")

    assert await asyncio.gather(*[one(n) for n in range(12)]) == list(range(12))
    assert len(bench.paid()) == 36
    assert len(bench.engine._functions._threads) <= 4
