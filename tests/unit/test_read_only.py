"""`AgentRunner.open(path, read_only=True)`: it reads everything, and writes, locks and creates nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core import (
    AgentRunner,
    InvalidArgument,
    NotSupported,
    RunnerConfig,
    RunStatus,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageTooNew,
    __version__,
)
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.sqlite import read_only
from agent_runtime_core._engines.sqlite.database import file_id
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.read_only import CLOSED, OPEN, ReadOnlySQLite
from agent_runtime_core.cli.main import main as command
from agent_runtime_core.persistence import Conversation
from agent_runtime_core.registry import Registry
from tests.compatibility.stored_runs import DONE
from tests.support.read_only import (
    EXPECTED,
    WITHOUT_CONVERSATION,
    agents,
    listing,
    read,
    read_all,
    save_conversation,
    write_store,
)
from tests.support.runs import Script

OF_0_6_0 = Path(__file__).parents[1] / "compatibility" / "stores_0_6_0" / "agents.db.gz"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for the store alone, and another one for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def temporary_files(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder.parent / "temporary").rglob("*"))


async def closed(folder: Path, name: str = "agents.db") -> Path:
    await write_store(folder / name)
    return folder / name


async def without_a_conversation(folder: Path) -> Path:
    await write_store(folder / "agents.db", conversation=False)
    return folder / "agents.db"


async def copied(folder: Path, *suffixes: str) -> Path:
    """Copies of the files of a store that is in use, made by another process: a test must not open them itself."""
    source = folder.parent / "live" / "agents.db"
    source.parent.mkdir()
    async with AgentRunner.open(source):
        await write_store(source)
        for suffix in suffixes:
            subprocess.run(["cp", f"{source}{suffix}", folder], check=True)
    return folder / "agents.db"


async def with_log_and_index(folder: Path) -> Path:
    return await copied(folder, "", "-wal", "-shm")


async def with_log_alone(folder: Path) -> Path:
    return await copied(folder, "", "-wal")


async def without_its_directory(folder: Path) -> Path:
    path = await closed(folder)
    shutil.rmtree(f"{path}.live")
    return path


async def with_a_rollback_journal(folder: Path) -> Path:
    """As a program leaves it that was killed in a transaction, after it had changed the journal mode."""
    path = await closed(folder.parent, "journaled.db")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode=DELETE")
        conn.execute("PRAGMA cache_size=1")
        conn.execute("BEGIN")
        conn.execute("UPDATE arc_runs SET status = 'dead'")
        conn.execute("CREATE TABLE more AS SELECT randomblob(20000)")  # more than the cache: it is written
        for suffix in ("", "-journal"):
            subprocess.run(["cp", f"{path}{suffix}", f"{folder / 'agents.db'}{suffix}"], check=True)
    return folder / "agents.db"


STORES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "closed": (closed, EXPECTED),
    "no conversation stored": (without_a_conversation, WITHOUT_CONVERSATION),
    "a copy of the file": (without_its_directory, EXPECTED),
    "a copy with log and index": (with_log_and_index, EXPECTED),
    "a copy with log": (with_log_alone, EXPECTED),
    "a rollback journal": (with_a_rollback_journal, EXPECTED),
}


@pytest.mark.parametrize("store", STORES)
async def test_reading_changes_nothing(folder: Path, store: str) -> None:
    make, expected = STORES[store]
    path = await make(folder)
    before = listing(folder)
    async with AgentRunner.open(path, read_only=True) as runner:
        assert await read(runner) == expected
        assert await read(runner) == expected
        assert listing(folder) == before
    assert listing(folder) == before
    assert temporary_files(folder) == []


async def test_a_store_that_this_process_has_open_is_read(folder: Path) -> None:
    """What other processes have open is in tests/fault/test_read_only_processes.py."""
    path = folder / "agents.db"
    async with AgentRunner.open(path):
        await write_store(path)
        before = sorted(folder.rglob("*"))
        assert await read_all(path) == EXPECTED
        assert sorted(folder.rglob("*")) == before
    assert sorted(each.name for each in folder.iterdir()) == ["agents.db", "agents.db.live"]


async def test_a_store_of_an_earlier_release_is_migrated_in_a_copy(folder: Path) -> None:
    path = folder / "agents.db"
    path.write_bytes(gzip.decompress(OF_0_6_0.read_bytes()))
    before = listing(folder)
    async with AgentRunner.open(path, read_only=True) as runner:
        assert (await runner.wait(DONE, 0)).final_output == {"price": 42, "answer": None}
        assert await runner.persistence.memory.get("k") is None
        assert "copy.db" in temporary_files(folder)
        with pytest.raises(NotSupported):
            await runner.discard(DONE)
    assert listing(folder) == before
    assert temporary_files(folder) == []


async def test_a_full_disk_is_that_of_the_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "agents.db"
    path.write_bytes(gzip.decompress(OF_0_6_0.read_bytes()))

    def connect(where: str, **options: Any) -> sqlite3.Connection:
        conn = sqlite3.Connection(where, **options)
        if where.endswith("copy.db"):
            conn.execute("PRAGMA max_page_count = 3")
        return conn

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(StorageFull, match=r"^no space to write .*copy\.db "):
        AgentRunner.open(path, registry=Registry(), read_only=True)
    assert [each.name for each in folder.iterdir()] == ["agents.db"]


async def test_an_earlier_schema_is_migrated_in_a_copy_while_the_store_is_in_use(folder: Path) -> None:
    path = await closed(folder)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA wal_autocheckpoint=0")
        conn.execute("UPDATE arc_schema SET version = 1 WHERE concern = 'fence'")
        conn.execute("ALTER TABLE arc_carried RENAME TO arc_fence")
        before = sorted(folder.rglob("*"))
        async with AgentRunner.open(path, read_only=True) as runner:
            assert runner.queue.commits.source().how == CLOSED  # type: ignore[attr-defined]
            assert await read(runner) == EXPECTED
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("concern", ["fence", "queue", "journal", "state", "documents"])
async def test_a_newer_schema_is_rejected(folder: Path, concern: str) -> None:
    path = await closed(folder)
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("UPDATE arc_schema SET version = 99 WHERE concern = ?", (concern,))
    before = listing(folder)
    library = rf"written by 'agent-runtime-core {re.escape(__version__)}'"
    fix = rf"agents.db: its {concern} schema has version 99, {library}, .*Upgrade agent-runtime-core"
    with pytest.raises(StorageTooNew, match=fix):
        await read_all(path)
    assert listing(folder) == before
    assert temporary_files(folder) == []


@pytest.mark.parametrize("log", [b"", b"not a log" * 100])
async def test_a_damaged_file_is_rejected(folder: Path, log: bytes) -> None:
    path = folder / "agents.db"
    path.write_bytes(b"no database" * 1000)
    if log:
        Path(f"{path}-wal").write_bytes(log)
    before = listing(folder)
    with pytest.raises(StorageCorrupt, match=r"store/agents\.db is not a readable database"):
        AgentRunner.open(path, read_only=True)
    assert listing(folder) == before
    assert temporary_files(folder) == []


@pytest.mark.parametrize("path", ["missing.db", "sqlite:///missing.db", "nowhere/missing.db", "."])
def test_a_missing_file_is_not_created(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InvalidArgument, match="path must be"):
        AgentRunner.open(path, read_only=True)
    assert list(folder.iterdir()) == []


def test_the_error_of_a_missing_file_says_how_to_create_it(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="create the store with AgentRunner"):
        AgentRunner.open(folder / "agents.db", read_only=True)


@pytest.mark.parametrize("log", [b"", b"left behind"])
async def test_a_file_that_is_no_store_is_rejected(folder: Path, log: bytes) -> None:
    for path in (folder / "empty.db", folder / "of another program.db"):
        path.touch()
        Path(f"{path}-wal").write_bytes(log)
    with contextlib.closing(sqlite3.connect(folder / "of another program.db")) as conn, conn:
        conn.execute("CREATE TABLE things (a)")
    before = listing(folder)
    for name in ("empty.db", "of another program.db"):
        with pytest.raises(InvalidArgument, match="path must be a store of this library, got"):
            AgentRunner.open(folder / name, read_only=True)
    assert listing(folder) == before


def test_memory_and_wrong_values_are_rejected(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="Leave read_only out"):
        AgentRunner.open("memory://", read_only=True)
    with pytest.raises(InvalidArgument, match="read_only must be True or False, got 'yes'"):
        AgentRunner.open(folder / "agents.db", read_only="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a b.db", "50%.db", "a?b.db", "a#b.db", "a&b=1.db", "ü.db", "a;b'\".db"])
async def test_a_name_with_special_characters_is_opened(folder: Path, name: str) -> None:
    path = await closed(folder, name)
    before = listing(folder)
    assert await read_all(path) == EXPECTED
    url = f"sqlite:///{path}".replace("%", "%25").replace("?", "%3F")
    assert await read_all(url) == EXPECTED
    async with AgentRunner.open(path):
        assert await read_all(url) == EXPECTED
    assert list(listing(folder)) == list(before)


WRITES: dict[str, Callable[[AgentRunner], Any]] = {
    "submit": lambda r: r.submit("a_run"),
    "submit again": lambda r: r.submit("a_run", run_id="a_run"),
    "execute": lambda r: r.execute("a_run"),
    "execute again": lambda r: r.execute("a_run", "a_run"),
    "cancel": lambda r: r.cancel("pending"),
    "cancel what has finished": lambda r: r.cancel("a_run"),
    "cancel what is unknown": lambda r: r.cancel("nothing"),
    "signal": lambda r: r.signal("a_question", "go"),
    "send": lambda r: r.send("a_question", "hello"),
    "approve": lambda r: r.approve("a_question", "ship"),
    "resume": lambda r: r.resume("a_failure"),
    "requeue": lambda r: r.requeue("a_failure"),
    "discard": lambda r: r.discard("a_run"),
    "vacuum": lambda r: r.vacuum({"succeeded": 0}),
    "vacuum nothing": lambda r: r.vacuum({}, compact=True),
    "fork": lambda r: r.fork("a_run"),
    "run_once": lambda r: r.run_once(),
    "run_loop": lambda r: r.run_loop(handle_signals=False),
    "worker_for": lambda r: r.worker_for(agents()).run_once(),
    "queue": lambda r: r.queue.enqueue(None, "a_run", {}),
    "claim": lambda r: r.queue.claim("me", 60, agent_keys=["a_run"]),
    "publish": lambda r: r.event_bus.publish(uuid4(), "tick", {}),
    "checkpoint": lambda r: r.state_store.save_checkpoint(uuid4(), {}),
    "memory": lambda r: r.persistence.memory.set("a", 1),
    "conversation": lambda r: r.persistence.conversations.save(Conversation()),
    "commit": lambda r: r.queue.commits.commit(None, []),
    "commit of a backend": lambda r: r.queue.commit(None, []),
}


@pytest.mark.parametrize("write", WRITES)
async def test_every_write_is_rejected(folder: Path, write: str) -> None:
    path = await closed(folder)
    before = listing(folder)
    async with AgentRunner.open(path, read_only=True, registry=agents()) as runner:
        fix = r"agents\.db' must be open for writing, got read_only=True. Call AgentRunner.open without read_only"
        with pytest.raises(NotSupported, match=fix):
            await WRITES[write](runner)
        assert await read(runner) == EXPECTED
    assert listing(folder) == before


async def test_writes_from_threads_are_rejected(folder: Path) -> None:
    path = await closed(folder)
    async with AgentRunner.open(path, read_only=True, registry=agents()) as runner:
        engine: Any = runner.queue.commits
        for write in (engine.commit_nowait, engine.commit_from_thread):
            with pytest.raises(NotSupported):
                write(None, [Op("fence.forget", ("a",))])
        with pytest.raises(NotSupported):
            await asyncio.to_thread(runner.submit_sync, "a_run")


# -- while others write


async def test_each_read_sees_what_was_committed_before(folder: Path) -> None:
    """Whichever way the file has to be read at that time."""
    path = await closed(folder)
    async with AgentRunner.open(path, read_only=True) as reader:
        engine: Any = reader.queue.commits
        for n in range(3):
            assert engine.source().how == CLOSED
            async with AgentRunner.open(path, registry=agents()) as writer:
                await writer.submit("a_run", run_id=f"new {n}")
                assert engine.source().how == OPEN
                assert len(await reader.runs()) == 5 + n
                await writer.persistence.memory.set("n", n)
                assert await reader.persistence.memory.get("n") == n
                await asyncio.to_thread(release, engine)
            assert (await reader.get_run(f"new {n}")).status == RunStatus.PENDING


def release(engine: ReadOnlySQLite) -> None:
    """Close the connections as after a pause, so that the last writer deletes the log."""
    for session in tuple(engine._sessions):
        session.close()


async def test_tables_that_are_created_later_are_read(folder: Path) -> None:
    path = await without_a_conversation(folder)
    async with AgentRunner.open(path, read_only=True) as reader:
        assert await read(reader) == WITHOUT_CONVERSATION
        async with AgentRunner.open(path) as writer:
            await save_conversation(writer)
            assert await read(reader) == EXPECTED
        assert await read(reader) == EXPECTED


async def test_a_writer_does_not_wait_for_a_read(folder: Path) -> None:
    path = await closed(folder)
    async with AgentRunner.open(path) as writer, AgentRunner.open(path, read_only=True) as reader:
        await writer.submit("a_run")
        reading, may_end = threading.Event(), threading.Event()

        def look(view: sqlite3.Connection) -> tuple[int, int]:
            count = "SELECT count(*) FROM arc_runs"
            before = view.execute(count).fetchone()[0]
            reading.set()
            assert may_end.wait(30)
            return before, view.execute(count).fetchone()[0]

        looks = asyncio.ensure_future(reader.queue.commits.read(look))  # type: ignore[attr-defined]
        await asyncio.to_thread(reading.wait, 30)
        for _ in range(60):  # more than the size at which the log is checkpointed
            await writer.submit("a_run", {"text": "x" * 100_000})
        assert not looks.done()
        may_end.set()
        assert await looks == (5, 5)
        assert len(await reader.runs()) == 65


async def test_a_read_during_which_the_file_changed_is_repeated(folder: Path) -> None:
    path = await closed(folder)
    async with AgentRunner.open(path, read_only=True) as reader:
        seen: list[int] = []

        def look(view: sqlite3.Connection) -> int:
            if not seen:  # a worker opens the file, writes and ends, all during this read
                with contextlib.closing(sqlite3.connect(path)) as conn, conn:
                    conn.execute("DELETE FROM arc_runs")
            seen.append(view.execute("SELECT count(*) FROM arc_runs").fetchone()[0])
            return seen[-1]

        assert await reader.queue.commits.read(look) == 0  # type: ignore[attr-defined]
        assert len(seen) == 2


async def test_a_file_that_changes_in_every_read_is_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_only, "PAUSE", 0.0)
    path = await closed(folder)
    async with AgentRunner.open(path, read_only=True) as reader:
        n = iter(range(1000))

        def look(view: sqlite3.Connection) -> None:
            os.utime(path, (0, next(n)))

        with pytest.raises(StorageBusy, match="was written to each time it was read"):
            await reader.queue.commits.read(look)  # type: ignore[attr-defined]


async def test_an_error_of_a_read_is_raised_once(folder: Path) -> None:
    path = await closed(folder)
    for live in (False, True):
        async with contextlib.AsyncExitStack() as stack:
            if live:
                writer = await stack.enter_async_context(AgentRunner.open(path))
                await writer.submit("a_run")
            reader = await stack.enter_async_context(AgentRunner.open(path, read_only=True))
            calls: list[None] = []

            def look(view: sqlite3.Connection, calls: list[None] = calls) -> None:
                calls.append(None)
                view.execute("SELECT a FROM nowhere")

            with pytest.raises(StorageError, match="no such table: nowhere"):
                await reader.queue.commits.read(look)  # type: ignore[attr-defined]
            assert len(calls) == 1


async def test_a_file_that_was_deleted_is_not_created_again(folder: Path) -> None:
    path = await closed(folder)
    async with AgentRunner.open(path, read_only=True) as reader:
        path.rename(folder / "moved.db")
        with pytest.raises(StorageError, match="was deleted or moved while it was open here"):
            await reader.runs()
        (folder / "moved.db").rename(path)
        assert len(await reader.runs()) == 4
    with pytest.raises(StorageClosed):
        await reader.runs()


async def test_a_running_run_is_followed(folder: Path) -> None:
    path = await closed(folder)
    go = asyncio.Event()

    async def body(ctx: Any) -> int:
        await ctx.emit("first")
        await go.wait()
        await ctx.emit("second")
        return 2

    registry = Registry()
    registry.register(Script(body, "slow"))
    async with AgentRunner.open(path, registry=registry) as writer, AgentRunner.open(path, read_only=True) as reader:
        await writer.submit("slow", run_id="slow")
        running = asyncio.create_task(writer.run_once())
        waits = asyncio.create_task(reader.wait("slow"))
        seen = []
        async for event in reader.stream("slow"):
            seen.append(event.event_type)
            if event.event_type == "first":
                go.set()
        assert seen == ["run.started", "first", "second", "run.succeeded"]
        assert (await waits).final_output == {"value": 2}
        await running


async def test_a_copy_is_taken_again_if_a_checkpoint_came_between(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await with_log_alone(folder)
    copies: list[str] = []
    really = shutil.copyfile

    def copyfile(source: str, target: str) -> None:
        really(source, target)
        copies.append(source)
        if len(copies) <= changes:
            os.utime(path, (0, len(copies)))

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    monkeypatch.setattr(read_only, "TICK", 0.0)
    changes = 1
    assert await read_all(path) == EXPECTED
    assert copies.count(str(path)) == 2
    changes, copies = 1000, []
    with pytest.raises(StorageBusy, match="was written to each time it was copied"):
        AgentRunner.open(path, read_only=True)
    assert copies.count(str(path)) == read_only.COPY_ATTEMPTS
    assert temporary_files(folder) == []


async def test_a_forked_child_may_not_open_what_its_parent_reads(folder: Path) -> None:
    """SQLite has the locks of the parent recorded there."""
    path = await closed(folder)
    async with AgentRunner.open(path, read_only=True) as reader:
        engine: Any = reader.queue.commits
        await reader.runs()
        engine.forked()
        assert file_id(str(path)) not in SQLiteEngine._carried
        async with AgentRunner.open(path) as writer:
            await writer.submit("a_run")
            await reader.runs()
            engine.forked()
        there = file_id(str(path))
        assert there in SQLiteEngine._carried
        SQLiteEngine._carried.remove(there)


async def test_a_closed_runner_leaves_no_thread_and_no_connection(folder: Path) -> None:
    path = await closed(folder)
    async with AgentRunner.open(path, read_only=True) as reader:
        engine: Any = reader.queue.commits
        stop = engine.listen("events", lambda: None)
        await reader.runs()
        assert engine.readers.threads
    stop()
    assert not any(each.is_alive() for each in (*engine.readers.threads, engine._notifier._thread))
    assert all(session.source is None for session in engine._sessions)
    with pytest.raises(StorageClosed):
        await engine.read(lambda view: None)


# -- the command line


@pytest.mark.parametrize("args", [["runs"], ["show", "a_run"], ["events", "a_run"], ["dead", "list"]])
async def test_commands_read_a_store_that_they_may_not_write(
    folder: Path, args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = await closed(folder)
    before = listing(folder)
    access = os.access
    # Modes do not apply to root.
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not mode & os.W_OK)
    assert await asyncio.to_thread(command, [*args, "--url", str(path)]) == 0
    assert "a_run" in capsys.readouterr().out or args[0] in ("events", "dead")
    assert listing(folder) == before


# -- Redis


@pytest.mark.redis
async def test_a_redis_store_is_read_and_not_written(redis_url: str) -> None:
    pytest.importorskip("redis")
    await write_store(redis_url)
    async with AgentRunner.open(redis_url, read_only=True, registry=agents()) as runner:
        assert await read(runner) == EXPECTED
        for write in WRITES.values():
            with pytest.raises(NotSupported, match="must be open for writing, got read_only=True"):
                await write(runner)
        async with AgentRunner.open(redis_url, registry=agents(), config=RunnerConfig(max_retries=1)) as writer:
            waits = asyncio.create_task(runner.wait("pending"))
            assert await writer.run_once()
            assert (await waits).final_output == {"value": 1}
        assert await read(runner) == {**EXPECTED, "runs": {**EXPECTED["runs"], "pending": "succeeded"}}
