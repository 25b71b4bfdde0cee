"""How documents lie in a SQLite file: damage, indexes, expiry, and other programs on the same file."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import StorageCorrupt
from agent_runtime_core.persistence.documents import sqlite, sqlite_fts
from agent_runtime_core.persistence.documents.base import Collection, Document, Entry
from agent_runtime_core.persistence.documents.sqlite import SQLiteDocuments
from agent_runtime_core.testing import VirtualClock


@contextlib.asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Collection]:
    documents = SQLiteDocuments(path, durability="normal", **options)
    try:
        yield Collection(documents, "project", "thing")
    finally:
        await documents.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "documents.db"


def asked(path: Path, sql: str, *args: Any) -> list[Any]:
    conn = sqlite3.connect(path, isolation_level=None)
    try:
        return conn.execute(sql, args).fetchall()
    finally:
        conn.close()


# -- damage


@pytest.mark.parametrize(
    "damage",
    [
        "text = 'AB'", "text = x'41'", "key = 'b'", "version = 7", "version = 'x'", "rank = 1.5", "rank = 'x'",
        "grp = 'other'", "expires = 1e12", "crc = crc + 1",
    ],
)  # fmt: skip
async def test_a_document_that_does_not_match_its_checksum_is_told_and_left(path: Path, damage: str) -> None:
    async with opened(path) as table:
        await table.write(table.put(Entry("a", "A", "g")), table.put(Entry("sound", "S", "h")))
    asked(path, f"UPDATE arc_documents SET {damage} WHERE key = 'a'")
    [stored] = asked(path, "SELECT * FROM arc_documents WHERE text <> 'S'")
    key = stored[2]
    async with opened(path) as table:
        for ask in (
            lambda: table.get(key),
            lambda: table.find(),
            lambda: table.find(prefix=key),
            lambda: table.write(table.put(Entry(key, "new"))),
            lambda: table.write(table.add(Entry(key, "new"))),
            lambda: table.write(table.touch(key, 9)),
        ):
            with pytest.raises(StorageCorrupt, match=f"'{key}'"):
                await ask()
        assert asked(path, "SELECT * FROM arc_documents WHERE key = ?", key) == [stored]
        assert await table.find("h") == [Document("sound", "S", 1, 1.0, "h")]
        assert await table.write(table.delete(key), table.put(Entry(key, "new"), 0)) == [True, (1, 1.0)]
        assert (await table.get(key)) == Document(key, "new", 1, 1.0)


# -- cost


async def _steps(table: Collection, writing: Callable[[], Any]) -> int:
    """How many steps SQLite's machine takes for a write."""
    counted = itertools.count()
    conn = table.documents.commits.file.writing  # type: ignore[attr-defined]
    conn.set_progress_handler(lambda: next(counted) < 0, 1)
    try:
        await table.write(writing())
    finally:
        conn.set_progress_handler(None, 0)
    return next(counted)


@pytest.mark.parametrize("words", ["", "some words of it"])
async def test_an_append_costs_the_same_at_any_length(path: Path, words: str) -> None:
    async with opened(path, clock=VirtualClock()) as table:
        entries = (Entry(f"{n:06}", "text", "g", words=words) for n in itertools.count())
        await table.write(*(table.add(next(entries)) for _ in range(9)))
        few = await _steps(table, lambda: table.add(next(entries)))
        for _ in range(10):
            await table.write(*(table.add(next(entries)) for _ in range(999)))
        assert len(await table.find("g")) == 10_000
        many = await _steps(table, lambda: table.add(next(entries)))
        assert 10 < few < 500
        assert many <= 1.5 * few


@pytest.mark.parametrize("asked_for", list(sqlite.FIND))
async def test_what_is_found_by_rank_is_not_sorted_again(path: Path, asked_for: tuple[str, bool]) -> None:
    async with opened(path) as table:
        await table.write(table.put(Entry("a", "")))
    values = dict.fromkeys(("kind", "group", "low", "high", "now", "prefix", "end", "limit", "offset"), 1)
    conn = sqlite3.connect(path)
    plan = " ".join(row[3] for row in conn.execute("EXPLAIN QUERY PLAN " + sqlite.FIND[asked_for], values))
    conn.close()
    assert "SEARCH d USING INDEX arc_documents_" in plan
    assert ("TEMP B-TREE" in plan) == (asked_for[0] == "key")


async def test_a_long_text_is_the_threads_to_write(path: Path) -> None:
    async with opened(path) as table:
        writer = table.documents.commits.writer  # type: ignore[attr-defined]
        await table.write(table.put(Entry("short", "x" * sqlite.LONG)))
        on_loop = writer._thread is None
        await table.write(table.put(Entry("long", "x" * (sqlite.LONG + 1))))
        assert (on_loop, writer._thread is None) == (True, False)


# -- expiry


async def test_the_expired_are_swept_by_later_writes_with_all_they_had(path: Path) -> None:
    clock = VirtualClock()
    async with opened(path, clock=clock) as table:
        session = Collection(table.documents, "session:1", "thing", 60.0)
        await session.write(*(session.put(Entry(f"k{n}", "t", words="swept words")) for n in range(20)))
        await table.write(table.put(Entry("kept", "", words="kept words")))
        assert len(await session.search("swept")) == 20
        clock.advance(60)
        left = []
        for n in range(4):
            await table.write(table.put(Entry("kept", str(n), words="kept words")))
            left.append(asked(path, "SELECT count(*) FROM arc_documents")[0][0])
        assert left == [13, 5, 1, 1]
        assert asked(path, "SELECT space FROM arc_document_kinds") == [("project",)]
        assert asked(path, "SELECT words FROM arc_document_words") == [("kept words",)]
        assert asked(path, "SELECT count(*) FROM arc_document_index('swept')") == [(0,)]
        assert await session.write(session.put(Entry("k1", "anew"), 0)) == [(1, 1.0)]
        assert [document.text for document in await session.find()] == ["anew"]


# -- words


def _has_index(path: Path) -> bool:
    return bool(asked(path, "SELECT 1 FROM sqlite_master WHERE name = 'arc_document_index'"))


def _sound(path: Path) -> None:
    """The index says what the words say, or SQLite raises an error."""
    asked(path, "INSERT INTO arc_document_index (arc_document_index, rank) VALUES ('integrity-check', 1)")


async def _keys(table: Collection, words: str) -> list[str]:
    return sorted(document.key for document in await table.search(words, limit=100))


async def test_the_first_search_makes_the_index_and_writes_keep_it(path: Path) -> None:
    async with opened(path) as table:
        await table.write(*(table.put(Entry(f"k{n}", "", words=f"all n{n}")) for n in range(5)))
        assert not _has_index(path)
        assert await _keys(table, "all n3") == ["k3"]
        assert _has_index(path)
        await table.write(
            table.put(Entry("k3", "", words="other")), table.delete("k4"), table.add(Entry("k5", "", words="all"))
        )
        assert await _keys(table, "all") == ["k0", "k1", "k2", "k5"]
        _sound(path)
    async with opened(path) as table:
        assert await _keys(table, "other") == ["k3"]


async def test_a_large_index_is_made_in_parts_while_others_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_fts, "CHUNK", 30)
    chance = random.Random(3)
    async with opened(path) as table:
        await table.write(*(table.put(Entry(f"k{n:02}", "", words=f"all n{n}")) for n in range(40)))

        async def others() -> None:
            for n in range(60):
                key = f"k{chance.randrange(60):02}"
                await table.write(
                    table.delete(key) if n % 3 == 0 else table.put(Entry(key, "", words=chance.choice(["all", "none"])))
                )
                await asyncio.sleep(0)

        await asyncio.gather(others(), *(_keys(table, "all") for _ in range(3)))
        _sound(path)
        expected = asked(
            path, "SELECT key FROM arc_documents d JOIN arc_document_words w USING (id) WHERE words LIKE 'all%'"
        )
        assert await _keys(table, "all") == sorted(key for (key,) in expected)


async def test_programs_without_fts5_search_too_and_what_they_write_is_indexed_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as table:
        await table.write(*(table.put(Entry(f"k{n}", "", words=f"all n{n}")) for n in range(4)))
        assert await _keys(table, "all n1") == ["k1"]
        with monkeypatch.context() as patched:
            patched.setattr(sqlite_fts, "has_index", lambda: False)
            await table.write(
                table.put(Entry("k1", "", words="all changed")),
                table.delete("k2"),
                table.add(Entry("k4", "", words="all")),
            )
            assert await _keys(table, "all") == ["k0", "k1", "k3", "k4"]
            assert await _keys(table, "changed al") == ["k1"]
        await table.write(table.put(Entry("k3", "", words="unindexed as yet")))
        assert await _keys(table, "all") == ["k0", "k1", "k4"]
        assert await _keys(table, "n1") == []
        _sound(path)


async def test_a_file_made_without_fts5_is_indexed_by_a_program_that_has_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sqlite_fts, "has_index", lambda: False)
        async with opened(path) as table:
            await table.write(table.put(Entry("a", "", words="some words")))
            assert await _keys(table, "word") == ["a"]
    assert not _has_index(path)
    async with opened(path) as table:
        assert await _keys(table, "word") == ["a"]
        assert _has_index(path)


async def test_where_the_index_stays_incomplete_it_is_looked_through(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as table:
        await table.write(table.put(Entry("a", "", words="some words")))
        # As where a program without FTS5 writes between each two steps of this one.
        monkeypatch.setattr(sqlite_fts, "complete", lambda view: False)
        assert await _keys(table, "words some") == ["a"]


async def test_the_index_and_the_look_through_find_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    letters = "aäbÉ日本ß\u0130\u0131\u017fΣς1\u0663 \u3000.-'\"\u0301"
    texts = {f"k{n:02}": "".join(chance.choices(letters, k=chance.randrange(25))) for n in range(60)}
    async with opened(path) as table:
        await table.write(*(table.put(Entry(key, "", words=words)) for key, words in texts.items()))
        queries = ["".join(chance.choices(letters, k=chance.randrange(1, 5))) for _ in range(80)]
        indexed = [await _keys(table, query) for query in queries]
        monkeypatch.setattr(sqlite_fts, "has_index", lambda: False)
        assert indexed == [await _keys(table, query) for query in queries]
        assert sum(map(bool, indexed)) > 20


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM arc_document_index_data WHERE id = 10",
        "DELETE FROM arc_document_index_data WHERE id > 10",
        "UPDATE arc_document_index_data SET block = x'00010203040506070809' WHERE id = 10",
    ],
)
@pytest.mark.parametrize("first", ["search", "write"])
async def test_a_damaged_index_is_made_anew_by_a_search(path: Path, damage: str, first: str) -> None:
    async with opened(path) as table:
        await table.write(*(table.put(Entry(f"k{n}", "", words=f"all n{n}")) for n in range(9)))
        assert len(await _keys(table, "all")) == 9
        asked(path, damage)
        if first == "write":
            with contextlib.suppress(StorageCorrupt):
                await table.write(table.put(Entry("k1", "", words="changed")), table.delete("k2"))
        await _keys(table, "all")
        await table.write(table.put(Entry("k1", "", words="changed")), table.delete("k2"))
        assert await _keys(table, "all") == ["k0", "k3", "k4", "k5", "k6", "k7", "k8"]
        assert await _keys(table, "changed") == ["k1"]
        _sound(path)


# -- others on the file


async def test_keys_with_a_nul_are_told_apart(path: Path) -> None:
    keys = ["", "\0", "a", "a\0", "a\0b", "a\0c", "b"]
    async with opened(path) as table:
        await table.write(*(table.put(Entry(key, key, key, 0)) for key in keys))
        assert [each.key for each in await table.find()] == sorted(keys)
        assert [each.key for each in await table.find(prefix="a\0")] == ["a\0", "a\0b", "a\0c"]
        assert [each.text for each in await table.find("a\0")] == ["a\0"]


_CHANGES = """
import asyncio, sys
from agent_runtime_core.persistence.documents.base import Collection, Entry
from agent_runtime_core.persistence.documents.sqlite import SQLiteDocuments

async def main(path, name):
    documents = SQLiteDocuments(path, durability="normal")
    table = Collection(documents, "project", "thing")
    for n in range(40):
        await table.change("n", lambda there: Entry("n", str(int(there.text if there else 0) + 1)))
        await table.write(table.add(Entry(f"{name}-{n}", "", "g")))
    await documents.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_lose_no_change_of_each_other(path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", _CHANGES, str(path), f"w{n}"]) for n in range(3)]
    assert [worker.wait(50) for worker in workers] == [0, 0, 0]
    async with opened(path) as table:
        counter = await table.get("n")
        assert counter is not None
        assert (counter.text, counter.version) == ("120", 120)
        group = await table.find("g")
        assert [each.rank for each in group] == [float(n + 1) for n in range(120)]
        for n in range(3):
            assert [each.key for each in group if each.key.startswith(f"w{n}-")] == [f"w{n}-{i}" for i in range(40)]
