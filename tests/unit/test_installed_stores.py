"""Stores of other packages, which add their URL scheme by an entry point: opened, listed, and named when broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    InvalidArgument,
    NotSupported,
    RunResult,
    StorageError,
    configure,
    open_run,
)
from agent_runtime_core.config import reset_config
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.persistence import PersistenceManager, get_persistence_manager, open_document_store
from agent_runtime_core.queue import RunFilter, get_queue
from agent_runtime_core.registry import Registry
from tests.support.command_line import Commands

REPOSITORY = Path(__file__).parents[2]
Install = Callable[..., Path]

#: A package whose stores are files of SQLite, but whose scheme is its own.
THEIRS = """
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.persistence import open_document_store
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.state import SQLiteStateStore

class Notes:
    opened = []

    def open(self, url, *, max_retries):
        self.opened.append((url, max_retries))
        path = url.removeprefix("notes://")
        return SQLiteQueue(path, max_retries=max_retries), SQLiteEventBus(path), SQLiteStateStore(path)

class Clocked(Notes):
    def open(self, url, *, max_retries, clock=None):
        more = {} if clock is None else {"clock": clock}
        path = url.partition("://")[2]
        return SQLiteQueue(path, max_retries=max_retries, **more), SQLiteEventBus(path), SQLiteStateStore(path, **more)

class NotesAndDocuments(Notes):
    def open_documents(self, url):
        return open_document_store(url.removeprefix("notes://"))

class Down:
    def open(self, url, *, max_retries):
        raise ConnectionRefusedError(f"no answer from {url}")

class Two:
    def open(self, url, *, max_retries):
        return Notes().open("notes://" + url.partition("://")[2], max_retries=max_retries)[:2]

class Swapped:
    def open(self, url, *, max_retries):
        return Notes().open("notes://" + url.partition("://")[2], max_retries=max_retries)[::-1]

class Later:
    async def open(self, url, *, max_retries):
        return None

class WrongDocuments(Notes):
    def open_documents(self, url):
        return {}

store, stored, clocked = Notes(), NotesAndDocuments(), Clocked()
down, two, swapped, later, wrong = Down(), Two(), Swapped(), Later(), WrongDocuments()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with entry points on the path of this process, as its files are when it is installed."""

    def installed(name: str, schemes: dict[str, str], source: str = THEIRS) -> Path:
        folder = tmp_path / f"site-{name}"
        for path, text in files_of(name, schemes, source).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return folder

    return installed


def files_of(name: str, schemes: dict[str, str], source: str) -> dict[str, str]:
    info = f"{name}-1.2.dist-info"
    points = "".join(f"{scheme} = {target}\n" for scheme, target in schemes.items())
    return {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[agent_runtime_core.backends]\n{points}",
        f"{info}/RECORD": "",
    }


class Hello(AgentRuntime):
    key = "hello"

    async def run(self, ctx: Any) -> RunResult:
        return RunResult({"said": await ctx.step("say", lambda: "hello")})


def agents() -> Registry:
    registry = Registry()
    registry.register(Hello())
    return registry


async def test_a_runner_opens_the_url_of_an_installed_package(install: Install, tmp_path: Path) -> None:
    install("their_notes", {"notes": "their_notes:store"})
    url = f"notes://{tmp_path}/a.db"
    async with AgentRunner.open(url, registry=agents()) as runner:
        run_id = await runner.submit("hello")
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"said": "hello"}
    async with AgentRunner.open(url, registry=agents()) as again:
        assert (await again.wait(run_id)).final_output == {"said": "hello"}
    assert sys.modules["their_notes"].store.opened[0] == (url, 3)


async def test_open_run_and_the_setting_take_such_a_url(install: Install, tmp_path: Path) -> None:
    install("their_notes", {"notes": "their_notes:store"})
    url = f"notes://{tmp_path}/a.db"
    async with open_run(url, "job") as ctx:
        assert await ctx.step("one", lambda: 1) == 1
    configure(backend_url=url)
    try:
        async with AgentRunner(registry=agents()) as runner:
            assert (await runner.execute("hello")).final_output == {"said": "hello"}
            assert len(await runner.queue.find(RunFilter())) == 2
        for one in (get_queue, get_event_bus):
            with pytest.raises(InvalidArgument, match=r"must be opened together with the others .*'notes://"):
                one()
    finally:
        reset_config()


async def test_read_only_rejects_every_write_and_reads(install: Install, tmp_path: Path) -> None:
    install("their_notes", {"notes": "their_notes:store"})
    url = f"notes://{tmp_path}/a.db"
    async with AgentRunner.open(url, registry=agents()) as runner:
        run_id = await runner.submit("hello")
    async with AgentRunner.open(url, registry=agents(), read_only=True) as reader:
        row = await reader.queue.row(str(run_id))
        assert row is not None
        assert row.status == "pending"
        for write in (lambda: reader.submit("hello"), lambda: reader.queue.commits.commit(None, [])):
            with pytest.raises(NotSupported, match="read_only"):
                await write()
    async with AgentRunner.open(url, registry=agents()) as runner:
        assert await runner.run_once()


async def test_document_stores_and_the_six_stores_are_optional(install: Install, tmp_path: Path) -> None:
    install("their_notes", {"notes": "their_notes:stored", "wrong": "their_notes:wrong", "bare": "their_notes:store"})
    url = f"notes://{tmp_path}/a.db"
    async with PersistenceManager.open(url) as stores:
        await stores.memory.set("name", "Ada")
    async with PersistenceManager.open(str(tmp_path / "a.db")) as stores:
        assert await stores.memory.get("name") == "Ada"
    documents = open_document_store(url)
    await documents.close()
    with pytest.raises(InvalidArgument, match=r"package their_notes 1\.2 must have a method open_documents"):
        open_document_store("bare://a")
    with pytest.raises(InvalidArgument, match=r"open_documents must return a DocumentStore, got \{\}"):
        open_document_store("wrong://a")


def test_without_document_stores_the_stores_of_the_process_are_files(install: Install) -> None:
    install("their_notes", {"bare": "their_notes:store"})
    configure(backend_url="bare://a")
    try:
        assert type(get_persistence_manager().memory).__name__ == "FileMemoryStore"
    finally:
        reset_config()


def test_an_unknown_scheme_names_the_installed_ones(install: Install) -> None:
    install("their_notes", {"notes": "their_notes:store"})
    with pytest.raises(InvalidArgument, match=r"store URL must be memory://.*, notes:// or the path .*got 'nots://x'"):
        AgentRunner.open("nots://x")
    assert "their_notes" not in sys.modules  # a message imports nothing


async def test_a_package_cannot_replace_a_scheme_of_the_library(install: Install, tmp_path: Path) -> None:
    install("their_notes", {"sqlite": "their_notes:down", "memory": "their_notes:down", "redis": "their_notes:down"})
    async with AgentRunner.open(f"sqlite:///{tmp_path}/a.db", registry=agents()) as runner:
        assert (await runner.execute("hello")).final_output == {"said": "hello"}
    assert "their_notes" not in sys.modules


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("their_notes:missing", InvalidArgument, "must be importable as their_notes:missing, got an? AttributeError: "),
        ("nowhere:store", InvalidArgument, "must be importable as nowhere:store, got an? ModuleNotFoundError: "),
        ("their_notes:Notes", InvalidArgument, "must be an object with a method open.*, got the class Notes"),
        ("their_notes:two", InvalidArgument, "open must return a queue, an event bus and a state store"),
        ("their_notes:swapped", InvalidArgument, "open must return a queue, .* The queue must be a RunQueue"),
        ("their_notes:later", InvalidArgument, "open must be a plain function, got a coroutine function"),
    ],
)
def test_a_broken_package_is_named(
    install: Install, tmp_path: Path, target: str, error: type[Exception], message: str
) -> None:
    install("their_notes", {"broken": target})
    with pytest.raises(error, match=rf"'broken' of the package their_notes 1\.2.*{message}"):
        AgentRunner.open(f"broken://{tmp_path}/a.db")


def test_a_package_that_cannot_be_imported_is_named(install: Install) -> None:
    install("their_notes", {"broken": "their_notes:store"}, "raise RuntimeError('no driver for redis://u:secret@h')")
    with pytest.raises(InvalidArgument, match=r"package their_notes 1\.2 must be importable .*RuntimeError") as caught:
        AgentRunner.open("broken://x")
    assert "secret" not in str(caught.value)


def test_an_error_of_the_driver_names_the_package_and_hides_the_password(install: Install) -> None:
    install("their_notes", {"down": "their_notes:down"})
    with pytest.raises(
        StorageError, match=r"down://.* not opened by the package their_notes 1\.2: .*Refused"
    ) as caught:
        AgentRunner.open("down://me:secret@host/db")
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_two_packages_with_one_scheme_are_refused(install: Install) -> None:
    install("their_notes", {"notes": "their_notes:store"})
    install("other_notes", {"notes": "other_notes:store"})
    with pytest.raises(InvalidArgument, match=r"one package, got other_notes 1\.2 and their_notes 1\.2\. Uninstall"):
        AgentRunner.open("notes://x")


def test_the_commands_take_the_url_of_a_package_that_pip_has_installed(tmp_path: Path) -> None:
    wheel, site = tmp_path / "their_notes-1.2-py3-none-any.whl", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        schemes = {"notes": "their_notes:store", "broken": "nowhere:store", "sqlite": "their_notes:down"}
        for path, text in files_of("their_notes", schemes, THEIRS).items():
            archive.writestr(path, text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    url = f"notes://{tmp_path}/a.db"
    path = os.pathsep.join([str(site), str(REPOSITORY / "src")])

    def command(*args: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": path}
        line = [sys.executable, "-m", "agent_runtime_core", *args]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    code, output = command("submit", "hello", "--url", url)
    assert code == 0, output
    code, output = command("runs", "--url", url, "--json")
    assert code == 0, output
    assert [each["status"] for each in json.loads(output)] == ["pending"]
    code, output = command("doctor", "--url", url)
    assert "can be read" in output, output
    assert "notes:// of the package their_notes 1.2" in output, output
    assert "'broken' of the package their_notes 1.2 must be importable" in output, output
    assert "'sqlite' of the package their_notes 1.2 is not used" in output, output


@pytest.mark.parametrize("target", ["store", "clocked"])
def test_the_conformance_tests_open_an_installed_url(
    target: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("theirs", {"notes": f"theirs:{target}"})
    for case in ("delayed_run", "wall_clocks", "through", "crashed_process", "status"):
        code, out, err = Commands(capsys)("conformance", "notes://{tmp}/a.db", "--case", case)
        assert (code, err) == (0, ""), out
