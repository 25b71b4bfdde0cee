"""The event stream of turns: four topics, each stored as one log of the event bus."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as _dt
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID, uuid5

from .._core.clock import Clock, aware
from .._core.context_vars import start_soon
from .._core.ids import new_ulid
from .._core.log import log
from .._core.redaction import LEFT_OUT, Kind, Redaction
from .._core.settings import COUNT
from .._core.validation import Shown, must, unknown
from .._engines.base import Op
from ..errors import InvalidArgument, InvalidTurn, RedactionFailed, brief
from ..events.base import TRIM, EventBus
from ..events.event import TOPICS, Event, topic_log
from ..state.base import StateStore
from ..tracing.tracer import Tracer
from .events import EventEnvelope, Payload, TurnEvent, invalid

_KINDS: Final[Mapping[str, Kind]] = {
    "delta": "result", "details": "event", "error": "error", "messages": "message", "metadata": "input",
    "params": "input", "prompt": "message", "reasoning": "message", "result": "result", "system_prompt": "message",
    "tool_input": "input",
}  # fmt: skip


def leaving_payload(redaction: Redaction, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payload that may leave the process. Where the hook fails, contents are left out."""

    def redacted(kind: Kind, value: Any) -> Any:
        otherwise = _without_contents(value)
        found = redaction.for_sink(kind, value, otherwise)
        return found if _has_form_of(value, found) else otherwise

    return _redacted(redacted, payload)


def stored_payload(redaction: Redaction, payload: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the payload that may be stored.

    Raises:
        RedactionFailed: The hook failed, or returned a value that the payload cannot have.
    """

    def redacted(kind: Kind, value: Any) -> Any:
        found = redaction.stored_value(kind, value, owner)
        if not _has_form_of(value, found):
            raise RedactionFailed(kind, owner, "returned a value of another type")
        return found

    return _redacted(redacted, payload)


def _redacted(redact: Callable[[Kind, Any], Any], payload: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(payload)
    for name, kind in _KINDS.items():
        value = payload.get(name)
        if not value:
            continue
        found[name] = [redact(kind, each) for each in value] if name == "messages" else redact(kind, value)
    return found


def _without_contents(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return LEFT_OUT
    return {"role": value["role"], "content": LEFT_OUT} if "role" in value and "content" in value else {}


def _has_form_of(value: Any, found: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(found, Mapping) and value.get("role") == found.get("role")
    return not isinstance(value, str) or isinstance(found, str)


_TRIM_BATCH = 1000  # events deleted in one commit
_LATENCIES = 1024  # last latencies of a topic, for percentiles


@dataclass
class _Counters:
    published: int = 0
    errors: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))


@dataclass(frozen=True)
class TopicStats:
    """Counters of one topic in this process. Latencies are in milliseconds, None before the first event.

    `lag` contains the number of uncommitted events for each consumer name used in this process.

    Attributes:
        published: The number of published events.
        errors: The number of commits that failed, and of events that are no valid envelopes.
        p50_ms: The median of the last latencies, in milliseconds.
        p95_ms: The 95th percentile of the last latencies, in milliseconds.
        max_ms: The longest of the last latencies, in milliseconds.
        lag: The number of uncommitted events for each consumer name used in this process.
    """

    published: int
    errors: int
    p50_ms: float | None
    p95_ms: float | None
    max_ms: float | None
    lag: Mapping[str, int]


class EventPublisherSubscriber:
    """Publishes and reads the topics agent.turns, agent.steps, agent.step_results and agent.audit.

    1. An event is published once for each tenant and event id. It is durable when `publish` returns.
    2. A subscriber gets every event from its start offset on, in order, at least once.
    3. `commit` stores the offset of a consumer under its name in the state store.

    Args:
        bus: Stores the topics.
        state: Stores the offsets of consumers.
        tracer: Receives the latency and the errors of each commit: a tracer, or a function that returns the present
            one, such as `lambda: runner.tracer`.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core.events import InMemoryEventBus
        >>> from agent_runtime_core.state import InMemoryStateStore
        >>> from agent_runtime_core.turns import AuditEvent, EventPublisherSubscriber
        >>> async def main():
        ...     topics = EventPublisherSubscriber(InMemoryEventBus(), InMemoryStateStore())
        ...     published = await topics.tell(AuditEvent(action="export"))
        ...     return published.topic, published.offset
        >>> asyncio.run(main())
        ('agent.audit', 0)
    """

    def __init__(
        self, bus: EventBus, state: StateStore, *, tracer: Tracer | Callable[[], Tracer | None] | None = None
    ) -> None:
        self._bus, self._state = bus, state
        self._tracer = tracer
        self.clock: Clock = bus.clock
        self._counters = {topic: _Counters() for topic in TOPICS}
        self._consumers: dict[str, set[str]] = {topic: set() for topic in TOPICS}

    @property
    def tracer(self) -> Tracer | None:
        """What receives the latency and the errors of each commit."""
        return self._tracer() if callable(self._tracer) else self._tracer

    # -- publishing

    def envelope(
        self, payload: Payload, *, event_id: str | None = None, trace_id: str | None = None,
        turn_id: str | None = None, step_id: str | None = None, tenant: str | None = None,
    ) -> EventEnvelope:  # fmt: skip
        """Return an event for the payload, with the present time.

        Without `event_id` it gets a new id. Without `tenant` it gets the tenant of the payload, if that is a turn.

        Args:
            payload: The payload.
            event_id: The id of the event; events of the same tenant with the same id are published once.
            trace_id: The trace of the turn.
            turn_id: The turn that the event is about.
            step_id: The step that the event is about.
            tenant: The tenant of the turn.
        """
        return EventEnvelope(
            topic=payload.topic, event_id=event_id or new_ulid(self.clock), type=payload.type, payload=payload,
            timestamp=aware(self.clock.wall()), trace_id=trace_id, turn_id=turn_id, step_id=step_id,
            tenant=tenant or (payload.tenant if isinstance(payload, TurnEvent) else None),
        )  # fmt: skip

    async def tell(self, payload: Payload, **ids: str | None) -> EventEnvelope:
        """Publish a payload on its topic. `ids` are the same as for `envelope`.

        Args:
            payload: The payload.
            **ids: The other arguments of `envelope`.

        Returns:
            The published envelope, with its offset.
        """
        return await self.publish(self.envelope(payload, **ids))

    async def publish(self, envelope: EventEnvelope) -> EventEnvelope:
        """Publish an envelope.

        Args:
            envelope: The envelope.

        Returns:
            A copy with its offset.

        Raises:
            InvalidTurn: Names the field that is invalid.
        """
        return (await self.publish_all([envelope]))[0]

    async def publish_all(self, envelopes: Sequence[EventEnvelope]) -> list[EventEnvelope]:
        """Publish envelopes of any topics in one commit, all or none. Otherwise like `publish`.

        Args:
            envelopes: The envelopes.

        Returns:
            Copies with their offsets.
        """
        by_topic: dict[str, list[tuple[int, EventEnvelope]]] = {}
        for index, each in enumerate(envelopes):
            if not isinstance(each, EventEnvelope):
                raise invalid("envelope", "be an EventEnvelope", each, "Create it with envelope()")
            by_topic.setdefault(each.topic, []).append((index, each))
        if not by_topic:
            return []
        ops = [self._publishing(topic, [each for _, each in rows]) for topic, rows in by_topic.items()]
        began = self.clock.boot()
        try:
            results = await self._bus.commit(None, ops)
        except Exception:
            for topic in by_topic:
                self._counters[topic].errors += 1
                self._trace(topic, None)
            raise
        latency = (self.clock.boot() - began) * 1000
        done = list(envelopes)
        for (topic, rows), sequences in zip(by_topic.items(), results, strict=True):
            self._counters[topic].published += len(rows)
            self._counters[topic].latencies.append(latency)
            self._trace(topic, latency)
            for (index, _), sequence in zip(rows, sequences, strict=True):
                done[index] = replace(done[index], offset=sequence)
        return done

    def publication(self, envelope: EventEnvelope) -> Op:
        """Return the write of an envelope, for a commit of the caller. Counts the envelope as published.

        Args:
            envelope: The envelope.
        """
        op = self._publishing(envelope.topic, [envelope])
        self._counters[envelope.topic].published += 1
        return op

    def _publishing(self, topic: str, envelopes: Sequence[EventEnvelope]) -> Op:
        rows: list[tuple[str, str, dict[str, Any]]] = []
        for each in envelopes:
            plain = each.to_dict()
            EventEnvelope.from_dict(plain)
            if (redaction := self._bus.redaction) is not None:
                plain["payload"] = stored_payload(redaction, plain["payload"], f"topic {topic}")
            rows.append((each.stored_id, each.type, plain))
        return self._bus.publishing(self._log(topic), rows, redacted=True)

    def _trace(self, topic: str, latency: float | None) -> None:
        if (tracer := self.tracer) is not None:
            counters = self._counters[topic]
            payload = {
                "topic": topic, "latency_ms": latency, "published": counters.published, "errors": counters.errors,
            }  # fmt: skip
            tracer.event(self._log(topic), "topic.published", payload)

    # -- reading

    async def subscribe(
        self, topic: str, since: int | None = None, *, consumer: str | None = None, follow: bool = True
    ) -> AsyncGenerator[EventEnvelope, None]:
        """Yield the envelopes of a topic: stored events, then new events.

        An event that is not a valid envelope is logged, counted as an error and skipped.

        Args:
            topic: The name of the topic.
            since: The offset to start at; by default after the last commit of `consumer`, or without one at the next
                new event.
            consumer: The name whose committed offset is the default start.
            follow: False ends after the last stored event. It then starts at 0 by default.
        """
        start = since
        if consumer is not None:
            start = await self.offset(topic, consumer) if since is None else since
        stored: asyncio.Future[None] | None = None
        if not follow:
            start, stored = start or 0, asyncio.get_running_loop().create_future()
            stored.set_result(None)
        async with contextlib.aclosing(self._bus.pages(self._log(topic), start, until=stored)) as pages:
            async for page in pages:
                for event in page:
                    if (envelope := self._read(topic, event)) is not None:
                        yield envelope

    def _read(self, topic: str, event: Event) -> EventEnvelope | None:
        if not event.payload:  # it was erased
            return None
        try:
            return EventEnvelope.from_dict(event.payload, event.sequence)
        except InvalidTurn as error:
            self._counters[topic].errors += 1
            if (tracer := self.tracer) is not None:
                tracer.event(self._log(topic), "topic.invalid", {"topic": topic, "offset": event.sequence})
            log.warning("event %d of topic %s is invalid and is skipped: %s", event.sequence, topic, error)
            return None

    async def head(self, topic: str) -> int:
        """Return the offset of the next event of a topic.

        Args:
            topic: The name of the topic.
        """
        return await self._bus.head(self._log(topic))

    async def read(self, topic: str, offset: int) -> EventEnvelope | None:
        """Return the event at an offset; None if it was deleted or is no envelope.

        Args:
            topic: The name of the topic.
            offset: The offset.
        """
        for event in await self._bus.get_events(self._log(topic), offset, 1):
            return self._read(topic, event)
        return None

    async def offset(self, topic: str, consumer: str) -> int:
        """Return the offset of the first event that the consumer did not commit.

        Args:
            topic: The name of the topic.
            consumer: The name of the consumer.
        """
        self._consumers[self._require_topic(topic)].add(consumer)
        stored = await self._state.get_checkpoint(self._consumer_id(topic, consumer))
        return 0 if stored is None else int(stored["offset"])

    async def commit(self, topic: str, consumer: str, offset: int) -> None:
        """Store that the consumer processed the event at `offset` and all events before it.

        Args:
            topic: The name of the topic.
            consumer: The name of the consumer.
            offset: The offset of the event.
        """
        COUNT.check("offset", offset)
        self._consumers[self._require_topic(topic)].add(consumer)
        await self._state.save_checkpoint(self._consumer_id(topic, consumer), {"offset": offset + 1})

    # -- deleting

    async def trim(
        self, topic: str | None = None, *, before: _dt.datetime | float | None = None, keep: int | None = None
    ) -> int:
        """Delete old events. Pass either `before` or `keep`.

        Later events keep their offsets. A consumer whose next event was deleted continues at the first event left.
        The id of a deleted event may be published again.

        Args:
            topic: The topic; None for all.
            before: Delete events before this time: an aware datetime, or seconds since the epoch.
            keep: Delete all but the last `keep` events. The last event of a topic always stays.

        Returns:
            The number of deleted events.

        Raises:
            InvalidArgument: Neither or both of `before` and `keep` are passed, or a value is invalid.
        """
        if (before is None) == (keep is None):
            raise must(
                "trim()",
                "have either before or keep",
                Shown(f"before={brief(before)} and keep={brief(keep)}"),
                "Pass one of the two",
            )
        COUNT.or_none().check("keep", keep)
        topics = TOPICS if topic is None else (topic,)
        moment = None if before is None else _as_datetime(before)
        return sum([await self._trim_log(self._log(each), moment, keep) for each in topics])

    async def _trim_log(self, log_id: UUID, before: _dt.datetime | None, keep: int | None) -> int:
        first, head = await self._first(log_id), await self._bus.head(log_id)
        if before is None:
            end = head - (keep or 0)
        else:
            end = await self._first_since(log_id, before, first, head)
        deleted = 0
        for start in range(first, end, _TRIM_BATCH):
            op = Op(TRIM, (str(log_id), min(start + _TRIM_BATCH, end)))
            deleted += (await self._bus.commit(None, [op]))[0]
        return deleted

    async def _first_since(self, log_id: UUID, moment: _dt.datetime, low: int, high: int) -> int:
        """Return the offset of the first event at or after `moment`. Events are stored in order of time."""
        while low < high:
            middle = (low + high) // 2
            [event] = await self._bus.get_events(log_id, middle, 1)
            low, high = (middle + 1, high) if event.timestamp < moment else (low, middle)
        return low

    async def _first(self, log_id: UUID) -> int:
        """Return the offset of the first stored event, or 0 if there is none."""
        found = await self._bus.get_events(log_id, 0, 1)
        return found[0].sequence if found else 0

    # -- statistics

    async def stats(self) -> dict[str, TopicStats]:
        """Return the counters of this process by topic."""
        return {topic: await self._topic_stats(topic) for topic in TOPICS}

    async def _topic_stats(self, topic: str) -> TopicStats:
        counters, names = self._counters[topic], sorted(self._consumers[topic])
        log_id = self._log(topic)
        first, head = (await self._first(log_id), await self._bus.head(log_id)) if names else (0, 0)
        offsets = await asyncio.gather(*(self.offset(topic, name) for name in names))
        latencies = sorted(counters.latencies)
        lag = {name: head - max(at, first) for name, at in zip(names, offsets, strict=True)}
        return TopicStats(
            counters.published, counters.errors, _percentile(latencies, 0.5), _percentile(latencies, 0.95),
            latencies[-1] if latencies else None, lag,
        )  # fmt: skip

    def _require_topic(self, topic: str) -> str:
        if topic not in TOPICS:
            raise InvalidArgument(unknown("topic", topic, TOPICS))
        return topic

    def _log(self, topic: str) -> UUID:
        return topic_log(self._require_topic(topic))

    def _consumer_id(self, topic: str, consumer: str) -> UUID:
        return uuid5(self._log(topic), f"consumer:{consumer}")


def _as_datetime(before: object) -> _dt.datetime:
    if isinstance(before, _dt.datetime) and before.tzinfo is not None:
        return before
    if isinstance(before, (int, float)) and not isinstance(before, bool):
        with contextlib.suppress(ValueError, OverflowError, OSError):
            return aware(before)
    raise must("before", "be an aware datetime, or seconds since 1970", before, "Use datetime.now(UTC) - timedelta(…)")


def _percentile(ordered: list[float], part: float) -> float | None:
    return ordered[max(math.ceil(len(ordered) * part) - 1, 0)] if ordered else None


async def next_unless(following: AsyncIterator[EventEnvelope], end: Awaitable[Any]) -> EventEnvelope | None:
    """Return the next event, or None if `end` is there first."""
    coming: asyncio.Future[EventEnvelope] = start_soon(anext(following))
    ending: asyncio.Future[Any] = start_soon(end)
    try:
        await asyncio.wait([coming, ending], return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        ending.cancel()
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})  # the generator must not be closed while it runs
