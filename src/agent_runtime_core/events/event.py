"""Event and StoredEvent, and the lazy decoding of stored events."""

from __future__ import annotations

import contextlib
import json
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid5

from .._core.clock import SYSTEM, aware
from .._core.codec.json import decode_dict
from .._core.log import log
from .._journal.record import Record, derived_events, record_size, stored_events
from ..errors import StorageCorrupt, UnserialisableResult

AGENT_MARK: Final = "agent:"  # begins the id of an event that `Event.from_agent` is about
PAGE_BYTES: Final = 262_144  # most bytes of payloads in a page of several events

#: The topics of turns. Each is stored as one log, which belongs to no run.
TOPICS: Final = ("agent.turns", "agent.steps", "agent.step_results", "agent.audit")
# The ids of these logs derive from it: with another value, stored topics would not be found.
_TOPIC_LOGS = UUID("1d5e0f6a-9c2b-5a71-8f34-6b0f7c1a2e95")

_new = object.__new__
_PAYLOAD = itemgetter(2)


def topic_log(topic: str) -> UUID:
    """Return the id of the log of a topic."""
    return uuid5(_TOPIC_LOGS, topic)


def _now() -> datetime:
    return aware(SYSTEM.wall())


class StoredEvent(NamedTuple):
    """An event as a backend stores it: `payload` is JSON, `t` is in seconds since 1970.

    Attributes:
        sequence: The position in the log of the run, from 0.
        event_type: The type of the event.
        payload: The fields of the event, as JSON.
        t: When it was published, in seconds since 1970.
        event_id: Identifies the event in the log of the run.
    """

    sequence: int
    event_type: str
    payload: str
    t: float
    event_id: str


class _LazyField:
    """An attribute that is decoded from the row on first access, and then stored in the object's dict."""

    def __init__(self, made: Callable[[Sequence[Any]], object]) -> None:
        self._made = made

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, event: Event | None, owner: type) -> object:
        if event is None:
            return self
        try:
            value = event.__dict__[self._name] = self._made(event._row)
        except UnserialisableResult:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise StorageCorrupt(
                f"run {event.run_id}: {self._name} of event {event.sequence} is not what was written "
                f"({type(error).__name__}). Restore a backup"
            ) from error
        return value


class _LazyEvent:
    """The fields of an event that are decoded on first access. Most subscribers read few of the payloads."""

    # A `__getattr__` would make each of these slower to read on Python 3.11.
    __slots__ = ("__dict__", "_json", "_row", "event_type", "run_id", "sequence")
    #: A StoredEvent or the row of an operation: the payload is at index 2, the time at index 3.
    _row: Sequence[Any]
    #: The event as JSON for clients, once it was sent to a client.
    _json: bytes
    payload: Any = _LazyField(lambda row: decode_dict(row[2]))
    timestamp: Any = _LazyField(lambda row: aware(row[3]))


@dataclass
class Event(_LazyEvent):
    """An event of a run; `sequence` counts from 0 for each run.

    Do not modify it: all subscribers in this process get the same object. `payload` and `timestamp` of a stored event
    are decoded on first access. Reading `payload` raises UnserialisableResult if it contains a type that is not
    registered in this process.

    Attributes:
        run_id: The id of the run.
        event_type: The type of the event.
        payload: The fields of the event.
        timestamp: When it was published, as an aware datetime in UTC.
        sequence: The position in the log of the run, from 0.

    Examples:
        >>> import asyncio
        >>> from uuid import UUID
        >>> from agent_runtime_core.events import InMemoryEventBus
        >>> async def main():
        ...     bus = InMemoryEventBus()
        ...     await bus.publish(UUID(int=1), "page.read", {"page": 1})
        ...     return [(event.sequence, event.payload) for event in await bus.get_events(UUID(int=1))]
        >>> asyncio.run(main())
        [(0, {'page': 1})]
    """

    __slots__ = ()
    run_id: UUID
    event_type: str
    payload: dict[str, Any] = field(default_factory=dict)
    timestamp: datetime = field(default_factory=_now)
    sequence: int = field(default_factory=int)

    @property
    def from_agent(self) -> bool:
        """Whether the code of the run emitted this event under a type of the runner, such as `run.succeeded`.

        Such an event says nothing about the status of the run.
        """
        return (id_of(self) or "").startswith(AGENT_MARK)


def lazy_event(run_id: UUID, sequence: int, row: Sequence[Any]) -> Event:
    """Return an event whose payload is decoded when it is read."""
    event = _new(Event)
    event.run_id, event.sequence, event.event_type = run_id, sequence, row[1]
    event._row = row
    return event


def lazy_events(run_id: UUID, rows: Iterable[StoredEvent]) -> list[Event]:
    """Return stored events as `lazy_event` does."""
    events = []
    for row in rows:  # a call for each would cost a third more
        event = _new(Event)
        event.run_id, event.sequence, event.event_type = run_id, row[0], row[1]
        event._row = row
        events.append(event)
    return events


def derived(run_id: UUID, record: Record, since: int) -> list[Event]:
    """Return the events that a record represents, from the sequence number `since` on."""
    try:
        pairs = derived_events(str(run_id), record)
    except UnserialisableResult:
        # It contains a type that is not registered here. Only a subscriber that reads the payload gets the error.
        texts = stored_events(str(run_id), record)
        return [
            lazy_event(run_id, n, (n, event_type, payload, record.t))
            for n, (event_type, payload) in enumerate(texts, record.ev)
            if n >= since
        ]
    t = aware(record.t)
    return [
        Event(run_id, event_type, payload, t, n)
        for n, (event_type, payload) in enumerate(pairs, record.ev)
        if n >= since
    ]


def size_of(event: Event) -> int:
    """Return the size of the stored payload of an event; 0 if it is derived from a record, which no text is."""
    row = getattr(event, "_row", None)
    return 0 if row is None else len(row[2])


def payload_of(event: Event) -> Any:
    """Return an event's payload, as stored JSON without decoding if it contains a type that is not registered here."""
    try:
        return event.payload
    except UnserialisableResult:
        return json.loads(event._row[2])


class EventPage(list[Event]):
    """Successive events of a run. Do not modify it: all readers of one event loop get the same object."""

    __slots__ = ("__weakref__", "frames", "more", "size")

    def __init__(self, events: Iterable[Event], more: bool, size: int) -> None:
        super().__init__(events)
        #: Whether the log may have more events after these.
        self.more: bool = more
        #: About how many bytes the events take in the store.
        self.size: int = size
        #: The events as server-sent events, without and with their types, once they were sent.
        self.frames: dict[bool, bytes] = {}


class EventRows(list[StoredEvent | Record]):
    """Rows of one page, sorted by sequence."""

    __slots__ = ("more", "size")

    def __init__(self, rows: Iterable[StoredEvent | Record], more: bool, size: int) -> None:
        super().__init__(rows)
        self.more: bool = more
        self.size: int = size


def page_rows(rows: Sequence[StoredEvent | Record], limit: int, more: bool) -> EventRows:
    """Return the first rows: at most `limit` and PAGE_BYTES, but at least one row.

    Args:
        rows: Rows, sorted by sequence.
        limit: The largest number of rows.
        more: Whether the log may have more events after these rows.
    """
    if len(rows) > limit:
        rows, more = rows[:limit], True
    # Most pages have no records. This takes a third of the time of `row_size`.
    sizes = list(map(row_size, rows) if Record in set(map(type, rows)) else map(len, map(_PAYLOAD, rows)))
    size = sum(sizes)
    if size > PAGE_BYTES and len(rows) > 1:
        totals = list(accumulate(sizes))
        count = max(bisect_right(totals, PAGE_BYTES), 1)
        rows, more, size = rows[:count], True, totals[count - 1]
    return EventRows(rows, more, size)


def row_size(row: StoredEvent | Record) -> int:
    """Return about how many bytes the payloads of a row have."""
    return record_size(row) if isinstance(row, Record) else len(row[2])


def sequence_after(row: StoredEvent | Record) -> int:
    """Return the sequence after the events of a row."""
    return row.ev + row.nev if isinstance(row, Record) else row.sequence + 1


def _starts_at(row: StoredEvent | Record) -> int:
    return row.ev if isinstance(row, Record) else row.sequence


def merged(stored: list[StoredEvent], records: list[Record], limit: int, end: int | None) -> EventRows:
    """Return the first rows of two lists, each sorted by sequence and without a common sequence, as `page_rows` does.

    Args:
        stored: Stored events.
        records: Records with events.
        limit: The largest number of rows.
        end: If the lists do not reach the end of the log: both have all rows before this sequence.
    """
    if end is not None:
        records = [each for each in records if each.ev < end]
    rows: list[StoredEvent | Record] = [*stored, *records]
    if records:
        rows.sort(key=_starts_at)
    while end is not None and rows and _starts_at(rows[-1]) >= end:
        rows.pop()
    return page_rows(rows, limit, end is not None)


def id_of(event: Event) -> str | None:
    """Return the id under which an event was published, None for an event that follows from a record."""
    row = getattr(event, "_row", None)
    return row.event_id if isinstance(row, StoredEvent) else None


def agent_type(event_type: str) -> str:
    """Return how readers that have no mark name a marked event. It is no type of the runner."""
    return f"agent.{event_type}"


def shown_type(event: Event) -> str:
    """Return the type of an event, for readers that have no mark."""
    return agent_type(event.event_type) if event.from_agent else event.event_type


def warn_of_runner_type(kind: str, who: str) -> None:
    """Warn, in the log and with a DeprecationWarning, that the code of a run emitted a type of the runner.

    Neither raises, even if the process turns warnings into errors: no run fails for an event.

    Args:
        kind: The type.
        who: The run, as messages name it.
    """
    text = (
        f"{who} emitted {kind!r}, a type of the runner. The runner stores such an event with the mark "
        "from_agent. Use another name, such as 'myapp.started'"
    )
    log.warning(text)
    with contextlib.suppress(DeprecationWarning):
        warnings.warn(text, DeprecationWarning, stacklevel=3)
