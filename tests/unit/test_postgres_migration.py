"""`agent-runtime migrate`: the schema, the roles, the promised views, and what a role without rights is told."""

from __future__ import annotations

import itertools
import shlex
import threading
from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Any

import psycopg
import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._core.log import log
from agent_runtime_core._engines.postgres import migration
from agent_runtime_core._engines.postgres.migration import migrate_store
from agent_runtime_core.errors import InvalidArgument, NotSupported, StorageBusy, StorageOutdated, StorageTooNew
from agent_runtime_core.registry import Registry
from tests.support.command_line import Commands
from tests.support.postgres_servers import PostgresServer
from tests.support.runs import Script

pytestmark = pytest.mark.postgres
_NUMBERS = itertools.count()


@pytest.fixture
def role(postgres_server: PostgresServer, postgres_url: str) -> Iterator[str]:
    """A role that may log in, and nothing else. Its name has to be quoted."""
    name = f"Worker-{next(_NUMBERS)}"
    postgres_server.ask(f'CREATE ROLE "{name}" LOGIN')
    yield name
    postgres_server.ask(f'DROP OWNED BY "{name}"')
    postgres_server.ask(f'DROP ROLE "{name}"')


def of(role: str, url: str) -> str:
    """Return the URL for another user."""
    return url.replace("postgres@", f"{role}@")


def schema_of(url: str) -> str:
    return url.partition("?schema=")[2]


async def _steps(ctx: Any) -> Any:
    await ctx.step("look", lambda: "looked")
    return await ctx.approve("pay", {"amount": 1}) if ctx.input["params"].get("asks") else "done"


def opened(url: str, **options: Any) -> AgentRunner:
    registry = Registry()
    registry.register(Script(_steps, "steps"))
    return AgentRunner.open(url, registry=registry, **options)


async def fill(runner: AgentRunner) -> None:
    await runner.submit("steps", {"params": {}}, run_id="done", tenant="acme", concurrency_key="k")
    await runner.submit("steps", {"params": {"asks": 1}}, run_id="asking", metadata={"n": 1})
    await runner.submit("steps", {"params": {}}, run_id="later", delay=3600)
    while await runner.run_once():
        pass


async def test_a_worker_without_create_runs_on_a_migrated_schema(role: str, postgres_url: str) -> None:
    migrate_store(postgres_url, role=role)
    async with opened(of(role, postgres_url)) as runner:
        await fill(runner)
        assert (await runner.get_run("done", tenant="acme")).status == "succeeded"
        assert await runner.approve("asking", "pay")
        await runner.discard("done", tenant="acme")
        await runner.persistence.memory.set("name", "value")
        assert await runner.persistence.memory.get("name") == "value"
    with psycopg.connect(of(role, postgres_url).partition("?")[0]) as conn:
        for statement in ("CREATE TABLE {}.mine (n int)", "UPDATE {}.schema SET version = 9", "DROP TABLE {}.runs"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement.format(schema_of(postgres_url)).encode())
            conn.rollback()


async def test_a_role_that_only_reads_suffices_to_read(
    role: str, postgres_url: str, postgres_server: PostgresServer
) -> None:
    migrate_store(postgres_url, reader=role)
    async with opened(postgres_url) as runner:
        await fill(runner)
    async with opened(of(role, postgres_url), read_only=True) as runner:
        assert len(await runner.runs()) == 3
        assert (await runner.queue.counts()).runs["succeeded", "steps"] == 1
        assert (await runner.wait("done", tenant="acme", timeout=5)).final_output == {"value": "done"}
        assert [each.event_type async for each in runner.stream("done", tenant="acme")][-1] == "run.succeeded"
        with pytest.raises(NotSupported):
            await runner.submit("steps")
    with (
        psycopg.connect(of(role, postgres_url).partition("?")[0]) as conn,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        conn.execute(f"DELETE FROM {schema_of(postgres_url)}.runs".encode())
    tables = postgres_server.ask(
        "SELECT has_table_privilege(%s, oid, 'INSERT'), has_table_privilege(%s, oid, 'SELECT') FROM pg_class"
        " WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'v')", role, role, schema_of(postgres_url),
    )  # fmt: skip
    assert {*tables} == {(False, True)}


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_store_that_is_not_migrated_is_refused_with_the_command(
    read_only: bool, role: str, postgres_url: str, postgres_server: PostgresServer
) -> None:
    url = of(f"{role}:secret", postgres_url)
    with pytest.raises(StorageOutdated) as caught:
        async with opened(url, read_only=read_only) as runner:
            await runner.runs()
    place = shlex.quote(postgres_url.replace("postgres@", ""))
    assert f"agent-runtime migrate {place}, with --role" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert postgres_server.ask("SELECT to_regnamespace(%s)", schema_of(postgres_url)) == [(None,)]


async def test_a_reader_creates_nothing_even_if_it_may(postgres_url: str, postgres_server: PostgresServer) -> None:
    async with opened(postgres_url, read_only=True) as runner:
        with pytest.raises(StorageOutdated, match="which a reader does not do"):
            await runner.runs()
        # The runner that writes has an engine of its own, and creates the schema for both.
        async with opened(postgres_url) as other:
            await other.runs()
        assert await runner.runs() == []
    assert postgres_server.ask("SELECT to_regnamespace(%s)", schema_of(postgres_url)) != [(None,)]


async def test_a_role_without_rights_on_the_schema_is_told_who_grants_them(role: str, postgres_url: str) -> None:
    migrate_store(postgres_url)
    for read_only in (True, False):
        async with opened(of(role, postgres_url), read_only=read_only) as runner:
            with pytest.raises(StorageOutdated, match=r"permission denied.* --role .* --reader"):
                await runner.runs()


async def test_a_role_without_rights_on_a_table_is_told_who_grants_them(
    role: str, postgres_url: str, postgres_server: PostgresServer
) -> None:
    migrate_store(postgres_url, role=role)
    postgres_server.ask(f'REVOKE INSERT ON {schema_of(postgres_url)}.mail FROM "{role}"')
    async with opened(of(role, postgres_url)) as runner:
        await runner.submit("steps", {"params": {}}, run_id="r")
        with pytest.raises(StorageOutdated, match=r"permission denied for table mail.*agent-runtime migrate .* --role"):
            await runner.signal("r", "go")
        migrate_store(postgres_url, role=role)
        await runner.signal("r", "go")


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_newer_schema_is_refused(read_only: bool, postgres_url: str, postgres_server: PostgresServer) -> None:
    migrate_store(postgres_url)
    postgres_server.ask(f"UPDATE {schema_of(postgres_url)}.schema SET version = 99, library = '9.1'")
    async with opened(postgres_url, read_only=read_only) as runner:
        with pytest.raises(StorageTooNew, match=r"version 99, written by '9\.1'"):
            await runner.runs()
    with pytest.raises(StorageTooNew):
        migrate_store(postgres_url)


def test_the_rights_are_given_again_and_hold_for_tables_of_later_releases(
    role: str, postgres_url: str, postgres_server: PostgresServer
) -> None:
    for _ in range(2):
        migrate_store(postgres_url, role=role)
    postgres_server.ask(f"CREATE TABLE {schema_of(postgres_url)}.later (n int)")
    with psycopg.connect(of(role, postgres_url).partition("?")[0]) as conn:
        conn.execute(f"INSERT INTO {schema_of(postgres_url)}.later VALUES (1)".encode())


def test_a_role_that_does_not_exist_is_an_invalid_argument(postgres_url: str, postgres_server: PostgresServer) -> None:
    with pytest.raises(InvalidArgument, match="role must exist on the server, got 'nobody; DROP'"):
        migrate_store(postgres_url, role="nobody; DROP")
    assert postgres_server.ask("SELECT to_regnamespace(%s)", schema_of(postgres_url)) == [(None,)]


def test_two_migrations_at_the_same_time_apply_it_once(postgres_url: str) -> None:
    done: list[list[str]] = []
    threads = [threading.Thread(target=lambda: done.append(migrate_store(postgres_url)[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(bool, done)) == [False, False, False, True]


def test_a_migration_waits_for_a_transaction_that_locks_a_table(
    postgres_url: str,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It gives up its own locks meanwhile: other transactions would wait behind them."""
    migrate_store(postgres_url)
    schema = schema_of(postgres_url)
    later = f"ALTER TABLE {schema}.runs ADD COLUMN later int"
    monkeypatch.setattr(migration, "_LOCK_TIMEOUT", "50ms")
    with psycopg.connect(postgres_server.url) as other:
        other.execute(f"LOCK TABLE {schema}.runs IN ACCESS SHARE MODE".encode())

        def release(record: Any) -> bool:
            if "the migration waits for other transactions" in record.getMessage():
                other.rollback()
            return True

        log.addFilter(release)
        try:
            with psycopg.connect(postgres_server.url, autocommit=True) as conn:
                migration.run_alone(_connection(postgres_url, conn), _place(postgres_url), [], [later])
        finally:
            log.removeFilter(release)
        assert "the migration waits for other transactions" in caplog.text
        caplog.clear()
        monkeypatch.setattr(migration, "_MIGRATION_SECONDS", 0.0)
        other.execute(f"LOCK TABLE {schema}.runs IN ACCESS SHARE MODE".encode())
        with psycopg.connect(postgres_server.url, autocommit=True) as conn, pytest.raises(StorageBusy, match="locked"):
            migration.run_alone(_connection(postgres_url, conn), _place(postgres_url), [], [later])


def _place(url: str) -> Any:
    from agent_runtime_core._engines.postgres.url import postgres_place

    return postgres_place(url)


def _connection(url: str, raw: Any) -> Any:
    from agent_runtime_core._engines.postgres.connection import PostgresConnection

    conn = PostgresConnection(_place(url), None)
    conn.close()
    conn.raw = raw
    return conn


async def test_the_promised_views(postgres_url: str, postgres_server: PostgresServer) -> None:
    async with opened(postgres_url) as runner:
        await fill(runner)
        await runner.submit("steps", {"params": {}}, run_id="first", concurrency_key="k")
        await runner.submit("steps", {"params": {}}, run_id="behind", concurrency_key="k")

    def rows(view: str, columns: str, order: str) -> list[tuple[Any, ...]]:
        schema = schema_of(postgres_url)
        return postgres_server.ask(f"SELECT {columns} FROM {schema}.v_{view} ORDER BY {order}")

    assert rows("runs", "run_key, agent, tenant, status, blocked, attempt", "run_key") == [
        ("asking", "steps", "", "waiting", False, 1),
        ("behind", "steps", "", "pending", True, 1),
        ("done", "steps", "acme", "succeeded", False, 1),
        ("first", "steps", "", "pending", False, 1),
        ("later", "steps", "", "pending", False, 1),
    ]
    [(created, due, started, finished, age)] = rows(
        "runs WHERE run_key = 'done'", "created_at, due_at, started_at, finished_at, age", "1"
    )
    assert due is None
    assert created <= started <= finished
    assert age == finished - created
    assert created.astimezone(UTC).year >= 2026
    [(waits,)] = rows("runs WHERE run_key = 'later'", "due_at - created_at", "1")
    assert timedelta(minutes=59) < waits < timedelta(minutes=61)
    steps = rows("steps", "run_key, step, status, duration >= interval '0', result_bytes", "run_key, position")
    assert ("done", "look", "completed", True, 8) in steps
    assert rows(
        "waiting", "run_key, waits_for, name, blocked, concurrency_key, open_questions, waited IS NULL", "1"
    ) == [("asking", "approval", "pay", False, None, 1, False), ("behind", None, None, True, "k", 0, False)]
    assert rows("counts", "agent, tenant, status, runs", "1, 2, 3") == [
        ("steps", "", "pending", 3),
        ("steps", "", "waiting", 1),
        ("steps", "acme", "succeeded", 1),
    ]


def test_the_command(role: str, postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = Commands(capsys), postgres_url.replace("postgres@", "")
    code, out, _ = command("migrate", postgres_url, "--dry-run", "--role", role)
    assert code == 0
    assert f'GRANT USAGE ON SCHEMA {schema_of(postgres_url)} TO "{role}";' in out.splitlines()
    assert all(line.endswith(";") for line in out.splitlines())
    assert command("migrate", postgres_url)[:2] == (0, f"migrated {shown}\n")
    assert command("migrate", postgres_url)[:2] == (0, f"{shown} is up to date\n")
    found = command.json("migrate", postgres_url, "--reader", role)
    assert found["store"] == shown
    assert found["statements"][0].startswith("GRANT USAGE")


def test_the_statements_of_a_dry_run_create_the_schema(postgres_url: str, postgres_server: PostgresServer) -> None:
    _, statements = migrate_store(postgres_url, dry_run=True)
    for each in statements:
        postgres_server.ask(each)
    assert migrate_store(postgres_url)[1] == []


@pytest.mark.parametrize("store", ["agents.db", "redis://user:secret@localhost"])
def test_the_command_is_for_postgresql(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = Commands(capsys)("migrate", store)
    assert code == 2
    assert "STORE must be postgresql://host:5432/database" in err
    assert "secret" not in err


def test_a_server_that_does_not_answer_is_busy(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = Commands(capsys)("migrate", "postgresql://user:secret@127.0.0.1:1/x")
    assert code == 2
    assert "postgresql://127.0.0.1:1/x did not answer" in err
    assert "secret" not in err
