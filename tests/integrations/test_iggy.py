"""Turns on Apache Iggy: the real client against a double of the documented REST API, and against a server.

The second needs a server of the version of the client: IGGY_URL=iggy+tcp://user:password@host:8090, or iggy+http://….
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.tracing import PrometheusSink
from agent_runtime_core.turns import EventEnvelope, EventPublisherSubscriber, TurnEvent, TurnManager

pytest.importorskip("apache_iggy")

import apache_iggy

from agent_runtime_core.integrations.iggy import IggyRelay, IggyTurns, _Server
from tests.support.iggy_server import IggyDouble

TURNS, STEPS, AUDIT = "agent.turns", "agent.steps", "agent.audit"


class Place:
    """A server: a double, or a real one."""

    def __init__(self, url: str, stream: str, double: IggyDouble | None = None) -> None:
        self.url, self.stream, self.double = url, stream, double
        self._server = _Server(url, 10)

    async def parts(self, topic: str) -> list[list[Any]]:
        """The messages of each partition of a topic."""
        found: Any = await self._server.call(lambda client: client.get_topic(self.stream, topic))
        count = 0 if found is None else found.partitions_count
        return [await self._part(topic, number) for number in range(count)]

    async def _part(self, topic: str, number: int) -> list[Any]:
        messages: list[Any] = []
        while more := await self._server.poll(self.stream, topic, number, len(messages), "reader"):
            messages += more
        return messages

    async def copied(self, topic: str) -> list[dict[str, Any]]:
        return [json.loads(each.payload()) for part in await self.parts(topic) for each in part]

    async def publish(self, *payloads: bytes, key: str = "a") -> None:
        """Publish messages on agent.turns, as another program does."""
        await self._server.prepare(self.stream, [TURNS], 2)
        messages = [apache_iggy.SendMessage(each) for each in payloads]
        partition = self._server.key(key)
        await self._server.call(lambda client: client.send_messages(self.stream, TURNS, partition, messages))


@pytest.fixture
def double() -> Iterator[IggyDouble]:
    with IggyDouble() as server:
        yield server


@pytest.fixture(params=["double", "server"])
def place(request: pytest.FixtureRequest) -> Place:
    """A server with a stream of its own; a real one, of the version of the client, if IGGY_URL names it."""
    stream = f"test-{uuid4().hex[:12]}"
    if request.param == "double":
        double = request.getfixturevalue("double")
        return Place(double.url, stream, double)
    if "IGGY_URL" not in os.environ:
        pytest.skip("needs a server: IGGY_URL=iggy+tcp://user:password@host:port")
    return Place(os.environ["IGGY_URL"], stream)


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    return AgentRunner.open(tmp_path / "turns.db", registry=Registry())


async def eventually(true: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    for _ in range(6000):
        found = true()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 60 s: {what}")


@contextlib.asynccontextmanager
async def running(part: IggyRelay | IggyTurns) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(part.run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


def stored(double: IggyDouble) -> list[dict[str, Any]]:
    """What the double has, without a request."""
    topic = double.streams.get("agents", {}).get(TURNS)
    return [] if topic is None else [each for part in topic.payloads for each in part]


async def has_copied(place: Place, topic: str, count: int) -> bool:
    return len(await place.copied(topic)) >= count


async def test_the_events_of_a_turn_are_copied_in_order(place: Place, runner: AgentRunner) -> None:
    manager = TurnManager(runner)
    relay = IggyRelay(manager.topics, place.url, stream=place.stream)
    async with running(relay):
        for number in range(3):
            await manager.run_turn({"text": f"add {number} and 1", "turn_id": f"t-{number}"})

        async def done() -> bool:
            return not any((await relay.lag()).values())

        await eventually(done, "everything is copied")
    for topic in (TURNS, STEPS, "agent.step_results", AUDIT):
        own = [each.to_dict() async for each in manager.topics.subscribe(topic, 0, follow=False)]
        parts = [[json.loads(each.payload()) for each in part] for part in await place.parts(topic)]
        assert sorted((each for part in parts for each in part), key=str) == sorted(own, key=str)
        for turn in {each["turn_id"] for each in own}:
            of_turn = [[each for each in part if each["turn_id"] == turn] for part in parts]
            # In one partition, in the order of the topic.
            assert [part for part in of_turn if part] == [[each for each in own if each["turn_id"] == turn]]


async def test_a_message_has_the_id_and_the_headers_of_its_event(place: Place, runner: AgentRunner) -> None:
    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    await topics.tell(TurnEvent.of("hello"), event_id="event-1", turn_id="t")
    async with running(IggyRelay(topics, place.url, stream=place.stream)):
        await eventually(lambda: has_copied(place, TURNS, 1), "it is copied")
    [message] = [each for part in await place.parts(TURNS) for each in part]
    assert 0 < message.id() < 2**64
    assert message.user_headers().to_scalar_dict() == {"event_id": "event-1", "type": "turn.requested"}


@pytest.mark.parametrize("fault", ["rejects", "loses", "delays", "down"])
async def test_nothing_is_lost_while_the_server_fails(double: IggyDouble, runner: AgentRunner, fault: str) -> None:
    place = Place(double.url, "agents", double)
    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    url = double.url
    if fault == "down":
        url = url.rpartition(":")[0] + ":1"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(IggyRelay(topics, url, timeout=0.5).run(), 1)
    elif fault == "delays":
        double.delays = (2, 0.5)
    else:
        setattr(double, fault, 2)
    expected = []
    for number in range(5):
        expected.append(f"event-{number}")
        await topics.tell(TurnEvent.of("hello"), event_id=expected[-1], turn_id="t")
    relay = IggyRelay(topics, double.url, timeout=0.3 if fault == "delays" else 5)
    async with running(relay):

        async def all_copied() -> bool:
            return {each["event_id"] for each in stored(double)} == {*expected}

        await eventually(all_copied, "all are copied")
    ids = [each["event_id"] for each in await place.copied(TURNS)]
    # At least once, and each repetition begins with an event that was sent before.
    assert ids[-5:] == expected
    if fault in ("rejects", "down"):
        assert ids == expected


async def test_a_relay_that_starts_again_continues_after_what_was_confirmed(place: Place, runner: AgentRunner) -> None:
    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    for number in range(2):
        await topics.tell(TurnEvent.of("hello"), event_id=f"event-{number}", turn_id="t")
        async with running(IggyRelay(topics, place.url, stream=place.stream)):
            await eventually(lambda number=number: has_copied(place, TURNS, number + 1), "it is copied")  # type: ignore[misc]
    assert [each["event_id"] for each in await place.copied(TURNS)] == ["event-0", "event-1"]


async def test_turns_that_other_programs_publish_are_started_once(place: Place, runner: AgentRunner) -> None:
    manager = TurnManager(runner)
    for key in ("a", "b"):
        await place.publish(b'{"text": "add 2 and 3", "turn_id": "t-1"}', key=key)
    await place.publish(b'{"text": "add 4 and 5"}')
    turns = IggyTurns(manager, place.url, stream=place.stream)
    assert await turns.lag() == 3
    async with running(turns):

        async def read() -> bool:
            return await turns.lag() == 0

        await eventually(read, "all are read")
    async with running(IggyTurns(manager, place.url, stream=place.stream)):  # which continues after them
        await asyncio.sleep(0.05)
    while await runner.run_once():
        pass
    assert (await manager.wait("t-1")).response == "5"
    answers = [(await manager.get_turn(run.run_id)).response for run in await runner.runs()]
    assert sorted(map(str, answers)) == ["5", "9"]


async def test_a_message_that_is_no_turn_is_reported_and_the_next_one_is_started(
    place: Place, runner: AgentRunner
) -> None:
    manager = TurnManager(runner)
    await place.publish(
        b"\xff", b"[1]", b'{"text": ""}', b'{"user": 1}', b'{"topic": "agent.audit"}',
        b'{"text": "add 1 and 1", "turn_id": "good"}',
    )  # fmt: skip
    turns = IggyTurns(manager, place.url, stream=place.stream)
    async with running(turns):

        async def read() -> bool:
            return await turns.lag() == 0

        await eventually(read, "all are read")
    audit = [each.payload async for each in manager.topics.subscribe(AUDIT, 0, follow=False)]
    assert [each.action for each in audit if hasattr(each, "action")] == ["turn.refused"] * 5
    await runner.run_once()
    assert (await manager.wait("good")).response == "2"


async def test_what_a_relay_has_copied_starts_no_turn_again(place: Place, runner: AgentRunner) -> None:
    manager = TurnManager(runner)
    relay = IggyRelay(manager.topics, place.url, stream=place.stream)
    turns = IggyTurns(manager, place.url, stream=place.stream)
    async with running(relay), running(turns):
        await manager.run_turn({"text": "add 1 and 2", "turn_id": "t"})

        async def read() -> bool:
            return not any((await relay.lag()).values()) and await turns.lag() == 0

        await eventually(read, "all is copied and read")
    assert len(await runner.runs()) == 1


@pytest.mark.parametrize(
    "url", ["localhost:8090", "iggy+tcp://localhost", "iggy+udp://a:b@localhost", "iggy+tcp://a@localhost", 5]
)
async def test_a_wrong_url_is_rejected_without_its_password(runner: AgentRunner, url: Any) -> None:
    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    with pytest.raises(InvalidArgument, match=r"url must be like iggy\+tcp://") as caught:
        IggyRelay(topics, url)
    assert "a:b" not in str(caught.value)


async def test_a_stream_that_two_processes_create_at_once_is_created_once(
    double: IggyDouble, runner: AgentRunner, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [_Server(double.url, 10) for _ in range(4)]
    await asyncio.gather(*(each.prepare("agents", [TURNS, STEPS], 2) for each in servers))
    assert {*double.streams["agents"]} == {TURNS, STEPS}
    assert caplog.records == []


async def test_a_wrong_password_is_no_end_of_the_program(
    double: IggyDouble, runner: AgentRunner, caplog: pytest.LogCaptureFixture
) -> None:
    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    relay = IggyRelay(topics, double.url.replace("iggy:iggy@", "iggy:canary-7c41@"))
    async with running(relay):
        await eventually(lambda: "does not answer as it should" in caplog.text, "it is logged")
    assert "canary" not in caplog.text


async def test_the_lag_is_a_metric(place: Place, runner: AgentRunner) -> None:
    pytest.importorskip("prometheus_client")
    manager, metrics = TurnManager(runner), PrometheusSink()
    await place.publish(b'{"text": "add 1 and 1"}')
    relay = IggyRelay(manager.topics, place.url, stream=place.stream)
    turns = IggyTurns(manager, place.url, stream=place.stream)
    await manager.topics.tell(TurnEvent.of("hello"), turn_id="t")
    metrics.add_source("iggy relay", relay.samples)
    metrics.add_source("iggy turns", turns.samples)
    text = (await metrics.exposition())[0].decode()
    assert 'iggy_consumer_lag{consumer="iggy",topic="agent.turns"} 1.0' in text
    assert 'iggy_consumer_lag{consumer="turns",topic="agent.turns"} 1.0' in text
    assert "agent_runtime_iggy" not in text


@pytest.mark.parametrize("hook_fails", [False, True])
async def test_contents_are_redacted_before_they_leave(
    double: IggyDouble, runner: AgentRunner, hook_fails: bool
) -> None:
    def redact(kind: str, value: Any) -> Any:
        if hook_fails:
            raise RuntimeError(value)
        return json.loads(json.dumps(value).replace("canary", "[redacted]"))

    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    configure(redact=redact)
    try:
        relay = IggyRelay(topics, double.url)
    finally:
        reset_config()
    asked = {"text": "the canary sings", "turn_id": "t", "metadata": {"note": "canary"}}
    await topics.tell(TurnEvent.of(asked), event_id="event-1", turn_id="t")
    async with running(relay):
        await eventually(lambda: bool(stored(double)), "it is copied")
    [copied] = stored(double)
    assert (copied["event_id"], copied["turn_id"], copied["payload"]["turn_id"]) == ("event-1", "t", "t")
    said, note = ("[left out]", {}) if hook_fails else ("the [redacted] sings", {"note": "[redacted]"})
    assert copied["payload"]["messages"] == [{"role": "user", "content": said}]
    assert copied["payload"]["metadata"] == note
    EventEnvelope.from_dict(copied)
