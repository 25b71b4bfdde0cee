"""A caller that is cancelled while its commit is under way learns of it only when the outcome is known."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.sqlite import group_commit, writer
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx
from agent_runtime_core.queue import SQLiteQueue


async def test_a_claim_cancelled_between_its_write_and_its_commit_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    slow: set[str] = set()

    class SlowToCommit(SQLiteTx):
        def __init__(self, engine: SQLiteEngine, conn: sqlite3.Connection) -> None:
            super().__init__(engine, conn)
            self.execute = self.held_up

        def held_up(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if sql in slow and not go.is_set():
                loop.call_soon_threadsafe(written.set)
                assert go.wait(10)
            return self.conn.execute(sql, *args)

    monkeypatch.setattr(group_commit, "SQLiteTx", SlowToCommit)
    monkeypatch.setattr(writer, "ON_LOOP", 0)  # what holds up the commit is to hold up a thread
    queue = SQLiteQueue(tmp_path / "queue.db")
    await queue.enqueue(None, "agent", {})
    slow.add("COMMIT")
    claiming = asyncio.ensure_future(queue.claim("w1"))
    try:
        await written.wait()
        claiming.cancel()
        await _turns(claiming.done)
        assert not claiming.done(), "the cancellation was raised while the transaction was open"
    finally:
        go.set()
    await asyncio.wait({claiming})
    assert claiming.cancelled()
    run = await queue.claim("w2")
    assert run is not None, "the run stayed with a claim that nobody knows"
    assert run.attempt == 1
    await queue.close()


async def _turns(over: Callable[[], bool], count: int = 200) -> None:
    for _ in range(count):
        if over():
            return
        await asyncio.sleep(0)
