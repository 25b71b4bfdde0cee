"""Stored documents that are encrypted again with another key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.payloads import encode_contents
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec, PayloadCodec
from agent_runtime_core.errors import StorageCorrupt
from agent_runtime_core.persistence.documents.base import Collection, DocumentStore, Entry, UndecodedCollection
from agent_runtime_core.persistence.documents.memory import MemoryDocuments
from agent_runtime_core.persistence.manager import open_document_store
from agent_runtime_core.runner import reencrypt, reencryption
from tests.support.backends import POSTGRES
from tests.support.reencryption import BOTH, CANARY, DIGEST_KEY, KEYS, NEW, OLD

KINDS = ["memory", "sqlite", "files", pytest.param("redis", marks=pytest.mark.redis), POSTGRES]
SEARCHABLE = AESGCMCodec({"new": KEYS["new"]}, "new", digest_key=DIGEST_KEY, searchable=True)
Opened = Callable[[PayloadCodec | None], Any]


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    yield
    reset_config()


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Open the same document store with a codec."""
    engine = MemoryEngine()

    def store() -> DocumentStore:
        match request.param:
            case "memory":
                return MemoryDocuments(engine=engine)
            case "redis" | "postgres" as server:
                return open_document_store(request.getfixturevalue(f"{server}_url"))
            case "files":
                return open_document_store(f"files:///{tmp_path}")
        return open_document_store(str(tmp_path / "documents.db"))

    @asynccontextmanager
    async def open_with(codec: PayloadCodec | None) -> AsyncIterator[DocumentStore]:
        documents = store()
        if codec is not None:
            encode_contents([documents], codec)
        try:
            yield documents
        finally:
            await documents.close()

    return open_with


async def again(documents: DocumentStore, batch: int = 3) -> Any:
    return await reencryption._reencrypt(None, [documents], batch)


PLACES = [("project:a/b", "note"), ("session:1", "note"), ("global", "Other kind")]


async def fill(documents: DocumentStore, count: int = 8) -> None:
    for space, kind in PLACES:
        collection = Collection(documents, space, kind, ttl=1000.0 if space.startswith("session") else None)
        for n in range(count):
            await collection.write(collection.put(Entry(f"k{n}", f"{CANARY} {n}", f"g{n % 2}", words=f"word {n}")))


async def test_documents_keep_all_but_their_text(opened: Opened) -> None:
    async with opened(OLD) as documents:
        await fill(documents)
        found = {place: await Collection(documents, *place).find() for place in PLACES}
    async with opened(BOTH) as documents:
        done = await again(documents)
        assert (done.texts, done.keys, done.unreadable) == (24, {"old": 0, "new": 24}, {})
        assert (await again(documents)).texts == 0
    async with opened(NEW) as documents:
        assert {place: await Collection(documents, *place).find() for place in PLACES} == found
    async with opened(None) as documents:
        stored = await UndecodedCollection(documents, *PLACES[0]).find()
        assert {each.text[:9] for each in stored} == {"arc1.new."}


async def test_the_words_of_plain_documents_are_deleted(opened: Opened) -> None:
    async with opened(None) as documents:
        await fill(documents)
        assert len(await Collection(documents, *PLACES[0]).search("word")) == 8
    async with opened(NEW) as documents:
        assert (await again(documents)).texts == 24
        assert await documents.read("words", *PLACES[0], documents.clock.wall()) == []


async def test_words_stay_if_the_codec_allows_them(opened: Opened) -> None:
    async with opened(None) as documents:
        await fill(documents)
    async with opened(SEARCHABLE) as documents:
        await again(documents)
        assert [each.key for each in await Collection(documents, *PLACES[0]).search("word 3")] == ["k3"]
    async with opened(NEW) as documents:
        done = await again(documents)
        assert (done.texts, done.keys) == (0, {"new": 24})
        assert await documents.read("words", *PLACES[0], documents.clock.wall()) == [], "also of encrypted documents"


async def test_the_operation_replaces_only_the_text_that_was_read(opened: Opened) -> None:
    async with opened(None) as documents:
        notes = Collection(documents, "project", "note", ttl=1000.0)
        await notes.write(notes.put(Entry("k", "one", "g", rank=5.0, words="word")))
        [before] = await notes.find()
        now = documents.clock.wall()

        def op(key: str, old: str, new: str, at: float = now) -> Op:
            return Op("documents.rewrite", ("project", "note", key, old, new, True, at))

        ops = [op("k", "other", "two"), op("none", "one", "two"), op("k", "one", "two", now + 2000)]
        assert await documents.commits.commit(None, ops) == [False, False, False]
        assert await notes.find() == [before]
        await notes.write(notes.touch("k", 7.0))
        [touched] = await notes.find()
        assert await documents.commits.commit(None, [op("k", "one", "two"), op("k", "two", "three")]) == [True, True]
        assert await notes.find() == [touched._replace(text="three")], "what other writers have changed stays"
        assert [each.text for each in await notes.search("word")] == ["three"]


async def test_a_document_that_no_key_reads_is_reported_and_left(opened: Opened) -> None:
    lost = AESGCMCodec({"lost": bytes(32)}, "lost")
    async with opened(lost) as documents:
        await fill(documents, 1)
    async with opened(BOTH) as documents:
        done = await again(documents)
        assert (done.texts, done.keys["lost"]) == (0, 3)
        assert sorted(done.unreadable)[-1] == "document session:1/note/k0"
    async with opened(lost) as documents:
        assert (await Collection(documents, *PLACES[0]).find())[0].text == f"{CANARY} 0"


async def test_a_directory_is_named_by_its_url(tmp_path: Path) -> None:
    configure(payload_codec=OLD)
    documents = open_document_store(f"files:///{tmp_path}")
    encode_contents([documents], OLD)
    await fill(documents, 1)
    await documents.close()
    configure(payload_codec=BOTH)
    assert (await reencrypt(f"files:///{tmp_path}")).keys == {"old": 0, "new": 3}
    assert not [each for each in tmp_path.rglob("*.json") if b"arc1.old." in each.read_bytes()]


async def test_a_space_whose_long_name_files_lack_is_reported(tmp_path: Path) -> None:
    documents = open_document_store(f"files:///{tmp_path}")
    encode_contents([documents], OLD)
    for space in (f"project:{'x' * 200}", "project"):
        notes = Collection(documents, space, "note")
        await notes.write(notes.put(Entry("k", CANARY)))
    await documents.close()
    [name] = tmp_path.rglob("space.json")
    name.rename(tmp_path / "space.json")  # as an earlier release left the directory
    for is_named in (False, True):
        documents = open_document_store(f"files:///{tmp_path}")
        encode_contents([documents], BOTH)
        done = await again(documents)
        await documents.close()
        assert done.keys == {"old": 0, "new": 1 + is_named}
        reported = {f"documents in {tmp_path}": "an earlier release has not stored the long name of a space"}
        assert done.not_supported == ({} if is_named else reported)
        if not is_named:
            (tmp_path / "space.json").rename(name)


async def test_a_damaged_document_is_reported(tmp_path: Path) -> None:
    documents = open_document_store(f"files:///{tmp_path}")
    encode_contents([documents], OLD)
    await fill(documents, 1)
    await documents.close()
    [path] = [each for each in tmp_path.rglob("*.json") if "session" in str(each)]
    path.write_bytes(path.read_bytes()[:-20])
    documents = open_document_store(f"files:///{tmp_path}")
    encode_contents([documents], BOTH)
    done = await again(documents)
    with pytest.raises(StorageCorrupt):
        await Collection(documents, "session:1", "note").find()
    await documents.close()
    assert (done.keys, [*done.unreadable]) == ({"old": 0, "new": 2}, ["documents session:1/note"])
