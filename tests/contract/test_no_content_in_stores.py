"""With a payload codec, no content of a run or a document is in what a store gets: its raw bytes are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, PersistenceConfig, PersistenceManager, RunnerConfig, configure
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.persistence import open_document_store
from agent_runtime_core.persistence.carry_over import carry_over
from agent_runtime_core.persistence.documents.base import Collection, Entry
from tests.support.canaries import Canaries, Overheard, bytes_under, run_with_contents, store_contents
from tests.support.codec import KEY
from tests.support.redis_servers import RedisServer

Raw = Callable[[], bytes]
CODECS = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])

pytest.importorskip("cryptography")

CONFIG = RunnerConfig(max_retries=1, park_after=0)


@contextmanager
def sqlite_file(folder: Path) -> Iterator[tuple[str, Raw]]:
    yield f"sqlite:///{folder / 'runs.db'}", lambda: bytes_under(folder)


@contextmanager
def redis(folder: Path) -> Iterator[tuple[str, Raw]]:
    with RedisServer() as server, Overheard(server) as overheard:
        yield server.url, overheard.raw


STORES = pytest.mark.parametrize("place", [sqlite_file, pytest.param(redis, marks=pytest.mark.redis)])


@CODECS
@STORES
async def test_a_store_of_runs_and_documents(place: Callable[..., object], encrypted: bool, tmp_path: Path) -> None:
    marked = Canaries()
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k") if encrypted else None)
    with place(tmp_path) as (url, raw):  # type: ignore[attr-defined]
        stores = PersistenceManager.open(url)
        async with AgentRunner.open(url, config=CONFIG, persistence=stores) as runner:
            await run_with_contents(runner, marked)
            await store_contents(stores, marked)
            while_open = raw()
            # Who can guess an input can recognize it by its digest, unless the digest has a key.
            digest = runner.queue.new_row(None, "speaker", {"text": marked("input")}).digest
        await stores.close()
        stored = while_open + raw()
    assert marked.found_in(stored) == (set() if encrypted else marked.made)
    assert (digest.encode() in stored) is not encrypted


@CODECS
async def test_files_of_documents(encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Canaries()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k") if encrypted else None)
    async with PersistenceManager(PersistenceConfig.of(project_dir=tmp_path / "project")) as stores:
        await store_contents(stores, marked)
        stored = bytes_under(tmp_path)
    assert marked.found_in(stored) == (set() if encrypted else marked.made)


@CODECS
async def test_a_document_store_that_was_opened_by_its_url(encrypted: bool, tmp_path: Path) -> None:
    marked = Canaries()
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k") if encrypted else None)
    documents = open_document_store(f"files:///{tmp_path}")
    things = Collection(documents, "space", "thing")
    await things.write(things.put(Entry("key", marked("document"), words=marked("words"))))
    found = await things.get("key")
    assert found is not None
    assert found.text == marked("document")
    await documents.close()
    assert marked.found_in(bytes_under(tmp_path)) == (set() if encrypted else marked.made)


@CODECS
async def test_migrated_files(encrypted: bool, tmp_path: Path) -> None:
    marked = Canaries()
    old = tmp_path / ".agent_runtime" / "memory" / "name.json"
    old.parent.mkdir(parents=True)
    value = {"key": "name", "value": marked("memory"), "updated_at": "2026-01-01T00:00:00+00:00"}
    old.write_text(json.dumps(value), "utf-8")
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k") if encrypted else None)
    assert (await carry_over(tmp_path)).carried == {"memory": 1}
    old.unlink()
    assert marked.found_in(bytes_under(tmp_path)) == (set() if encrypted else marked.made)
