"""Open questions of runs to people: list them, and find the question that an answer belongs to."""

from __future__ import annotations

import asyncio
import datetime as _dt
import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

from .._core.clock import aware
from .._core.codec.json import decode_known
from .._core.ids import known_uuid
from .._core.validation import Shown, must
from .._execution.waits import ANSWER_SCHEMA, reviewed
from ..errors import MOST_NAMED, IllegalTransition, InvalidArgument, UnserialisableResult, brief
from ..events.base import EventBus
from ..queue import records
from ..queue.base import RunQueue
from ..tools.confirmation import misfit_of_answer

_BATCH: Final = 1000  # rows in one read of `open_requests`
_REVIEWED: Final = ("step_name", "step_id", "tool_name", "tool_args", "tool_call_id")


@dataclass(frozen=True)
class ApprovalRequest:
    """A question that a run asks a person now, as `runner.approvals` returns it.

    Answer it with `runner.approve(run_id, name, answer, request_id=request_id)`.

    Attributes:
        run_id: The run that asks.
        run_key: The run id that you passed, if it was not a UUID; else None.
        agent_key: The key of the agent.
        name: Name of the approval, or "in_doubt:" and the name of a step that a person must review.
        request_id: Identifies the question. Pass it to `runner.approve`.
        details: What the agent passed to `ctx.approve`; for a review, the name and the id of the step, and its tool
            call.
        schema: The JSON Schema that the answer must match.
        asked_at: When the run asked, as an aware datetime in UTC.
        approved_before: The run of the same lineage of forks that got this approval before.
        cursor: Pass it as `after` to get the questions that follow.
        problem: Why the last message that was meant as an answer does not fit; None if there is none.
        tenant: Whose run it is; None for a run without a tenant.
    """

    run_id: UUID
    run_key: str | None
    agent_key: str
    name: str
    request_id: str
    details: Any
    schema: dict[str, Any] | None
    asked_at: _dt.datetime
    approved_before: str | None
    cursor: str
    problem: str | None = None
    tenant: str | None = None


class _Position(NamedTuple):
    """Where a question is in the list of all open questions."""

    asked_at: float
    n: int  # of the run
    request_id: str

    def cursor(self) -> str:
        return f"{self.asked_at!r}_{self.n}_{self.request_id}"

    @classmethod
    def of_cursor(cls, cursor: str) -> _Position:
        try:
            asked_at, n, request_id = cursor.split("_", 2)
            return cls(float(asked_at), int(n), request_id)
        except (AttributeError, ValueError):
            fix = "Pass the cursor of the last request of the page before"
            raise must("after", "be the cursor of an ApprovalRequest, or None", cursor, fix) from None


_Found = tuple[_Position, records.RunRow, records.OpenQuestion]


def _in(rows: Sequence[records.RunRow], after: _Position | None) -> Iterator[_Found]:
    """Yield the open questions of these runs that follow a position."""
    for row in rows:
        for question in records.open_questions(row):
            position = _Position(question.asked_at, row.arrival, question.request_id)
            if after is None or position > after:
                yield position, row, question


async def open_requests(
    queue: RunQueue, limit: int, after: str | None, agent: str | None, tenant: str = "", *, metadata: bool = False
) -> list[tuple[records.RunRow, ApprovalRequest]]:
    """Return the open questions of all runs, the oldest first, each with the row of its run: light, or with `metadata`.

    The rows of the runs that ask have all that the order depends on. Only the mailboxes of the runs on the page are
    read.
    """
    start = None if after is None else _Position.of_cursor(after)
    first: list[_Found] = []
    wanted = records.RunFilter(
        agent=agent, tenant=tenant or None, asking=True, light=not metadata, without_input=metadata, limit=_BATCH
    )
    while rows := await queue.find(wanted):
        first = heapq.nsmallest(limit, (*first, *_in(rows, start)))
        if len(rows) < _BATCH:
            break
        wanted = wanted._replace(after=rows[-1].arrival)
    runs = list(dict.fromkeys(row.run_id for _, row, _ in first))
    mail = dict(zip(runs, await asyncio.gather(*map(queue.mail, runs)), strict=True))
    asked = ((each[1], _request(*each, mail[each[1].run_id])) for each in first)
    found = [(row, request) for row, request in asked if request is not None]
    if len(found) < len(first) == limit:  # runs were deleted since: a shorter page would look like the last page
        last = first[-1][0].cursor()
        found += await open_requests(queue, limit - len(found), last, agent, tenant, metadata=metadata)
    return found


async def open_requests_of(queue: RunQueue, row: records.RunRow) -> list[ApprovalRequest]:
    """Return the open questions of one run, the oldest first."""
    found = sorted(_in([row], None), key=itemgetter(0))
    mail = await queue.mail(row.run_id) if found else []
    return [asked for each in found if (asked := _request(*each, mail)) is not None]


def _request(
    position: _Position, row: records.RunRow, question: records.OpenQuestion, mail: Sequence[records.MailboxMessage]
) -> ApprovalRequest | None:
    """Return an open question with what the mailbox of the run contains about it; None if the run was deleted."""
    message = next((each for each in mail if (each.kind, each.msg_id) == (records.QUESTION, question.request_id)), None)
    if message is None:
        return None
    payload = _payload(row.run_id, message)
    details, schema = payload.get("details"), payload.get("schema")
    if "encrypted" in payload:
        details = payload  # a process without the key shows a mark
    elif _is_review(payload):
        details, schema = {name: payload[name] for name in _REVIEWED if name in payload}, ANSWER_SCHEMA
    return ApprovalRequest(
        run_id=row.decoded("run_id", known_uuid),
        run_key=row.run_key,
        agent_key=row.agent,
        name=message.name,
        request_id=message.msg_id,
        details=details,
        schema=schema,
        asked_at=aware(message.t),
        approved_before=payload.get("approved_before"),
        cursor=position.cursor(),
        problem=_problem(payload, message.name, mail),
        tenant=row.tenant or None,
    )


def _problem(payload: dict[str, Any], name: str, mail: Sequence[records.MailboxMessage]) -> str | None:
    """Return why the last message under the name of a question does not answer it.

    `approve` stores no answer that does not fit. So it is a plain signal, or an answer from before the question.
    """
    for each in reversed(mail):
        if each.msg_id.startswith(records.SIGNAL_ONLY):  # its sender may not answer
            continue
        if each.kind == "signal" and each.name == name and records.answered_request(each.msg_id) is None:
            with suppress(UnserialisableResult):  # the run, which decodes it too, fails with this error
                return misfit_of_answer(decode_known(each.payload), payload.get("schema")) or payload.get("problem")
    return payload.get("problem")


def _payload(run_id: object, message: records.MailboxMessage) -> dict[str, Any]:
    try:
        payload = decode_known(message.payload)
    except UnserialisableResult:
        payload = None
    if not isinstance(payload, dict):
        raise records.damaged(run_id, f"the question {message.msg_id}", payload)
    return payload


def _is_review(payload: dict[str, Any]) -> bool:
    return "request_id" not in payload  # a "step.in_doubt" event contains none


class AskedRequests:
    """The requests of one name that a run made, and how they were decided.

    Args:
        run_id: The run, as the caller names it.
        name: Name of the approval.
        mail: All messages of the run's mailbox.
        payloads: By request id, in the order in which the run asked.
    """

    def __init__(
        self, run_id: str, name: str, mail: Sequence[records.MailboxMessage], payloads: dict[str, dict[str, Any]]
    ) -> None:
        self.payloads = payloads
        #: Number of the last message that was read.
        self.read: int = mail[-1].seq if mail else 0
        self._run_id, self._name = run_id, name
        self._received = {each.msg_id for each in mail}
        self._decided = decisions(mail)

    @classmethod
    async def of(cls, queue: RunQueue, bus: EventBus, run_id: str, name: str, called: object = None) -> AskedRequests:
        """Return the requests of that name in the mailbox of a run.

        The requests of a run that asked under an older release are in its event log only. `called` is the run as the
        caller names it, if that is not `run_id`.
        """
        mail = await queue.mail(run_id)
        payloads = {
            each.msg_id: _payload(run_id, each) for each in mail if each.kind == records.QUESTION and each.name == name
        }
        if not payloads:
            payloads = {
                event.payload["request_id"]: event.payload
                for event in await bus.get_events(run_id)
                if event.event_type == "approval.requested" and event.payload.get("name") == name
                if isinstance(event.payload.get("request_id"), str)  # other code may publish events of that type
            }
        return cls(str(called or run_id), name, mail, payloads)

    def chosen(self, request_id: str | None, message_id: str | None) -> str | None:
        """Return the request that an answer is for, None if that was decided by another message.

        It is the request to which the same message was posted before, else the named request, else the only open
        request.

        Raises:
            IllegalTransition: The code of the run cancelled the wait for the answer.
            InvalidArgument: Several requests are open, and `request_id` names none of them.
        """
        given = {each: records.answer_id(each, message_id) for each in self.payloads if message_id}
        repeated = next((each for each, answer in given.items() if answer in self._received), None)
        if repeated is not None:
            return repeated if self._decided[repeated].msg_id == given[repeated] else None
        wanted = request_id
        if wanted is None:
            still_open = [each for each in self.payloads if each not in self._decided]
            if len(still_open) > 1:
                raise self._ambiguous(still_open)
            wanted = still_open[0] if still_open else [*self.payloads][-1]
        return None if self.decided_by(wanted, self._decided) is not None else wanted

    def _ambiguous(self, requests: Sequence[str]) -> InvalidArgument:
        more = f" and {len(requests) - MOST_NAMED} more" if len(requests) > MOST_NAMED else ""
        subjects = [brief(each) for each in map(self._subject, requests[:MOST_NAMED]) if each is not None]
        about = f"They are about {', '.join(subjects)}. " if subjects else ""
        # The HTTP API shows the last sentence, which is free of contents.
        fix = f"{about}Known: {', '.join(requests[:MOST_NAMED])}{more}."
        where = f"request_id of approval {brief(self._name)} of run {self._run_id!r}"
        return must(where, f"name one of {len(requests)} open requests", Shown("none"), fix)

    def _subject(self, request_id: str) -> Any:
        """Return by what a person recognizes a request: the arguments of a call, or else its details."""
        payload = self.payloads[request_id]
        details = payload if _is_review(payload) else payload.get("details")
        return details.get("tool_args", details) if isinstance(details, dict) else details

    def decided_by(self, request_id: str, found: Mapping[str, records.MailboxMessage]) -> str | None:
        """Return the id of the message that decided a request, None if it is open.

        Args:
            request_id: The request.
            found: The `decisions` in the mailbox of the run.

        Raises:
            IllegalTransition: The code of the run cancelled the wait for the answer.
        """
        message = found.get(request_id)
        if message is not None and (message.kind, message.payload) == (records.CLOSED, records.WAIT_CANCELLED):
            raise IllegalTransition(
                f"cannot answer {brief(self._name)} of run {self._run_id!r}: the code of the run has cancelled its "
                "wait for the answer. If it asks again, runner.approvals() shows the new question"
            )
        return None if message is None else message.msg_id

    def check(self, request_id: str, answer: Any) -> None:
        """Raise InvalidArgument if the answer is none to that request."""
        payload = self.payloads[request_id]
        subject = f"answer to approval {brief(self._name)}"
        if _is_review(payload):
            try:
                reviewed(answer)
            except InvalidArgument as error:
                raise must(subject, "be a review of the step", answer, str(error)) from None
        elif (wrong := misfit_of_answer(answer, payload.get("schema"))) is not None:
            raise must(subject, "match the schema of the request", answer, wrong)


def decisions(mail: Sequence[records.MailboxMessage]) -> dict[str, records.MailboxMessage]:
    """Return, by the id of the request, the first message that answered or closed it."""
    found: dict[str, records.MailboxMessage] = {}
    for each in mail:
        if (request := records.answered_request(each.msg_id)) is not None:
            found.setdefault(request, each)
    return found
