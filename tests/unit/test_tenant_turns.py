"""Turns of two tenants, and of nobody, with the same turn id, event id, user and conversation do not meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import IdempotencyConflict, InvalidArgument, InvalidTurn, UnknownRun
from agent_runtime_core.status import RunStatus
from agent_runtime_core.turns import EventPublisherSubscriber, StepResultChunk, Turn, TurnEvent, TurnManager
from agent_runtime_core.turns.events import AUDIT, RESULTS, TOPICS, TURNS, AuditEvent, EventEnvelope
from tests.unit.test_turns import SUM, House

TENANTS = (None, "a", "b")


async def _published(topics: EventPublisherSubscriber, *names: str) -> list[EventEnvelope]:
    return [each for topic in names for each in [e async for e in topics.subscribe(topic, 0, follow=False)]]


async def _all_done(house: House) -> None:
    while await house.runner.run_once():
        pass


@pytest.mark.parametrize("remote", [False, True])
async def test_turns_of_tenants_with_one_id_do_not_meet(place: Path | None, remote: bool) -> None:
    async with House(place) as house:
        manager = house.manager(remote_steps=remote)
        turns: dict[str | None, Turn] = {}
        for number, tenant in enumerate(TENANTS):
            event = {"text": f"add {number} and 30", "turn_id": "t", "conversation_id": "support-1", "user_id": "u"}
            turns[tenant] = await manager.start_turn({**event, **({"tenant": tenant} if tenant else {})})
        await _all_done(house)
        assert len({turn.id for turn in turns.values()}) == len(TENANTS)
        for number, tenant in enumerate(TENANTS):
            turn = await manager.wait("t", 0, tenant=tenant)
            assert (turn.id, turn.tenant, turn.status) == (turns[tenant].id, tenant, RunStatus.SUCCEEDED)
            assert (turn.response, len(turn.messages)) == (str(number + 30), 1)
            store = house.stores.for_tenant(tenant)
            assert len(await store.memory.list_keys()) == 1
            [conversation] = await store.conversations.list_conversations()
            messages = await store.conversations.get_messages(conversation.id)
            assert [each.content for each in messages] == [f"add {number} and 30", str(number + 30)]
        for each in await _published(manager.topics, *TOPICS):
            assert each.turn_id == turns[each.tenant].id
            assert each.to_dict().get("tenant", "none") == (each.tenant or "none")
        for topic in TOPICS:
            assert {each.tenant for each in await _published(manager.topics, topic)} == set(TENANTS)
        await manager.discard("t", tenant="a")
        with pytest.raises(UnknownRun):
            await manager.get_turn("t", tenant="a")
        assert await house.stores.for_tenant("a").memory.list_keys() == []
        assert [(await manager.get_turn("t", tenant=tenant)).tenant for tenant in (None, "b")] == [None, "b"]


async def test_a_turn_is_found_by_its_name_without_a_tenant_if_it_is_the_only_one() -> None:
    async with House() as house:
        manager = house.manager()
        first = await manager.start_turn(SUM, tenant="a")
        assert first.tenant == "a"
        await manager.start_turn({"text": SUM, "turn_id": "t", "tenant": "a"})
        assert (await manager.get_turn("t")).tenant == "a"
        again = await manager.start_turn({"text": SUM, "turn_id": "t", "tenant": "a"})
        assert again.id == (await manager.get_turn("t", tenant="a")).id
        with pytest.raises(IdempotencyConflict):
            await manager.start_turn({"text": "something else", "turn_id": "t", "tenant": "a"})
        await manager.start_turn({"text": SUM, "turn_id": "t"}, tenant="b")
        with pytest.raises(InvalidArgument, match="'a', 'b'"):
            await manager.get_turn("t")
        await manager.cancel("t", tenant="b")
        assert [(await manager.get_turn("t", tenant=each)).status.value for each in "ab"] == ["pending", "cancelled"]
        child = await manager.start_turn(SUM, parent_run_id=first.id)
        assert child.tenant == "a"
        with pytest.raises(InvalidTurn, match="tenant must be 'b'"):
            await manager.start_turn({"text": SUM, "tenant": "a"}, tenant="b")
        for wrong in ("", "a\nb", "x" * 129, 5):
            with pytest.raises(InvalidTurn, match="tenant must"):
                await manager.start_turn({"text": SUM, "tenant": wrong})
        done = await manager.run_turn({"text": SUM, "turn_id": "here", "tenant": "a"})
        assert (done.tenant, done.status) == ("a", RunStatus.SUCCEEDED)
        events = [each async for each in manager.stream("here", tenant="a")]
        assert events
        assert events[0].run_id == done.id or str(events[0].run_id) == done.id


async def test_requests_of_tenants_on_the_topic_start_a_turn_each(place: Path | None) -> None:
    async with House(place) as house:
        manager, other = house.manager(), house.manager(house.another())
        topics = manager.topics
        for _ in range(2):  # each is published twice, and started once
            for tenant in TENANTS:
                event = TurnEvent(messages=[{"role": "user", "content": SUM}], turn_id="t", tenant=tenant)
                await topics.tell(event, event_id="request")
                unnamed = TurnEvent(messages=[{"role": "user", "content": SUM}])
                await topics.publish(topics.envelope(unnamed, event_id="unnamed", tenant=tenant))
        requested = await _published(topics, TURNS)
        assert [(each.event_id, each.tenant) for each in requested] == [
            (event_id, tenant) for tenant in TENANTS for event_id in ("request", "unnamed")
        ]
        for consumer in (manager, other):
            for each in requested:
                await consumer.start_published(each)
        rows = await house.runner.runs()
        assert sorted(str(each.tenant) for each in rows) == ["None", "None", "a", "a", "b", "b"]
        assert {each.run_key for each in rows} == {None, "t", "turn:unnamed"}
        await _all_done(house)
        for each in await _published(topics, TURNS):
            await other.start_published(each)
        assert len(await house.runner.runs()) == len(rows)


async def test_a_request_that_names_another_tenant_than_its_envelope_is_refused() -> None:
    async with House() as house:
        manager = house.manager()
        event = TurnEvent(messages=[{"role": "user", "content": SUM}], tenant="b")
        envelope = await manager.topics.publish(manager.topics.envelope(event, tenant="a"))
        await manager.start_published(envelope)
        assert await house.runner.runs() == []
        [refused] = await _published(manager.topics, AUDIT)
        assert isinstance(refused.payload, AuditEvent)
        assert (refused.tenant, refused.payload.details["field"]) == ("a", "tenant")


async def test_results_are_saved_in_the_turn_of_their_tenant(place: Path | None) -> None:
    async with House(place) as house:
        manager = house.manager()
        turns = {tenant: await manager.run_turn({"text": SUM, "turn_id": "t", **_of(tenant)}) for tenant in TENANTS}
        turn = turns["a"]
        found = [each for each in await _published(manager.topics, RESULTS) if each.tenant == "a"]
        assert found
        for each in found:
            saved = await manager.handle_step_result_event(each)
            assert saved is not None
            assert (saved.id, saved.tenant) == (turn.id, "a")
        chunk = StepResultChunk(step_number=1, final=True, status="completed", result=0)
        forged = manager.topics.envelope(chunk, turn_id=turn.id, tenant="b")
        assert await manager.handle_step_result_event(forged) is None


def _of(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"tenant": tenant}


async def test_preferences_and_last_known_values_are_the_tenants() -> None:
    async with House() as house:
        contexts = house.manager().contexts
        for tenant in TENANTS:
            await house.stores.for_tenant(tenant).preferences.set("u/name", f"name of {tenant}")
            await contexts.for_tenant(tenant).preferences("u")

        async def fail(*_: Any, **__: Any) -> Any:
            raise OSError("the store is away")

        for tenant in TENANTS:
            bound = contexts.for_tenant(tenant)
            found = await bound._read("preferences:u", fail)
            assert (found.value, found.stale) == ({"name": f"name of {tenant}"}, True)
        with pytest.raises(OSError, match="away"):
            await contexts.for_tenant("c")._read("preferences:u", fail)


def test_events_without_a_tenant_are_stored_as_before() -> None:
    event = TurnEvent(messages=[{"role": "user", "content": "hi"}])
    assert "tenant" not in event.to_dict()
    assert "tenant" not in Turn("id", "trace").to_dict()
    assert list(TurnEvent(messages=event.messages, tenant="a").to_dict())[-1] == "tenant"
    assert Turn.from_dict(Turn("id", "trace", tenant="a").to_dict()).tenant == "a"


@pytest.mark.parametrize("wrong", ["", "a\x00", "x" * 129, 5])
async def test_an_envelope_of_no_tenant_is_refused(wrong: Any) -> None:
    async with House() as house:
        topics = TurnManager(house.runner).topics
        plain = topics.envelope(AuditEvent(action="a"), event_id="e").to_dict()
        with pytest.raises(InvalidTurn, match="tenant must"):
            EventEnvelope.from_dict({**plain, "tenant": wrong})
