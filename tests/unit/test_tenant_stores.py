"""The stores of tenants: names that cannot imitate another tenant, managers of tenants, and conversations that move."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from uuid import UUID, uuid4

import pytest

from agent_runtime_core._core.ids import conversation_id
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.payloads import encode_contents
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import InvalidArgument, NotSupported
from agent_runtime_core.persistence import (
    Conversation,
    ConversationMessage,
    ConversationStore,
    InMemoryConversationStore,
    PersistenceConfig,
    PersistenceManager,
    Scope,
)
from agent_runtime_core.persistence.backends.memory import InMemoryMemoryStore
from agent_runtime_core.persistence.document_stores.base import of_space
from agent_runtime_core.persistence.documents.base import Collection, Entry
from agent_runtime_core.persistence.documents.memory import MemoryDocuments
from agent_runtime_core.persistence.manager import open_document_store
from agent_runtime_core.runner import reencryption
from tests.contract.third_party.plain_stores import PlainConversations, PlainMemory
from tests.support.backends import POSTGRES
from tests.support.reencryption import BOTH, CANARY, OLD

ID = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2bff")
KINDS = ("memory", "conversations", "tasks", "preferences", "knowledge", "audit")


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    yield
    reset_config()


def said(*contents: str) -> Conversation:
    return Conversation(id=ID, messages=[ConversationMessage(role="user", content=each) for each in contents])


async def contents(manager: PersistenceManager) -> list[Any]:
    return [each.content for each in await manager.conversations.get_messages(ID)]


# -- names


def test_no_names_of_tenant_project_and_session_make_the_space_of_others() -> None:
    texts = ["".join(each) for count in (1, 2, 3) for each in itertools.product(":1p", repeat=count)]
    texts += ["project", "global", "session", "tenant", "tenant:1:p", "1:p:project", "é" * 128]
    names: dict[str, tuple[Any, ...]] = {}
    for project, session in zip(["", *texts], ["", *reversed(texts)], strict=True):
        home = InMemoryMemoryStore(project=project, session_id=session).home
        for tenant in ["", *texts]:
            bound = home.for_tenant(tenant) if tenant else home
            for scope, part in ((Scope.GLOBAL, ""), (Scope.PROJECT, project), (Scope.SESSION, session)):
                place = (tenant, scope, part)
                assert names.setdefault(bound.table(scope, "kind").space, place) == place


async def test_closing_the_store_ends_the_sessions_of_all_tenants_and_leaves_the_rest() -> None:
    documents = MemoryDocuments(engine=MemoryEngine())
    manager = PersistenceManager(PersistenceConfig.on(documents))
    for tenant in (None, "a", "b"):
        memory = manager.for_tenant(tenant).memory
        for scope in Scope:
            await memory.set("key", 1, scope)
        gc.collect()  # nobody needs the manager of a tenant any more
        if tenant is not None:
            await manager.for_tenant(tenant).close()
        assert await memory.get("key", Scope.SESSION) == 1
    session = manager.session_id
    await manager.close()
    left = PersistenceManager(PersistenceConfig.on(documents, session_id=session))
    for tenant in (None, "a", "b"):
        memory = left.for_tenant(tenant).memory
        assert [await memory.get("key", scope) for scope in Scope] == [None if s is Scope.SESSION else 1 for s in Scope]


def test_the_space_that_was_used_longest_ago_is_dropped() -> None:
    known: dict[str, str] = {}
    for space in ("a", "b", "a", "c", "a", "d"):
        assert of_space(known, space, lambda space=space: f"of {space}", 2) == f"of {space}"  # type: ignore[misc]
    assert [*known] == ["a", "d"]


# -- managers


def test_the_manager_of_a_tenant_is_the_same_while_it_is_used() -> None:
    manager = PersistenceManager.open("memory://")
    theirs = manager.for_tenant("a")
    assert manager.for_tenant(None) is manager
    assert manager.for_tenant("a") is theirs is theirs.for_tenant("a") is theirs.for_tenant(None)
    assert (manager.tenant, theirs.tenant, theirs.session_id) == (None, "a", manager.session_id)
    assert theirs.document_stores() == manager.document_stores()
    for kind in KINDS:
        assert getattr(theirs, kind) is getattr(theirs, kind) is not getattr(manager, kind)
    assert (theirs.has_audit(), theirs.has_knowledge()) == (True, True)


def test_what_is_no_tenant_or_another_tenant_is_refused() -> None:
    manager = PersistenceManager.open("memory://")
    for wrong in ("", "a\nb", "x" * 129, 1, "\ud800"):
        with pytest.raises(InvalidArgument, match="tenant must"):
            manager.for_tenant(wrong)  # type: ignore[arg-type]
    theirs = manager.for_tenant("a")
    with pytest.raises(InvalidArgument, match="tenant must be 'a', whose stores these are, got 'b'"):
        theirs.for_tenant("b")
    with pytest.raises(InvalidArgument, match="tenant must be 'a', whose stores these are, got 'b'"):
        theirs.memory.for_tenant("b")  # type: ignore[attr-defined]


async def test_a_closed_manager_opens_its_stores_anew_for_tenants_too(tmp_path: Path) -> None:
    manager = PersistenceManager.open(tmp_path / "s.db")
    theirs = manager.for_tenant("a")
    await theirs.memory.set("key", 1)
    await manager.close()
    assert (await theirs.memory.get("key"), await manager.memory.get("key")) == (1, None)
    await manager.close()


class OfTenants:
    """A store of one's own with a store of the same kind for each tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Self] = {}

    def for_tenant(self, tenant: str) -> Self:
        return self.parts.setdefault(tenant, type(self)())


class MemoryOfTenants(OfTenants, PlainMemory):
    pass


class ConversationsOfTenants(OfTenants, PlainConversations):
    pass


async def test_a_store_of_ones_own_serves_tenants_only_if_it_says_so() -> None:
    manager = PersistenceManager(
        PersistenceConfig(memory_store=MemoryOfTenants(), conversation_store_class=PlainConversations)
    )
    theirs = manager.for_tenant("a")
    await theirs.memory.set("key", 1)
    assert (await theirs.memory.get("key"), await manager.memory.get("key")) == (1, None)
    assert await manager.conversations.get(ID) is None
    with pytest.raises(NotSupported, match=r"the conversation store of tenant 'a' must .* PlainConversations"):
        _ = theirs.conversations
    with pytest.raises(NotSupported):
        await manager.assign_conversation(ID, "a")
    assert theirs.audit is None


# -- conversations that move


@pytest.fixture(params=["memory", "sqlite", "files", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PersistenceManager:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    match request.param:
        case "memory":
            return PersistenceManager.open("memory://")
        case "redis" | "postgres" as server:
            return PersistenceManager.open(str(request.getfixturevalue(f"{server}_url")))
        case "files":
            return PersistenceManager(PersistenceConfig(project_dir=tmp_path))
    return PersistenceManager.open(tmp_path / "s.db")


async def test_a_conversation_moves_under_the_name_that_its_runs_used(manager: PersistenceManager) -> None:
    async with manager:
        named = Conversation(id=conversation_id("support-1"))  # type: ignore[arg-type]
        await manager.conversations.save(named)
        assert await manager.assign_conversation("support-1", "a")
        assert not await manager.assign_conversation("support-1", "a")
        assert not await manager.assign_conversation(uuid4(), "a")
        assert await manager.conversations.get(named.id) is None
        assert await manager.for_tenant("a").conversations.get(named.id) is not None
        for wrong in (("", "a"), (named.id, None)):
            with pytest.raises(InvalidArgument):
                await manager.assign_conversation(*wrong)


async def test_messages_that_are_appended_during_the_move_are_moved(
    manager: PersistenceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with manager:
        store = manager.conversations
        documents = store.documents(Scope.PROJECT)  # type: ignore[attr-defined]
        await store.save(said("one", "two"))
        write, late = documents.write, ["during the move", "and one more"]

        async def written(*ops: Op) -> list[Any]:
            if len(ops) > 3 and late:  # the commit of the move
                monkeypatch.setattr(documents, "write", write)
                await store.append(ID, [ConversationMessage(role="user", content=late.pop(0))])
                monkeypatch.setattr(documents, "write", written)
            return list(await write(*ops))

        monkeypatch.setattr(documents, "write", written)
        assert await manager.assign_conversation(ID, "a")
        assert await contents(manager.for_tenant("a")) == ["one", "two", "during the move"]
        assert await contents(manager) == []
        with pytest.raises(InvalidArgument, match="not found in this scope"):
            await store.append(ID, [ConversationMessage(role="user", content="too late")])


async def test_a_killed_move_is_finished_by_the_next_one(
    manager: PersistenceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    async with manager:
        store = manager.conversations
        documents = store.documents(Scope.PROJECT)  # type: ignore[attr-defined]
        await store.save(said("one", "two"))
        write, calls = documents.write, itertools.count()

        async def written(*ops: Op) -> list[Any]:
            if next(calls) == 1:
                raise Killed
            monkeypatch.setattr(documents, "write", write)
            await store.append(ID, [ConversationMessage(role="user", content="during the move")])
            monkeypatch.setattr(documents, "write", written)
            return list(await write(*ops))

        monkeypatch.setattr(documents, "write", written)
        with pytest.raises(Killed):
            await manager.assign_conversation(ID, "a")
        monkeypatch.setattr(documents, "write", write)
        assert await contents(manager.for_tenant("a")) == ["one", "two"]
        assert await manager.assign_conversation(ID, "a")
        assert await contents(manager.for_tenant("a")) == ["one", "two", "during the move"]
        assert not await manager.assign_conversation(ID, "a")


async def test_a_change_of_the_header_during_the_move_is_moved(
    manager: PersistenceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with manager:
        store = manager.conversations
        documents = store.documents(Scope.PROJECT)  # type: ignore[attr-defined]
        await store.save(said("one", "two"))
        write = documents.write

        async def written(*ops: Op) -> list[Any]:
            monkeypatch.setattr(documents, "write", write)
            found = await store.get(ID)
            assert found is not None
            found.title = "changed"
            await store.save(found)
            return list(await write(*ops))

        monkeypatch.setattr(documents, "write", written)
        assert await manager.assign_conversation(ID, "a")
        moved = await manager.for_tenant("a").conversations.get(ID)
        assert moved is not None
        assert (moved.title, len(moved.messages)) == ("changed", 2)


@pytest.mark.parametrize("kill", [False, True])
async def test_a_conversation_of_a_store_of_ones_own_moves_also_after_a_kill(kill: bool) -> None:
    store = ConversationsOfTenants()
    manager = PersistenceManager(PersistenceConfig(conversation_store=store))
    await store.save(said("one", "two"))
    if kill:  # after it was stored with the tenant, and before it was deleted
        await store.for_tenant("a").save(said("one", "two"))
        found = await store.for_tenant("a").get(ID)
        assert found is not None
        found.messages = (await store.get(ID) or found).messages
        await store.for_tenant("a").save(found)
    await store.for_tenant("b").save(said("theirs"))
    assert not await manager.assign_conversation(ID, "b")
    assert await manager.assign_conversation(ID, "a")
    assert (await contents(manager), await contents(manager.for_tenant("a"))) == ([], ["one", "two"])
    assert not await manager.assign_conversation(ID, "a")


async def test_a_conversation_moves_from_one_document_store_to_another() -> None:
    one, other = InMemoryConversationStore(), InMemoryConversationStore()
    await one.save(said("one"))
    moved: ConversationStore = other.for_tenant("a")
    assert await one.move_to(moved, ID)
    assert [each.content for each in await moved.get_messages(ID)] == ["one"]
    assert (await one.get(ID), await other.get(ID)) == (None, None)


# -- every space is found


async def test_the_documents_of_tenants_are_encrypted_again(manager: PersistenceManager) -> None:
    names = [None, "a", "é/ü " * 32]
    configure(payload_codec=OLD)
    async with manager:
        for tenant in names:
            await manager.for_tenant(tenant).memory.set("key", CANARY)
            await manager.for_tenant(tenant).conversations.save(said(CANARY))
        stores = manager.document_stores()
        for each in stores:
            each.payloads = None
        encode_contents(stores, BOTH)
        done = await reencryption._reencrypt(None, stores, 500)
        assert (done.keys, done.unreadable, done.not_supported) == ({"old": 0, "new": 9}, {}, {})
        for tenant in names:
            assert await manager.for_tenant(tenant).memory.get("key") == CANARY


async def test_a_file_names_the_space_whose_name_is_too_long_for_a_directory(tmp_path: Path) -> None:
    url, spaces = f"files:///{tmp_path}", [f"tenant:{'é' * 120}:{n}" for n in range(2)]
    documents = open_document_store(url)
    for space in spaces:
        notes = Collection(documents, space, "note")
        for _ in range(2):
            await notes.write(notes.put(Entry("k", space)))
    await documents.close()
    documents = open_document_store(url)
    assert sorted(await documents.read("kinds")) == [(space, "note") for space in spaces]
    await documents.drop(spaces[0])
    assert [await Collection(documents, space, "note").get("k") is None for space in spaces] == [True, False]
    await documents.close()
