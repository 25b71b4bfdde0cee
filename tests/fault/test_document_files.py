"""Documents in files under SIGKILL and many writers: nothing torn, nothing acknowledged lost, no update lost.

The long forms, 300 kills and 16 appenders of 500 each:
pytest tests/fault/test_document_files.py -m slow -o log_cli=true
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest

from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.persistence.documents.base import Collection, Document, Entry
from agent_runtime_core.persistence.documents.file_directory import locked
from agent_runtime_core.persistence.documents.file_format import decode_record
from agent_runtime_core.persistence.documents.files import FileDocuments
from tests.support.processes import PATIENCE, Child, Command, until
from tests.support.store_0_5_2 import write_old_store
from tests.unit.test_carry_over import found_whole, snapshot

log = logging.getLogger("fault")


async def killed(root: Path, kills: int) -> None:
    random, done, landed = Random(kills), 0, 0
    while landed < kills:
        with Child("filing", root, "writes") as child:
            child.expect("ready")
            life = random.expovariate(1 / 0.1)
            while (said := child.poll_line(life)) is not None:
                done = int(said.removeprefix("done "))
                if random.random() < 0.1:
                    break
            landed += child.kill()
            while (said := child.poll_line(0)) is not None:
                done = int(said.removeprefix("done "))
        whole(root)
        done = await checked(root, done)
    log.info("%d kills while writing, %d commits of four documents: no torn file, none half, none lost", landed, done)


def whole(root: Path) -> None:
    """No file that has its name is torn, in the state that the killed one left behind."""
    for path in root.glob("documents/*/*/**/*.json"):
        decode_record(path.read_bytes(), str(path))


async def checked(root: Path, done: int) -> int:
    """What the next one finds; the number that it goes on from."""
    documents = FileDocuments(root)
    headers, messages = Collection(documents, "project", "header"), Collection(documents, "project", "message")
    try:
        stored = {each.key: int(each.text) for each in await headers.many(["one", "two", "alone"])}
        one, two, alone = (stored.get(key, 0) for key in ("one", "two", "alone"))
        assert one == two, "a commit is there in part"
        assert one >= done, "an acknowledged commit is gone"
        assert alone <= one
        found = await messages.find("talk")
        assert [(each.rank, each.key) for each in found] == [
            (n, f"talk/{n}") for n in range(1, one + 1) if n % 2 or n + 5 > one
        ]
        header = await headers.get("one")
        assert header is None or header.rank == one
    finally:
        await documents.close()
    return one


async def test_killed_while_writing(tmp_path: Path) -> None:
    await killed(tmp_path / "store", 20)


@pytest.mark.slow
async def test_300_times_killed_while_writing(tmp_path: Path) -> None:
    await killed(tmp_path / "store", 300)


@pytest.mark.parametrize(("processes", "times"), [(2, 60), (8, 15)])
async def test_no_update_of_another_process_is_lost(tmp_path: Path, processes: int, times: int) -> None:
    run(tmp_path, [("counts", times)] * processes)
    documents = FileDocuments(tmp_path)
    found = await Collection(documents, "project", "counter").get("n")
    await documents.close()
    assert found is not None
    assert (json.loads(found.text)[0], found.version) == (processes * times, processes * times)


async def appended(root: Path, names: list[str], times: int) -> None:
    """Appenders in as many processes as there are names; a name stands for several with commas between."""
    run(root, [("appends", name, times) for name in names], patience=times / 2 + PATIENCE)
    documents = FileDocuments(root)
    found: list[Document] = await Collection(documents, "project", "message").find("talk")
    await documents.close()
    every = [each for name in names for each in name.split(",")]
    assert [each.rank for each in found] == list(range(1, len(every) * times + 1))
    for who in every:
        mine = [n for name, n in map(json.loads, (each.text for each in found)) if name == who]
        assert mine == list(range(times)), "not in order"
    log.info("%d appenders in %d processes, %d messages, in order", len(every), len(names), len(found))


def run(root: Path, jobs: list[tuple[object, ...]], patience: float = PATIENCE) -> None:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child("filing", root, *job)) for job in jobs]
        for child in children:
            child.expect("ready")
        for child in children:
            assert child.poll_line(patience) == "over"
            assert child.ended() == 0


async def test_messages_of_many_appenders(tmp_path: Path) -> None:
    await appended(tmp_path, ["a,b,c,d", "e,f", "g", "h"], 50)


@pytest.mark.slow
async def test_8000_messages_of_16_appenders(tmp_path: Path) -> None:
    await appended(tmp_path, ["a,b,c,d", "e,f,g,h", "i,j,k,l", "m,n,o,p"], 500)


async def carried_through(project: Path, kills: int) -> None:
    """`agent-runtime carry-over`, killed so often, and then left to finish."""
    directory, random, landed = write_old_store(project, messages=600), Random(kills), 0
    before = snapshot(directory)
    while True:
        with Command("agent_runtime_core", "carry-over", project) as child:
            root = directory / "v1"
            if landed < kills:
                until(root.exists, "something is written")
                child.poll_line(random.uniform(0, 0.4))
            if landed < kills and child.process.poll() is None:
                landed += child.kill()
                whole(root)
                continue
            assert child.ended() == 0
            break
    assert snapshot(directory) == before
    await found_whole(project, messages=600)
    log.info("carried over after %d kills", landed)


async def test_carrying_over_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    await carried_through(tmp_path, 4)


class Hasty(FileDocuments):
    patience = 0.2


async def test_readers_see_whole_commits_while_others_write(tmp_path: Path) -> None:
    documents = FileDocuments(tmp_path)
    table = Collection(documents, "project", "header")
    with Child("filing", tmp_path, "writes") as child:
        child.expect("ready")
        for _ in range(20):
            before = int(child.expect("done"))
            found = {each.key: int(each.text) for each in await table.many(["one", "two"])}
            assert found["one"] == found["two"] >= before
    await documents.close()


async def test_a_writer_that_stands_still_is_named_and_not_waited_for(tmp_path: Path) -> None:
    documents = Hasty(tmp_path)
    table = Collection(documents, "project", "header")
    with Child("filing", tmp_path, "writes") as child:
        child.expect("ready")
        child.expect("done")
        with locked(str(tmp_path / "lock")), pytest.raises(StorageBusy, match="did not answer"):
            await table.get("one")
        documents.patience = 30.0
        assert await table.get("one")
    await documents.close()


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    with Child("filing", tmp_path, "fills") as child:
        child.expect("ready")
        for _ in range(5):
            told = json.loads(child.line())
            assert told == {
                "one": "StorageFull", "two": "StorageFull", "fence": "StorageFull", "there": ["1", "1"], "after": 2
            }  # fmt: skip
        child.expect("over")
    assert not list((tmp_path / "drafts").iterdir())


async def test_who_may_only_read_reads(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp())
    try:
        await look_only(place)
    finally:
        shutil.rmtree(place)


async def look_only(place: Path) -> None:
    os.chmod(place, 0o755)
    root = place / "store"
    documents = FileDocuments(root)
    table = Collection(documents, "project", "memory")
    await table.write(table.put(Entry("a", "1")))
    await documents.close()
    intent = root / "intent"
    for each in [root, *root.rglob("*")]:
        if os.geteuid() == 0:
            os.chown(each, 65534, 65534)
        os.chmod(each, 0o500 if each.is_dir() else 0o400)
    try:
        with Child("filing", root, "looks") as child:
            child.expect("ready")
            for left_behind in ("nothing", "no lock", "an intent"):
                os.chmod(root, 0o700)
                if left_behind == "no lock":
                    (root / "lock").unlink()
                if left_behind == "an intent":
                    intent.write_text("{}")
                os.chmod(root, 0o500)
                child.tell("go on")
                found = json.loads(child.line())
                expected = ["StorageError"] * 2 if left_behind == "an intent" else [["1"], ["1"]]
                assert found == [*expected, "StorageError"], left_behind
    finally:
        for each in [root, *root.rglob("*")]:
            os.chmod(each, 0o700)
