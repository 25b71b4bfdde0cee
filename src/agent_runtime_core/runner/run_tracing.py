"""The traces of one execution of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from .._core.codec.json import decode_known
from .._core.ids import RunTrace, known_uuid, parsed
from .._execution.result_codec import error_payload
from .._execution.run_control import RunControl
from .._journal.record import RESUMED, Record, is_copied
from ..interfaces import RunResult
from ..queue.records import RunRow
from ..status import RunStatus
from ..tracing.tracer import Tracer
from .claim import HeldClaim


class RunTracing:
    """The traces of one execution.

    Args:
        claim: The claim of the execution.
        tracer: Passes the traces on.
        operation: What the agent does, as spans name it; None for "invoke_agent".
    """

    def __init__(self, claim: HeldClaim, tracer: Tracer, operation: str | None) -> None:
        self._claim, self._tracer, self._operation = claim, tracer, operation
        self._started = False
        self._trace: RunTrace | None = None  # of the present attempt; None before it starts

    def start(self, records: Sequence[Record]) -> RunTrace:
        """Report that the execution begins. Another attempt in the same execution reports itself by its event.

        Args:
            records: The journal of the run, as it is before the attempt.

        Returns:
            The place of the present attempt in the trace of the run.
        """
        row = self._claim.row
        self._trace = trace = _trace_of(row, records)
        if self._started:
            return trace
        self._started = True
        input_ = cast("dict[str, Any]", decode_known(row.input))
        about = {
            "agent_key": row.agent, "attempt": row.attempt, "conversation_id": input_.get("conversation_id"),
            "metadata": decode_known(row.metadata), "input": input_.get("messages") or input_,
            "operation": self._operation, "tenant": row.tenant or None, "trace": trace,
            "previous": _previous(row, trace, records),
        }  # fmt: skip
        self._tracer.start_run(known_uuid(row.run_id), about)
        return trace

    def end(self, result: RunResult | None, control: RunControl) -> None:
        """Report that the execution ended.

        Args:
            result: The result of the run; None if there is none yet.
            control: Says why there is none.
        """
        if not self._started:
            return
        self._started = False
        run_id = known_uuid(self._claim.row.run_id)
        if result is None:
            self._tracer.end_run(run_id, "waiting" if control.parked else "lost" if control.lost else "given back")
            return
        about = {"output": result.final_output, "usage": result.usage, "error": error_payload(result.error)}
        self._tracer.end_run(run_id, (result.status or RunStatus.FAILED).value, about)

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager in which the span of the execution is the current span."""
        if not self._tracer.activates or self._trace is None:
            return nullcontext()
        return self._tracer.activated(self._trace.execution.text)


def _trace_of(row: RunRow, records: Sequence[Record]) -> RunTrace:
    """Return the place of the execution that begins with this row and this journal."""
    parent = json.loads(row.metadata).get("traceparent") if '"traceparent"' in row.metadata else None
    # Records that are copied into a fork have the claim ids of the other run.
    resumes = sum(each.kind == RESUMED and each.attempt == row.attempt and not is_copied(each) for each in records)
    return RunTrace(row.run_id, row.generation, row.failures, row.crashes, resumes + row.parked, parsed(parent))


def _previous(row: RunRow, trace: RunTrace, records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the execution before this execution: its place in the trace, its time, and whether it crashed."""
    own = [each for each in records if each.claim_id and not is_copied(each)]
    if trace.resumes:
        before = trace._replace(resumes=trace.resumes - 1)
    elif row.crashes_in_row and not row.parked and trace.crashes:  # this claim took the run over
        attempt = row.attempt - 1
        resumes = sum(each.kind == RESUMED and each.attempt == attempt for each in own)
        before = trace._replace(crashes=trace.crashes - 1, resumes=resumes)
    else:
        return None
    last = [each.t for each in own if each.claim_id == own[-1].claim_id] or [row.started_at or row.created_at]
    return {"trace": before, "crashed": not trace.resumes, "started_at": last[0], "ended_at": last[-1]}
