"""`agent-runtime backup` and `verify`: the copy is one state of the store, and what is damaged is named."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunnerConfig, RunResult
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.registry import Registry
from tests.support.command_line import Commands, on
from tests.support.reencryption import CANARY, OLD


class Steps(AgentRuntime):
    """Adds two numbers in steps, and sends a message about it."""

    key = "steps"

    async def run(self, ctx: RunContext) -> RunResult:
        total = await ctx.step("one", lambda: 1) + await ctx.step("two", lambda: 2)
        await ctx.emit("custom.total", {"total": total})
        return RunResult(final_output={"total": total})


class Waits(AgentRuntime):
    """Waits for a signal after a step."""

    key = "waits"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.step("asked", lambda: 1)
        await ctx.wait_for_signal("go")
        return RunResult()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "runs.db")
    agents = Registry()
    agents.register(Waits())

    async def fill() -> None:
        async with AgentRunner.open(path, registry=agents, config=RunnerConfig(park_after=0)) as runner:
            said = {"messages": [{"role": "user", "content": "Add!"}], "conversation_id": str(uuid4())}
            await runner.execute(Steps(), "done", said)
            await runner.submit("waits", run_id="parked")
            await runner.run_once()
            await runner.submit("waits", run_id="new")
            await runner.send("new", "Hurry!")

    asyncio.run(fill())
    return path


CONTENTS = """\
runs: 3 (1 pending, 1 succeeded, 1 waiting)
records: {records}
events: 10
messages: 1
documents: 2 (1 conversation, 1 message)
damaged: 0
"""


def test_a_copy_is_a_store_for_its_owner_only(store: str, run: Commands, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    # A start that was buffered is a record of its own if the commit was not due before the end.
    contents = CONTENTS.format(records=run.json("verify", store)["records"])
    assert run("backup", store, str(copy)) == (0, f"copied {store} to {copy}\n{contents}", "")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert run("verify", str(copy)) == run("verify", "--url", store) == (0, contents, "")
    assert sorted(each.name for each in tmp_path.glob("copy*")) == ["copy.db"]

    async def goes_on(runner: AgentRunner) -> Any:
        return (await runner.queue.require("new")).status

    assert on(str(copy), goes_on) == "pending"


def test_a_copy_replaces_no_file(store: str, run: Commands, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_text("precious")
    code, _, said = run("backup", store, str(copy))
    assert code == 2
    assert "COPY must be a file that does not exist" in said
    assert copy.read_text() == "precious"


@pytest.mark.parametrize("source", ["redis://localhost:1/0", "missing.db"])
def test_what_is_no_file_is_rejected(source: str, run: Commands, tmp_path: Path) -> None:
    code, _, said = run("backup", source, str(tmp_path / "copy.db"))
    assert code == 2
    assert source in said
    assert [*tmp_path.iterdir()] == []


def test_a_copy_that_fails_leaves_no_file(run: Commands, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as conn:
        conn.execute("CREATE TABLE t (x)")
    assert run("backup", str(other), str(tmp_path / "copy.db"))[0] == 2
    assert [each.name for each in tmp_path.iterdir()] == ["other.db"]


def test_each_copy_is_one_state_while_a_worker_writes(run: Commands, tmp_path: Path) -> None:
    path, stop = str(tmp_path / "busy.db"), threading.Event()
    ready = threading.Event()

    async def write() -> None:
        async with AgentRunner.open(path) as runner:
            while not stop.is_set():
                await runner.execute(Steps())
                ready.set()

    writer = threading.Thread(target=asyncio.run, args=(write(),))
    writer.start()
    try:
        assert ready.wait(20)
        found = [run.json("backup", path, str(tmp_path / f"copy-{n}.db")) for n in range(3)]
    finally:
        stop.set()
        writer.join()
    for each in found:
        assert each["damaged"] == {}
        assert each["runs"].get("succeeded", 0) >= 1
        assert set(each["runs"]) <= {"succeeded", "running"}


def test_contents_are_copied_and_verified_without_their_key(run: Commands, tmp_path: Path) -> None:
    path, copy = str(tmp_path / "secret.db"), tmp_path / "copy.db"
    configure(payload_codec=OLD)
    try:

        async def submitted(runner: AgentRunner) -> None:
            await runner.submit("nobody", {"text": CANARY})

        on(path, submitted)
    finally:
        reset_config()
    assert run("backup", path, str(copy))[0] == 0
    assert CANARY.encode() not in copy.read_bytes()


def _damage(path: str, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.execute(statement)
        conn.commit()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE arc_journal SET result = '2' WHERE name = 'one'", "run done: "),
        ("UPDATE arc_runs SET mark = 2 WHERE run_key = 'parked'", "run parked: the ends of 2 steps were"),
    ],
)
def test_what_is_damaged_is_named(statement: str, said: str, store: str, run: Commands, tmp_path: Path) -> None:
    _damage(store, statement)
    code, out, error = run("verify", store)
    assert code == 1
    assert out.endswith("damaged: 1\n")
    assert said in error
    code, _, again = run("backup", store, str(tmp_path / "copy.db"))
    assert (code, again) == (1, error)
    assert (tmp_path / "copy.db").exists(), "a damaged store is worth a copy"


def test_a_damaged_index_is_found(store: str, run: Commands) -> None:
    with contextlib.closing(sqlite3.connect(store)) as conn:
        conn.execute("PRAGMA writable_schema=ON")
        change = "UPDATE sqlite_master SET sql = substr(sql, 1, instr(sql, 'WHERE') - 1) WHERE name = 'arc_runs_ready'"
        assert conn.execute(change).rowcount == 1
        conn.commit()
    code, _, said = run("verify", store)
    assert code == 1
    assert f"{store}:1: row 1 missing from index arc_runs_ready" in said
