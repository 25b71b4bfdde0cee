"""A PostgreSQL store that is dumped, restored and marked; and what the commands for files say of such a store."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.verification import mark_restored, verify_store
from tests.support.cases import for_each
from tests.support.command_line import Commands
from tests.support.postgres_servers import PostgresServer, programs
from tests.support.runs import Script

paid: list[str] = []


async def pays(ctx: Any) -> str:
    await ctx.wait_for_signal("go")
    await ctx.step("pay", paid.append, ctx.run_key, on_in_doubt="fail")
    return "paid"


def opened(url: str) -> AgentRunner:
    registry = Registry()
    registry.register(Script(pays, "pays"))
    return AgentRunner.open(url, registry=registry, config=RunnerConfig(max_retries=1, park_after=0))


def run_program(name: str, *arguments: str) -> None:
    folder = programs()
    assert folder is not None
    program = (folder / "initdb").resolve().with_name(name)  # of the version of the server
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.postgres
async def test_what_may_have_happened_after_the_dump_is_in_doubt(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    paid.clear()
    dump, schema = tmp_path / "runs.dump", postgres_url.partition("?schema=")[2]
    async with opened(postgres_url) as runner:
        await runner.submit("pays", run_id="r")
        await runner.run_once()
        await runner.persistence.memory.set("name", "value")
        run_program("pg_dump", "--format=custom", f"--schema={schema}", f"--file={dump}", postgres_server.url)
        await runner.signal("r", "go")
        await runner.run_once()
        assert paid == ["r"]

    postgres_server.ask("CREATE DATABASE restored TEMPLATE template0")
    server = postgres_server.url.removesuffix("postgres") + "restored"
    try:
        run_program("pg_restore", "--exit-on-error", f"--dbname={server}", str(dump))
        async with opened(f"{server}?schema={schema}") as runner:
            assert (await verify_store(runner)).damaged == {}
            assert await mark_restored(runner) == 1
            assert await runner.persistence.memory.get("name") == "value"
            await runner.signal("r", "go")
            await runner.run_once()
            error = (await runner.wait("r", timeout=5)).error
            assert error is not None
            assert "perhaps done after the copy from which the store was restored" in error.message
            assert paid == ["r"]
            later = await runner.submit("pays")
            assert (await runner.queue.require(str(later))).arrival == 2, "numbers continue"

        # A server that has another identity, as one on another machine.
        caplog.set_level(logging.WARNING, "agent_runtime_core")
        monkeypatch.setattr("agent_runtime_core._engines.postgres.engine.identity", lambda conn: "1:00000001")
        async with opened(f"{server}?schema={schema}") as runner:
            await runner.runs()
        assert "After the restore of a backup, run: agent-runtime mark-restored" in caplog.text
    finally:
        postgres_server.ask("DROP DATABASE restored WITH (FORCE)")


@for_each(
    ("arguments", "argument"),
    [
        (("backup", "postgresql://u:secret@h/db", "copy.db"), "FILE"),
        (("restore", "copy.db", "postgresql://u:secret@h/db"), "FILE"),
        (("restore", "postgresql://u:secret@h/db", "runs.db"), "COPY"),
    ],
)
def test_commands_for_files_name_the_programs_for_servers(
    arguments: tuple[str, ...], argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = Commands(capsys)(*arguments)
    assert code == 2
    assert f"{argument} must be a SQLite file, got 'postgresql://***@h/db'" in err
    assert "a PostgreSQL store with pg_dump and pg_restore" in err
    assert "mark-restored" in err


@pytest.mark.postgres
def test_the_commands_after_a_restore(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Commands(capsys, postgres_url)
    assert run("submit", "pays", "--run-id", "r")[0] == 0
    assert "1 run that had not ended marked" in run("mark-restored")[1]
    assert "may have done more than the store knows" in run("restored", "r")[1]
    assert run("restored", "r", "--confirm", "--by", "anna")[:2] == (0, "run r lacks nothing more\n")
