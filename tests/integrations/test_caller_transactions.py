"""`runner.submit(…, connection=)`: the run exists if and only if the transaction of its caller is committed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core._core.per_loop import call_in_loop
from agent_runtime_core._engines.base import moving_mark
from agent_runtime_core.config import configure
from agent_runtime_core.errors import IdempotencyConflict, InvalidArgument, NotSupported, StorageMoved, UnknownRun
from agent_runtime_core.portal import call
from agent_runtime_core.queue.records import RunFilter
from agent_runtime_core.registry import Registry
from tests.support.postgres_servers import PostgresServer

pytestmark = pytest.mark.postgres

asyncpg = pytest.importorskip("asyncpg")
psycopg = pytest.importorskip("psycopg")
sqlalchemy = pytest.importorskip("sqlalchemy")

ASYNC = ["psycopg-async", "asyncpg", "asyncpg-pool", "connection+psycopg", "connection+asyncpg", "session+psycopg",
         "session+asyncpg"]  # fmt: skip
SYNC = ["psycopg", "sync-connection", "sync-session"]
KINDS = [*ASYNC, *SYNC, "django"]


class Greeter(AgentRuntime):
    key = "greeter"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"said": f"Hello, {ctx.params['name']}"})


ADA: dict[str, Any] = {"params": {"name": "Ada"}}


@pytest.fixture
def runner(postgres_url: str) -> Iterator[AgentRunner]:
    registry = Registry()
    registry.register(Greeter())
    opened = AgentRunner.open(postgres_url, registry=registry)
    yield opened
    call(opened.close)


@pytest.fixture
def dsn(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # a view has no event loop in its thread, a test has
    with contextlib.suppress(psycopg.errors.DuplicateTable):
        postgres_server.ask("CREATE TABLE orders (name text)")
    postgres_server.ask("DELETE FROM orders")
    return postgres_server.url


def django_connection(dsn: str) -> Any:
    settings: Any = import_module("django.conf").settings
    if not settings.configured:
        settings.configure()
        import_module("django").setup()
    handler = import_module("django.db.utils").ConnectionHandler
    host, _, port = dsn.rpartition("@")[2].partition("/")[0].partition(":")
    where = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", "HOST": host}
    return import_module("django.utils.connection").ConnectionProxy(
        handler({"default": {**where, "PORT": port}}), "default"
    )


ORDER = "INSERT INTO orders VALUES ('Ada')"


class Place:
    """An open transaction of one kind, in which a row was inserted."""

    def __init__(self, connection: Any, commit: Any, rollback: Any, runner: AgentRunner, *, sync: bool) -> None:
        self.connection, self._commit, self._rollback = connection, commit, rollback
        self._submit: Any = runner.submit_sync if sync else runner.submit

    async def submit(self, *args: Any, **options: Any) -> UUID:
        run_id: UUID = await _awaited(self._submit(*(args or ("greeter", ADA)), connection=self.connection, **options))
        return run_id

    async def commit(self) -> None:
        await _awaited(self._commit())

    async def rollback(self) -> None:
        await _awaited(self._rollback())


async def _awaited(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


@contextlib.asynccontextmanager
async def opened(kind: str, dsn: str, runner: AgentRunner) -> AsyncIterator[Place]:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session

    async with contextlib.AsyncExitStack() as stack:
        if kind == "psycopg-async":
            conn = await psycopg.AsyncConnection.connect(dsn)
            stack.push_async_callback(conn.close)
            await conn.execute(ORDER)
        elif kind.startswith("asyncpg"):
            if kind == "asyncpg":
                conn = await asyncpg.connect(dsn)
                stack.push_async_callback(conn.close)
            else:
                pool = await stack.enter_async_context(asyncpg.create_pool(dsn, min_size=1, max_size=1))
                conn = await stack.enter_async_context(pool.acquire())
            transaction = conn.transaction()
            await transaction.start()
            await conn.execute(ORDER)
            yield Place(conn, transaction.commit, transaction.rollback, runner, sync=False)
            return
        elif "+" in kind:
            what, _, name = kind.partition("+")
            engine = create_async_engine(dsn.replace("postgresql:", f"postgresql+{name}:"))
            stack.push_async_callback(engine.dispose)
            conn = await stack.enter_async_context(engine.connect() if what == "connection" else AsyncSession(engine))
            await conn.execute(sqlalchemy.text(ORDER))
        elif kind == "psycopg":
            conn = stack.enter_context(contextlib.closing(psycopg.connect(dsn)))
            conn.execute(ORDER)
        elif kind == "django":
            conn = django_connection(dsn)
            conn.set_autocommit(False)
            stack.callback(conn.close)
            with conn.cursor() as cursor:
                cursor.execute(ORDER)
        else:
            engine = sqlalchemy.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
            stack.callback(engine.dispose)
            conn = stack.enter_context(engine.connect() if kind == "sync-connection" else Session(engine))
            conn.execute(sqlalchemy.text(ORDER))
        yield Place(conn, conn.commit, conn.rollback, runner, sync=kind not in ASYNC)


def orders(server: PostgresServer) -> int:
    return int(server.ask("SELECT count(*) FROM orders")[0][0])


async def worked_off(runner: AgentRunner, *run_ids: UUID | str) -> list[Any]:
    """The outputs of these runs, after this process has executed what it could claim."""
    while await runner.run_once():
        pass
    return [(await runner.wait(each, timeout=0)).final_output for each in run_ids]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_run_exists_if_and_only_if_its_caller_commits(
    runner: AgentRunner, dsn: str, postgres_server: PostgresServer, kind: str
) -> None:
    async with opened(kind, dsn, runner) as place:
        lost = await place.submit()
        with pytest.raises(UnknownRun):
            await runner.get_run(lost)  # nobody else sees it before the commit
        await place.rollback()
    with pytest.raises(UnknownRun):
        await runner.get_run(lost)
    assert orders(postgres_server) == 0
    async with opened(kind, dsn, runner) as place:
        kept = await place.submit(run_id="kept", concurrency_key="ada", priority=3, metadata={"a": 1})
        await place.commit()
    assert orders(postgres_server) == 1
    info = await runner.get_run("kept")
    assert (info.run_id, info.priority, info.concurrency_key, info.metadata["a"]) == (kept, 3, "ada", 1)
    assert await worked_off(runner, "kept") == [{"said": "Hello, Ada"}]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_that_is_stored_is_returned_or_a_conflict_that_leaves_the_transaction_usable(
    runner: AgentRunner, dsn: str, postgres_server: PostgresServer, kind: str
) -> None:
    stored = await runner.submit("greeter", ADA, run_id="one", idempotency_key="key")
    async with opened(kind, dsn, runner) as place:
        assert await place.submit(run_id="one") == stored
        assert await place.submit(idempotency_key="key") == stored
        for names in ({"run_id": "one"}, {"idempotency_key": "key"}):
            with pytest.raises(IdempotencyConflict, match="was used before with another input"):
                await place.submit("greeter", {"params": {"name": "Bob"}}, **names)
        second = await place.submit(run_id="two")
        assert await place.submit(run_id="two") == second
        await place.commit()
    assert orders(postgres_server) == 1
    assert {info.run_id for info in await runner.runs()} == {stored, second}


async def test_it_takes_what_a_normal_submit_takes(runner: AgentRunner, dsn: str) -> None:
    options: dict[str, Any] = {
        "priority": 2, "expires_in": 50.0, "deadline": 4e9, "metadata": {"m": "\0ü"}, "tenant": "acme",
        "idempotency_key": "k%s :a", "params": {"more": [1, None, "\0"]}, "delay": 100.0, "concurrency_key": "q",
    }  # fmt: skip
    parent = await runner.submit("greeter", ADA, tenant="acme", run_id="parent")
    input_ = {"conversation_id": "room 7", "params": {"name": "Ada"}}
    async with opened("asyncpg", dsn, runner) as place:
        here = await place.submit("greeter", input_, parent_run_id=parent, run_id="here", **options)
        await place.commit()
    options["idempotency_key"] = "other"
    there = await runner.submit("greeter", input_, parent_run_id=parent, run_id="there", **options)
    rows = [await runner.queue.require(each) for each in (here, there)]
    differing = {"run_id", "run_key", "idem_key", "created_at", "updated_at", "due_at", "expires_at", "arrival"}
    mine, others = [{n: v for n, v in row._asdict().items() if n not in differing} for row in rows]
    assert mine == others
    assert rows[0].run_key == "here"
    assert rows[0].idem_key == "k%s :a"
    assert rows[0].tenant == "acme"
    assert abs(rows[0].due_at - rows[1].due_at) < 20
    assert abs((rows[0].expires_at or 0) - (rows[1].expires_at or 0)) < 20
    assert [info.run_id for info in await runner.runs(conversation="room 7", tenant="acme")] == [here, there]


async def test_the_tenant_of_a_parent_and_a_run_key_that_was_given_to_it(runner: AgentRunner, dsn: str) -> None:
    parent = await runner.submit("greeter", ADA, tenant="acme")
    async with opened("psycopg", dsn, runner) as place:
        child = await place.submit(parent_run_id=parent)
        named = await place.submit(run_id="named", tenant="acme")
        await place.commit()
    assert (await runner.queue.require(child)).tenant == "acme"
    assert (await runner.get_run("named", tenant="acme")).run_id == named


async def test_contents_are_encrypted(postgres_url: str, postgres_server: PostgresServer, dsn: str) -> None:
    pytest.importorskip("cryptography")
    from agent_runtime_core.encryption import AESGCMCodec

    configure(payload_codec=AESGCMCodec({"k1": bytes(32)}, "k1"))
    try:
        registry = Registry()
        registry.register(Greeter())
        async with AgentRunner.open(postgres_url, registry=registry) as runner:
            async with opened("psycopg-async", dsn, runner) as place:
                run_id = await place.submit(idempotency_key="a")
                assert await place.submit(idempotency_key="a") == run_id
                with pytest.raises(IdempotencyConflict):
                    await place.submit("greeter", {"params": {"name": "Bob"}}, idempotency_key="a")
                await place.commit()
            schema = postgres_url.partition("schema=")[2]
            assert "Ada" not in postgres_server.ask(f"SELECT input FROM {schema}.runs")[0][0]
            assert await worked_off(runner, run_id) == [{"said": "Hello, Ada"}]
    finally:
        configure(payload_codec=None)


async def test_two_open_transactions_with_one_concurrency_key_wait_for_nobody(runner: AgentRunner, dsn: str) -> None:
    """Neither for each other, nor does the active run of the key wait for them when it ends."""
    active = await runner.submit("greeter", ADA, concurrency_key="desk")
    async with opened("asyncpg", dsn, runner) as one, opened("psycopg-async", dsn, runner) as two:
        first = await one.submit(concurrency_key="desk")
        second = await two.submit(concurrency_key="desk")
        assert await worked_off(runner, active) == [{"said": "Hello, Ada"}]
        later = await runner.submit("greeter", ADA, concurrency_key="desk")
        assert await worked_off(runner, later) == [{"said": "Hello, Ada"}]
        await two.commit()
        assert await worked_off(runner, second) == [{"said": "Hello, Ada"}]
        await one.commit()
        assert await worked_off(runner, first) == [{"said": "Hello, Ada"}]
    rows = [await runner.queue.require(each) for each in (active, first, second, later)]
    assert [row.blocked for row in rows] == [0] * 4


async def test_a_claim_places_it_behind_the_active_run(runner: AgentRunner, dsn: str) -> None:
    submitted: list[UUID] = []

    class Desk(AgentRuntime):
        key = "desk"

        async def run(self, ctx: RunContext) -> RunResult:
            async with opened("psycopg", dsn, runner) as place:
                for priority in (0, 1):
                    submitted.append(await place.submit(concurrency_key="desk", priority=priority))
                await place.commit()
            return RunResult({"claimed": len(await runner.queue.claim_rows("me", limit=5))})

    runner.registry.register(Desk())
    active = await runner.submit("desk", {}, concurrency_key="desk")
    assert await worked_off(runner, active) == [{"claimed": 0}]
    first, urgent = [await runner.get_run(each) for each in submitted]
    assert urgent.started_at is not None
    assert first.started_at is not None
    assert urgent.started_at < first.started_at


async def test_two_transactions_with_one_run_id_store_one_run(runner: AgentRunner, dsn: str) -> None:
    async with opened("asyncpg", dsn, runner) as one, opened("psycopg-async", dsn, runner) as two:
        first = await one.submit(run_id="same")
        waiting = asyncio.ensure_future(two.submit(run_id="same"))
        await asyncio.sleep(0)
        await one.commit()
        assert await waiting == first
        await two.commit()
    async with opened("asyncpg", dsn, runner) as one, opened("psycopg-async", dsn, runner) as two:
        third = await one.submit(run_id="other")
        waiting = asyncio.ensure_future(two.submit(run_id="other"))
        await asyncio.sleep(0)
        await one.rollback()
        assert await waiting == third
        await two.commit()
    assert len(await runner.runs()) == 2


@pytest.mark.parametrize("names", [{"run_id": "same"}, {"run_id": "same", "delay": 1e-6}], ids=["batched", "alone"])
async def test_a_normal_submit_of_the_same_run_waits_alone(
    runner: AgentRunner, dsn: str, names: dict[str, Any]
) -> None:
    """Other commits of the process would wait with it, heartbeats too."""
    async with opened("asyncpg", dsn, runner) as place:
        first = await place.submit(**names)
        waiting = asyncio.ensure_future(runner.submit("greeter", ADA, **names))
        await asyncio.sleep(0)
        others = [await runner.submit("greeter", ADA) for _ in range(3)]
        assert not waiting.done()
        await place.commit()
    assert await waiting == first
    assert await worked_off(runner, first, *others) == [{"said": "Hello, Ada"}] * 4


async def test_a_worker_that_listens_is_woken_by_the_commit(runner: AgentRunner, dsn: str) -> None:
    woken = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        call_in_loop(loop, woken.set)

    stop = runner.queue.listen("work", wake)
    assert stop is not None
    async with asyncio.timeout(20):
        while not runner.queue.engine._notifier.hears:  # type: ignore[attr-defined] # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with opened("asyncpg", dsn, runner) as place:
            await place.submit()
            woken.clear()
            await place.commit()
        await woken.wait()
    stop()


# -- connections that are refused


async def test_a_connection_in_autocommit_mode_is_refused(runner: AgentRunner, dsn: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    refused = pytest.raises(InvalidArgument, match="connection must have an open transaction, got one in autocommit")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        with refused:
            await runner.submit("greeter", ADA, connection=conn)
        async with conn.transaction():
            await runner.submit("greeter", ADA, run_id="a", connection=conn)
    with psycopg.connect(dsn, autocommit=True) as conn, refused:
        runner.submit_sync("greeter", ADA, connection=conn)
    conn = await asyncpg.connect(dsn)
    with refused:
        await runner.submit("greeter", ADA, connection=conn)
    await conn.close()
    for name in ("psycopg", "asyncpg"):
        engine = create_async_engine(dsn.replace("postgresql:", f"postgresql+{name}:"), isolation_level="AUTOCOMMIT")
        async with engine.connect() as conn:
            with refused:
                await runner.submit("greeter", ADA, connection=conn)
        await engine.dispose()
    django = django_connection(dsn)
    with refused:
        runner.submit_sync("greeter", ADA, connection=django)
    django.close()
    assert [info.run_key for info in await runner.queue.find(RunFilter())] == ["a"]


async def test_a_connection_to_another_database_is_refused(
    runner: AgentRunner, dsn: str, postgres_server: PostgresServer, postgres_url: str
) -> None:
    match = "connection must be to the database and schema of the runner"
    with contextlib.suppress(psycopg.errors.DuplicateDatabase):
        postgres_server.ask("CREATE DATABASE elsewhere")
    elsewhere = f"{dsn.rpartition('/')[0]}/elsewhere"
    with psycopg.connect(elsewhere) as conn, pytest.raises(InvalidArgument, match=match):
        runner.submit_sync("greeter", ADA, connection=conn)
    url = postgres_url.replace("/postgres?", "/elsewhere?")
    async with AgentRunner.open(url) as other:  # where the tables are, too
        assert await other.runs() == []
        async with await psycopg.AsyncConnection.connect(elsewhere) as conn:
            with pytest.raises(InvalidArgument, match=match):
                await runner.submit("greeter", ADA, connection=conn)
            await other.submit("greeter", ADA, connection=conn)
        assert len(await other.runs()) == 1
    assert await runner.runs() == []
    lite = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.pool.StaticPool)
    with lite.connect() as conn, pytest.raises(InvalidArgument, match=f"{match}, got one to sqlite"):
        runner.submit_sync("greeter", ADA, connection=conn)
    lite.dispose()


async def test_sessions_of_a_scope_and_in_run_sync(runner: AgentRunner, dsn: str) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
    from sqlalchemy.orm import scoped_session, sessionmaker

    engine = sqlalchemy.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
    scoped = scoped_session(sessionmaker(engine))
    runner.submit_sync("greeter", ADA, run_id="a", connection=scoped)
    scoped.commit()
    scoped.remove()
    engine.dispose()
    later = create_async_engine(dsn.replace("postgresql:", "postgresql+asyncpg:"))
    async_scoped = async_scoped_session(async_sessionmaker(later), asyncio.current_task)
    await runner.submit("greeter", ADA, run_id="b", connection=async_scoped)
    await async_scoped.commit()
    await async_scoped.remove()
    async with AsyncSession(later) as session:
        await session.run_sync(lambda sync: runner.submit_sync("greeter", ADA, run_id="c", connection=sync))
        await session.commit()
    await later.dispose()
    assert await worked_off(runner, "a", "b", "c") == [{"said": "Hello, Ada"}] * 3


async def test_a_role_needs_few_rights(
    runner: AgentRunner, dsn: str, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Those that the page names."""
    assert await runner.runs() == []
    schema, ask = postgres_url.partition("schema=")[2], postgres_server.ask
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        ask("CREATE ROLE web LOGIN")
    ask(f"GRANT USAGE ON SCHEMA {schema} TO web")
    ask(f"GRANT SELECT, INSERT ON {schema}.runs TO web")
    with psycopg.connect(dsn, user="web") as conn, pytest.raises(psycopg.errors.InsufficientPrivilege, match="fences"):
        runner.submit_sync("greeter", ADA, connection=conn)
    ask(f"GRANT SELECT ON {schema}.fences TO web")
    with psycopg.connect(dsn, user="web") as conn:
        run_id = runner.submit_sync("greeter", ADA, connection=conn)
    assert await worked_off(runner, run_id) == [{"said": "Hello, Ada"}]


async def test_a_move_of_the_store_waits_for_the_transaction_and_ends_later_ones(
    runner: AgentRunner, dsn: str, postgres_server: PostgresServer, postgres_url: str
) -> None:
    schema = postgres_url.partition("schema=")[2]
    lock = f"LOCK TABLE {schema}.fences IN ACCESS EXCLUSIVE MODE NOWAIT"
    async with opened("asyncpg", dsn, runner) as place:
        await place.submit()
        with psycopg.connect(dsn) as conn, pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute(lock.encode())
        await place.commit()
    with psycopg.connect(dsn) as conn:
        conn.execute(lock.encode())
        mark = moving_mark("01", to="elsewhere.db", done=True)
        conn.execute(f"INSERT INTO {schema}.fences VALUES ('moved', %s)".encode(), (mark,))
    async with opened("asyncpg", dsn, runner) as place:
        with pytest.raises(StorageMoved, match=r"was moved to elsewhere\.db"):
            await place.submit()
        await place.commit()
    assert len(await runner.runs()) == 1


async def test_a_connection_for_the_other_call_is_refused(runner: AgentRunner, dsn: str) -> None:
    async with opened("asyncpg", dsn, runner) as place:
        with pytest.raises(InvalidArgument, match="must not be async in submit_sync"):
            runner.submit_sync("greeter", ADA, connection=place.connection)
    with pytest.raises(InvalidArgument, match="must not belong to a thread in submit"):
        await runner.submit("greeter", ADA, connection=django_connection(dsn))
    with pytest.raises(InvalidArgument, match=r"connection must be an open connection .* got builtins\.str"):
        await runner.submit("greeter", ADA, connection=dsn)


async def test_a_blocking_connection_does_not_block_the_loop(runner: AgentRunner, dsn: str) -> None:
    """Its row waits for another transaction with the same run id, which this event loop commits."""
    async with opened("asyncpg", dsn, runner) as one:
        first = await one.submit(run_id="same")
        with psycopg.connect(dsn) as conn:
            waiting = asyncio.ensure_future(runner.submit("greeter", ADA, run_id="same", connection=conn))
            await asyncio.sleep(0)
            await one.commit()
            assert await waiting == first


async def test_other_stores_refuse_it(tmp_path: Any, dsn: str) -> None:
    for where in (tmp_path / "runs.db", "memory://"):
        async with AgentRunner.open(where) as other:
            with (
                psycopg.connect(dsn) as conn,
                pytest.raises(NotSupported, match="submit with connection= needs runs on PostgreSQL"),
            ):
                await other.submit("greeter", ADA, connection=conn)


async def test_the_error_of_a_broken_transaction_is_its_callers(runner: AgentRunner, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        with pytest.raises(psycopg.errors.UndefinedTable):
            conn.execute("SELECT * FROM nothing")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            await runner.submit("greeter", ADA, connection=conn)


async def test_a_restarted_server_is_the_same_database() -> None:
    registry = Registry()
    registry.register(Greeter())
    with PostgresServer() as server:
        async with AgentRunner.open(server.url, registry=registry) as runner:
            for name in ("before", "after"):
                async with await psycopg.AsyncConnection.connect(server.url) as conn:
                    await runner.submit("greeter", ADA, run_id=name, connection=conn)
                if name == "before":
                    server.end(signal.SIGINT)
                    server.start()
            assert await worked_off(runner, "before", "after") == [{"said": "Hello, Ada"}] * 2


# -- a process that is killed

KILLED = """
    import os, signal, sys
    import psycopg
    from agent_runtime_core import AgentRunner

    url, dsn, when = sys.argv[1:]
    runner = AgentRunner.open(url)
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO orders VALUES ('Ada')")
        runner.submit_sync("greeter", {"params": {"name": "Ada"}}, run_id="killed", connection=conn)
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_run_of_a_killed_process_exists_if_its_order_does(
    runner: AgentRunner, postgres_url: str, dsn: str, postgres_server: PostgresServer, when: str
) -> None:
    arguments = [sys.executable, "-c", textwrap.dedent(KILLED), postgres_url, dsn, when]
    done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert orders(postgres_server) == (when == "after")
    if when == "before":
        with pytest.raises(UnknownRun):
            await runner.get_run("killed")
    assert await worked_off(runner, *["killed"] * (when == "after")) == [{"said": "Hello, Ada"}] * (when == "after")
