"""Text that a model streamed in an attempt that failed: it is in the event log, but in no message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .._core.event_types import EventType
from .._core.ids import step_id
from .._journal.record import ATTEMPT, DONE, ENDED, RESUMED, Record, includes_start
from ..queue.records import LIVE, RunRow
from ..runner.run_client import RunClient

MOST_EVENTS: Final = 20_000  # of a longer log nothing is read: a page of messages must not read hundreds of megabytes
_PAGE: Final = 256
_BOUNDARIES = frozenset({EventType.RUN_STARTED.value, EventType.RUN_RESUMED.value})


class Invalidated(NamedTuple):
    """What one attempt streamed of an answer."""

    attempt: int  # the number of the run attempt
    text: str


async def invalidated_texts(
    runner: RunClient, row: RunRow, records: Sequence[Record]
) -> dict[str, list[Invalidated]]:  # fmt: skip
    """Return the texts by the id of the step of their model call, in the order in which they were streamed.

    When a run starts or resumes, the text of a model call that has not ended is streamed again from its beginning.
    When the run has finished, a text without a saved answer never becomes one.
    """
    starts = [each for each in records if each.kind in (ATTEMPT, RESUMED) or _is_whole_attempt(each)]
    finished = row.status not in LIVE
    if len(starts) < 2 and not (finished and row.status != "succeeded"):
        return {}  # nearly all runs: their log need not be read
    if await runner.event_bus.head(row.run_id) > MOST_EVENTS:
        return {}
    texts = await _streamed(runner, row, starts)
    answered = _answered(row, records, starts)
    found: dict[str, list[Invalidated]] = {}
    for (step, start), text in texts.items():
        # The text of the last start is the answer, or may still become one.
        last = answered.get(step, None if finished else len(starts) - 1)
        if last is None or start < last:
            found.setdefault(step, []).append(Invalidated(_attempt(starts, start), text))
    return found


def _is_whole_attempt(record: Record) -> bool:
    """Return whether the end of a run attempt includes its start."""
    return record.kind == ENDED and includes_start(record)


def _attempt(starts: Sequence[Record], start: int) -> int:
    if not 0 <= start < len(starts):
        return 1
    record = starts[start]
    return int(json.loads(record.info or "{}")["began"][2]) if record.kind == ENDED else record.attempt


def _answered(row: RunRow, records: Sequence[Record], starts: Sequence[Record]) -> dict[str, int]:
    """Return the index of the start in which each model call got its saved answer."""
    found: dict[str, int] = {}
    for record in records:
        if record.kind == DONE and record.name == "model":
            before = sum(each.seq < record.seq for each in starts) - 1
            found[step_id(row.run_id, record.name, record.key)] = before
    return found


async def _streamed(runner: RunClient, row: RunRow, starts: Sequence[Record]) -> Mapping[tuple[str, int], str]:
    """Return the streamed text by step and by the index of the start of the run before it."""
    parts: dict[tuple[str, int], list[str]] = {}
    since, start = 0, -1
    while page := await runner.event_bus.get_events(row.run_id, since, _PAGE):
        if since == 0 and page[0].sequence > 0:
            return {}  # the beginning was deleted, so the starts cannot be counted
        for event in page:
            if event.event_type in _BOUNDARIES and not event.from_agent:
                start += 1
            elif event.event_type == EventType.ASSISTANT_DELTA.value:
                # The agent's own code may emit this type, with any payload.
                step, delta = event.payload.get("step_id"), event.payload.get("delta")
                if isinstance(step, str) and isinstance(delta, str):
                    parts.setdefault((step, start), []).append(delta)
        since = page[-1].sequence + 1
        if len(page) < _PAGE or since > MOST_EVENTS:
            break
    return {which: "".join(texts) for which, texts in parts.items()}
