"""What is checked after a connect to PostgreSQL: settings that lose runs, a standby, and another server than before."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.postgres import notifier, safety_checks
from agent_runtime_core._engines.postgres.safety_checks import IsStandby, check, findings
from agent_runtime_core._engines.postgres.url import postgres_place
from agent_runtime_core.errors import StorageBusy, StorageError, UnsafePostgres
from tests.support.cases import for_each
from tests.support.postgres_servers import PostgresServer
from tests.support.runs import soon

SAFE = {
    "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "synchronous_standby_names": "",
    "server_encoding": "UTF8", "server_version_num": "150008", "in_recovery": "false", "standbys": "0", "unlogged": "",
    "network": "",
}  # fmt: skip
URL = "postgresql://user:secret@db.example.com/app"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No warning was logged by this process yet."""
    pytest.importorskip("psycopg")
    monkeypatch.setattr(safety_checks, "_logged", set())
    caplog.set_level(logging.WARNING, "agent_runtime_core")


@for_each(
    ("settings", "severity", "setting"),
    [
        ({}, None, None),
        ({"server_version_num": "120022"}, "refuse", "version"),
        ({"server_encoding": "SQL_ASCII"}, "refuse", "server_encoding"),
        ({"fsync": "off"}, "warn", "fsync"),
        ({"full_page_writes": "off"}, "warn", "full_page_writes"),
        ({"synchronous_commit": "off"}, "warn", "synchronous_commit"),
        ({"synchronous_commit": "remote_write"}, None, None),
        ({"unlogged": "journal"}, "warn", "unlogged tables"),
        ({"standbys": "2"}, "warn", "synchronous_standby_names"),
        ({"standbys": "2", "synchronous_standby_names": "ANY 1 (*)"}, None, None),
        ({"network": "open"}, "warn", "TLS"),
    ],
)
def test_a_setting(settings: dict[str, str], severity: str | None, setting: str | None) -> None:
    found = findings({**SAFE, **settings})
    assert [(each.severity, each.setting) for each in found] == ([(severity, setting)] if severity else [])


def test_what_is_refused_comes_first_and_may_be_allowed() -> None:
    settings = {**SAFE, "fsync": "off", "server_encoding": "LATIN1"}
    with pytest.raises(UnsafePostgres, match=r"server_encoding is 'LATIN1'.*ENCODING 'UTF8'.*allow_unsafe=1") as caught:
        check(settings, postgres_place(URL))
    assert caught.value.refused == {"server_encoding": "LATIN1"}
    assert "secret" not in str(caught.value)
    found = check(settings, postgres_place(f"{URL}?allow_unsafe=1"))
    assert [each.setting for each in found] == ["server_encoding", "fsync"]


def test_a_standby_is_only_read() -> None:
    settings = {**SAFE, "in_recovery": "true"}
    assert check(settings, postgres_place(URL), reads_only=True) == []
    with pytest.raises(IsStandby):
        check(settings, postgres_place(URL))


@for_each(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("/run/postgresql", True), ("", True),
     ("10.0.0.1", False), ("db.example.com", False)],
)  # fmt: skip
def test_a_connection_without_tls_is_safe_on_this_machine(host: str, local: bool) -> None:
    assert safety_checks._is_local(host) is local


# -- with a server


async def connect(url: str) -> None:
    async with AgentRunner.open(url) as runner:
        await runner.runs()


@pytest.mark.postgres
async def test_a_warning_is_logged_by_one_process_a_day(
    postgres_url: str,
    postgres_server: PostgresServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def warnings() -> list[str]:
        caplog.clear()
        monkeypatch.setattr(safety_checks, "_logged", set())  # another process
        await connect(postgres_url)
        return [each.getMessage() for each in caplog.records if "fsync" in each.getMessage()]

    [warning] = await warnings()
    assert warning.startswith("postgresql://127.0.0.1:")
    assert "fsync is 'off', so a crash of the system may lose runs" in warning
    assert await warnings() == []
    schema = postgres_url.partition("?schema=")[2]
    postgres_server.ask(f"UPDATE {schema}.seen SET t = t - 86401 WHERE name = 'warned fsync'")
    assert len(await warnings()) == 1
    await connect(postgres_url)
    assert await warnings() == []


@pytest.mark.postgres
async def test_a_table_that_is_not_logged_is_found(
    postgres_url: str, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    await connect(postgres_url)
    schema = postgres_url.partition("?schema=")[2]
    postgres_server.ask(f"ALTER TABLE {schema}.journal SET UNLOGGED")
    await connect(postgres_url)
    assert "unlogged tables is 'journal', which are empty after a crash" in caplog.text


@pytest.mark.postgres
async def test_a_database_that_does_not_store_all_texts_is_refused(postgres_server: PostgresServer) -> None:
    postgres_server.ask("CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    url = postgres_server.url.removesuffix("postgres") + "latin"
    try:
        with pytest.raises(UnsafePostgres, match="server_encoding is 'LATIN1'"):
            await connect(url)
        assert postgres_server.ask("SELECT 1 FROM pg_namespace WHERE nspname = 'arc'") == []
        await connect(f"{url}?allow_unsafe=1")
    finally:
        postgres_server.ask("DROP DATABASE latin WITH (FORCE)")


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that a test stops and promotes."""
    with PostgresServer() as server:
        yield server


@pytest.mark.postgres
async def test_a_standby_that_is_promoted(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{own_server.url}?schema=promoted"
    async with AgentRunner.open(url) as runner:
        engine: Any = runner.queue.commits
        run_id = await runner.submit("agent", {}, run_id="before")
        own_server.end()
        (own_server.folder / "data" / "standby.signal").touch()
        own_server.start()
        monkeypatch.setattr(engine, "timeout", 0.3)
        with pytest.raises(StorageBusy, match=r"is read-only \(the server is a standby in recovery\)"):
            await runner.submit("agent", {})
        with pytest.raises(StorageBusy, match="is read-only"):
            await runner.runs()
        async with AgentRunner.open(url, read_only=True) as reader:
            assert [str(each.run_id) for each in await reader.runs()] == [str(run_id)]
        monkeypatch.setattr(engine, "timeout", 30.0)
        assert own_server.ask("SELECT pg_promote()") == [(True,)]
        caplog.clear()
        await runner.submit("agent", {}, run_id="after")
        assert "its timeline changed from 00000001 to 00000002, as after a failover" in caplog.text
        assert len(await runner.runs()) == 2
    # The store knows it: the next process logs nothing.
    caplog.clear()
    await connect(url)
    assert "timeline" not in caplog.text


@pytest.mark.postgres
async def test_a_store_on_another_server_than_before_is_told(
    postgres_url: str, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    await connect(postgres_url)
    schema = postgres_url.partition("?schema=")[2]
    postgres_server.ask(f"UPDATE {schema}.seen SET value = '12345:00000007' WHERE name = 'server'")
    await connect(postgres_url)
    assert "the database is on another server now" in caplog.text
    assert "mark-restored" in caplog.text
    caplog.clear()
    await connect(postgres_url)
    assert "another server" not in caplog.text


@pytest.mark.postgres
@for_each(
    ("user", "database", "why"),
    [("nobody", "postgres", 'role "nobody" does not exist'), ("postgres", "none", 'database "none" does not exist')],
)
async def test_a_refused_connection_is_not_repeated(
    user: str, database: str, why: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.url.replace("postgres@", f"{user}:secret@").removesuffix("postgres") + database
    async with AgentRunner.open(url) as runner:
        monkeypatch.setattr(runner.queue.commits, "timeout", 3600.0)
        for act in (runner.runs, lambda: runner.submit("agent", {})):
            with pytest.raises(StorageError, match=f"refused the connection .*{why}") as caught:
                await act()
            assert "secret" not in str(caught.value)


@pytest.mark.postgres
@for_each(
    ("listen_url", "why"),
    [
        ("", "the URL has pooler=1 and no listen_url=.*A pooler such as PgBouncer does that: add listen_url="),
        ("&listen_url=postgresql://127.0.0.1:1/x", "Connection refused.*They are sent again when it answers"),
    ],
)
async def test_a_store_without_notifications_is_polled_and_that_is_logged_once(
    listen_url: str, why: str, postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "POLL", 0.001)
    caplog.clear()
    async with AgentRunner.open(f"{postgres_url}&pooler=1{listen_url}") as runner:
        engine: Any = runner.queue.commits
        woken = itertools.count()
        stop = engine.listen("any topic", lambda: next(woken))
        await soon(lambda: next(woken) > 20)
        stop()
    [warning] = [each.getMessage() for each in caplog.records if "no notifications" in each.getMessage()]
    assert re.search(why, warning)
