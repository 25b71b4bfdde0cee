"""The topics of turns on the event bus: once for each id, from any place, at least once for each consumer."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._core.clock import aware
from agent_runtime_core.errors import InvalidArgument, InvalidTurn, StorageBusy
from agent_runtime_core.interfaces import TraceSink
from agent_runtime_core.tracing.tracer import Tracer
from agent_runtime_core.turns import AuditEvent, EventPublisherSubscriber, StepResultChunk
from agent_runtime_core.turns.events import AUDIT, RESULTS, TURNS
from tests.support.runs import Rig
from tests.unit.test_turns import House


def _topics(rig: Rig, **options: Any) -> EventPublisherSubscriber:
    runner = rig.another()
    return EventPublisherSubscriber(runner.event_bus, runner.state_store, **options)


async def _some(events: AsyncIterator[Any], count: int) -> list[Any]:
    return [await anext(events) for _ in range(count)]


@pytest.mark.sentence("001", "EventPublisherSubscriber: idempotent writes via `step_id` keys")
async def test_the_same_event_is_published_once(place: Path | None) -> None:
    async with Rig(place) as rig:
        one, other = _topics(rig), _topics(rig)
        chunk = StepResultChunk(step_number=1, final=True, status="completed", result=7)
        first = await one.tell(chunk, event_id="STEP:result", step_id="STEP")
        again = await other.tell(chunk, event_id="STEP:result", step_id="STEP")
        await one.tell(chunk, event_id="OTHER:result", step_id="OTHER")
        assert first.offset == again.offset == 0
        there = [each async for each in one.subscribe(RESULTS, 0, follow=False)]
        assert [each.step_id for each in there] == ["STEP", "OTHER"]
        assert there[0] == first
        assert [each.offset async for each in one.subscribe(RESULTS, 1, follow=False)] == [1]


async def test_what_is_no_event_and_no_place_is_refused() -> None:
    async with Rig() as rig:
        topics = _topics(rig)
        for wrong in (None, {"topic": AUDIT}, AuditEvent(action="a")):
            envelope: Any = wrong
            with pytest.raises(InvalidTurn, match="envelope must be an EventEnvelope"):
                await topics.publish(envelope)
        for place in (-1, True, 1.5, "0", None):
            offset: Any = place
            with pytest.raises(InvalidArgument, match="offset must be"):
                await topics.commit(AUDIT, "c", offset)
        assert await topics.offset(AUDIT, "c") == 0


@pytest.mark.sentence(
    "001",
    "EventPublisherSubscriber: publishes all internal events and subscribes to results with at-least-once semantics",
)
async def test_a_follower_replays_and_then_goes_on(place: Path | None) -> None:
    async with Rig(place) as rig:
        topics, elsewhere = _topics(rig), _topics(rig)
        await topics.tell(AuditEvent(action="a"))
        following = topics.subscribe(AUDIT, 0)
        assert (await anext(following)).payload == AuditEvent(action="a")
        coming = asyncio.ensure_future(anext(following))
        await elsewhere.tell(AuditEvent(action="b"))
        assert (await coming).payload == AuditEvent(action="b")
        assert (await coming).offset == 1
        await following.aclose()


@pytest.mark.sentence(
    "001",
    "EventPublisherSubscriber: publishes all internal events and subscribes to results with at-least-once semantics",
)
async def test_a_consumer_goes_on_behind_its_last_commit_in_another_process(place: Path | None) -> None:
    async with Rig(place) as rig:
        topics, elsewhere = _topics(rig), _topics(rig)
        for name in "abcd":
            await topics.tell(AuditEvent(action=name))
        first = topics.subscribe(AUDIT, consumer="me")
        seen = await _some(first, 3)
        await topics.commit(AUDIT, "me", seen[1].offset)
        await first.aclose()
        again = elsewhere.subscribe(AUDIT, consumer="me")
        # The third was read and not committed: it comes once more.
        assert [each.payload.action for each in await _some(again, 2)] == ["c", "d"]
        await again.aclose()
        assert (await elsewhere.stats())[AUDIT].lag == {"me": 2}


async def test_what_is_no_envelope_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig:
        topics = _topics(rig)
        await topics.tell(AuditEvent(action="a"))
        await rig.runner.event_bus.publish(topics._log(AUDIT), "audit", {"who": "knows"})
        await topics.tell(AuditEvent(action="b"))
        there = [each async for each in topics.subscribe(AUDIT, 0, follow=False)]
        assert [(each.payload, each.offset) for each in there] == [
            (AuditEvent(action="a"), 0),
            (AuditEvent(action="b"), 2),
        ]
        assert "event 1 of topic agent.audit is invalid and is skipped" in caplog.text
        assert (await topics.stats())[AUDIT].errors == 1


async def test_counters_are_readable_and_reach_the_trace_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    class Sink(TraceSink):
        def log_event(self, run_id: Any, event_type: str, payload: dict[str, Any]) -> None:
            told.append({"type": event_type, **payload})

    async with Rig() as rig:
        tracer = Tracer([Sink()])
        topics = _topics(rig, tracer=tracer)
        steps = iter([1.0, 2.0, 10.0])
        commit = topics._bus.commit

        async def slow(*args: Any, **options: Any) -> Any:
            rig.clock.advance(next(steps) / 1000)  # type: ignore[attr-defined]
            return await commit(*args, **options)

        monkeypatch.setattr(topics._bus, "commit", slow)
        for name in "abc":
            await topics.tell(AuditEvent(action=name))

        async def away(*args: Any, **options: Any) -> Any:
            raise StorageBusy("no answer")

        monkeypatch.setattr(topics._bus, "commit", away)
        with pytest.raises(StorageBusy):
            await topics.tell(AuditEvent(action="d"))
        stats = (await topics.stats())[AUDIT]
        assert (stats.published, stats.errors) == (3, 1)
        assert [stats.p50_ms, stats.p95_ms, stats.max_ms] == pytest.approx([2.0, 10.0, 10.0])
        assert (await topics.stats())[TURNS].p50_ms is None
        tracer.close()
    assert [each["published"] for each in told] == [1, 2, 3, 3]
    assert told[-1] == {"type": "topic.published", "topic": AUDIT, "latency_ms": None, "published": 3, "errors": 1}


async def test_a_topic_that_is_not_there_is_refused() -> None:
    async with Rig() as rig:
        topics = _topics(rig)
        with pytest.raises(InvalidArgument, match=r"agent\.nothing"):
            await topics.offset("agent.nothing", "me")
        with pytest.raises(InvalidTurn, match="step_id"):
            await topics.tell(AuditEvent(action="a"), step_id="x" * 300)


async def test_events_of_several_topics_are_published_together(place: Path | None) -> None:
    async with Rig(place) as rig:
        topics = _topics(rig)
        chunk, audit = StepResultChunk(step_number=1), AuditEvent(action="a")
        told = [topics.envelope(each, event_id=name) for name in "ab" for each in (chunk, audit)]
        made = await topics.publish_all([*told, told[0]])
        assert [(each.topic, each.offset) for each in made] == [
            (RESULTS, 0), (AUDIT, 0), (RESULTS, 1), (AUDIT, 1), (RESULTS, 0),
        ]  # fmt: skip
        assert await topics.publish_all([]) == []


async def _offsets(topics: EventPublisherSubscriber, topic: str = AUDIT) -> list[int | None]:
    return [each.offset async for each in topics.subscribe(topic, 0, follow=False)]


async def test_old_events_are_trimmed_and_offsets_go_on(place: Path | None) -> None:
    async with Rig(place) as rig:
        topics = _topics(rig)
        for number in range(10):
            await topics.tell(AuditEvent(action=f"a{number}"))
            rig.clock.advance(10)  # type: ignore[attr-defined]
        await topics.tell(StepResultChunk(step_number=1))
        now = rig.clock.wall()
        assert await topics.trim(AUDIT, before=now - 65) == 4
        assert await _offsets(topics) == [4, 5, 6, 7, 8, 9]
        assert await topics.trim(AUDIT, before=aware(now - 45)) == 2
        assert await topics.trim(keep=3) == 1
        assert await _offsets(topics) == [7, 8, 9]
        assert await _offsets(topics, RESULTS) == [0]
        assert await topics.trim(AUDIT, before=now + 1) == 2
        assert await topics.trim(AUDIT, keep=0) == 0
        assert (await topics.tell(AuditEvent(action="next"))).offset == 10
        assert await _offsets(_topics(rig)) == [9, 10]
        assert await topics.trim(TURNS, keep=0) == 0


async def test_many_events_are_trimmed_in_several_commits() -> None:
    async with Rig() as rig:
        topics = _topics(rig)
        await topics.publish_all([topics.envelope(AuditEvent(action="a")) for _ in range(2500)])
        assert await topics.trim(keep=10) == 2490
        assert await _offsets(topics) == [*range(2490, 2500)]


async def test_a_consumer_whose_place_is_gone_goes_on_at_the_first_event_there_is(place: Path | None) -> None:
    async with Rig(place) as rig:
        topics = _topics(rig)
        for name in "abcdef":
            await topics.tell(AuditEvent(action=name))
        await topics.commit(AUDIT, "me", 0)
        assert await topics.trim(keep=2) == 4
        assert (await topics.stats())[AUDIT].lag == {"me": 2}
        following = topics.subscribe(AUDIT, consumer="me")
        assert [each.offset for each in await _some(following, 2)] == [4, 5]
        await following.aclose()


@pytest.mark.parametrize("options", [{}, {"before": 1.0, "keep": 1}, {"keep": -1}, {"keep": True}, {"keep": 1.5}])
async def test_what_to_trim_is_said_in_one_way(options: dict[str, Any]) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match="keep"):
            await _topics(rig).trim(**options)


@pytest.mark.parametrize("before", [float("nan"), float("inf"), 1e18, True, "today", dt.datetime(2026, 1, 2)])  # noqa: DTZ001
async def test_a_time_that_is_none_is_refused_by_name(before: Any) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match="before must be"):
            await _topics(rig).trim(before=before)


@pytest.mark.sentence("001", "`EventPublisherSubscriber` surfaces per-topic latency and error metrics")
async def test_a_sink_that_is_added_later_counts_in_each_process_that_executes_turns(place: Path | None) -> None:
    seen = list[tuple[str, dict[str, Any]]]()

    class Sink(TraceSink):
        def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
            seen.append((event_type, payload))

    async with House(place) as house:
        manager = house.manager()
        asking = house.manager(house.another())
        await manager.topics.tell(AuditEvent(action="before"))
        house.runner.add_trace_sink(Sink())  # as `agent-runtime worker --metrics-port` does
        await asking.start_turn({"text": "add 12 and 30", "turn_id": "t"})
        await house.runner.run_once()
        tracer = manager.topics.tracer
        assert tracer is not None
        assert tracer is house.runner.tracer
        await asyncio.to_thread(tracer.close)
        assert asking.topics.tracer is None
    published = {payload["topic"] for kind, payload in seen if kind == "topic.published"}
    assert published == {TURNS, AUDIT, RESULTS, "agent.steps"}
