"""How documents lie on a Redis server: what they cost, what is left of them, and what others may do to them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_runtime_core.errors import StorageCorrupt, StorageError
from agent_runtime_core.persistence.documents.base import Collection, Document, Entry
from agent_runtime_core.persistence.documents.redis import RedisDocuments
from agent_runtime_core.testing import VirtualClock
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.redis


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Collection]:
    documents = RedisDocuments(url, **options)
    try:
        yield Collection(documents, "project", "thing")
    finally:
        await documents.close()


def left(server: RedisServer, url: str) -> set[str]:
    """The keys of this test, without their prefix."""
    prefix = f"{{{url.rpartition('=')[2]}}}:"
    return {key.decode().removeprefix(prefix) for key in server.ask("KEYS", f"{prefix}*")}


def calls(server: RedisServer) -> dict[str, int]:
    """How often each command was carried out."""
    stats = server.ask("INFO", "commandstats").decode().splitlines()
    lines = (line.partition(":calls=") for line in stats)
    return {name: int(rest.partition(",")[0]) for name, colon, rest in lines if colon and "info" not in name}


async def test_an_append_costs_the_same_at_any_length(redis_server: RedisServer, redis_url: str) -> None:
    async with opened(redis_url) as table:
        entries = (Entry(f"{n:06}", "text", "g", words="some words of it") for n in itertools.count())

        async def cost() -> dict[str, int]:
            before = calls(redis_server)
            await table.write(table.add(next(entries)))
            return {
                name: count - before.get(name, 0)
                for name, count in calls(redis_server).items()
                if count != before.get(name)
            }

        await table.write(*(table.add(next(entries)) for _ in range(9)))
        few = await cost()
        for _ in range(10):
            await table.write(*(table.add(next(entries)) for _ in range(999)))
        # Each of these is of the order of log n at most; none answers with more than one element.
        assert await cost() == few
        assert sum(few.values()) < 25
        assert len(await table.find("g")) == 10_001


async def test_no_answer_is_large_but_for_one_document(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(redis_url) as table:
        largest = 0
        tell = table.documents.commits._pipeline._read_answer  # type: ignore[attr-defined]

        def measured(call: Any, answer: bytes) -> None:
            nonlocal largest
            largest = max(largest, len(answer))
            tell(call, answer)

        monkeypatch.setattr(table.documents.commits._pipeline, "_read_answer", measured)  # type: ignore[attr-defined]
        keys = [f"{n:06}" for n in range(10_000)]
        for start in range(0, 10_000, 500):
            entries = (Entry(key, "t" * 900, "g", words=f"all {key}") for key in keys[start : start + 500])
            await table.write(*(table.add(entry) for entry in entries))
        largest = 0
        assert [each.key for each in await table.find("g", descending=True)] == keys[::-1]
        assert [each.key for each in await table.many(keys)] == keys
        assert [each.key for each in await table.search("all 009999")] == ["009999"]
        assert 100_000 < largest < 300_000
        await table.write(
            table.put(Entry("large", "x" * 1_000_000, "h")), table.put(Entry("larger", "y" * 1_000_000, "h"))
        )
        assert [len(each.text) for each in await table.find("h")] == [1_000_000] * 2
        assert largest < 1_300_000


@pytest.mark.parametrize("descending", [False, True])
async def test_others_may_write_between_two_answers_of_one_find(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, descending: bool
) -> None:
    async with opened(redis_url) as table:
        await table.write(*(table.add(Entry(f"k{n:04}", "t" * 400)) for n in range(2_000)))
        engine: Any = table.documents.commits
        ask, asked = engine.ask, itertools.count(1)

        async def meanwhile(what: str, *args: Any) -> Any:
            answer = await ask(what, *args)
            n = next(asked)
            await table.write(
                table.touch(f"k{n:04}", 5_000 + n),
                table.delete(f"k{1_000 + n}"),
                table.add(Entry(f"new{n}", "")),
                *([table.delete(answer[0][1])] if answer[0] else []),  # where it is to go on from
            )
            return answer

        monkeypatch.setattr(engine, "ask", meanwhile)
        found = [each.key for each in await table.find(descending=descending)]
        monkeypatch.undo()
        assert next(asked) > 4
        assert len(set(found)) == len(found)
        stayed = {key for key in (each.key for each in await table.find()) if key[0] == "k" and key > "k0020"}
        assert stayed <= set(found)


async def test_the_expired_give_their_memory_back(redis_server: RedisServer, redis_url: str) -> None:
    clock = VirtualClock()
    async with opened(redis_url, clock=clock) as table:
        for n in range(3):
            session = Collection(table.documents, f"session:{n}", "thing", 60.0 + n)
            await session.write(*(session.put(Entry(f"k{i}", "t", "g", words="words")) for i in range(20)))
        other = Collection(table.documents, "session:9", "thing", 500.0)
        await other.write(other.put(Entry("k", "t")))
        clock.advance(100)
        for n in range(12):
            await table.write(table.put(Entry("kept", str(n))))
        mine = {f"{name}:7:projectthing" for name in ("doc", "docorder")} | {"dockinds:project"}
        his = {f"{name}:9:session:9thing" for name in ("doc", "docorder", "docends")} | {"dockinds:session:9"}
        assert left(redis_server, redis_url) == {"docdue"} | mine | his
        clock.advance(500)
        await table.write(table.put(Entry("kept", "", "g")))
        assert left(redis_server, redis_url) == mine
        await table.write(table.delete("kept"))
        assert left(redis_server, redis_url) == set()


async def test_a_dropped_space_and_a_cleared_kind_leave_nothing(redis_server: RedisServer, redis_url: str) -> None:
    async with opened(redis_url) as table:
        tables = [Collection(table.documents, "session:1", kind, 60.0) for kind in "abc"]
        for each in tables:
            await each.write(*(each.put(Entry(f"k{n}", "t", f"g{n}", words="words")) for n in range(10)))
        await tables[0].write(tables[0].clear())
        assert not {key for key in left(redis_server, redis_url) if key.endswith("session:1a")}
        for n in range(10):
            await tables[1].write(tables[1].clear(f"g{n}"))
        assert not {key for key in left(redis_server, redis_url) if key.endswith("session:1b")}
        await table.documents.drop("session:1")
        assert left(redis_server, redis_url) == set()


async def test_a_key_of_somebody_else_is_told_and_nothing_written(redis_server: RedisServer, redis_url: str) -> None:
    prefix = f"{{{redis_url.rpartition('=')[2]}}}"
    redis_server.ask("SET", f"{prefix}:docorder:7:projectthing", "mine")
    async with opened(redis_url) as table:
        with pytest.raises(StorageError, match="WRONGTYPE"):
            await table.write(table.put(Entry("a", "A", rank=1)))
        assert left(redis_server, redis_url) == {"docorder:7:projectthing"}


async def test_a_document_that_cannot_be_read_is_told_and_left(redis_server: RedisServer, redis_url: str) -> None:
    place = f"{{{redis_url.rpartition('=')[2]}}}:doc:7:projectthing"
    async with opened(redis_url) as table:
        await table.write(table.put(Entry("a", "A", "g")), table.put(Entry("sound", "S", "h")))
        redis_server.ask("HSET", place, "a", "something else")
        for ask in (lambda: table.get("a"), lambda: table.find("g"), lambda: table.find()):
            with pytest.raises(StorageCorrupt, match="thing 'a'"):
                await ask()
        for op in (table.put(Entry("a", "new")), table.add(Entry("a", "new")), table.touch("a", 9), table.delete("a")):
            with pytest.raises(StorageCorrupt):
                await table.write(op)
        assert redis_server.ask("HGET", place, "a") == b"something else"
        assert await table.find("h") == [Document("sound", "S", 1, 1.0, "h")]
        redis_server.ask("HDEL", place, "a")
        with pytest.raises(StorageCorrupt, match="thing 'a'"):
            await table.find("g")
        await table.write(table.clear("g"))
        assert await table.find() == [Document("sound", "S", 1, 1.0, "h")]


async def test_keys_with_a_nul_are_told_apart(redis_url: str) -> None:
    keys = ["", "\0", "a", "a\0", "a\0b", "a\0c", "b"]
    async with opened(redis_url) as table:
        await table.write(*(table.put(Entry(key, key, key, 0)) for key in keys))
        assert [each.key for each in await table.find()] == sorted(keys)
        assert [each.key for each in await table.find(prefix="a\0")] == ["a\0", "a\0b", "a\0c"]
        assert [each.text for each in await table.find("a\0")] == ["a\0"]


async def test_one_that_expired_and_cannot_be_read_stands_in_the_way_of_no_other(
    redis_server: RedisServer, redis_url: str
) -> None:
    clock = VirtualClock()
    async with opened(redis_url, clock=clock) as table:
        await table.write(*(table.put(Entry(key, "text", expires=clock.wall() + 1)) for key in ("damaged", "other")))
        tag = f"{{{redis_url.rpartition('=')[2]}}}"
        redis_server.ask("HSET", f"{tag}:doc:7:projectthing", "damaged", "half of")
        clock.advance(2)
        elsewhere = Collection(table.documents, "project", "elsewhere")
        await elsewhere.write(elsewhere.put(Entry("a", "text")))
        assert redis_server.ask("HKEYS", f"{tag}:doc:7:projectthing") == [b"damaged"], "the other one is swept away"
        with pytest.raises(StorageCorrupt, match="damaged"):
            await table.get("damaged")
        with pytest.raises(StorageCorrupt):
            await table.write(table.put(Entry("damaged", "text")))
        await elsewhere.write(elsewhere.put(Entry("b", "text")))
