"""Erase a tenant, a conversation or a run: nothing of it is in the bytes of the store, and all of another one is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig, RunResult, configure, conversation_uuid
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import IllegalTransition, InvalidArgument, StorageCorrupt, UnknownEncryptionKey
from agent_runtime_core.persistence import Conversation, Scope
from agent_runtime_core.persistence.documents.base import Collection, Entry
from agent_runtime_core.runner.erasure import BLANK
from agent_runtime_core.status import RunStatus
from tests.support import erasure as store
from tests.support.backends import backends
from tests.support.codec import KEY
from tests.support.erasure import Owner
from tests.support.runs import Script

pytest.importorskip("cryptography")

CONFIG = RunnerConfig(max_retries=1, park_after=0)
Raw = Callable[[], bytes]


@pytest.fixture(params=backends(["memory", "sqlite", "redis", "postgres"]))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[AgentRunner], bytes]]:
    """The URL of a new store, and what reads all of it."""
    store.OWNERS.clear()
    store.repaired.clear()
    if request.param == "redis":
        url, server = str(request.getfixturevalue("redis_url")), request.getfixturevalue("redis_server")
        return url, lambda _: store.raw_redis(server, url)
    if request.param == "postgres":
        url, database = str(request.getfixturevalue("postgres_url")), request.getfixturevalue("postgres_server")
        return url, lambda _: repr(database.rows(url)).encode()
    if request.param == "postgres":
        url, server = str(request.getfixturevalue("postgres_url")), request.getfixturevalue("postgres_server")
        return url, lambda _: store.raw_postgres(server, url)
    if request.param == "sqlite":
        path = tmp_path / "runs.db"
        return str(path), lambda _: store.raw_file(path)
    return "memory://", store.raw_memory


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[AgentRunner]:
    async with AgentRunner.open(url, registry=store.agents(), config=CONFIG) as runner:
        yield runner


#: What is erased of the owner "anna", for each kind of owner.
TARGETS: dict[str, Callable[[Owner], dict[str, Any]]] = {
    "tenant": lambda owner: {"tenant": owner.tenant},
    "conversation": lambda owner: {"conversation": owner.conversation},
    "conversation id": lambda owner: {"conversation": conversation_uuid(owner.conversation)},
    "conversation of a tenant": lambda owner: {"conversation": owner.conversation, "tenant": owner.tenant},
    "run": lambda owner: {"run_ids": owner.run},
    "run of a tenant": lambda owner: {"run_ids": [owner.run], "tenant": owner.tenant},
}


async def filled(runner: AgentRunner, kind: str, owners: tuple[Owner, ...], *, live: bool = False) -> None:
    """Store everything that an owner of that kind can have. The owners take turns."""
    of_run = kind.startswith("run")
    for owner in owners:
        await store.store_runs(runner, owner)
    for owner in owners:
        run_id = (await runner.get_run(owner.run, tenant=owner.tenant)).run_id
        if not of_run:
            await store.store_more_runs(runner, owner, live=live)
        stores = runner.persistence.for_tenant(owner.tenant)
        await store.store_documents(stores, owner, run_id if of_run else None, all_kinds=kind == "tenant")
        await store.store_topics(runner, owner, run_id)


def two(kind: str) -> tuple[Owner, Owner]:
    tenants = ("annas", "bobs") if "tenant" in kind else (None, None)
    return Owner("anna", tenants[0]), Owner("bob", tenants[1])


@pytest.mark.parametrize("kind", TARGETS)
async def test_nothing_of_it_remains_and_all_of_another(place: Any, kind: str) -> None:
    url, raw_of = place
    anna, bob = two(kind)
    async with opened(url) as runner:
        await filled(runner, kind, (anna, bob))
        before = raw_of(runner)
        # What only digests have, such as the arguments of a step, was never stored.
        anna.made, bob.made = anna.found_in(before), bob.found_in(before)
        assert len(anna.made) == len(bob.made) >= 40
        expected = await runner.erase(**TARGETS[kind](anna), dry_run=True)
        assert anna.found_in(raw_of(runner)) == anna.made
        found = await runner.erase(**TARGETS[kind](anna))
        assert found.counts() == expected.counts()
        raw = raw_of(runner)
        assert anna.found_in(raw) == (anna.found_in(raw) & _kept(kind, anna))
        assert bob.found_in(raw) == bob.made
        assert found.left == {}
        again = await runner.erase(**TARGETS[kind](anna))
        assert not any(again.counts().values())
        await _bob_works(runner, kind, bob)
    if url.endswith(".db"):
        assert anna.found_in(raw_of(runner)) <= _kept(kind, anna)


def _kept(kind: str, owner: Owner) -> set[str]:
    """Return what stays: the name of the conversation of a run."""
    return {owner.conversation} if kind.startswith("run") else set()


async def _bob_works(runner: AgentRunner, kind: str, bob: Owner) -> None:
    """Execute, fork and resume runs of the other owner, and read its documents."""
    again = await runner.fork(bob.run, new_run_id=bob("laterfork"), effects="reuse", tenant=bob.tenant)
    await store.work(runner)
    (await runner.wait(again, 0)).raise_for_status()
    if not kind.startswith("run"):
        store.repaired.add(bob.name)
        await runner.resume(bob("failingkey"), tenant=bob.tenant)
        await store.work(runner)
        assert (await runner.wait(bob("failingkey"), 0, tenant=bob.tenant)).status == RunStatus.SUCCEEDED
        conversations = runner.persistence.for_tenant(bob.tenant).conversations
        assert await conversations.search(bob("edited"))
        listed = await conversations.list_conversations()
        assert bob.conversation in {each.name for each in listed}
        assert await conversations.history(conversation_uuid(bob.conversation))
    run_id = str((await runner.get_run(bob.run, tenant=bob.tenant)).run_id)
    assert set(await store.topics_of(runner.event_bus, runner.state_store)) == {run_id}


async def test_the_name_of_a_tenant_is_only_in_the_audit_record(place: Any) -> None:
    url, raw_of = place
    anna, bob = two("tenant")
    async with opened(url) as runner:
        await filled(runner, "tenant", (anna, bob))
        assert b"annas" in raw_of(runner)
        await runner.erase(tenant="annas")
        assert runner.persistence.audit is not None
        started, finished = reversed(await runner.persistence.audit.get_events())
        for entry in (started, finished):
            assert entry.details["erased"] == [{"kind": "tenant", "id": "annas"}]
        assert finished.details["counts"]["runs"] == 4
        for documents in runner.document_stores()[:1]:
            events = Collection(documents, "project", "event")
            await events.write(*[events.delete(each.key) for each in await events.find()])
        await runner.vacuum(compact=True)
        assert b"annas" not in raw_of(runner)
        assert b"bobs" in raw_of(runner)


async def test_an_effect_of_an_erased_run_does_not_happen_again(place: Any) -> None:
    url, raw_of = place
    anna, bob = two("run of a tenant")
    async with opened(url) as runner:
        for owner in (anna, bob):
            await store.store_runs(runner, owner)
        await runner.erase(run_ids=anna.run, tenant=anna.tenant)
        for _ in range(2):  # also after the second run was deleted
            about = {"owner": anna.name}
            result = await runner.execute("speaker", anna.run, about, tenant=anna.tenant)
            assert result.error is not None
            assert result.error.type == "EffectAlreadyDone"
            await runner.discard(anna.run, tenant=anna.tenant)
        assert b"effectofanna" not in raw_of(runner)


async def test_live_runs_are_refused_or_cancelled(place: Any) -> None:
    url, raw_of = place
    anna, bob = two("tenant")
    async with opened(url) as runner:
        await filled(runner, "tenant", (anna, bob), live=True)
        anna.made = anna.found_in(raw_of(runner))
        with pytest.raises(IllegalTransition, match="2 runs have not finished and cannot be erased: 'waitingkey"):
            await runner.erase(tenant=anna.tenant)
        assert anna.found_in(raw_of(runner)) == anna.made
        assert (await runner.erase(tenant=anna.tenant, dry_run=True)).live == 2
        found = await runner.erase(tenant=anna.tenant, cancel=True)
        assert (found.live, found.runs) == (2, 6)
        assert anna.found_in(raw_of(runner)) == set()
        assert await runner.runs(tenant=anna.tenant) == []
        waits = await runner.runs("waiting", tenant=bob.tenant)
        assert [each.run_key for each in waits] == [bob("waitingkey")]
        await runner.signal(bob("waitingkey"), "never", tenant=bob.tenant)
        await store.work(runner)
        waits = await runner.runs("waiting", tenant=bob.tenant)
        assert [each.run_key for each in waits] == [bob("blockedkey")]


async def test_it_is_repeatable_after_each_commit(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, raw_of = place
    anna, bob = two("conversation")
    stopped, tries = True, 0
    async with opened(url) as runner:
        await filled(runner, "conversation", (anna, bob))
        anna.made, bob.made = anna.found_in(raw_of(runner)), bob.found_in(raw_of(runner))
        expected = (await runner.erase(conversation=anna.conversation, dry_run=True)).counts()
        engine: Any = runner.queue.commits
        commit, left = engine.commit, 0

        def counting(guard: Any, ops: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return commit(guard, ops)

        monkeypatch.setattr(engine, "commit", counting)
        while stopped:
            left, stopped = 3 * tries + 1, False
            try:
                found = await runner.erase(conversation=anna.conversation)
            except KeyboardInterrupt:
                stopped, tries = True, tries + 1
        monkeypatch.undo()
        assert tries > 1
        assert expected["runs"] == 4
        assert found.left == {}
        assert anna.found_in(raw_of(runner)) == set()
        assert bob.found_in(raw_of(runner)) == bob.made


async def reply(ctx: Any) -> RunResult:
    """Answer with what the conversation contains, or fail."""
    said = [each["content"] for each in ctx.input_messages]
    if ctx.input.get("fails") and "repaired" not in store.repaired:
        raise ValueError("not yet")
    return RunResult({"response": f"answer {len(said)}", "said": said})


async def calls(ctx: Any) -> Any:
    return await ctx.call("child", {"owner": ctx.input["owner"]})


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "conversation_id": "room 7", **more}


async def test_later_runs_of_the_conversation_of_an_erased_run_continue(place: Any) -> None:
    url, _ = place
    async with opened(url) as runner:
        runner.registry.register(Script(reply, "reply"))
        await runner.execute("reply", "first", said("one"))
        await runner.execute("reply", "second", said("two"))
        await runner.execute("reply", "third", said("three", fails=True))
        found = await runner.erase(run_ids="second")
        assert (found.runs, found.blanked, found.documents) == (1, 2, {})
        room = conversation_uuid("room 7")
        history = await runner.persistence.conversations.history(room)
        assert [each.content for each in history] == ["one", "answer 1", BLANK, BLANK, "three"]
        store.repaired.add("repaired")
        await runner.resume("third")
        await store.work(runner)
        result = await runner.wait("third", 0)
        assert result.final_output["said"] == ["one", "answer 1", BLANK, BLANK, "three"]


async def test_the_caller_of_an_erased_child_run_is_named(place: Any) -> None:
    url, _ = place
    anna = store.OWNERS["anna"] = Owner("anna")
    async with opened(url) as runner:
        runner.registry.register(Script(calls, "calls"))
        await runner.execute("calls", "parent", {"owner": "anna"})
        [child] = await runner.runs(agent="child")
        found = await runner.erase(run_ids=child.run_id)
        assert found.runs == 1
        assert found.left == {"run 'parent'": f"has the result of its child run {str(child.run_id)!r}"}
        assert anna("childoutput") in str((await runner.wait("parent", 0)).final_output)


async def test_a_run_of_another_tenant_is_named_and_stays(place: Any) -> None:
    url, _ = place
    async with opened(url) as runner:
        runner.registry.register(Script(reply, "reply"))
        parent = (await runner.execute("reply", "parent", tenant="a")).run_id
        await runner.submit("reply", run_id="child", parent_run_id=parent, tenant="b")
        found = await runner.erase(tenant="a")
        assert found.runs == 1
        assert found.left == {"run 'child'": "belongs to another tenant, and has contents of run 'parent'"}
        assert [each.run_key for each in await runner.runs()] == ["child"]


@pytest.mark.parametrize("deleted", ["child", "source"])
async def test_results_that_deleted_runs_have_left_are_erased_too(place: Any, deleted: str) -> None:
    url, raw_of = place
    anna = store.OWNERS["anna"] = Owner("anna")
    async with opened(url) as runner:
        runner.registry.register(Script(calls, "calls"))
        await runner.execute("calls", "source", {"owner": "anna"})
        await runner.fork("source", new_run_id="fork", effects="reuse")
        await store.work(runner)
        for info in await runner.runs(agent="child") if deleted == "child" else [await runner.get_run("source")]:
            await runner.discard(info.run_id)
        anna("childeffect")
        assert anna.found_in(raw_of(runner))
        await runner.erase(run_ids=["fork", "source"])
        await runner.erase(run_ids=[each.run_id for each in await runner.runs()] or "fork")
        assert anna.found_in(raw_of(runner)) == set()
        again = await runner.execute("calls", "source", {"owner": "anna"})
        assert "'pay' was already done" in str(again.error)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "erase must be given a target, got none"),
        ({"conversation": ""}, "conversation must be the name or the id of a conversation, got ''"),
        ({"tenant": ""}, "tenant must be a string of 1 to 128 characters"),
        ({"run_ids": [""]}, "run_id must not be empty"),
    ],
)
async def test_a_wrong_target_is_rejected(wrong: dict[str, Any], message: str) -> None:
    async with AgentRunner.open("memory://") as runner:
        with pytest.raises(InvalidArgument, match=message):
            await runner.erase(**wrong)


async def test_runs_that_are_submitted_again_each_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("memory://") as runner:
        runner.registry.register(Script(reply, "reply"))
        await runner.execute("reply", "r", tenant="a")
        engine: Any = runner.queue.commits
        commit, times = engine.commit, 20

        async def submitting(guard: Any, ops: Any) -> Any:
            nonlocal times
            found = await commit(guard, ops)
            if any(op.name == "queue.delete" for op in ops) and times:
                times -= 1
                await runner.execute("reply", "r", tenant="a")
            return found

        monkeypatch.setattr(engine, "commit", submitting)
        found = await runner.erase(tenant="a")
        assert found.left == {
            "run 'r'": "was not erased, because it is submitted again each time, or its row is damaged"
        }
        times = 3
        found = await runner.erase(tenant="a")
        assert (found.left, found.runs) == ({}, 4)


@pytest.mark.parametrize("kind", ["tenant", "conversation of a tenant", "run of a tenant"])
@pytest.mark.parametrize("codec", [None, AESGCMCodec({"other": KEY}, "other")], ids=["none", "other"])
async def test_without_the_key_of_encrypted_contents_nothing_changes(
    tmp_path: Path, kind: str, codec: AESGCMCodec | None
) -> None:
    url, anna = str(tmp_path / "runs.db"), Owner("anna", "annas")
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k"))
    async with opened(url) as runner:
        await store.store_runs(runner, anna)
        before = await runner.erase(**TARGETS[kind](anna), dry_run=True)
    configure(payload_codec=codec)
    async with opened(url) as runner:
        with pytest.raises((UnknownEncryptionKey, StorageCorrupt)):
            await runner.erase(**TARGETS[kind](anna))
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k"))
    async with opened(url) as runner:
        assert (await runner.erase(**TARGETS[kind](anna), dry_run=True)).counts() == before.counts()
        assert (await runner.erase(**TARGETS[kind](anna))).counts() == before.counts()
        again = await runner.execute("speaker", anna.run, {"owner": "anna"}, tenant=anna.tenant)
        assert "'pay' was already done" in str(again.error)


async def test_without_stores_only_runs_are_erased_and_there_is_no_record() -> None:
    async with AgentRunner(registry=store.agents(), persistence=None) as runner:
        await runner.execute("child", "r", {"owner": "anna"})
        found = await runner.erase(run_ids=["r", "unknown"])
        assert (found.runs, found.audited, found.unknown) == (1, False, ["unknown"])


# -- names of conversations


async def test_a_list_of_conversations_has_names_and_reads_no_messages(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = place
    async with opened(url) as runner:
        runner.registry.register(Script(reply, "reply"))
        for tenant in (None, "a"):
            await runner.execute("reply", input_data=said("one"), tenant=tenant)
        room, plain = conversation_uuid("room 7"), conversation_uuid("0f0e0d0c-0b0a-4908-8706-050403020100")
        await runner.execute("reply", input_data={**said("two"), "conversation_id": str(plain)})
        await runner.persistence.conversations.save(Conversation(id=uuid4(), title="by hand"))
        documents = runner.persistence.conversations.documents(Scope.PROJECT)  # type: ignore[attr-defined]
        read, kinds = documents.read, list[str]()

        async def counted(what: str, *args: Any) -> Any:
            kinds.append(args[0].kind if what == "find" else args[1])
            return await read(what, *args)

        monkeypatch.setattr(documents, "read", counted)
        listed = await runner.persistence.conversations.list_conversations()
        assert kinds == ["conversation"]
        names = {each.id: each.name for each in listed}
        assert (names[room], names[plain]) == ("room 7", None)
        assert all(each.messages == [] for each in listed)
        listed[-1].title = "renamed"
        await runner.persistence.conversations.save(listed[-1])
        monkeypatch.undo()
        assert len(await runner.persistence.conversations.get_messages(room)) == 2
        [of_tenant] = await runner.persistence.for_tenant("a").conversations.list_conversations()
        assert (of_tenant.name, of_tenant.id) == ("room 7", conversation_uuid("room 7", "a"))


async def test_a_conversation_that_an_earlier_release_stored_has_no_name(place: Any) -> None:
    url, _ = place
    async with opened(url) as runner:
        runner.registry.register(Script(reply, "reply"))
        await runner.execute("reply", input_data=said("one"))
        room = str(conversation_uuid("room 7"))
        documents = runner.persistence.conversations.documents(Scope.PROJECT)  # type: ignore[attr-defined]
        headers = Collection(documents, "project", "conversation")
        [stored] = await headers.find()
        fields = json.loads(stored.text)
        assert fields.pop("name") == "room 7"
        await headers.write(headers.put(Entry(room, json.dumps(fields), stored.group, stored.rank)))
        [listed] = await runner.persistence.conversations.list_conversations()
        assert (str(listed.id), listed.name) == (room, None)
        await runner.execute("reply", input_data=said("two"))
        found = await runner.erase(conversation=room)  # the runs are found by their name, which is stored nowhere else
        assert (found.runs, found.documents) == (2, {"conversation": 1, "message": 4})


@pytest.mark.parametrize("name", ["", None, 7])
def test_what_names_no_conversation_is_rejected(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="the name of a conversation must be a non-empty string or a UUID, got"):
        conversation_uuid(name)


def test_the_id_of_a_conversation_follows_from_its_name() -> None:
    room = UUID("0f0e0d0c-0b0a-4908-8706-050403020100")
    assert conversation_uuid(room) == conversation_uuid(str(room).upper()) == room
    assert conversation_uuid("room 7") == conversation_uuid("room 7", "a") != conversation_uuid("room 8")
    with pytest.raises(InvalidArgument, match="tenant must be"):
        conversation_uuid("room 7", "")
