"""Stores that are opened read-only while other processes write to them, have died, or are the only ones that may."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, StorageBusy
from agent_runtime_core._engines.sqlite.read_only import OPEN, copy_file
from tests.support.processes import Child
from tests.support.read_only import EXPECTED, listing, read, read_all, write_store

OPENED = 100  # times that a store is opened while a process writes to it
COPIED = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


async def test_reading_changes_nothing_that_an_idle_worker_has_open(folder: Path) -> None:
    path = folder / "agents.db"
    await write_store(path)
    with Child("writes", path, 1, 0) as child:
        child.expect("ready")
        before = listing(folder)
        async with AgentRunner.open(path, read_only=True) as runner:
            assert runner.queue.commits.source().how == OPEN  # type: ignore[attr-defined]
            found = await read(runner)
            assert found["runs"].pop("run 1") == "pending"
            assert found == EXPECTED
            assert listing(folder) == before
        assert listing(folder) == before
        child.tell("")
        assert json.loads(await asyncio.to_thread(child.expect, "wrote"))["errors"] == {}
        assert child.ended() == 0
    # Nothing that reads is left, so the worker could delete its log.
    assert sorted(each.name for each in folder.iterdir()) == ["agents.db", "agents.db.live"]


async def test_a_store_is_opened_many_times_while_a_worker_writes(folder: Path) -> None:
    path = folder / "agents.db"
    await write_store(path)
    with Child("writes", path, 1, 3600) as child:
        child.expect("ready")
        child.tell("")
        heads, ways = [], set()
        for _ in range(OPENED):
            async with AgentRunner.open(path, read_only=True) as runner:
                ways.add(runner.queue.commits.source().how)  # type: ignore[attr-defined]
                found = await read(runner)
                found["runs"].pop("run 1")
                assert found == EXPECTED
                heads.append(await runner.event_bus.head("run 1"))
        assert ways == {OPEN}
        assert heads == sorted(heads)
        assert heads[-1] > heads[0]
        assert child.kill()


async def test_reading_changes_nothing_that_a_killed_worker_left_behind(folder: Path) -> None:
    path = folder / "agents.db"
    await write_store(path)
    with Child("writes", path, 1, 3600) as child:
        child.expect("ready")
        child.tell("")
        async with AgentRunner.open(path, read_only=True) as runner:
            events = runner.event_bus.subscribe("run 1")
            await anext(events)
            await events.aclose()
        assert child.kill()
    before = listing(folder)
    assert "agents.db-wal" in before
    found = await read_all(path)
    found["runs"].pop("run 1")
    assert found == EXPECTED
    assert listing(folder) == before


def _copy_between_checkpoints(path: Path, target: Path) -> None:
    """Copy the store. On a busy machine, a writer without a pause may begin its log anew during every try."""
    while True:
        try:
            copy_file(str(path), str(target))
        except StorageBusy:
            continue
        return


async def test_a_copy_that_is_made_while_a_worker_writes_is_whole(folder: Path) -> None:
    path, target = folder / "agents.db", folder.parent / "copy.db"
    await write_store(path)
    counts = []
    with Child("writes", path, 1, 3600) as child:
        child.expect("ready")
        child.tell("")
        for _ in range(COPIED):
            _copy_between_checkpoints(path, target)
            with contextlib.closing(sqlite3.connect(target)) as conn:
                assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                counts.append(conn.execute("SELECT count(*) FROM arc_events").fetchone()[0])
        assert child.kill()
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that each user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="read-only-")) / "store"
    folder.mkdir()
    folder.parent.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder.parent)


@pytest.mark.parametrize("suffixes", [("",), ("", "-wal"), ("", "-wal", "-shm")])
async def test_who_may_only_read_reads(open_folder: Path, tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    """Files of mode 0444 in a directory of mode 0555. A process of root becomes another user for that."""
    source, path, warm = tmp_path / "live.db", open_folder / "agents.db", tmp_path / "warm.db"
    await write_store(warm)
    if suffixes == ("",):
        await write_store(path)
        shutil.rmtree(f"{path}.live")
    else:
        async with AgentRunner.open(source):
            await write_store(source)
            for suffix in suffixes:  # by another process: this one has it open
                subprocess.run(["cp", f"{source}{suffix}", f"{path}{suffix}"], check=True)
    for each in open_folder.iterdir():
        each.chmod(0o444)
    open_folder.chmod(0o555)
    before = listing(open_folder)
    with Child("reads", warm, path, path) as child:
        assert json.loads(await asyncio.to_thread(child.expect, "read")) == EXPECTED
        assert child.ended() == 0
    assert listing(open_folder) == before
    assert os.listdir(open_folder.parent) == ["store"]
