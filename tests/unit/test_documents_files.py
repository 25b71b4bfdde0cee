"""Documents in files: what lies on the disk, what is refused, and what other processes and people do to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core._engines.base import FORGET, INSTALL, Guard, Op
from agent_runtime_core.errors import (
    InvalidArgument,
    LeaseLost,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    StorageTooNew,
)
from agent_runtime_core.persistence.backends.files import FileMemoryStore
from agent_runtime_core.persistence.documents.base import Collection, DocumentMissing, Entry, VersionConflict
from agent_runtime_core.persistence.documents.file_directory import DurableDirectory, locked
from agent_runtime_core.persistence.documents.file_format import sealed
from agent_runtime_core.persistence.documents.files import FileDocuments
from agent_runtime_core.persistence.documents.memory import MemoryDocuments
from agent_runtime_core.persistence.models import Scope
from agent_runtime_core.testing.clock import VirtualClock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


class Store:
    """One process's view of a directory."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.documents = FileDocuments(root, **options)
        self.table = Collection(self.documents, "project", "memory")

    async def put(self, key: str, text: str = '"x"', group: str = "", **more: Any) -> None:
        await self.table.write(self.table.put(Entry(key, text, group, **more)))

    async def texts(self, *keys: str) -> list[str]:
        return [each.text for each in await self.table.many(keys)]


def memory(root: Path) -> Path:
    return root / "documents" / "project" / "memory"


def files(root: Path) -> list[str]:
    return sorted(str(each.relative_to(memory(root))) for each in memory(root).rglob("*.json"))


# -- what lies on the disk


async def test_a_person_can_read_it(root: Path) -> None:
    store = Store(root)
    await store.put("theme", '{"dark":true}', rank=0.0)
    await store.put("note", "no JSON\nat all")
    path = memory(root) / "000000~theme.json"
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert lines[1] == '"value": {"dark":true},'
    told = json.loads(path.read_text())
    assert told["v"] == 1
    assert told["key"] == "theme"
    assert told["value"] == {"dark": True}
    assert told["version"] == 1
    assert json.loads((memory(root) / "000001~note.json").read_text())["text"] == "no JSON\nat all"
    assert await store.texts("theme", "note") == ['{"dark":true}', "no JSON\nat all"]


@pytest.mark.parametrize(
    "text",
    ["", "1", " 1 ", '{"a": 1}', "nan", "NaN", '"\u2028"', "a\r\nb", '{"a":\n1}', "é", "\0", '"', "{}\n", "[" * 5_000],
)
async def test_a_text_is_kept_to_the_letter(root: Path, text: str) -> None:
    store = Store(root)
    await store.put("k", text)
    assert await store.texts("k") == [text]
    assert (
        json.loads((memory(root) / "000001~k.json").read_bytes(), parse_constant=pytest.fail)
        if "[" not in text
        else True
    )


async def test_only_its_owner_may_look_whatever_the_umask(root: Path) -> None:
    for umask in (0o000, 0o777):
        before = os.umask(umask)
        try:
            store = Store(root / f"{umask:o}" / "deeper")
            await store.put("a", group="g")
            await store.table.write(store.table.put(Entry("b", "1")), store.table.put(Entry("c", "1")))
            await store.documents.commit(None, [Op(INSTALL, ("run", "1"))])
        finally:
            os.umask(before)
    found = list(root.rglob("*"))
    assert len(found) > 20
    for each in found:
        mode = stat.S_IMODE(each.stat().st_mode)
        assert mode == (0o700 if each.is_dir() else 0o600), each


async def test_a_group_is_a_directory(root: Path) -> None:
    store = Store(root)
    for n in range(3):
        await store.put(f"talk/{n}", group="talk")
    await store.put("other", group="A group")
    assert files(root) == ["%41%20group/000001~other.json", *(f"talk/00000{n + 1}@{n}.json" for n in range(3))]
    await store.table.write(store.table.touch("talk/0", 9.0))
    await store.put("talk/1", group="")
    assert files(root) == [
        "%41%20group/000001~other.json", "000001~talk%2f1.json", "talk/000003@2.json", "talk/000009@0.json"
    ]  # fmt: skip
    assert [each.key for each in await store.table.find("talk")] == ["talk/2", "talk/0"]


async def test_nothing_is_made_before_the_first_write(root: Path) -> None:
    store = Store(root)
    assert await store.texts("a") == []
    assert await store.table.find() == []
    assert await store.table.search("a") == []
    await store.documents.close()
    assert not root.exists()


async def test_nothing_is_left_over(root: Path) -> None:
    store = Store(root)
    for n in range(5):
        await store.table.write(*(store.table.put(Entry(f"{each}", f"{n}")) for each in range(4)))
    with pytest.raises(VersionConflict):
        await store.table.write(store.table.put(Entry("new", "1")), store.table.put(Entry("0", "x"), 1))
    assert not list((root / "drafts").iterdir())
    assert not (root / "intent").exists()
    assert files(root) == [f"00000{each + 1}~{each}.json" for each in range(4)]


# -- the same as in memory, whatever comes


def steps(random: Random, table: Collection, now: float) -> list[Op]:
    found = []
    for key in random.sample(["a", "b", "g/a", "g/b", "h", "A", "a/b", "g"], random.choice([1, 1, 2, 3])):
        group = random.choice(["", "g", "a", "G"])
        end = random.choice([None, None, now + 5])
        entry = Entry(key, f'{{"n": {random.randrange(5)}}}', group, random.choice([None, None, 1.5, 7, -3]), end)
        entry = entry._replace(words=random.choice(["", "some words"]))
        choices: list[Callable[[], Op]] = [
            partial(table.put, entry, random.choice([None, 0, 1, 2])), partial(table.add, entry),
            partial(table.touch, key, random.randrange(20)), partial(table.delete, key), partial(table.clear, group),
            partial(Op, "documents.drop", (table.space, now)),
        ]  # fmt: skip
        found.append(random.choice(choices)())
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_it_is_what_memory_is(root: Path, seed: int) -> None:
    """Two that look at one directory in turns, and dicts."""
    clock, random = VirtualClock(), Random(seed)
    stores = [
        Collection(each, "project", "thing")
        for each in (MemoryDocuments(clock=clock), FileDocuments(root, clock=clock), FileDocuments(root, clock=clock))
    ]
    for turn in range(40):
        answers = []
        state, seed_of_marks = random.getstate(), clock.random.getstate()
        for table in (stores[0], random.choice(stores[1:])):
            random.setstate(state)
            clock.random.setstate(seed_of_marks)
            try:
                answers.append(await table.write(*steps(random, table, clock.wall())))
            except (VersionConflict, DocumentMissing) as error:
                answers.append([type(error)])
        assert answers[0] == answers[1], turn
        asked: dict[str, Any] = {
            "group": random.choice([None, "", "g", "a", "G"]), "prefix": random.choice(["", "g", "a", "g/"]),
            "low": random.choice([None, 1.5]), "high": random.choice([None, 7]), "descending": random.random() < 0.5,
            "offset": random.choice([0, 1]), "limit": random.choice([None, 2]),
        }  # fmt: skip
        found = [await table.find(**asked) for table in stores]
        assert found[0] == found[1] == found[2], (turn, asked)
        found = [await table.many(["a", "b", "g/a", "g/b", "h", "A", "a/b", "g"]) for table in stores]
        assert found[0] == found[1] == found[2], turn
        found = [await table.search("word") for table in stores]
        assert found[0] == found[1] == found[2], turn
        clock.advance(random.choice([0.0, 0.0, 2.0]))


# -- what cannot be read


BROKEN = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-9],
    "half": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data.replace(b"dark", b"bark"),
    "zeros": lambda data: b"\0" * len(data),
    "foreign": lambda data: b'{"theme": "dark"}',
    "text": lambda data: b"dark",
    "another": lambda data: sealed(data.replace(b"theme", b"teme!").rpartition(b',\n"crc"')[0]),
    "longer": lambda data: data + b"\n",
    "no document": lambda data: sealed(b'{"v": 1, "key": "theme"'),
    "version 0": lambda data: sealed(data.replace(b'{"v": 1', b'{"v": 0').rpartition(b',\n"crc"')[0]),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_what_cannot_be_read_is_named_and_left_as_it_is(root: Path, how: str) -> None:
    await refused(root, BROKEN[how], StorageCorrupt)


async def test_what_a_later_version_wrote_is_named_and_left_as_it_is(root: Path) -> None:
    await refused(root, lambda data: data.replace(b'{"v": 1', b'{"v": 2'), StorageTooNew)
    await refused(root / "another", lambda data: b'{"v": 17, "format": "other"}', StorageTooNew)


async def refused(root: Path, broken: Any, error: type[StorageError]) -> None:
    store = Store(root)
    await store.put("theme", '"dark"', rank=0.0)
    await store.put("fine")
    path = memory(root) / "000000~theme.json"
    path.write_bytes(data := broken(path.read_bytes()))
    table = store.table
    for again in (store, Store(root)):
        assert await again.texts("fine") == ['"x"']
        for look in (
            lambda: table.get("theme"), lambda: table.find(), lambda: table.search("dark"),
            lambda again=again: again.put("theme", '"light"'), lambda: table.write(table.add(Entry("theme", "1"))),
            lambda: table.write(table.put(Entry("new", "1")), table.put(Entry("theme", "1"), 0)),
            lambda: table.write(table.touch("theme", 5.0)), lambda: table.write(table.delete("theme")),
            lambda: table.write(table.clear()), lambda: table.change("theme", lambda there: Entry("theme", "2")),
        ):  # fmt: skip
            with pytest.raises(error, match=r"~theme\.json"):
                await look()
    assert path.read_bytes() == data
    assert await store.texts("new") == []
    path.unlink()  # what the message asks for
    assert await store.texts("theme", "fine") == ['"x"']


@pytest.mark.parametrize(
    "name", ["theme.json", "000001~theme (1).json", "copy of 000000~theme.json", "000000~Theme.json"]
)
async def test_a_file_that_is_none_of_ours_is_named(root: Path, name: str) -> None:
    store = Store(root)
    await store.put("theme", rank=0.0)
    shutil.copy(memory(root) / "000000~theme.json", memory(root) / name)
    with pytest.raises(StorageCorrupt, match="is not a document"):
        await Store(root).table.find()


async def test_one_document_twice_is_named(root: Path) -> None:
    store = Store(root)
    await store.put("theme", rank=0.0)
    shutil.copy(memory(root) / "000000~theme.json", memory(root) / "000007~theme.json")
    with pytest.raises(StorageCorrupt, match="hold the same document"):
        await Store(root).table.find()
    store, before = Store(root), files(root)
    answers = await asyncio.gather(*(store.put(key) for key in ("theme", "theme", "new")), return_exceptions=True)
    assert [type(each) for each in answers] == [StorageCorrupt] * 3
    assert files(root) == before


async def test_what_people_leave_there_does_no_harm(root: Path) -> None:
    store = Store(root)
    await store.put("theme", rank=0.0)
    for name in (".DS_Store", "README", "000000~theme.json~", ".000000~theme.json.swp"):
        (memory(root) / name).write_text("x")
    assert [each.key for each in await Store(root).table.find()] == ["theme"]


async def test_what_people_take_away_is_gone(root: Path) -> None:
    store = Store(root)
    for key in ("a", "b", "c"):
        await store.put(key, rank=0.0)
    (memory(root) / "000000~a.json").unlink()
    assert await store.texts("a", "b") == ['"x"']
    (memory(root) / "000000~b.json").unlink()
    await store.put("b", "2")
    assert await store.texts("a", "b") == ["2"]
    (memory(root) / "000000~c.json").unlink()
    assert await store.table.write(store.table.delete("c")) == [False]


# -- links, and places that cannot be used


@pytest.mark.parametrize("what", ["file", "group", "kind", "space", "documents", "fence", "lock"])
async def test_a_link_is_not_followed_out_of_the_directory(root: Path, tmp_path: Path, what: str) -> None:
    store = Store(root)
    await store.put("a/1", group="a")
    await store.documents.commit(None, [Op(INSTALL, ("run", "1"))])
    inside = {
        "file": memory(root) / "a" / "000001@1.json", "group": memory(root) / "a", "kind": memory(root),
        "space": memory(root).parent, "documents": root / "documents", "fence": root / "fences" / "run.json",
        "lock": root / "lock",
    }[what]  # fmt: skip
    outside = tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    before = snapshot(outside)
    for again in (store, Store(root)):
        with pytest.raises(StorageError, match=r"link|no directory"):
            await again.documents.commit(Guard("run", "1"), [again.table.put(Entry("a/1", "2", "a"))])
        if what != "fence":
            with pytest.raises(StorageError, match=r"link|no directory"):
                await again.table.get("a/1")
    assert snapshot(outside) == before


def snapshot(path: Path) -> dict[str, bytes]:
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    return {str(each): each.read_bytes() for each in found if each.is_file()}


async def test_a_pipe_is_not_waited_for(root: Path) -> None:
    store = Store(root)
    await store.put("a")
    os.mkfifo(memory(root) / "000002~pipe.json")
    os.mkdir(memory(root) / "000003~folder.json")
    for key in ("pipe", "folder"):
        with pytest.raises(StorageCorrupt, match="must be a regular file"):
            await Store(root).table.get(key)


async def test_a_root_that_is_a_file(root: Path) -> None:
    root.write_text("x")
    for again in (root, root / "below"):
        with pytest.raises(StorageError, match=r"must be a directory|not a directory"):
            await Store(again).put("a")
        with pytest.raises(StorageError, match=r"must be a directory|not a directory"):
            await Store(again).table.find()
    assert root.read_text() == "x"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no place that nobody may write to")
async def test_a_place_that_may_not_be_written(root: Path) -> None:
    with pytest.raises(StorageError):
        await Store(Path("/proc/self/store")).put("a")


async def test_a_directory_that_is_removed_is_not_taken_for_an_empty_one(root: Path) -> None:
    store = Store(root)
    await store.put("a")
    shutil.rmtree(root)
    for _ in range(2):
        with pytest.raises(StorageError, match="was removed while it was in use"):
            await store.texts("a")
        with pytest.raises(StorageError, match="was removed while it was in use"):
            await store.put("b")
    assert not root.exists()
    assert await Store(root).texts("a") == []


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_path(path: str) -> None:
    with pytest.raises(InvalidArgument):
        FileDocuments(path)


async def test_closed(root: Path) -> None:
    store = Store(root)
    await store.put("a")
    await store.documents.close()
    await store.documents.close()
    with pytest.raises(StorageClosed):
        await store.put("a")
    with pytest.raises(StorageClosed):
        await store.texts("a")


# -- commits that were interrupted


async def interrupted(root: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> bool:
    """A commit of four changes whose process dies before its n-th rename or removal; False: it has less of them."""
    store = Store(root)
    await store.table.write(*(store.table.put(Entry(key, "1", rank=0.0)) for key in ("a", "b", "c")))
    left = at

    def alive() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(5, "the process is gone")

    def replace(source: str, target: str) -> None:
        alive()
        os.rename(source, target)

    def unlink(path: str) -> None:
        alive()
        os.remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(os, "unlink", unlink)
        table = store.table
        ops = [
            table.put(Entry("a", "2")),
            table.put(Entry("b", "2", rank=5.0)),
            table.delete("c"),
            table.add(Entry("d", "2")),
        ]
        try:
            await table.write(*ops)
        except StorageError:
            return True
        return False


NEW = [("a", "2", 0.0), ("b", "2", 5.0), ("d", "2", 6.0)]
OLD = [(key, "1", 0.0) for key in ("a", "b", "c")]


async def test_a_commit_is_whole_wherever_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[str] = []
    for at in range(30):
        for reads_first in (True, False):
            root = tmp_path / f"{at}{reads_first}"
            if not await interrupted(root, monkeypatch, at):
                assert len(outcomes) > 12
                assert set(outcomes) == {"old", "new"}
                return
            store = Store(root)
            if not reads_first:
                await store.put("other", rank=9.0)
            found = [(each.key, each.text, each.rank) for each in await store.table.find() if each.key != "other"]
            assert found in (OLD, NEW), at
            outcomes.append("new" if found == NEW else "old")
            assert not (root / "intent").exists() or outcomes[-1] == "old" or reads_first
    pytest.fail("it never came to its end")


async def test_an_intent_that_cannot_be_read_is_named(root: Path) -> None:
    store = Store(root)
    await store.put("a")
    (root / "intent").write_text("{")
    with pytest.raises(StorageCorrupt, match="intent"):
        await store.put("b")


async def test_a_process_of_version_0_6_0_is_made_to_list_again(root: Path) -> None:
    store = Store(root)
    await store.table.write(store.table.put(Entry("a", "1")), store.table.put(Entry("b", "1")))
    for ops in ([store.table.put(Entry("a", "2"))], [store.table.delete("a"), store.table.delete("b")]):
        (memory(root) / "~stamp").write_text("01KB0000000000000000000000 .\n")  # its change token
        await store.table.write(*ops)
        assert not (memory(root) / "~stamp").exists()


# -- claims


async def test_a_fence_is_a_file_of_its_run(root: Path) -> None:
    store, other = Store(root), Store(root)
    await store.documents.commit(None, [Op(INSTALL, ("a run", "01A")), store.table.put(Entry("k", "1"))])
    await other.documents.commit(None, [Op(INSTALL, ("a run", "01B"))])
    with pytest.raises(LeaseLost):
        await store.documents.commit(None, [Op(INSTALL, ("a run", "01A")), store.table.put(Entry("k", "2"))])
    with pytest.raises(LeaseLost):
        await store.documents.commit(Guard("a run", "01A"), [store.table.put(Entry("k", "2"))])
    assert await store.texts("k") == ["1"]
    fence = root / "fences" / "a%20run.json"
    assert json.loads(fence.read_text())["token"] == "01B"
    fence.write_text(fence.read_text().replace("01B", "01A"))
    with pytest.raises(StorageCorrupt, match="fences"):
        await store.documents.commit(None, [Op(INSTALL, ("a run", "01C"))])
    fence.unlink()
    await store.documents.commit(None, [Op(FORGET, ("a run",))])


# -- others at the same time


async def test_who_holds_the_lock_keeps_others_waiting(root: Path) -> None:
    class Hasty(FileDocuments):
        patience = 0.3

    await Store(root).put("a")
    for reads_first in (True, False):
        documents = Hasty(root)
        table = Collection(documents, "project", "memory")
        with locked(str(root / "lock")):
            if reads_first:
                with pytest.raises(StorageBusy):
                    await table.get("a")
            with pytest.raises(StorageBusy):
                await table.write(table.put(Entry("a", "late")))
            with pytest.raises(StorageBusy):
                await table.get("a")
        await table.write(table.put(Entry("b", "after")))
        found = await table.many(["a", "b"])
        assert [each.text for each in found] == ['"x"', "after"], "what was given up is not written later"


async def test_readers_share_the_lock(root: Path) -> None:
    class Hasty(FileDocuments):
        patience = 0.3

    await Store(root).put("a")
    table = Collection(Hasty(root), "project", "memory")
    with locked(str(root / "lock"), shared=True):
        assert await table.get("a")
        with pytest.raises(StorageBusy):
            await table.write(table.put(Entry("a", "late")))
    assert await Store(root).texts("a") == ['"x"']


async def test_a_cancelled_read_is_not_waited_for(root: Path) -> None:
    store = Store(root)
    await store.put("a")
    with locked(str(root / "lock")):
        reading = asyncio.ensure_future(store.texts("a"))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert await store.texts("a") == ['"x"']


async def test_a_change_in_the_same_instant_is_seen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes of a directory that are given one modification time."""
    store, other = Store(root), Store(root)
    await store.put("a")
    assert [each.key for each in await other.table.find()] == ["a"]
    before = memory(root).stat()
    await store.put("b")
    os.utime(memory(root), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [each.key for each in await other.table.find()] == ["a", "b"]


async def test_a_directory_that_did_not_change_is_not_listed_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(root)
    for group in ("g", "h"):
        await store.put(f"{group}/1", group=group)
        os.utime(memory(root) / group, (1e9, 1e9))
    os.utime(memory(root), (1e9, 1e9))
    assert len(await store.table.find()) == 2
    disk, listed = store.documents._database.disk, list[str]()
    names = disk.names

    def noted(where: str) -> list[str]:
        listed.append(where.rpartition("/")[2])
        return names(where)

    monkeypatch.setattr(disk, "names", noted)
    assert len(await store.table.find()) == 2
    assert "g" not in listed
    await Store(root).put("h/2", group="h")
    assert [each.key for each in await store.table.find("h")] == ["h/1", "h/2"]
    assert len(await store.table.find()) == 3
    assert "h" in listed
    assert "g" not in listed


async def test_what_fails_among_others_fails_alone(root: Path) -> None:
    store = Store(root)
    await store.put("bad")
    (memory(root) / "000001~bad.json").write_text("")
    await store.documents.commit(None, [Op(INSTALL, ("run", "2"))])
    table = store.table
    answers = await asyncio.gather(
        *(store.put(f"k{n}") for n in range(10)), store.put("bad"), table.write(table.put(Entry("k1", "1"), 9)),
        store.documents.commit(Guard("run", "1"), [table.put(Entry("late", "1"))]), store.put("x" * 10, "y" * 10),
        table.write(table.put(Entry("first", "1"), 0)), table.write(table.put(Entry("first", "2"), 0)),
        *(store.put(f"k{n}", "new") for n in range(10)), return_exceptions=True,
    )  # fmt: skip
    errors = [type(each) for each in answers if each is not None and not isinstance(each, list)]
    assert errors == [StorageCorrupt, VersionConflict, LeaseLost, VersionConflict]
    assert answers[14] == [(1, 13.0)]
    found = await table.many([*(f"k{n}" for n in range(10)), "first", "late"])
    assert [each.text for each in found] == ["new"] * 10 + ["1"]
    assert [(each.version, each.rank) for each in found[:10]] == [(2, n + 2.0) for n in range(10)]


async def test_a_cancelled_commit_is_whole(root: Path) -> None:
    store = Store(root)
    task = asyncio.ensure_future(store.table.write(*(store.table.put(Entry(f"{n}", "1")) for n in range(20))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await store.table.find()) == 20


async def test_an_append_reads_no_other_file_of_its_group(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(root)
    await store.table.write(*(store.table.add(Entry(f"g/{n}", "1", "g")) for n in range(300)))
    again = Store(root)
    assert len(await again.table.find("g", low=300.0)) == 1
    read: list[str] = []
    disk = again.documents._database.disk
    whole = disk.read

    def noted(where: str) -> bytes:
        read.append(where)
        return whole(where)

    monkeypatch.setattr(disk, "read", noted)
    await again.table.write(again.table.add(Entry("g/new", "1", "g")))
    assert len(await again.table.find("g", descending=True, limit=3)) == 3
    assert len([each for each in read if each.endswith(".json")]) == 3
    assert [each.key for each in await again.table.find("g", prefix="g/29", limit=2)] == ["g/29", "g/290"]
    assert len([each for each in read if each.endswith(".json")]) == 5


async def test_what_expired_is_removed_a_little_at_a_time(root: Path) -> None:
    clock = VirtualClock()
    store, other = Store(root, clock=clock), Store(root, clock=clock)
    await store.table.write(*(store.table.put(Entry(f"k{n}", "1", expires=clock.wall() + 5)) for n in range(10)))
    await store.put("stays")
    clock.advance(6)
    await other.table.write(other.table.put(Entry("k9", "again")))  # which this one has not seen to expire
    assert [each.key for each in await store.table.find()] == ["stays", "k9"]
    for left in (7, 3, 2, 2):
        await store.put("stays")
        assert len(files(root)) == left
    assert await store.texts("k9") == ["again"]
    await store.put("broken", expires=clock.wall() + 1)
    clock.advance(2)
    assert await store.texts("broken") == []
    (memory(root) / "000013~broken.json").write_text("")
    await store.put("next")
    (memory(root) / "000013~broken.json").unlink()
    assert (await store.table.find())[-1].rank == 14.0


# -- where stores are


async def test_the_home_of_the_default_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    home, named = FileMemoryStore().home, FileMemoryStore(tmp_path / "named").home
    monkeypatch.setenv("HOME", str(tmp_path / "another"))
    monkeypatch.chdir(tmp_path)
    for each, where in ((home, "here"), (named, "named")):
        for scope in Scope:
            table = each.table(scope, "memory")
            await table.write(table.put(Entry("k", f'"{where} {scope.value}"')))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "named", "user"]
    assert (tmp_path / "user/.agent_runtime/v1/documents/global/memory/000001~k.json").exists()
    assert (tmp_path / "named/.agent_runtime/v1/documents/project/memory/000001~k.json").exists()
    found = [await each.table(Scope.GLOBAL, "memory").get("k") for each in (home, named)]
    assert [each and each.text for each in found] == ['"named global"'] * 2
    assert await FileMemoryStore().home.table(Scope.SESSION, "memory").get("k") is None
    await home.close()
    await named.close()


async def test_a_layout_of_later_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".agent_runtime" / "v2").mkdir(parents=True)
    with pytest.raises(StorageTooNew, match="v2"):
        await FileMemoryStore(tmp_path).home.table(Scope.PROJECT, "memory").get("k")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "nowhere")
    with pytest.raises(InvalidArgument, match="HOME"):
        FileMemoryStore()


def test_a_directory_that_is_made_while_it_is_looked_for_was_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, look = DurableDirectory(str(tmp_path / "store")), os.stat

    def slow(path: Any, **more: Any) -> os.stat_result:
        try:
            return look(path, **more)
        except FileNotFoundError:
            disk._existed = True  # by another thread, which came right after it was made
            raise

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", slow)
        assert disk.exists() is False
    with pytest.raises(StorageError, match="removed"):
        disk.exists()
