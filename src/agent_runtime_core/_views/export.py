"""A run as a sequence of JSON objects, read from the store in pages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Final

from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .attempts import step_views
from .events import event_json
from .journal import record_view
from .messages import messages_view
from .runs import run_view

_PAGE: Final = 32  # events that are read at once; one may have megabytes


async def export(runner: RunClient, row: RunRow) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the run, its steps, the records of its journal, its events and its messages.

    Each is an object whose `kind` is "run", "step", "record", "event" or "message". The events are read in pages, as
    a run may have very many.
    """
    records = await runner.state_store.records(row.run_id)
    yield {"kind": "run", **await run_view(runner, row, records=records)}
    for step in step_views(row, records)["items"]:
        yield {"kind": "step", **step}
    for record in records:
        fields = record_view(record, row.run_id)
        yield {"kind": "record", "record_kind": fields.pop("kind"), **fields}
    async for event in events_of(runner, row):
        yield {"kind": "event", **event}
    for message in (await messages_view(runner, row, records=records, invalidated=False))["items"]:
        yield {"kind": "message", "message": message}


async def events_of(runner: RunClient, row: RunRow) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a run, which are read in pages."""
    since = 0
    while page := await runner.event_bus.get_events(row.run_id, since, _PAGE):
        for event in page:
            yield json.loads(event_json(event))
        since = page[-1].sequence + 1
