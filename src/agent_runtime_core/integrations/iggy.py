"""The topics of turns on Apache Iggy: copy them there, and start the turns that other programs publish there.

Experimental: it was tested with the client of the package `apache-iggy` against a double of the documented REST API,
and not with a server. Iggy has no conditional append, so it is no event bus of this library: the store keeps the
topics.

async with AgentRunner.open("turns.db") as runner:
    manager = TurnManager(runner)
    relay = IggyRelay(manager.topics, "iggy+tcp://user:password@localhost:8090")
    await asyncio.gather(runner.run_loop(), relay.run())
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import NAMESPACE_URL, UUID, uuid5

from .._core.clock import Clock
from .._core.context_vars import start_soon
from .._core.lazy_import import load
from .._core.log import log
from .._core.settings import POSITIVE, POSITIVE_SECONDS
from .._core.validation import Shown, must, redacted_url
from ..config import get_config
from ..errors import InvalidTurn
from ..retry import Backoff
from ..tracing.prometheus import Sample
from ..turns.event_topics import EventPublisherSubscriber, leaving_payload
from ..turns.events import TOPICS, TURNS, AuditEvent, EventEnvelope, TurnEvent
from ..turns.manager import TurnManager

__all__ = ["IggyRelay", "IggyTurns", "IggyUnavailable"]

T = TypeVar("T")

LAG: Final = "iggy_consumer_lag"
BATCH: Final = 100  # messages that are sent or read together
GATHER_SECONDS: Final = 0.01  # how long events are gathered before they are sent
POLL_SECONDS: Final = 0.5  # between two reads of partitions without new messages
TIMEOUT: Final = 10.0  # seconds for one request
RECONNECTS: Final = 3
_SCHEMES: Final = ("iggy+tcp", "iggy+http", "iggy+https")
_BACKOFF: Final = Backoff(1.0, maximum=30.0)


class IggyUnavailable(ConnectionError):
    """The Iggy server does not answer, or rejected a request."""


class _Server:
    """The connection to an Iggy server. It is made when it is needed, and again after a failure.

    Args:
        url: Where the server is, and who logs in.
        timeout: Seconds that a request may take, with its connection.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        if parts.scheme not in _SCHEMES or not parts.hostname or parts.username is None or parts.password is None:
            shown = Shown(redacted_url(url)) if isinstance(url, str) else url
            raise must("url", f"be like iggy+tcp://user:password@localhost:8090, with {' or '.join(_SCHEMES)}", shown)
        POSITIVE_SECONDS.check("timeout", timeout)
        self._iggy = cast("ModuleType", load("apache_iggy", needed_by="the topics on Iggy"))
        self._parts, self._timeout = parts, timeout
        self._client: Any = None

    async def call(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Await `work(client)`.

        Raises:
            IggyUnavailable: It failed, or took too long.
        """
        try:
            async with asyncio.timeout(self._timeout):
                if self._client is None:
                    self._client = await self._connected()
                return await work(self._client)
        except (RuntimeError, TimeoutError) as error:
            self._client = None
            raise IggyUnavailable(f"the Iggy server does not answer as it should: {type(error).__name__}") from error

    async def _connected(self) -> Any:
        iggy, parts = cast("Any", self._iggy), self._parts
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if parts.scheme == "iggy+tcp":
            config = iggy.TcpConfig(
                server_address=f"{parts.hostname}:{parts.port or 8090}",
                auto_login=iggy.AutoLogin.username_password(user, password),
                # By default it tries for ever.
                reconnection=iggy.TcpReconnectionConfig(max_retries=RECONNECTS, interval=timedelta(seconds=1)),
                tls_enabled=parse_qs(parts.query).get("tls") == ["true"],
            )
        else:
            address = f"{parts.scheme.removeprefix('iggy+')}://{parts.hostname}:{parts.port or 3000}"
            config = iggy.HttpConfig(api_url=address, retries=0)
        client = iggy.IggyClient(config)
        await client.connect()
        await client.login_user(user, password)
        return client

    async def prepare(self, stream: str, topics: Sequence[str], partitions: int) -> None:
        """Create a stream and its topics, if they are missing. Another process may do so at the same time."""

        async def create(client: Any) -> None:
            await _ensured(lambda: client.get_stream(stream), lambda: client.create_stream(stream))
            for topic in topics:
                await _ensured(
                    lambda topic=topic: client.get_topic(stream, topic),  # type: ignore[misc]
                    lambda topic=topic: client.create_topic(stream, topic, partitions),  # type: ignore[misc]
                )

        await self.call(create)

    def message(self, data: bytes, event_id: str, headers: dict[str, str]) -> Any:
        """Return a message whose id is derived from the id of its event."""
        # The HTTP transport of the client cannot send ids of more than 64 bits.
        number = int.from_bytes(hashlib.sha256(event_id.encode()).digest()[:8], "big") or 1
        return cast("Any", self._iggy).SendMessage(data, headers, number)

    def key(self, text: str) -> Any:
        """Return what sends all messages with this key to the same partition."""
        return cast("Any", self._iggy).Partitioning.messages_key(text)

    async def poll(self, stream: str, topic: str, partition: int, offset: int, consumer: str) -> list[Any]:
        """Return at most 100 messages of a partition from an offset on."""
        iggy = cast("Any", self._iggy)
        return await self.call(
            lambda client: client.poll_messages(
                stream, topic, consumer=iggy.Consumer.Single(consumer), count=BATCH, auto_commit=False,
                polling_strategy=iggy.PollingStrategy.Offset(offset), partition_id=partition,
            )
        )  # fmt: skip


async def _ensured(find: Callable[[], Awaitable[Any]], create: Callable[[], Awaitable[Any]]) -> None:
    if await find() is not None:
        return
    try:
        await create()
    except RuntimeError:
        if await find() is None:
            raise


class IggyRelay:
    """Copies the topics of turns to Apache Iggy, in order and at least once.

    Each event is a message: its payload is the JSON of the envelope, its id is derived from the event id, and its
    headers are `event_id` and `type`. All events of a turn are in one partition. What was copied is stored as the
    offset of a consumer of the topics, after the server confirmed it.

    Args:
        topics: `TurnManager.topics`.
        url: `iggy+tcp://user:password@host:8090`, with `?tls=true` for TLS, or `iggy+http://…` and `iggy+https://…`.
        stream: The stream on Iggy. It is created if it is missing, and so are its topics.
        consumer: The name of the consumer. Two relays with the same name would both copy everything.
        partitions: Partitions of a topic that is created.
        timeout: Seconds for a request.

    Raises:
        InvalidArgument: An argument is invalid.
        MissingDependency: apache-iggy is not installed.
    """

    def __init__(
        self, topics: EventPublisherSubscriber, url: str, *, stream: str = "agents", consumer: str = "iggy",
        partitions: int = 4, timeout: float = TIMEOUT,
    ) -> None:  # fmt: skip
        POSITIVE.check("partitions", partitions)
        self._topics, self._server = topics, _Server(url, timeout)
        self._stream, self._consumer, self._partitions = stream, consumer, partitions
        self._redaction = get_config().redaction()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Copy until `stop` is set or the caller is cancelled. A server that does not answer is tried again."""
        async with asyncio.TaskGroup() as group:
            for topic in TOPICS:
                group.create_task(_repeated(lambda topic=topic: self._copy(topic, stop), self._topics.clock, stop))  # type: ignore[misc]

    async def lag(self) -> dict[str, int]:
        """Return how many events of each topic were not copied yet."""
        return {
            topic: await self._topics.head(topic) - await self._topics.offset(topic, self._consumer) for topic in TOPICS
        }

    async def samples(self) -> list[Sample]:
        """Return the lag for `PrometheusSink.add_source("iggy relay", relay.samples)`: `iggy_consumer_lag`."""
        return [Sample(LAG, (topic, self._consumer), lag) for topic, lag in (await self.lag()).items()]

    async def _copy(self, topic: str, stop: asyncio.Event | None) -> None:
        await self._server.prepare(self._stream, [topic], self._partitions)
        events = self._topics.subscribe(topic, consumer=self._consumer)
        async with contextlib.aclosing(_batches(events, stop)) as batches:
            async for batch in batches:
                await self._send(topic, batch)

    async def _send(self, topic: str, batch: Sequence[EventEnvelope]) -> None:
        by_turn: dict[str, list[Any]] = {}
        for each in batch:
            plain = each.to_dict()
            if self._redaction is not None:
                plain["payload"] = leaving_payload(self._redaction, plain["payload"])
            data = json.dumps(plain, separators=(",", ":")).encode()
            message = self._server.message(data, each.stored_id, {"event_id": each.event_id, "type": each.type})
            by_turn.setdefault(each.turn_id or each.stored_id, []).append(message)
        for turn, messages in by_turn.items():
            key = self._server.key(turn[:255])
            await self._server.call(
                lambda client, key=key, messages=messages: client.send_messages(self._stream, topic, key, messages)  # type: ignore[misc]
            )
        assert batch[-1].offset is not None
        await self._topics.commit(topic, self._consumer, batch[-1].offset)


class IggyTurns:
    """Starts the turns that other programs publish on the topic `agent.turns` of Apache Iggy.

    A message is the JSON of an envelope, or of a turn such as `{"text": "…", "turn_id": "…"}`. The same `turn_id` is
    one turn; a message without it is one turn by its place. A message that is no turn is reported on `agent.audit`. The
    offsets are kept in the store of the runner, after the turns of a read are stored.

    Args:
        manager: Starts the turns.
        url: As for `IggyRelay`.
        stream: The stream on Iggy.
        consumer: The name that the offsets are stored under. One process may read with it at a time.
        timeout: Seconds for a request.

    Raises:
        InvalidArgument: An argument is invalid.
        MissingDependency: apache-iggy is not installed.
    """

    def __init__(
        self, manager: TurnManager, url: str, *, stream: str = "agents", consumer: str = "turns",
        timeout: float = TIMEOUT,
    ) -> None:  # fmt: skip
        self._manager, self._server = manager, _Server(url, timeout)
        self._stream, self._consumer = stream, consumer

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Start turns until `stop` is set or the caller is cancelled. A server that does not answer is tried again."""
        await _repeated(lambda: self._read(stop), self._manager.topics.clock, stop)

    async def lag(self) -> int:
        """Return how many messages of the topic were not read yet."""
        topic = await self._server.call(lambda client: client.get_topic(self._stream, TURNS))
        if topic is None:
            return 0
        found = 0
        for partition in topic.partitions:
            if partition.messages_count:
                found += max(partition.current_offset + 1 - await self._offset(partition.id), 0)
        return found

    async def samples(self) -> list[Sample]:
        """Return the lag for `PrometheusSink.add_source("iggy turns", turns.samples)`: `iggy_consumer_lag`."""
        return [Sample(LAG, (TURNS, self._consumer), await self.lag())]

    async def _read(self, stop: asyncio.Event | None) -> None:
        clock = self._manager.topics.clock
        await self._server.prepare(self._stream, [TURNS], 1)
        topic: Any = await self._server.call(lambda client: client.get_topic(self._stream, TURNS))
        while stop is None or not stop.is_set():
            counts = [await self._read_partition(number) for number in range(topic.partitions_count)]
            if not any(counts):
                await _sleep(clock, POLL_SECONDS, stop)

    async def _read_partition(self, partition: int) -> int:
        offset = await self._offset(partition)
        messages = await self._server.poll(self._stream, TURNS, partition, offset, self._consumer)
        for message in messages:
            await self._start(partition, message.offset(), bytes(message.payload()))
        if messages:
            checkpoint = {"offset": messages[-1].offset() + 1}
            await self._manager.runner.state_store.save_checkpoint(self._place(partition), checkpoint)
        return len(messages)

    async def _start(self, partition: int, offset: int, payload: bytes) -> None:
        topics, place = self._manager.topics, f"iggy:{self._stream}:{partition}:{offset}"
        try:
            envelope = _envelope_of(topics, payload, place)
        except (InvalidTurn, ValueError) as error:
            log.warning("message %d of partition %d on Iggy is no turn: %s", offset, partition, type(error).__name__)
            details = {"place": place, "error": str(error), "field": getattr(error, "field", None)}
            await topics.tell(AuditEvent(action="turn.refused", details=details), event_id=f"refused:{place}")
            return
        await self._manager.start_published(envelope)

    async def _offset(self, partition: int) -> int:
        stored = await self._manager.runner.state_store.get_checkpoint(self._place(partition))
        return 0 if stored is None else int(stored["offset"])

    def _place(self, partition: int) -> UUID:
        return uuid5(NAMESPACE_URL, f"iggy:{self._stream}/{TURNS}/{partition}/{self._consumer}")


def _envelope_of(topics: EventPublisherSubscriber, payload: bytes, place: str) -> EventEnvelope:
    data = json.loads(payload)
    if isinstance(data, dict) and "topic" in data:
        envelope = EventEnvelope.from_dict(data)
        if not isinstance(envelope.payload, TurnEvent):
            raise InvalidTurn("type", f"must be {TurnEvent.type}, got {envelope.type}")
        return envelope
    turn = TurnEvent.of(data)
    return topics.envelope(turn, event_id=place, turn_id=turn.turn_id)


async def _repeated(work: Callable[[], Awaitable[None]], clock: Clock, stop: asyncio.Event | None) -> None:
    """Await `work()`, again after each failure of the server."""
    failures = 0
    while stop is None or not stop.is_set():
        try:
            await work()
        except IggyUnavailable as error:
            failures += 1
            if failures == 1:
                log.warning("%s. It is tried again", error)
            await _sleep(clock, _BACKOFF(min(failures, 10), clock.random), stop)
        else:
            return


async def _batches(
    events: AsyncIterator[EventEnvelope], stop: asyncio.Event | None
) -> AsyncGenerator[list[EventEnvelope], None]:
    """Yield events in batches of what arrives within 10 ms, until `stop` is set."""
    stopping: asyncio.Future[Any] | None = None if stop is None else start_soon(stop.wait())
    coming: asyncio.Future[Any] = start_soon(anext(events))
    try:
        while True:
            await asyncio.wait(
                {coming} if stopping is None else {coming, stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            if not coming.done():
                return
            batch = list[EventEnvelope]()
            while coming.done() and len(batch) < BATCH:
                batch.append(coming.result())
                coming = start_soon(anext(events))
                await asyncio.wait({coming}, timeout=GATHER_SECONDS)
            yield batch
            if stop is not None and stop.is_set():
                return
    finally:
        for each in (coming, stopping):
            if each is not None and not each.done():
                each.cancel()
                await asyncio.wait({each})
        await cast("Any", events).aclose()


async def _sleep(clock: Clock, seconds: float, stop: asyncio.Event | None) -> None:
    """Sleep, at most until `stop` is set."""
    ends = {start_soon(clock.sleep(seconds))} | (set() if stop is None else {start_soon(stop.wait())})
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in ends:
            each.cancel()
