"""Erase a tenant, a conversation or a run: nothing of it is in the bytes of the store, and all of another one is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig, conversation_uuid
from agent_runtime_core.errors import IllegalTransition
from agent_runtime_core.persistence.documents.base import Collection
from agent_runtime_core.status import RunStatus
from tests.support import erasure as store
from tests.support.backends import backends
from tests.support.erasure import Owner

CONFIG = RunnerConfig(max_retries=1, park_after=0)
Raw = Callable[[], bytes]


@pytest.fixture(params=backends(["memory", "sqlite", "redis"]))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[AgentRunner], bytes]]:
    """The URL of a new store, and what reads all of it."""
    store.OWNERS.clear()
    store.repaired.clear()
    if request.param == "redis":
        url, server = str(request.getfixturevalue("redis_url")), request.getfixturevalue("redis_server")
        return url, lambda _: store.raw_redis(server, url)
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
