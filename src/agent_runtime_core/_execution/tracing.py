"""The spans of a run: which trace it belongs to, and which span is the current one while its code runs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .._core.ids import RunTrace, checked, parsed
from .._journal.record import RESUMED, Record, is_copied
from ..queue.records import RunRow
from ..tracing.tracer import Tracer
from .step import StepScope
from .step_journal import RunJournal

Call = Callable[[int], Awaitable[Any]]


def trace_of(row: RunRow, records: Sequence[Record]) -> RunTrace:
    """Return the place of the execution that begins with this row and this journal."""
    parent = json.loads(row.metadata).get("traceparent") if '"traceparent"' in row.metadata else None
    # Records that are copied into a fork have the claim ids of the other run.
    resumes = sum(each.kind == RESUMED and each.attempt == row.attempt and not is_copied(each) for each in records)
    return RunTrace(row.run_id, row.generation, row.failures, row.crashes, resumes + row.parked, parsed(parent))


def with_traceparent(
    metadata: Mapping[str, Any] | None, tracer: Tracer | None, traceparent: str | None = None
) -> Mapping[str, Any] | None:
    """Return the metadata of a new run with the span that it belongs to: the current one, if none is passed.

    Raises:
        InvalidArgument: `traceparent` is no W3C traceparent.
    """
    if traceparent is not None:
        checked(traceparent)
    elif tracer is not None and not (metadata and "traceparent" in metadata):
        traceparent = tracer.current_traceparent()
    if traceparent is None or not (metadata is None or isinstance(metadata, Mapping)):
        return metadata
    return {**(metadata or {}), "traceparent": traceparent}


def make_steps_current(journal: RunJournal, tracer: Tracer | None) -> None:
    """Let the trace sinks make the span of each step current while its function runs."""
    if tracer is not None and tracer.activates and journal.trace is not None:
        journal.around_step = partial(_around, tracer, journal.trace)


def _around(tracer: Tracer, trace: RunTrace, scope: StepScope, call: Call) -> Call:
    async def current(attempt: int) -> Any:
        with tracer.activated(trace.step(scope.step_id, attempt).text):
            return await call(attempt)

    return current
