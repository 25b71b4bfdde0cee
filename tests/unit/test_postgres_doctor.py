"""What `agent-runtime doctor` finds in a PostgreSQL store."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.postgres import diagnosis
from agent_runtime_core._engines.postgres.migration import migrate_store
from tests.support.command_line import Commands
from tests.support.postgres_servers import PostgresServer, missing
from tests.support.redis_servers import HOST

pytestmark = pytest.mark.postgres


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], postgres_url: str) -> Commands:
    async def fill() -> None:
        async with AgentRunner.open(postgres_url) as runner:
            await runner.submit("agent", {})

    asyncio.run(fill())
    return Commands(capsys, postgres_url)


def found(run: Commands, status: str) -> list[str]:
    """Return what the checks of the server with this status say."""
    checks = run.json("doctor")["checks"]
    return [
        f"{each['detail']}. {each['fix']}" for each in checks if (each["check"], each["status"]) == ("postgres", status)
    ]


def test_a_sound_store(run: Commands, postgres_url: str) -> None:
    schema = postgres_url.partition("?schema=")[2]
    text = "\n".join(found(run, "ok"))
    for part in (
        "PostgreSQL 1", "timeline 1", f"schema {schema} has version 2, written by release", "tables take ", "runs ",
        "dead rows, last vacuum", "of 300 connections are open", "notifications are heard",
    ):  # fmt: skip
        assert part in text
    assert [each.partition(",")[0] for each in found(run, "warning")] == ["fsync is 'off'"], "the server of the tests"
    assert found(run, "error") == []
    assert run("doctor")[0] == 0


def test_a_store_without_its_schema_stays_so(
    capsys: pytest.CaptureFixture[str], postgres_url: str, postgres_server: PostgresServer
) -> None:
    code, out, _ = Commands(capsys, postgres_url)("doctor")
    assert code == 0
    assert "must be created or updated, which a reader does not do. Run, as its owner: agent-runtime migrate" in out
    assert postgres_server.ask("SELECT to_regnamespace(%s)", postgres_url.partition("?schema=")[2]) == [(None,)]


def test_the_oldest_transaction_and_who_has_it(
    run: Commands, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(postgres_server.url, application_name="report") as conn:
        conn.execute("SELECT 1")
        mine = f"(idle in transaction, user postgres, report, pid {conn.info.backend_pid})"
        assert any(each.startswith("the oldest transaction is open for ") and mine in each for each in found(run, "ok"))
        monkeypatch.setattr(diagnosis, "_LONG", 0.0)
        [warning] = [each for each in found(run, "warning") if mine in each]
        assert f"End it: SELECT pg_terminate_backend({conn.info.backend_pid})" in warning
    assert "no other transaction is open. " in found(run, "ok")


def test_dead_rows(
    run: Commands, postgres_url: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = postgres_url.partition("?schema=")[2] + ".fences"
    postgres_server.ask(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    with psycopg.connect(postgres_server.url, autocommit=True) as conn:
        conn.execute(f"INSERT INTO {table} SELECT n::text, '1' FROM generate_series(1, 100) n".encode())
        conn.execute(f"DELETE FROM {table}".encode())
        conn.execute("SELECT pg_stat_force_next_flush()")  # two sessions would report their rows in any order
    monkeypatch.setattr(diagnosis, "_MANY_DEAD", 50)
    [warning] = [each for each in found(run, "warning") if "dead rows" in each]
    assert warning.startswith("table fences has 100 dead rows beside 0 live ones, never vacuumed. End the oldest")
    postgres_server.ask(f"VACUUM {table}")
    assert any("dead rows, last vacuum 0 s ago" in each for each in found(run, "ok"))


def test_few_connections_left_and_an_unused_slot(
    run: Commands, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_FULL", 0.0)
    postgres_server.ask("SELECT pg_create_physical_replication_slot('left')")
    try:
        warnings = "\n".join(found(run, "warning"))
    finally:
        postgres_server.ask("SELECT pg_drop_replication_slot('left')")
    assert "of 300 connections are open" in warnings
    assert "replication slot 'left' is unused" in warnings


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("pooler=1", "the URL has pooler=1 and no listen_url="),
        ("pooler=1&listen_url=postgresql://127.0.0.1:1/x", "notifications are not heard"),
    ],
)
def test_a_store_without_notifications(
    options: str, why: str, run: Commands, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "agent_runtime_core")
    monkeypatch.setattr(diagnosis, "HEARD_WITHIN", 0.0)
    monkeypatch.setattr(diagnosis, "POLL", 0.05)
    run.url += f"&{options}"
    assert any(each.startswith(why) and "listen_url=" in each for each in found(run, "warning"))


def test_a_role_that_only_reads(run: Commands, postgres_server: PostgresServer) -> None:
    postgres_server.ask("CREATE ROLE doctor LOGIN")
    try:
        migrate_store(run.url, reader="doctor")
        run.url = run.url.replace("postgres@", "doctor@")
        text = "\n".join(found(run, "ok"))
        assert "To see them: GRANT pg_read_all_stats TO doctor" in text
        assert "no other transaction" not in text
        assert "timeline 1" in text
        assert "notifications are heard" in text
    finally:
        postgres_server.ask("DROP OWNED BY doctor")
        postgres_server.ask("DROP ROLE doctor")


@pytest.fixture
def pgbouncer(postgres_server: PostgresServer) -> Iterator[str]:
    """The address of a PgBouncer in transaction mode before the server."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        missing("no pgbouncer")
    assert program is not None
    folder = Path(tempfile.mkdtemp(prefix="arc-pgbouncer-"))
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    (folder / "ini").write_text(
        f"[databases]\npostgres = host={HOST} port={postgres_server.port} user=postgres\n"
        f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        "pool_mode = transaction\ndefault_pool_size = 4\n"
    )
    folder.chmod(0o755)
    process = subprocess.Popen([program, folder / "ini"], stderr=subprocess.PIPE, cwd="/", **postgres_server._as)
    try:
        assert process.stderr is not None
        while b"process up" not in (line := process.stderr.readline()):
            assert line, "it did not start"
        yield f"{HOST}:{port}"
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder)


def test_a_pooler_in_transaction_mode(
    run: Commands, postgres_server: PostgresServer, pgbouncer: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It accepts LISTEN, and passes no notification on."""
    caplog.set_level(logging.CRITICAL, "agent_runtime_core")
    direct, run.url = run.url, run.url.replace(f"{HOST}:{postgres_server.port}", pgbouncer)
    with monkeypatch.context() as patched:
        patched.setattr(diagnosis, "HEARD_WITHIN", 0.0)
        patched.setattr(diagnosis, "POLL", 0.3)
        [deaf] = [each for each in found(run, "warning") if each.startswith("notifications are not heard")]
    assert "such as PgBouncer, add pooler=1 and listen_url=" in deaf
    run.url += f"&pooler=1&listen_url={quote(direct.partition('?')[0], safe='')}"
    assert any(each.startswith("notifications are heard") for each in found(run, "ok"))
    assert run("submit", "agent")[0] == 0
    # An application shares the connections of the pooler.
    with psycopg.connect(f"postgresql://postgres@{pgbouncer}/postgres") as other:
        found_there = other.execute("SELECT current_setting('enable_seqscan'), current_setting('plan_cache_mode')")
        assert found_there.fetchone() == ("on", "auto")
    assert "PENDING" in run("runs")[1].upper()
    assert migrate_store(run.url) == (run.url.partition("&")[0].replace("postgres@", ""), [])
