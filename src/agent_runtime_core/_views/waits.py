"""What a run waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.ids import step_id
from .._journal.record import DONE, STARTED, Record
from ..queue.records import IN_DOUBT, LIVE, QUESTION, RunRow, answered_request
from ..runner.approvals import ApprovalRequest, open_requests_of
from ..runner.run_client import RunClient
from .plain import plain_of


async def waits_of(
    runner: RunClient, row: RunRow, records: Sequence[Record] | None = None
) -> tuple[list[dict[str, str]], set[str]]:  # fmt: skip
    """Return the open waits of a run, and the names of all questions that it has asked.

    A wait is {"kind": "approval", "review" or "signal", "name": …}. A review is the question about a step in doubt.
    Pass `records` if the journal has been read.
    """
    if row.status not in LIVE:
        return [], set()
    mail = await runner.queue.mail(row.run_id)
    requested = {each.msg_id: each.name for each in mail if each.kind == QUESTION}
    # The question is stored before the record of its wait.
    waits = dict(requested)
    for record in await runner.state_store.records(row.run_id) if records is None else records:
        if record.kind == STARTED and record.key.startswith("w:") and record.name.startswith("signal:"):
            waits[step_id(row.run_id, record.name, record.key)] = record.name.removeprefix("signal:")
        elif record.kind == DONE and waits:
            waits.pop(step_id(row.run_id, record.name, record.key), None)
    for each in mail:
        waits.pop(answered_request(each.msg_id) or "", None)
    of_reason = row.reason.removeprefix("approval ")  # also if the run has asked under an older release

    def kind(wait: str, name: str) -> str:
        if name.startswith(IN_DOUBT):
            return "review"
        return "approval" if wait in requested or name == of_reason else "signal"

    return [{"kind": kind(wait, name), "name": name} for wait, name in waits.items()], set(requested.values())


async def questions_of(runner: RunClient, row: RunRow) -> list[dict[str, Any]]:
    """Return what a run asks people now, the oldest question first."""
    return [question_view(each) for each in await open_requests_of(runner.queue, row)]


def question_view(asked: ApprovalRequest) -> dict[str, Any]:
    """Return an open question with its details and the schema of its answer."""
    return {
        "run_id": str(asked.run_id), "key": asked.run_key, "tenant": asked.tenant, "agent": asked.agent_key,
        "name": asked.name, "request_id": asked.request_id, "details": plain_of(asked.details),
        "schema": plain_of(asked.schema), "asked_at": asked.asked_at.isoformat(),
        "approved_before": asked.approved_before, "problem": asked.problem,
    }  # fmt: skip
