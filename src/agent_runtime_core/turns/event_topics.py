"""The event trail of turns: four topics, each one log of the event bus that there is."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as _dt
import math
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid5

from .._core.clock import aware
from .._core.ids import new_ulid
from .._core.settings import COUNT
from .._engines.base import Op
from ..errors import InvalidArgument, InvalidTurn, brief
from ..events.base import TRIM, EventBus
from ..events.event import Event
from ..state.base import StateStore
from ..tracing.tracer import Tracer
from .events import TOPICS, EventEnvelope, Payload
from .logs import log

# Part of every store that has a topic: another value would lose them.
_TOPICS = UUID("1d5e0f6a-9c2b-5a71-8f34-6b0f7c1a2e95")
_AT_ONCE = 1000  # events deleted in one commit
_KEPT = 1024  # latencies of a topic that percentiles are taken of


@dataclass
class _Counters:
    published: int = 0
    errors: int = 0
    took: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))


@dataclass(frozen=True)
class TopicStats:
    """Counters of one topic in this process; latencies are milliseconds, None before the first.

    `lag` is how many events there are that a consumer named here has not committed yet, whichever process does.
    """

    published: int
    errors: int
    p50_ms: float | None
    p95_ms: float | None
    max_ms: float | None
    lag: Mapping[str, int]


class EventPublisherSubscriber:
    """Publishes and follows the topics agent.turns, agent.steps, agent.step_results and agent.audit.

    1. An event is published once for each event id, and durable when `publish` returns.
    2. A follower gets every event from its place on, in order, at least once.
    3. A consumer's place is kept in the state store under its name, when it says so with `commit`.
    """

    def __init__(self, bus: EventBus, state: StateStore, *, tracer: Tracer | None = None) -> None:
        self._bus, self._state, self._tracer = bus, state, tracer
        self._clock = bus.clock
        self._counters = {topic: _Counters() for topic in TOPICS}
        self._consumers: dict[str, set[str]] = {topic: set() for topic in TOPICS}

    # -- publishing

    def envelope(
        self, payload: Payload, *, event_id: str | None = None, trace_id: str | None = None,
        turn_id: str | None = None, step_id: str | None = None,
    ) -> EventEnvelope:  # fmt: skip
        """The payload as an event of its topic, now; without an `event_id` it is a new event each time."""
        return EventEnvelope(
            topic=payload.topic, event_id=event_id or new_ulid(self._clock), type=payload.type, payload=payload,
            timestamp=aware(self._clock.wall()), trace_id=trace_id, turn_id=turn_id, step_id=step_id,
        )  # fmt: skip

    async def tell(self, payload: Payload, **ids: str | None) -> EventEnvelope:
        """Publish a payload on its topic, with ids as in `envelope`."""
        return await self.publish(self.envelope(payload, **ids))

    async def publish(self, envelope: EventEnvelope) -> EventEnvelope:
        """Publish an envelope; the one that is given back has its offset. InvalidTurn names what does not fit."""
        return (await self.publish_all([envelope]))[0]

    async def publish_all(self, envelopes: Sequence[EventEnvelope]) -> list[EventEnvelope]:
        """Publish several envelopes, of any topics, in one commit: all of them or none."""
        told: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for place, each in enumerate(envelopes):
            if not isinstance(each, EventEnvelope):
                raise InvalidTurn("envelope", f"is an EventEnvelope, as `envelope` makes it, not {brief(each)}")
            plain = each.to_dict()
            EventEnvelope.from_dict(plain)
            told.setdefault(each.topic, []).append((place, plain))
        if not told:
            return []
        ops = [self._publishing(topic, [plain for _, plain in rows]) for topic, rows in told.items()]
        began = self._clock.boot()
        try:
            results = await self._bus.commit(None, ops)
        except Exception:
            for topic in told:
                self._counters[topic].errors += 1
                self._trace(topic, None)
            raise
        took = (self._clock.boot() - began) * 1000
        done = list(envelopes)
        for (topic, rows), sequences in zip(told.items(), results, strict=True):
            self._counters[topic].published += len(rows)
            self._counters[topic].took.append(took)
            self._trace(topic, took)
            for (place, _), sequence in zip(rows, sequences, strict=True):
                done[place] = replace(done[place], offset=sequence)
        return done

    def publication(self, envelope: EventEnvelope) -> Op:
        """The write of an envelope as a value, for a commit of somebody else's; it is counted as published."""
        plain = envelope.to_dict()
        EventEnvelope.from_dict(plain)
        self._counters[envelope.topic].published += 1
        return self._publishing(envelope.topic, [plain])

    def _publishing(self, topic: str, told: Sequence[dict[str, Any]]) -> Op:
        return self._bus.publishing(self._log(topic), [(each["event_id"], each["type"], each) for each in told])

    def _trace(self, topic: str, took: float | None) -> None:
        if self._tracer is not None:
            counters = self._counters[topic]
            about = {
                "topic": topic, "latency_ms": took, "published": counters.published, "errors": counters.errors,
            }  # fmt: skip
            self._tracer.event(self._log(topic), "topic.published", about)

    # -- following

    async def subscribe(
        self, topic: str, since: int | None = None, *, consumer: str | None = None, follow: bool = True
    ) -> AsyncGenerator[EventEnvelope, None]:
        """The envelopes of a topic from offset `since` on, then live; with a `consumer`, from behind its last commit.

        With neither, from now on. `follow=False` ends at what there is. An event that is no envelope is logged,
        counted as an error and left out.
        """
        start = since
        if consumer is not None:
            start = await self.offset(topic, consumer) if since is None else since
        if not follow:
            for event in await self._bus.get_events(self._log(topic), start or 0):
                if (envelope := self._read(topic, event)) is not None:
                    yield envelope
            return
        async with contextlib.aclosing(self._bus.subscribe(self._log(topic), start)) as events:
            async for event in events:
                if (envelope := self._read(topic, event)) is not None:
                    yield envelope

    def _read(self, topic: str, event: Event) -> EventEnvelope | None:
        try:
            return EventEnvelope.from_dict(event.payload, event.sequence)
        except InvalidTurn as error:
            self._counters[topic].errors += 1
            log.warning("event %d of %s is left out: %s", event.sequence, topic, error)
            return None

    async def offset(self, topic: str, consumer: str) -> int:
        """The offset of the first event that the consumer has not committed."""
        self._consumers[self._known(topic)].add(consumer)
        kept = await self._state.get_checkpoint(self._place(topic, consumer))
        return 0 if kept is None else int(kept["offset"])

    async def commit(self, topic: str, consumer: str, offset: int) -> None:
        """The consumer is done with the event at `offset` and with all before it."""
        COUNT.check("offset", offset)
        self._consumers[self._known(topic)].add(consumer)
        await self._state.save_checkpoint(self._place(topic, consumer), {"offset": offset + 1})

    # -- deleting

    async def trim(
        self, topic: str | None = None, *, before: _dt.datetime | float | None = None, keep: int | None = None
    ) -> int:
        """Delete old events of a topic, or of all; how many. Offsets go on.

        `before` a time (aware, or seconds since the epoch), or all but the last `keep`. The last event of a topic
        stays in any case. A consumer whose place is gone goes on at the first event there is; an event id that was
        deleted may be published again.
        """
        if (before is None) == (keep is None):
            raise InvalidArgument(
                f"trim wants either before= or keep=, not before={brief(before)} and keep={brief(keep)}"
            )
        COUNT.or_none().check("keep", keep)
        topics = TOPICS if topic is None else (topic,)
        moment = None if before is None else _moment(before)
        return sum([await self._trimmed(self._log(each), moment, keep) for each in topics])

    async def _trimmed(self, log_id: UUID, before: _dt.datetime | None, keep: int | None) -> int:
        first, head = await self._first(log_id), await self._bus.head(log_id)
        if before is None:
            end = head - (keep or 0)
        else:
            end = await self._since(log_id, before, first, head)
        gone = 0
        for start in range(first, end, _AT_ONCE):
            op = Op(TRIM, (str(log_id), min(start + _AT_ONCE, end)))
            gone += (await self._bus.commit(None, [op]))[0]
        return gone

    async def _since(self, log_id: UUID, moment: _dt.datetime, low: int, high: int) -> int:
        """The first offset from that moment on: events stand there in the order of time."""
        while low < high:
            middle = (low + high) // 2
            [event] = await self._bus.get_events(log_id, middle, 1)
            low, high = (middle + 1, high) if event.timestamp < moment else (low, middle)
        return low

    async def _first(self, log_id: UUID) -> int:
        """The offset of the first event there is."""
        found = await self._bus.get_events(log_id, 0, 1)
        return found[0].sequence if found else 0

    # -- looking

    async def stats(self) -> dict[str, TopicStats]:
        """Counters by topic."""
        return {topic: await self._stats(topic) for topic in TOPICS}

    async def _stats(self, topic: str) -> TopicStats:
        counters, names = self._counters[topic], sorted(self._consumers[topic])
        log_id = self._log(topic)
        first, head = (await self._first(log_id), await self._bus.head(log_id)) if names else (0, 0)
        offsets = await asyncio.gather(*(self.offset(topic, name) for name in names))
        took = sorted(counters.took)
        return TopicStats(
            counters.published, counters.errors, _percentile(took, 0.5), _percentile(took, 0.95),
            took[-1] if took else None, {name: head - max(at, first) for name, at in zip(names, offsets, strict=True)},
        )  # fmt: skip

    def _known(self, topic: str) -> str:
        if topic not in TOPICS:
            raise InvalidArgument(f"no topic {brief(topic)}: there is {', '.join(TOPICS)}")
        return topic

    def _log(self, topic: str) -> UUID:
        return uuid5(_TOPICS, self._known(topic))

    def _place(self, topic: str, consumer: str) -> UUID:
        return uuid5(self._log(topic), f"consumer:{consumer}")


def _moment(before: object) -> _dt.datetime:
    if isinstance(before, _dt.datetime) and before.tzinfo is not None:
        return before
    if isinstance(before, (int, float)) and not isinstance(before, bool):
        with contextlib.suppress(ValueError, OverflowError, OSError):
            return aware(before)
    raise InvalidArgument(
        f"before={brief(before)} cannot be used: it is an aware datetime, or seconds since the epoch that a "
        "calendar has"
    )


def _percentile(ordered: list[float], part: float) -> float | None:
    return ordered[max(math.ceil(len(ordered) * part) - 1, 0)] if ordered else None
