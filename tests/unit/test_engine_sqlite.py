"""The engine on one SQLite file: groups, guards, deadlines, closing, and what it refuses to open."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agent_runtime_core
from agent_runtime_core._engines.base import INSTALL, Guard, NotApplied, Op, OperationSet
from agent_runtime_core._engines.commit_request import CommitRequest
from agent_runtime_core._engines.sqlite import engine as sqlite
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.liveness import CommitLock
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx, translate
from agent_runtime_core.errors import (
    InvalidArgument,
    LeaseLost,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageTooNew,
)
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.queue.records import RunFilter
from tests.support.cases import for_each
from tests.support.runs import no_thread, soon, until

OLD, NEW = "0" * 26, "1" + "0" * 25


def put(tx: SQLiteTx, key: str, value: Any) -> Any:
    tx.execute("INSERT OR REPLACE INTO arc_things VALUES (?, ?)", (key, value))
    tx.notify("things")
    return value


def fail(tx: SQLiteTx, key: str) -> None:
    tx.execute("INSERT OR REPLACE INTO arc_things VALUES (?, 'half')", (key,))
    raise ValueError("no")


def wrong(tx: SQLiteTx) -> None:
    tx.execute("SELECT nothing FROM nowhere")


def was_put(tx: SQLiteTx, key: str, value: Any) -> Any:
    if tx.execute("SELECT 1 FROM arc_things WHERE key = ? AND value = ?", (key, value)).fetchone() is None:
        raise NotApplied
    return value


def get(view: sqlite3.Connection, key: str) -> Any:
    row = view.execute("SELECT value FROM arc_things WHERE key = ?", (key,)).fetchone()
    return row and row[0]


SCHEMA = "CREATE TABLE arc_things (key TEXT PRIMARY KEY, value)"
THINGS = OperationSet("things", {"put": put, "fail": fail, "wrong": wrong}, {"put": was_put}, (SCHEMA,))


def opened(path: Path, **options: Any) -> SQLiteEngine:
    engine = SQLiteEngine.open(path, **options)
    engine.add(THINGS)
    return engine


@contextlib.contextmanager
def held(engine: SQLiteEngine) -> Iterator[None]:
    """The writer thread stands still, so that what is sent meanwhile becomes one group."""
    standing, go = threading.Event(), threading.Event()

    def wait() -> None:
        standing.set()
        go.wait(30)

    engine.writer.run_job(wait)
    assert standing.wait(10)
    try:
        yield
    finally:
        go.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def engine(path: Path) -> Iterator[SQLiteEngine]:
    engine = opened(path)
    yield engine
    if not engine._closed:
        engine._users = 1
        engine.close_now()


# -- writing


async def test_results_come_in_order_and_last(engine: SQLiteEngine, path: Path) -> None:
    assert await engine.commit(None, [Op("put", ("a", 1)), Op("put", ("b", 2))]) == [1, 2]
    assert (await engine.read(get, "a"), await engine.read(get, "b")) == (1, 2)
    await engine.close()
    again = opened(path)
    assert await again.read(get, "b") == 2
    await again.close()


@pytest.mark.parametrize("bad", [Op("fail", ("x",)), Op("wrong"), Op("unheard of")])
async def test_one_that_fails_in_a_group_leaves_the_others_alone(engine: SQLiteEngine, bad: Op) -> None:
    with held(engine):
        commits = [
            asyncio.ensure_future(engine.commit(None, ops))
            for ops in ([Op("put", ("a", 1))], [Op("put", ("x", 1)), bad, Op("put", ("y", 1))], [Op("put", ("b", 2))])
        ]
        posted = [Op("put", ("p", 3))]
        engine.commit_nowait(None, posted)
        await soon(lambda: engine.writer._queued > 4)
    done = await asyncio.gather(*commits, return_exceptions=True)
    assert (done[0], done[2]) == ([1], [2])
    assert isinstance(done[1], (ValueError, StorageError, KeyError))
    assert [await engine.read(get, key) for key in "axybp"] == [1, None, None, 2, 3]


async def test_one_alone_that_fails_leaves_nothing(engine: SQLiteEngine) -> None:
    with pytest.raises(ValueError, match="no"):
        await engine.commit(None, [Op("put", ("a", 1)), Op("fail", ("b",))])
    assert [await engine.read(get, key) for key in "ab"] == [None, None]


async def test_a_superseded_one_in_a_group_leaves_the_others_alone(engine: SQLiteEngine) -> None:
    await engine.commit(None, [Op(INSTALL, ("run", NEW)), Op("put", ("landed", 1))])
    with held(engine):
        commits = [
            asyncio.ensure_future(engine.commit(guard, ops))
            for guard, ops in (
                (Guard("run", NEW), [Op("put", ("a", 1))]),
                (Guard("run", OLD), [Op("put", ("b", 1))]),
                (Guard("run", OLD), [Op("put", ("landed", 1))]),
                (Guard("run", OLD), [Op("fail", ("c",))]),
            )
        ]
        await soon(lambda: engine.writer._queued > 4)
    done = await asyncio.gather(*commits, return_exceptions=True)
    assert (done[0], done[2]) == ([1], [1])
    assert isinstance(done[1], LeaseLost)
    assert isinstance(done[3], LeaseLost)
    assert [await engine.read(get, key) for key in "abc"] == [1, None, None]


async def test_a_fence_only_grows(engine: SQLiteEngine) -> None:
    await engine.commit(None, [Op(INSTALL, ("run", NEW))])
    with pytest.raises(LeaseLost):
        await engine.commit(None, [Op(INSTALL, ("run", OLD))])
    assert await engine.commit(None, [Op(INSTALL, ("run", NEW))]) == [True]


async def test_a_group_is_one_transaction(engine: SQLiteEngine) -> None:
    made: list[str] = []
    engine.writer.committer.conn.set_trace_callback(lambda sql: made.append(sql) if sql.startswith("COMMIT") else None)
    with held(engine):
        commits = [asyncio.ensure_future(engine.commit(None, [Op("put", (str(n), n))])) for n in range(50)]
        await soon(lambda: engine.writer._queued > 50)
    await asyncio.gather(*commits)
    assert len(made) == 1


async def test_a_cancelled_caller_knows_the_outcome_before_it_goes(engine: SQLiteEngine) -> None:
    with held(engine):
        task = asyncio.ensure_future(engine.commit(None, [Op("put", ("a", 1))]))
        await soon(lambda: engine.writer._queued > 1)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await engine.read(get, "a") == 1
    assert not any(batch.pending.waiting for batch in engine.writer.batches.values())


async def test_no_answer_in_time_is_busy_and_is_not_written_late(engine: SQLiteEngine) -> None:
    engine.writer.committer.timeout = 0.04
    with held(engine):
        with pytest.raises(StorageBusy, match="The outcome of the write is unknown"):
            await engine.commit(None, [Op("put", ("a", 1))])
        with pytest.raises(StorageBusy, match=r"did not answer within 0\.04 s"):
            await asyncio.to_thread(engine.commit_from_thread, None, [Op("put", ("b", 1))])
    engine.writer.committer.timeout = 6.0
    await engine.commit(None, [Op("put", ("c", 1))])
    assert [await engine.read(get, key) for key in "abc"] == [None, None, 1]
    await soon(lambda: not any(batch.pending.waiting for batch in engine.writer.batches.values()))


async def test_another_program_that_locks_the_file_makes_it_busy(path: Path) -> None:
    engine = opened(path)
    engine.writer.committer.timeout = 0.2
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusy, match=r"locked by a program outside|did not answer"):
            await engine.commit(None, [Op("put", ("a", 1))])
    finally:
        other.close()
    await engine.commit(None, [Op("put", ("a", 2))])
    assert await engine.read(get, "a") == 2
    await engine.close()


def test_a_thread_without_a_loop_commits(engine: SQLiteEngine) -> None:
    assert engine.commit_from_thread(None, [Op("put", ("a", 1))]) == [1]
    with pytest.raises(ValueError, match="no"):
        engine.commit_from_thread(None, [Op("fail", ("a",))])


def test_several_loops_use_one_engine(engine: SQLiteEngine) -> None:
    async def work(name: str) -> None:
        await asyncio.gather(*(engine.commit(None, [Op("put", (f"{name}{n}", n))]) for n in range(50)))
        assert await engine.read(get, f"{name}49") == 49

    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(str(n)))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def count() -> int:
        return int(await engine.read(lambda view: view.execute("SELECT count(*) FROM arc_things").fetchone()[0]))

    assert asyncio.run(count()) == 200


def test_a_loop_that_is_gone_does_not_disturb_the_writer(engine: SQLiteEngine) -> None:
    loop = asyncio.new_event_loop()
    request = CommitRequest(None, [Op("put", ("a", 1))])
    request.loop, request.future = loop, loop.create_future()
    loop.close()
    engine.writer.enqueue([request])
    assert engine.commit_from_thread(None, [Op("put", ("b", 1))]) == [1]


async def test_errors_of_readers_belong_to_their_caller(engine: SQLiteEngine) -> None:
    def broken(view: sqlite3.Connection) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await engine.read(broken)
    with pytest.raises(StorageError, match="no such table: nowhere"):
        await engine.read(lambda view: view.execute("SELECT * FROM nowhere"))
    assert await engine.read(get, "a") is None


# -- files


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
async def test_a_read_that_failed_half_way_keeps_no_later_one_in_the_past(engine: SQLiteEngine) -> None:
    def half(view: sqlite3.Connection) -> None:
        rows = view.execute("SELECT value FROM arc_things")
        raise ValueError(rows.fetchone())

    await engine.commit(None, [Op("put", ("a", 1)), Op("put", ("b", 1))])
    with pytest.raises(ValueError, match="1") as kept:
        await engine.read(half)
    await engine.commit(None, [Op("put", ("a", 2))])
    assert await engine.read(get, "a") == 2, f"while {kept.value!r} is kept"


async def test_only_the_owner_may_read_the_files(engine: SQLiteEngine, path: Path) -> None:
    await engine.commit(None, [Op("put", ("a", 1))])
    engine.listen("things", lambda: None)
    await soon(lambda: engine._liveness.fifo is not None)

    def mode(where: Path) -> int:
        return stat.S_IMODE(where.stat().st_mode)

    live = Path(f"{path}.live")
    assert mode(live) == 0o700
    assert {mode(each) for each in live.iterdir()} == {0o600}
    assert {mode(each) for each in path.parent.glob("a.db*") if each.is_file()} == {0o600}


async def test_a_file_is_kept_in_wal_with_full_synchronous(engine: SQLiteEngine) -> None:
    def pragma(name: str) -> Any:
        return engine.writer.committer.conn.execute(f"PRAGMA {name}").fetchone()[0]

    assert pragma("journal_mode") == "wal"
    assert pragma("synchronous") == 2
    assert (pragma("foreign_keys"), pragma("trusted_schema"), pragma("wal_autocheckpoint")) == (1, 0, 0)


async def test_durability_is_one_for_a_file(path: Path) -> None:
    engine = opened(path, durability="normal")
    assert engine.writer.committer.conn.execute("PRAGMA synchronous").fetchone()[0] == 1
    with pytest.raises(
        InvalidArgument, match=r"must be the same for all .*, got 'full' while it is open with 'normal'"
    ):
        SQLiteEngine.open(path)
    with pytest.raises(InvalidArgument, match=r"^durability must be 'full' or 'normal', got 'most'"):
        SQLiteEngine.open(path, durability="most")
    await engine.close()
    engine = opened(path, durability="full")
    await engine.close()


async def test_one_engine_per_file_whatever_it_is_called(path: Path, tmp_path: Path) -> None:
    engine = opened(path)
    link = tmp_path / "link.db"
    link.symlink_to(path)
    assert SQLiteEngine.open(link) is engine
    assert SQLiteEngine.open(f"{tmp_path}/./a.db") is engine
    for _ in range(2):
        await engine.close()
        assert await engine.commit(None, [Op("put", ("a", 1))]) == [1]
    await engine.close()
    with pytest.raises(StorageClosed, match=r"a\.db was closed"):
        await engine.commit(None, [])
    with pytest.raises(StorageClosed):
        await engine.read(get, "a")
    with pytest.raises(StorageClosed):
        engine.commit_nowait(None, [])
    with pytest.raises(StorageClosed):
        engine.commit_from_thread(None, [])
    with pytest.raises(StorageClosed):
        await engine.compact()
    await engine.close()
    another = opened(path)
    assert another is not engine
    await another.close()


async def test_closing_waits_for_what_was_sent(path: Path) -> None:
    engine = opened(path)
    for n in range(100):
        engine.commit_nowait(None, [Op("put", (str(n), n))])
    await engine.close()
    assert list(Path(f"{path}.live").glob("*.lock")) == [Path(f"{path}.live/commit.lock")]
    assert not any(thread.is_alive() for thread in (engine.writer._thread, *engine.readers.threads) if thread)
    again = opened(path)
    assert await again.read(get, "99") == 99
    await again.close()


async def test_closing_from_another_loop_waits_for_a_commit_that_is_carried_out(path: Path) -> None:
    engine = SQLiteEngine.open(path)
    writing, closing = threading.Event(), threading.Event()

    def wait(tx: SQLiteTx, key: str) -> None:
        put(tx, key, 1)
        writing.set()
        assert closing.wait(10)
        put(tx, key, 2)

    engine.add(dataclasses.replace(THINGS, operations={"wait": wait}))

    async def commit() -> None:
        await engine.commit(None, [Op("wait", ("a",))])

    other = threading.Thread(target=lambda: asyncio.run(commit()))
    other.start()
    await asyncio.to_thread(writing.wait, 10)
    end = asyncio.ensure_future(engine.close())
    await soon(lambda: engine.writer._closed)
    closing.set()
    await end
    other.join()
    again = opened(path)
    assert await again.read(get, "a") == 2
    await again.close()


async def test_what_another_loop_was_asked_for_when_it_was_closed_is_refused_at_once(path: Path) -> None:
    engine = opened(path)
    await asyncio.gather(*(engine.commit(None, [Op("put", ("a", n))]) for n in range(2)))
    commits = [asyncio.ensure_future(engine.commit(None, [Op("put", ("b", n))])) for n in range(2)]
    if not engine.writer.batches.here().requests:  # eager tasks have asked already
        await asyncio.sleep(0)
    assert len(engine.writer.batches.here().requests) == 2  # they are together, and not sent yet
    closing = threading.Thread(target=engine.close_now)
    closing.start()
    closing.join()
    async with asyncio.timeout(3):
        done = await asyncio.gather(*commits, return_exceptions=True)
    assert all(isinstance(each, StorageClosed) for each in done), done
    loop = asyncio.get_running_loop()
    with pytest.raises(StorageClosed):  # nobody would ever answer
        engine.submit_read(get, ("a",), loop, loop.create_future())


@pytest.mark.parametrize("bad", ["", ":memory:", "a\0b", "a\ud800.db"])
def test_what_is_no_path_is_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="must be the path of a database file"):
        SQLiteEngine.open(bad)


def test_a_directory_or_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="Add the name of a file in it"):
        SQLiteEngine.open(tmp_path)
    with pytest.raises(InvalidArgument, match="must be in a directory that exists, got"):
        SQLiteEngine.open(tmp_path / "nowhere" / "a.db")
    (tmp_path / "b.db.live").write_text("in the way")
    with pytest.raises(StorageError, match=r"b\.db\.live must be a directory, got a file"):
        SQLiteEngine.open(tmp_path / "b.db")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.db")
    for bad in (os.devnull, tmp_path / "pipe.db"):
        with pytest.raises(InvalidArgument, match="is a device, a pipe or a socket"):
            SQLiteEngine.open(bad)
    assert not (tmp_path / "pipe.db.live").exists()


@pytest.mark.parametrize("name", ["sp ace.db", "ü#?.db", "quo'te\".db", "%41.db", "-rf.db", "new\nline.db"])
async def test_strange_names_are_names(tmp_path: Path, name: str) -> None:
    engine = opened(tmp_path / name)
    await engine.commit(None, [Op("put", ("a", 1))])
    await engine.close()
    assert (tmp_path / name).exists()
    # As it is after it was moved here alone: looked at before it is used.
    shutil.rmtree(tmp_path / f"{name}.live")
    again = opened(tmp_path / name)
    assert await again.read(get, "a") == 1
    await again.close()


@pytest.mark.parametrize("where", ["loop", "thread"])
@pytest.mark.parametrize("after", ["deleted", "moved", "replaced"])
async def test_nothing_is_acknowledged_for_a_file_that_is_not_there_any_more(
    engine: SQLiteEngine, path: Path, after: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core._engines.sqlite.database._LOOK", 0.0)

    async def commit() -> None:
        if where == "loop":
            await engine.commit(None, [Op("put", ("a", 1))])
        else:
            await asyncio.to_thread(engine.commit_from_thread, None, [Op("put", ("a", 1))])

    await commit()
    away = None
    if after == "deleted":
        path.unlink()
    else:
        away = path.rename(path.with_name("away.db"))
    if after == "replaced":
        sqlite3.connect(path).close()
        path.touch()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"a\.db was deleted, moved or replaced while it was open here"):
            await commit()
    if away is not None:
        away.rename(path)
        await commit()


@pytest.mark.parametrize("what", ["-wal", "-shm", ".live/commit.lock"])
async def test_nothing_is_acknowledged_without_what_belongs_to_the_file(
    engine: SQLiteEngine, path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core._engines.sqlite.database._LOOK", 0.0)
    await engine.commit(None, [Op("put", ("a", 1))])
    Path(f"{path}{what}").unlink()
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"a\.db{what} was deleted, moved or replaced while .*a\.db was open"):
            await engine.commit(None, [Op("put", ("a", 2))])
    await engine.close()
    again = opened(path)
    assert await again.read(get, "a") == 1
    await again.close()


async def test_a_file_that_is_damaged_while_it_is_open_is_told_as_that(engine: SQLiteEngine, path: Path) -> None:
    await engine.commit(None, [Op("put", ("a", 1))])
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        other.execute("PRAGMA user_version=7")  # so that pages are read again
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # Closed in another process: here that would take SQLite's locks away.
    subprocess.run([sys.executable, "-c", "import sys; open(sys.argv[1], 'r+b').write(bytes(4096))", path], check=True)
    with pytest.raises(StorageCorrupt, match="It was not modified"):
        await engine.commit(None, [Op("put", ("a", 2))])
    with pytest.raises(StorageCorrupt, match="It was not modified"):
        await asyncio.to_thread(engine.commit_from_thread, None, [Op("put", ("a", 2))])


async def test_what_may_not_be_written_is_told_with_the_way_out(engine: SQLiteEngine) -> None:
    engine.file.writing.execute("PRAGMA query_only=ON")
    with pytest.raises(StorageError, match="Let the user of this process write it, and its -wal and -shm"):
        await engine.commit(None, [Op("put", ("a", 1))])
    engine.file.writing.execute("PRAGMA query_only=OFF")
    await engine.commit(None, [Op("put", ("a", 1))])


def test_what_cannot_be_kept_leaves_nothing_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    def made(at: Path) -> CommitLock:
        locks.append(CommitLock(at))
        return locks[-1]

    locks: list[CommitLock] = []
    monkeypatch.setattr("agent_runtime_core._engines.sqlite.engine.ProcessLiveness", refuse)
    monkeypatch.setattr("agent_runtime_core._engines.sqlite.engine.CommitLock", made)
    with pytest.raises(StorageError, match=r"a\.db may not be read or written \(no\)\. Grant the permission"):
        opened(path)
    assert [lock._fd for lock in locks] == [-1]


async def test_a_file_that_is_no_database_is_left_as_it_is(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StorageCorrupt, match="It was not modified"):
        opened(path)
    assert path.read_bytes() == b"not a database at all" * 100
    assert list(path.parent.iterdir()) == [path]
    assert str(path) not in SQLiteEngine._open


@pytest.mark.parametrize("mode", ["delete", "wal"])
async def test_a_database_of_somebody_else_is_taken_as_it_is(path: Path, mode: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as theirs:
        theirs.execute(f"PRAGMA journal_mode={mode}")
        theirs.execute("CREATE TABLE t (x)")
        theirs.execute("INSERT INTO t VALUES (1)")
        engine = opened(path)
        await engine.commit(None, [Op("put", ("a", 1))])
        assert theirs.execute("SELECT x FROM t").fetchall() == [(1,)]
        await engine.close()


async def test_an_empty_file_becomes_a_database(path: Path) -> None:
    path.touch()
    engine = opened(path)
    await engine.commit(None, [Op("put", ("a", 1))])
    await engine.close()
    assert path.read_bytes().startswith(b"SQLite format 3")


async def test_a_newer_schema_is_refused(path: Path) -> None:
    engine = opened(path)
    await engine.close()
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("UPDATE arc_schema SET version = 9 WHERE concern = 'things'")
        conn.execute("UPDATE arc_schema SET version = 'agent-runtime-core 0.9.1' WHERE concern = 'library of things'")
    with pytest.raises(StorageTooNew) as caught:
        opened(path)
    assert str(caught.value) == (
        f"{path}: its things schema has version 9, written by 'agent-runtime-core 0.9.1', this library knows 1. "
        "Upgrade agent-runtime-core"
    )


@for_each("row", ["DELETE FROM arc_schema WHERE concern = 'library of things'",
                  "UPDATE arc_schema SET version = 7 WHERE concern = 'library of things'"])  # fmt: skip
async def test_a_newer_schema_of_an_unknown_library_is_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "a.db"
    await opened(path).close()
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("UPDATE arc_schema SET version = 9 WHERE concern = 'things'")
        conn.execute(row)
    with pytest.raises(StorageTooNew, match=r"its things schema has version 9, this library knows 1\. Upgrade"):
        opened(path)


async def test_the_library_is_that_of_the_last_migration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def versions() -> dict[str, Any]:
        with contextlib.closing(sqlite3.connect(path)) as conn:
            return dict(conn.execute("SELECT * FROM arc_schema WHERE concern LIKE '%things'"))

    for library, migrations in (("1.10", 1), ("2.0", 1), ("3.0", 2)):
        monkeypatch.setattr(agent_runtime_core, "__version__", library)
        engine = SQLiteEngine.open(path)
        engine.add(OperationSet("things", {}, {}, (SCHEMA, "ALTER TABLE arc_things ADD COLUMN extra")[:migrations]))
        await engine.close()
        written = "3.0" if migrations == 2 else "1.10"
        assert versions() == {"things": migrations, "library of things": f"agent-runtime-core {written}"}


async def test_migrations_run_once_each_and_all_or_none(path: Path) -> None:
    engine = opened(path)
    await engine.commit(None, [Op("put", ("a", 1))])
    await engine.close()
    more = "ALTER TABLE arc_things ADD COLUMN extra;\nCREATE INDEX arc_extra ON arc_things (extra)"
    engine = SQLiteEngine.open(path)
    broken = OperationSet("things", {}, {}, (SCHEMA, more, "CREATE TABLE arc_things (twice)"))
    with pytest.raises(StorageError, match="already exists"):
        engine.add(broken)
    engine.add(OperationSet("things", THINGS.operations, {}, (SCHEMA, more)))
    engine.add(OperationSet("things", {}, {}, ("nonsense",)))

    def columns(view: sqlite3.Connection) -> list[str]:
        return [row[1] for row in view.execute("PRAGMA table_info(arc_things)")]

    assert await engine.read(columns) == ["key", "value", "extra"]
    assert await engine.read(get, "a") == 1
    await engine.close()


def test_errors_of_the_driver_are_told_as_ours() -> None:
    def error(code: int) -> sqlite3.Error:
        error = sqlite3.OperationalError("said")
        error.sqlite_errorcode = code
        return error

    for code, kind in (
        (sqlite3.SQLITE_FULL, StorageFull),
        (sqlite3.SQLITE_IOERR_WRITE, StorageFull),
        (sqlite3.SQLITE_IOERR_FSYNC, StorageFull),
        (sqlite3.SQLITE_IOERR_TRUNCATE, StorageFull),
        (sqlite3.SQLITE_IOERR_SHMSIZE, StorageFull),
        (sqlite3.SQLITE_BUSY, StorageBusy),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, StorageBusy),
        (sqlite3.SQLITE_LOCKED, StorageBusy),
        (sqlite3.SQLITE_CORRUPT, StorageCorrupt),
        (sqlite3.SQLITE_NOTADB, StorageCorrupt),
        (sqlite3.SQLITE_ERROR, StorageError),
    ):
        ours = translate(error(code), "a.db")
        assert type(ours) is kind
        assert "a.db" in str(ours)
        assert "said" in str(ours)
    assert type(translate(sqlite3.ProgrammingError("said"), "a.db")) is StorageError


async def test_the_log_does_not_grow_without_end(engine: SQLiteEngine, path: Path) -> None:
    for n in range(60):
        await engine.commit(None, [Op("put", (str(n % 5), "x" * 300_000))])
    assert Path(f"{path}-wal").stat().st_size < 17 << 20


async def test_compacting_gives_space_back(engine: SQLiteEngine, path: Path) -> None:
    await engine.commit(None, [Op("put", ("a", "x" * 2_000_000))])
    await engine.commit(None, [Op("put", ("a", None))])
    await engine.compact()
    assert path.stat().st_size < 500_000
    assert await engine.read(get, "a") is None


async def test_a_large_file_is_compacted_only_where_that_is_asked_for(
    engine: SQLiteEngine, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sqlite, "LARGE", 1_000_000)
    await engine.commit(None, [Op("put", ("a", "x" * 2_000_000))])
    await engine.compact(always=True)
    await engine.commit(None, [Op("put", ("a", None))])
    assert caplog.messages == []
    await engine.compact()
    assert path.stat().st_size > 2_000_000
    [said] = caplog.messages
    assert said.endswith("To return it to the file system, stop the workers, then call runner.vacuum(compact=True)")
    await engine.compact(always=True)
    assert path.stat().st_size < 500_000


async def test_compacting_waits_no_longer_than_others_do(
    engine: SQLiteEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped in a commit does not let go; one that could not begin in time never does."""
    compacted: list[str] = []
    monkeypatch.setattr(engine.log, "compact", lambda: compacted.append("again"))
    engine.writer.committer.timeout = 0.2
    lock = CommitLock(Path(f"{path}.live"))
    with contextlib.closing(lock), lock, pytest.raises(StorageBusy, match="was not compacted"):
        await engine.compact()
    engine.writer.committer.timeout = 6.0
    await engine.commit(None, [Op("put", ("a", 1))])
    assert compacted == []
    await engine.compact()
    assert compacted == ["again"]


async def test_a_thread_that_waits_holds_nothing_of_what_it_did_last(engine: SQLiteEngine) -> None:
    class Found(list[int]):
        pass

    ops = [Op("put", ("a", 1))]
    await asyncio.to_thread(engine.commit_from_thread, None, ops)
    await soon(lambda: not any(type(each) is CommitRequest and each.ops is ops for each in gc.get_objects()))
    found = weakref.ref(await engine.read(lambda conn: Found([1])))
    await soon(lambda: found() is None)


async def writes(engine: SQLiteEngine) -> None:
    """More than a loop carries out itself."""
    await asyncio.gather(*(engine.commit(None, [Op("put", (str(n), n))]) for n in range(9)))


async def writes_from_a_thread(engine: SQLiteEngine) -> None:
    engine.commit_from_thread(None, [Op("put", ("a", 1))])


async def reads(engine: SQLiteEngine) -> None:
    assert await asyncio.gather(*(engine.read(get, "nothing") for _ in range(3))) == [None] * 3


async def listens(engine: SQLiteEngine) -> None:
    heard = asyncio.Event()
    stop = engine.listen("things", heard.set)
    await engine.commit(None, [Op("put", ("b", 1))])
    await until(heard)
    stop()


async def compacts(engine: SQLiteEngine) -> None:
    await engine.compact()


@pytest.mark.parametrize("act", [writes, writes_from_a_thread, reads, listens, compacts])
async def test_what_has_no_thread_is_refused_and_works_when_there_is_one(engine: SQLiteEngine, act: Any) -> None:
    for _ in range(2):
        with no_thread("agent-runtime-"), pytest.raises(StorageBusy, match="can't start new thread"):
            await act(engine)
    await act(engine)
    await engine.commit(None, [Op("put", ("a", 1))])


async def test_what_has_no_second_reader_is_read_by_the_first(engine: SQLiteEngine) -> None:
    assert await engine.read(get, "nothing") is None
    with no_thread("agent-runtime-"):
        await reads(engine)
    assert len(engine.readers.threads) == 1


async def test_a_commit_does_not_overtake_what_its_task_posted(
    engine: SQLiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the loop could carry it out at once, where it could not a moment ago."""
    now, answers = engine.writer.commit_on_loop, iter([False])
    monkeypatch.setattr(engine.writer, "commit_on_loop", lambda batch: next(answers, True) and now(batch))

    async def post_and_commit() -> None:
        engine.commit_nowait(None, [Op("put", ("a", 2))])
        await engine.commit(None, [Op("put", ("a", 3))])

    await asyncio.gather(engine.commit(None, [Op("put", ("a", 1))]), post_and_commit())
    assert await engine.read(get, "a") == 3


async def test_a_job_that_fails_does_not_end_the_writer(engine: SQLiteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(engine.log, "compact", fail)
        with pytest.raises(StorageError, match=r"a\.db: No locks available"):
            await asyncio.wait_for(engine.compact(), 10)
        engine.writer.run_job(fail)
    await asyncio.wait_for(engine.compact(), 10)
    assert await asyncio.wait_for(engine.commit(None, [Op("put", ("a", 1))]), 10) == [1]


# -- hearing each other


async def test_listeners_hear_commits_of_this_process(engine: SQLiteEngine) -> None:
    heard: list[str] = []
    stop = engine.listen("things", lambda: heard.append("things"))
    engine.listen("others", lambda: heard.append("others"))
    await engine.commit(None, [Op("put", ("a", 1))])
    await soon(lambda: "things" in heard)
    stop()
    stop()
    assert set(engine._notifier._listeners) == {"others"}


WRITER = """
import asyncio, sys
from agent_runtime_core.queue import SQLiteQueue

async def main():
    queue = SQLiteQueue(sys.argv[1])
    print("open", flush=True)
    for line in sys.stdin:
        await queue.enqueue(line.strip(), "agent", {})
        print("stored", flush=True)
    await queue.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("bell", [True, False], ids=["bell", "data_version"])
async def test_listeners_hear_commits_of_another_process(
    path: Path, bell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bell:
        monkeypatch.delattr(os, "mkfifo")
    queue = SQLiteQueue(path)
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        loop.call_soon_threadsafe(heard.set)

    queue.listen("work", wake)
    assert (queue.engine._liveness.fifo is not None) is bell
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "open\n"
        for n in range(3):
            await asyncio.sleep(0.06)
            heard.clear()
            process.stdin.write(f"r{n}\n")
            process.stdin.flush()
            assert await asyncio.to_thread(process.stdout.readline) == "stored\n"
            async with asyncio.timeout(5):
                await heard.wait()
        process.stdin.close()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert len(await queue.find(RunFilter())) == 3
    await queue.close()


async def test_a_listener_whose_loop_is_gone_disturbs_nobody(engine: SQLiteEngine) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    heard: list[int] = []

    def wake() -> None:
        loop.call_soon_threadsafe(str)

    engine.listen("things", wake)
    engine.listen("things", lambda: heard.append(1))
    await engine.commit(None, [Op("put", ("a", 1))])
    await soon(lambda: bool(heard))


# -- backends over it


async def test_a_backend_takes_a_path_in_two_words_or_an_engine(path: Path, engine: SQLiteEngine) -> None:
    queue = SQLiteQueue(db_path=path)
    other = SQLiteQueue(engine=engine)
    assert queue.engine is other.engine is engine
    await queue.close()
    await queue.close()
    await other.close()
    assert await engine.commit(None, [Op("put", ("a", 1))]) == [1]
    with pytest.raises(InvalidArgument, match="path and db_path must not both be passed"):
        SQLiteQueue(path, db_path=path)


async def test_without_a_path_the_default_is_beside_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    queue = SQLiteQueue()
    await queue.close()
    assert (tmp_path / "agent_runtime.db").exists()
