"""An event of a run, and how it is decoded from what a store holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from .._core.clock import SYSTEM, aware
from .._core.codec.json import decode_dict
from .._journal.record import Record, derived_events, stored_events
from ..errors import StorageCorrupt, UnserialisableResult

_new = object.__new__


def _now() -> datetime:
    return aware(SYSTEM.wall())


class StoredEvent(NamedTuple):
    """An event as a backend keeps it: `payload` is a JSON text, `t` seconds since the epoch."""

    sequence: int
    event_type: str
    payload: str
    t: float
    event_id: str


class _LazyField:
    """An attribute that is made of the row when it is first read, and then found in the object's dict."""

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
                f"run {event.run_id}: {self._name} of event {event.sequence} is not what was written ({error}); "
                "restore a backup"
            ) from error
        return value


class _LazyEvent:
    """What a stored event has not decoded yet: most followers read few of the payloads they pass."""

    # A `__getattr__` would make each of these slower to read on Python 3.11.
    __slots__ = ("__dict__", "_row", "event_type", "run_id", "sequence")
    #: Whatever has the payload at 2 and the time at 3: a StoredEvent, or the row of an operation.
    _row: Sequence[Any]
    payload: Any = _LazyField(lambda row: decode_dict(row[2]))
    timestamp: Any = _LazyField(lambda row: aware(row[3]))


@dataclass
class Event(_LazyEvent):
    """One entry of a run's log; `sequence` counts from 0 for each run.

    Read-only: all followers in this process are handed the same object. What comes from a store decodes
    its payload and timestamp when they are first read; a payload holding a type that is not registered
    here raises UnserialisableResult then.
    """

    __slots__ = ()
    run_id: UUID
    event_type: str
    payload: dict[str, Any] = field(default_factory=dict)
    timestamp: datetime = field(default_factory=_now)
    sequence: int = field(default_factory=int)  # a plain default would hide the slot


def lazy_event(run_id: UUID, sequence: int, row: Sequence[Any]) -> Event:
    event = _new(Event)
    event.run_id, event.sequence, event.event_type = run_id, sequence, row[1]
    event._row = row
    return event


def lazy_events(run_id: UUID, rows: Iterable[StoredEvent]) -> list[Event]:
    events = []
    for row in rows:  # a call for each would cost a third more
        event = _new(Event)
        event.run_id, event.sequence, event.event_type = run_id, row[0], row[1]
        event._row = row
        events.append(event)
    return events


def derived(run_id: UUID, record: Record, since: int) -> list[Event]:
    try:
        pairs = derived_events(str(run_id), record)
    except UnserialisableResult:
        # It holds a type that is not known here: whoever reads that payload is told, and not who passes it.
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


def payload_of(event: Event) -> Any:
    """Its payload; as plain JSON, as it is stored, where that holds a type which is not registered here."""
    try:
        return event.payload
    except UnserialisableResult:
        return json.loads(event._row[2])


def _starts_at(row: StoredEvent | Record) -> int:
    return row.ev if isinstance(row, Record) else row.sequence


def merged(stored: list[StoredEvent], records: list[Record], limit: int) -> Sequence[StoredEvent | Record]:
    """The first `limit` of two lists, each sorted by sequence and not overlapping the other."""
    if not records:
        return stored
    rows: list[StoredEvent | Record] = [*stored, *records]
    rows.sort(key=_starts_at)
    return rows[:limit]


def id_of(event: Event) -> str | None:
    """Return the id under which an event was published, None for one that follows from a record."""
    row = getattr(event, "_row", None)
    return row.event_id if isinstance(row, StoredEvent) else None
