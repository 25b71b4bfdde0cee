"""Events of records, for an event bus that does not read them from the journal itself."""

from __future__ import annotations

from collections.abc import Sequence

from .._core.codec.json import encode
from .._engines.base import Op
from .._journal.record import Record, derived_events, event_id, stored_events
from ..errors import UnserialisableResult
from ..events.base import EventBus
from .run_writer import Row


def publish_op(run_id: str, rows: Sequence[Row]) -> Op:
    """Return the operation that publishes these events."""
    return Op("events.publish", (run_id, tuple(rows)))


def derived_rows(run_id: str, record: Record) -> list[Row]:
    """Return the events of a record."""
    try:
        texts = [(kind, encode(payload)) for kind, payload in derived_events(run_id, record)]
    except UnserialisableResult:  # a process that cancels a run may not know the types of its results
        texts = stored_events(run_id, record)
    return [(event_id(record, i), kind, text, record.t) for i, (kind, text) in enumerate(texts)]


async def missing_events(bus: EventBus, run_id: str, records: Sequence[Record]) -> list[Row]:
    """Return the events of these records that were never published."""
    published = await bus.published(run_id)
    return [row for record in records for row in derived_rows(run_id, record) if row[0] not in published]


class EventPublisher:
    """Publishes the events of one run's records. Their ids are deterministic, so that none is published twice.

    Attributes:
        unconfirmed: Events that were handed to the bus without waiting for the commit. They are published once more
            with the next ones, in case they were lost.
    """

    def __init__(self, run_id: str, bus: EventBus) -> None:
        self.unconfirmed: list[Row] = []
        self._run_id = run_id
        self._bus = bus

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """Return the events of these records."""
        return [row for record in records for row in derived_rows(self._run_id, record)]

    def operations(self, records: Sequence[Record]) -> list[Op]:
        """Return what publishes the events of these records."""
        rows = self.rows(records)
        return [publish_op(self._run_id, rows)] if rows else []

    async def missing(self, records: Sequence[Record]) -> list[Op]:
        """Return what publishes the events of these records that an earlier claim could not publish."""
        rows = await missing_events(self._bus, self._run_id, records)
        return [publish_op(self._run_id, rows)] if rows else []
