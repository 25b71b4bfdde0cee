"""`agent-runtime inspect` as a process, and stores that it may only read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_client import PATHS, LocalClient
from tests.support.processes import PATIENCE, ROOT, Child, Command, until
from tests.support.read_only import listing, write_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    path = tmp_path / "store" / "agents.db"
    asyncio.run(write_store(path))
    return path


def inspect(*arguments: object) -> Command:
    return Command("agent_runtime_core", "inspect", *arguments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_leaves_the_store_as_it_was(store: Path, number: signal.Signals) -> None:
    before = listing(store.parent)
    with inspect(store) as process:
        said = process.expect(f"inspecting {store} on http://127.0.0.1:")
        assert said.endswith("/")
        client = LocalClient(int(said.rstrip("/")))
        assert client.send("/").status == 200
        assert {path: client.data(path).status for path in PATHS} == dict.fromkeys(PATHS, 200)
        assert listing(store.parent) == before
        process.send(number)  # the connection of the client is still open
        assert process.ended() == 0
        client.close()
    assert listing(store.parent) == before


def test_with_json_the_ready_line_is_json_and_the_browser_gets_the_url(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.new && mv {opened}.new {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    with inspect(store, "--json", "--open") as process:
        ready = json.loads(process.line())
        assert ready == {"ready": True, "url": ready["url"], "store": str(store)}
        until(opened.exists, "the browser was started")
        assert opened.read_text().strip() == ready["url"]
        process.send(signal.SIGTERM)
        assert process.ended() == 0


def test_a_store_that_cannot_be_read_is_an_error_of_one_line(store: Path, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_bytes(b"no database" * 1000)
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        conn.execute("CREATE TABLE t (x)")
    with contextlib.closing(sqlite3.connect(store)) as conn, conn:
        conn.execute("UPDATE arc_schema SET version = 99")
    for path, reason in (
        (tmp_path / "none.db", "none.db' not found. Check the path"),
        (tmp_path / "text.db", "is not a readable database"),
        (tmp_path / "other.db", "path must be a store of this library"),
        (store, "schema has version 99"),
        ("memory://", "other processes cannot see the runs of a store in memory"),
        (None, "store must be a file or a URL"),
    ):
        command = [sys.executable, "-m", "agent_runtime_core", "inspect", *([] if path is None else [str(path)])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert reason in done.stderr


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that each user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="inspect-")) / "store"
    folder.mkdir()
    folder.parent.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder.parent)


def test_who_may_only_read_inspects(open_folder: Path, store: Path) -> None:
    """A file of mode 0444 in a directory of mode 0555. A process of root becomes another user for that."""
    path = open_folder / "agents.db"
    asyncio.run(write_store(path))
    shutil.rmtree(f"{path}.live")
    path.chmod(0o444)
    open_folder.chmod(0o555)
    before = listing(open_folder)
    with Child("inspects", store, path) as child:
        found = json.loads(child.expect("read"))
        assert set(found.values()) == {200}
        assert len(found) == len(PATHS) + 1
        assert child.ended() == 0
    assert listing(open_folder) == before
    assert os.listdir(open_folder.parent) == ["store"]
