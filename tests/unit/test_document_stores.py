"""Document stores for third parties: all six stores on one, and public names."""

from __future__ import annotations

import pytest

from agent_runtime_core import persistence
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.persistence import (
    Collection,
    DocumentStore,
    Entry,
    PersistenceConfig,
    PersistenceManager,
    Scope,
    open_document_store,
)


async def test_six_stores_share_a_passed_document_store_and_leave_it_open() -> None:
    documents = open_document_store("memory://")
    async with PersistenceManager(PersistenceConfig.on(documents)) as manager:
        await manager.memory.set("city", "Paris")
        await manager.preferences.set("theme", "dark")
        assert manager.has_knowledge()
        assert manager.has_audit()
        assert manager.document_stores() == [documents]
    found = await Collection(documents, "project", "memory").find()
    assert [each.key for each in found] == ["city"]
    async with PersistenceManager(PersistenceConfig.on(documents)) as second:
        assert await second.preferences.get("theme") == "dark"
    await documents.close()


async def test_a_session_that_ends_is_deleted_from_a_passed_document_store() -> None:
    documents = open_document_store("memory://")
    async with PersistenceManager(PersistenceConfig.on(documents)) as manager:
        await manager.memory.set("city", "Paris", scope=Scope.SESSION)
        space = f"session:{manager.session_id}"
        assert len(await Collection(documents, space, "memory").find()) == 1
    assert await Collection(documents, space, "memory").find() == []
    await documents.close()


@pytest.mark.parametrize("url", ["sqlite", "files"])
async def test_documents_are_found_by_the_next_object_at_the_url(url: str, tmp_path: object) -> None:
    where = {"sqlite": f"sqlite:///{tmp_path}/a.db", "files": f"files:///{tmp_path}/documents"}[url]
    first = open_document_store(where)
    things = Collection(first, "mine", "thing")
    await things.write(things.put(Entry("a", "A")))
    await first.close()
    second = open_document_store(where, durability="normal")
    assert (await Collection(second, "mine", "thing").get("a") or Entry("", "")).text == "A"
    await second.close()


@pytest.mark.parametrize("url", ["", "memory", "http://host", 5, None])
def test_another_value_than_a_url_is_rejected(url: str) -> None:
    with pytest.raises(InvalidArgument):
        open_document_store(url)


def test_a_document_store_with_missing_methods_is_rejected_by_name() -> None:
    class Half(DocumentStore):
        async def commit(self, guard: object, ops: object) -> list[object]:
            return []

    with pytest.raises(InvalidArgument, match="read"):
        Half()  # type: ignore[abstract]


def test_names_for_third_parties_are_public() -> None:
    names = "Collection Document DocumentMissing DocumentStore DocumentTransaction Entry Query VersionConflict"
    assert set(names.split()) <= set(dir(persistence))
