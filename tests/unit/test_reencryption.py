"""Stored contents that are encrypted again with another key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core.config import configure
from agent_runtime_core.encryption import AESGCMCodec, PayloadCodec
from agent_runtime_core.errors import InvalidArgument, NotSupported
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.events.event import StoredEvent
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.queue.records import RunFilter, RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, reencrypt
from agent_runtime_core.state import SQLiteStateStore
from tests.support.redis_servers import RedisCluster, RedisServer
from tests.support.reencryption import (
    BOTH,
    CANARY,
    DIGEST_KEY,
    KEYS,
    KINDS,
    NEW,
    OLD,
    Agents,
    Place,
    check,
    fill,
    place_of,
)
from tests.support.runs import Script


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


async def test_only_the_new_key_is_needed_afterwards(place: Place) -> None:
    agents = Agents()
    async with place.runner(OLD, *agents.scripts) as runner:
        await fill(runner)
    assert "arc1.old." in place.stored()
    async with place.runner(BOTH) as runner:
        done = await reencrypt(runner, batch=3)
        assert done.keys["old"] == 0
        assert done.keys["new"] == done.texts > 20
        assert (done.runs, done.plain, done.skipped, done.not_supported, done.unreadable) == (4, 0, [], {}, {})
    assert "arc1.old." not in place.stored()
    assert CANARY not in place.stored()
    async with place.runner(NEW, *agents.scripts) as runner:
        again = await reencrypt(runner)
        assert (again.texts, again.keys) == (0, {"new": done.texts})
        await check(runner, agents)


async def test_a_plain_store_is_encrypted(place: Place) -> None:
    agents = Agents()
    async with place.runner(None, *agents.scripts) as runner:
        await fill(runner)
    assert CANARY in place.stored()
    async with place.runner(NEW) as runner:
        done = await reencrypt(runner, batch=3)
        assert (done.plain, done.keys["new"] > 20, done.unreadable) == (0, True, {})
        rows: list[RunRow] = await runner.queue.read("find", RunFilter())
        assert {row.digest[:2] for row in rows} == {"h."}, "equal inputs are not revealed"
    assert CANARY not in place.stored()
    strict = AESGCMCodec({"new": KEYS["new"]}, "new", digest_key=DIGEST_KEY, strict=True)
    async with place.runner(strict, *agents.scripts) as runner:
        await check(runner, agents)


# -- runs that a worker owns


async def test_a_run_of_a_worker_is_skipped_and_works_on(place: Place) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def held(ctx: Any) -> str:
        await ctx.step("tell", lambda: CANARY)
        begun.set()
        await gate.wait()
        return CANARY

    async with place.runner(OLD, Script(held, "held")) as runner:
        await runner.submit("held", {"text": CANARY}, run_id="held")
        await runner.submit("nobody", {"text": CANARY})
        working = asyncio.create_task(runner.run_once())
        await begun.wait()
        async with place.runner(BOTH) as other:
            done = await reencrypt(other)
            assert done.skipped == ["held"]
            assert done.keys["old"] >= 2, "its texts are counted"
            assert done.texts == done.keys["new"] == 1
        gate.set()
        await working
        assert (await runner.wait("held", timeout=5)).final_output["value"] == CANARY
    async with place.runner(BOTH) as runner:
        done = await reencrypt(runner)
        assert (done.skipped, done.keys["old"]) == ([], 0)
    async with place.runner(NEW) as runner:
        assert (await runner.wait("held", timeout=5)).final_output["value"] == CANARY


async def test_a_run_whose_lease_has_expired_is_not_owned(place: Place) -> None:
    async with place.runner(OLD) as runner:
        run = await runner.submit("nobody", {"text": CANARY})
        claimed = await runner.queue.claim("w", 60)
        await runner.queue.commits.commit(None, [Op("queue.beat", (((str(run), claimed.claim_id),), -1.0))])
    async with place.runner(BOTH) as runner:
        assert (await reencrypt(runner)).skipped == []
        assert (await runner.get_run(run)).input["text"] == CANARY


# -- what is large, old, or of another kind


async def test_long_journals_and_event_logs_keep_their_numbers(place: Place) -> None:
    count = 230

    async def talk(ctx: Any) -> str:
        for n in range(count):
            await ctx.step(f"s{n}", lambda: CANARY)
            await ctx.emit("my.event", {"text": CANARY, "n": n})
        return CANARY

    async with place.runner(OLD, Script(talk, "talker")) as runner:
        run = await runner.submit("talker")
        await runner.run_once()
        before = [(each.sequence, each.event_type, each.payload) for each in await runner.event_bus.get_events(run)]
        records = await runner.state_store.records(run)
    async with place.runner(BOTH) as runner:
        done = await reencrypt(runner, batch=50)
        assert done.keys["old"] == 0
        assert done.texts > 2 * count
    async with place.runner(NEW) as runner:
        after = [(each.sequence, each.event_type, each.payload) for each in await runner.event_bus.get_events(run)]
        assert after == before
        assert await runner.state_store.records(run) == records
        assert [event.sequence async for event in runner.stream(run, since_sequence=200)][:2] == [200, 201]
        assert (await runner.event_bus.publish(run, "late", {})).sequence == len(before)


async def test_rows_of_deleted_runs_in_a_lineage_are_encrypted(place: Place) -> None:
    agents = Agents()
    async with place.runner(OLD, *agents.scripts) as runner:
        await runner.submit("payer", run_id="first")
        await runner.run_once()
        await runner.fork("first", "tell", new_run_id="second")
        await runner.run_once()
        assert await runner.vacuum({"succeeded": 0}) == 1
    async with place.runner(BOTH) as runner:
        assert (await reencrypt(runner)).runs == 1
    assert "arc1.old." not in place.stored()
    async with place.runner(NEW, *agents.scripts) as runner:
        await runner.resume("second")
        await runner.run_once()
        refused = (await runner.wait("second", timeout=5)).error
        assert refused is not None
        assert "was already done in run" in refused.message
    assert agents.calls == ["order", "payment"]


async def test_a_codec_without_key_ids_is_accepted(place: Place) -> None:
    class Reversed:
        def encode(self, text: str, *, context: str) -> str:
            return f"~{text[::-1]}"

        def decode(self, text: str, *, context: str) -> str:
            return text[:0:-1] if text.startswith("~") else text

    async with place.runner(None) as runner:
        await runner.submit("nobody", {"text": CANARY}, run_id="r")
    async with place.runner(Reversed()) as runner:
        done = await reencrypt(runner)
        assert (done.texts, done.keys, done.plain) == (1, {}, 0)
    assert CANARY not in place.stored()
    async with place.runner(Reversed()) as runner:
        assert (await runner.get_run("r")).input["text"] == CANARY


async def test_what_no_key_reads_is_reported_and_left(place: Place) -> None:
    lost = AESGCMCodec({"lost": bytes(32)}, "lost", digest_key=DIGEST_KEY)
    async with place.runner(lost) as runner:
        run = await runner.submit("nobody", {"text": CANARY}, run_id="lost")
    async with place.runner(OLD) as runner:
        await runner.submit("nobody", {"text": CANARY}, run_id="kept")
    async with place.runner(BOTH) as runner:
        done = await reencrypt(runner)
        assert (done.texts, done.keys) == (1, {"old": 0, "new": 1, "lost": 1})
        assert [*done.unreadable] == [f"input of run {run}"]
        assert "key 'lost'" in done.unreadable[f"input of run {run}"]
    async with place.runner(lost) as runner:
        assert (await runner.get_run("lost")).input["text"] == CANARY


async def test_a_backend_without_the_operations_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place.runner(OLD) as runner:
        run = await runner.submit("nobody", {"text": CANARY})
        await runner.event_bus.publish(run, "my.event", {"text": CANARY})
    async with place.runner(BOTH) as runner:
        for backend in (runner.event_bus, runner.state_store):
            monkeypatch.setattr(type(backend), "rewrites", False)
        done = await reencrypt(runner)
        assert [*done.not_supported] == ["events", "state"]
        assert type(runner.event_bus).__name__ in done.not_supported["events"]
        assert done.keys == {"old": 0, "new": 1}
        monkeypatch.setattr(type(runner.queue), "rewrites", False)
        assert [*(await reencrypt(runner)).not_supported] == ["queue", "events", "state"]


async def test_a_codec_must_be_set_and_the_store_writable(place: Place) -> None:
    async with place.runner(None) as runner:
        await runner.submit("nobody")
        with pytest.raises(InvalidArgument, match="payload_codec must be a payload codec, got None"):
            await reencrypt(runner)
        with pytest.raises(InvalidArgument, match="batch must be"):
            await reencrypt(runner, batch=0)
    if place.kind != "memory":
        async with AgentRunner.open(place.url, read_only=True) as runner:
            with pytest.raises(NotSupported):
                await reencrypt(runner)


# -- the operations


async def test_an_operation_replaces_only_what_was_read(place: Place) -> None:
    agents = Agents()
    async with place.runner(None, *agents.scripts) as runner:
        await fill(runner)
        parked = str((await runner.get_run("parked")).run_id)
        commit, state = runner.queue.commits.commit, runner.state_store
        [mail] = await runner.queue.mail(parked)
        records = await state.records(parked)
        page = await runner.event_bus.stored_rows(parked, 0, 100)
        event = next(row for row in page if isinstance(row, StoredEvent))
        checkpoint = (await state.state(parked)).checkpoint
        other = mail._replace(payload="1")
        record, changed = records[0], records[0]._replace(result='"x"')
        before = place.stored()
        refused = await commit(None, [
            Op("queue.rewrite", (parked, ("{}",) * 5, ("[]",) * 5, runner.queue.lease_now())),
            Op("queue.rewrite", ("nobody", ("{}",) * 5, ("[]",) * 5, runner.queue.lease_now())),
            Op("queue.rewrite_mail", (parked, ((other, mail),))),
            Op("queue.rewrite_mail", ("nobody", ((mail, other),))),
            Op("journal.rewrite", (parked, ((changed, record), (record._replace(seq=99), changed)))),
            Op("journal.rewrite", ("nobody", ((record, changed),))),
            Op("state.rewrite", (parked, "other", "new")),
            Op("state.rewrite", ("nobody", "other", "new")),
            Op("events.rewrite", (parked, ((event._replace(payload="1"), event),))),
            Op("events.rewrite", ("nobody", ((event, event),))),
        ])  # fmt: skip
        assert refused == ["changed", "gone", [False], [False], [False, False], [False], False, False, [False], [False]]
        assert place.stored() == before
        assert await commit(None, [
            Op("queue.rewrite_mail", (parked, ((other, mail), (mail, other)))),
            Op("journal.rewrite", (parked, ((changed, record), (record, changed)))),
            Op("state.rewrite", (parked, checkpoint, '{"at":2}')),
            Op("events.rewrite", (parked, ((event, event._replace(payload='{"b":1}')),))),
        ]) == [[False, True], [False, True], True, [True]]  # fmt: skip
        assert await runner.queue.mail(parked) == [other]
        assert await state.records(parked) == [changed, *records[1:]]
        assert await state.get_checkpoint(parked) == {"at": 2}
        changed_page = [event._replace(payload='{"b":1}') if row is event else row for row in page]
        assert [*await runner.event_bus.stored_rows(parked, 0, 100)][1:] == changed_page[1:]


async def test_backends_on_different_engines_are_all_encrypted(tmp_path: Path) -> None:
    agents = Agents()
    places = [tmp_path / f"{name}.db" for name in ("queue", "events", "state")]

    def opened(codec: PayloadCodec) -> AgentRunner:
        configure(payload_codec=codec)
        registry = Registry()
        for script in agents.scripts:
            registry.register(script)
        queue, bus, state = SQLiteQueue(places[0]), SQLiteEventBus(places[1]), SQLiteStateStore(places[2])
        return AgentRunner(queue, bus, state, registry=registry, persistence=None)

    async with opened(OLD) as runner:
        run = await runner.submit("payer", {"text": CANARY})
        await runner.run_once()
        before = [event.payload for event in await runner.event_bus.get_events(run)]
    async with opened(BOTH) as runner:
        done = await reencrypt(runner)
        assert (done.keys["old"], done.unreadable) == (0, {})
    async with opened(NEW) as runner:
        assert [event.payload for event in await runner.event_bus.get_events(run)] == before
        assert (await runner.wait(run, timeout=5)).final_output["value"] == {"paid": CANARY}
    for path in places:
        with contextlib.closing(sqlite3.connect(path)) as conn:
            assert "arc1.old." not in "".join(conn.iterdump())


@pytest.mark.redis
async def test_a_row_of_an_older_release_keeps_its_conversation(redis_server: RedisServer, redis_url: str) -> None:
    place = Place("redis", Path(), (redis_server, redis_url))
    async with place.runner(None) as runner:
        run = await runner.submit("nobody", {"conversation_id": "talk", "text": CANARY})
        key = f"{{{redis_url.rpartition('=')[2]}}}:run:{run}"
        row = json.loads(redis_server.ask("GET", key))
        redis_server.ask("SET", key, json.dumps(row[: RunRow._fields.index("conversation")]))
    async with place.runner(NEW) as runner:
        assert (await reencrypt(runner)).keys == {"new": 1}
        assert [each.run_id for each in await runner.runs(conversation="talk")] == [run]
        assert (await runner.queue.require(run)).conversation == "talk"


@pytest.mark.redis
async def test_the_documents_of_a_cluster_are_found(redis_cluster: RedisCluster) -> None:
    for number, node in enumerate(redis_cluster.urls):
        url = f"{node}?prefix=again{number}"
        configure(payload_codec=OLD)
        async with PersistenceManager.open(url) as stores:
            await stores.memory.set("name", CANARY)
        configure(payload_codec=BOTH)
        assert (await reencrypt(url)).keys == {"old": 0, "new": 1}
