"""What a SQLite engine reads on the event loop, and what it leaves to a thread."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.sqlite.engine import READS_ON_LOOP
from agent_runtime_core._engines.sqlite.readers import Readers
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.queue.sqlite import _SHORT

RUN = "run"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """The reads that a thread made."""
    made: list[Callable[..., Any]] = []
    submit = Readers.submit

    def noted(self: Readers, fn: Callable[..., Any], *args: Any) -> None:
        made.append(fn)
        submit(self, fn, *args)

    monkeypatch.setattr(Readers, "submit", noted)
    return made


async def opened(path: Path, payloads: list[str]) -> tuple[SQLiteQueue, str]:
    queue = SQLiteQueue(path)
    run = await queue.enqueue(RUN, "agent", {})
    for number, payload in enumerate(payloads):
        await queue.post(run.run_id, "signal", f"{number}", payload)
    return queue, str(run.run_id)


async def test_few_messages_are_read_on_the_event_loop(tmp_path: Path, threads: list[Any]) -> None:
    queue, run_id = await opened(tmp_path / "a.db", ["x", "y"])
    assert [mail.name for mail in await queue.read("mail", run_id, 0)] == ["0", "1"]
    assert await queue.read("mail", run_id, 2) == []
    assert threads == []
    await queue.close()


async def test_a_thread_reads_long_messages(tmp_path: Path, threads: list[Any]) -> None:
    queue, run_id = await opened(tmp_path / "a.db", ["x" * (_SHORT // 2), "y" * (_SHORT // 2), "z"])
    assert [mail.name for mail in await queue.read("mail", run_id, 0)] == ["0", "1", "2"]
    assert len(threads) == 1
    assert [mail.name for mail in await queue.read("mail", run_id, 1)] == ["1", "2"]
    assert len(threads) == 1
    await queue.close()


async def test_a_thread_reads_while_another_uses_the_connection(tmp_path: Path, threads: list[Any]) -> None:
    queue, run_id = await opened(tmp_path / "a.db", ["x"])
    writer = queue.engine.writer
    used, released = threading.Event(), threading.Event()

    def use() -> None:
        with writer._connection_lock:
            used.set()
            released.wait()

    thread = threading.Thread(target=use)
    thread.start()
    await asyncio.to_thread(used.wait)
    try:
        assert len(await queue.read("mail", run_id, 0)) == 1
    finally:
        released.set()
        thread.join()
    assert len(threads) == 1
    assert len(await queue.read("mail", run_id, 0)) == 1
    assert len(threads) == 1
    await queue.close()


async def test_a_failed_short_read_is_repeated_by_a_thread(tmp_path: Path, threads: list[Any]) -> None:
    queue, run_id = await opened(tmp_path / "a.db", ["x"])
    [(read, _)] = queue.engine._short_reads.items()
    calls = []

    def locked(view: sqlite3.Connection, *args: Any) -> Any:
        calls.append(args)
        raise sqlite3.OperationalError("database is locked")

    queue.engine._short_reads[read] = locked
    assert len(await queue.read("mail", run_id, 0)) == 1
    assert (len(calls), len(threads)) == (1, 1)
    await queue.close()


async def test_a_short_read_sees_the_last_commit_of_each_process(tmp_path: Path, threads: list[Any]) -> None:
    queue, run_id = await opened(tmp_path / "a.db", [])
    assert await queue.read("mail", run_id, 0) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as other, other:
        other.execute("INSERT INTO arc_mail VALUES (?, 1, 'signal', 'there', '{}', 'm', 0)", (run_id,))
    assert [mail.name for mail in await queue.read("mail", run_id, 0)] == ["there"]
    assert threads == []
    await queue.close()


async def test_a_task_that_repeats_a_read_lets_others_write_what_it_looks_for(tmp_path: Path) -> None:
    queue, run_id = await opened(tmp_path / "a.db", [])
    sender = asyncio.ensure_future(queue.post(run_id, "signal", "there", "x"))
    found: list[Any] = []
    for _ in range(100 * READS_ON_LOOP):  # without a pause, none of these reads finds the message
        found = found or await queue.read("mail", run_id, 0)
    assert [mail.name for mail in found] == ["there"]
    await sender
    await queue.close()


async def test_a_thread_reads_while_the_connection_is_in_a_transaction(tmp_path: Path, threads: list[Any]) -> None:
    queue, run_id = await opened(tmp_path / "a.db", ["x"])
    conn = queue.engine.file.writing
    conn.execute("BEGIN")
    conn.execute("DELETE FROM arc_mail")
    assert len(await queue.read("mail", run_id, 0)) == 1
    assert len(threads) == 1
    conn.execute("ROLLBACK")
    await queue.close()
