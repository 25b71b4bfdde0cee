"""The WAL's file is extended ahead of use, reused, and never written to under somebody else's hands."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime_core._engines.sqlite.writer import WAL_SIZE, WriteAheadLog


def connect(path: Path) -> sqlite3.Connection:
    conn = sqlite3.connect(path, isolation_level=None, timeout=0.05)
    conn.execute("PRAGMA journal_mode=WAL")
    conn.execute("PRAGMA wal_autocheckpoint=0")
    return conn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def conn(path: Path) -> Iterator[sqlite3.Connection]:
    conn = connect(path)
    conn.execute("CREATE TABLE t (n INTEGER, text TEXT)")
    yield conn
    conn.close()


def log(path: Path, conn: sqlite3.Connection, *, flushes: bool = True) -> WriteAheadLog:
    return WriteAheadLog(str(path), conn, flushes=flushes)


def size(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


def write(conn: sqlite3.Connection, log: WriteAheadLog | None, count: int, text: str = "x") -> None:
    for n in range(count):
        conn.execute("INSERT INTO t VALUES (?, ?)", (n, text))
        if log is not None and log.grown():
            log.maintain()


def rows(path: Path) -> int:
    conn = sqlite3.connect(path)
    try:
        assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found: int = conn.execute("SELECT count(*) FROM t").fetchone()[0]
        return found
    finally:
        conn.close()


def test_a_short_lived_process_extends_the_file_by_little(path: Path, conn: sqlite3.Connection) -> None:
    before = size(path)
    write(conn, log(path, conn), 5)
    assert before + (1 << 17) <= size(path) < before + (1 << 18)


def test_no_commit_but_the_first_has_to_extend_the_file(path: Path, conn: sqlite3.Connection) -> None:
    tended, ahead = log(path, conn), []
    write(conn, tended, 1)
    for _ in range(300):
        before = size(path)
        write(conn, None, 1)
        ahead.append(size(path) == before)
        assert not tended.grown()
    assert all(ahead)


def test_the_file_is_extended_ahead_and_reads_as_before(path: Path, conn: sqlite3.Connection) -> None:
    tended = log(path, conn)
    write(conn, tended, 2000)
    assert WAL_SIZE <= size(path) < WAL_SIZE + (2 << 20)
    assert rows(path) == 2000


@pytest.mark.parametrize("flushes", [True, False])
def test_processes_that_end_after_one_commit_see_to_its_size_as_well(
    path: Path, conn: sqlite3.Connection, flushes: bool
) -> None:
    for _ in range(300):
        write(conn, log(path, conn, flushes=flushes), 1, "x" * 60_000)
    assert size(path) < 2 * WAL_SIZE
    assert rows(path) == 300


def test_without_flushes_nothing_is_written_ahead(path: Path, conn: sqlite3.Connection) -> None:
    write(conn, log(path, conn, flushes=False), 16)
    assert size(path) < 256 << 10


def test_where_commits_are_large_nothing_is_written_ahead(path: Path, conn: sqlite3.Connection) -> None:
    tended = log(path, conn)
    write(conn, tended, 16, "x" * 60_000)
    assert size(path) < 16 * 80_000


def test_the_log_is_begun_anew_and_does_not_grow(path: Path, conn: sqlite3.Connection) -> None:
    tended = log(path, conn)
    write(conn, tended, 12_000)
    assert size(path) < 2 * WAL_SIZE
    assert rows(path) == 12_000


@pytest.mark.parametrize("flushes", [False, True])
def test_it_is_not_begun_anew_before_it_is_almost_full(path: Path, conn: sqlite3.Connection, flushes: bool) -> None:
    made: list[str] = []
    conn.set_trace_callback(lambda sql: made.append(sql) if "checkpoint" in sql else None)
    write(conn, log(path, conn, flushes=flushes), 5000)
    assert 4 <= len(made) <= 8  # of 1,018 frames each


def test_while_another_program_writes_the_file_is_left_alone(path: Path, conn: sqlite3.Connection) -> None:
    other = connect(path)
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO t VALUES (1, 'theirs')")
    before = size(path)
    assert not log(path, conn).grown()
    assert size(path) == before
    other.execute("COMMIT")
    other.close()
    assert rows(path) == 1


def test_what_another_program_commits_just_before_is_not_overwritten(
    path: Path, conn: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = connect(path)
    stat, looked = os.stat, [0]

    def stat_and_let_others_in(name: str, **how: object) -> object:
        found = stat(name, **how)  # type: ignore[arg-type]
        looked[0] += 1
        if looked[0] == 1:
            other.execute("INSERT INTO t VALUES (1, ?)", ("theirs" * 5000,))
        return found

    monkeypatch.setattr(os, "stat", stat_and_let_others_in)
    assert not log(path, conn).grown()
    monkeypatch.undo()
    assert looked[0] == 2
    other.close()
    assert rows(path) == 1
