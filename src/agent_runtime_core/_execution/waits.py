"""What the code of a run waits for: time, signals, approvals, reviews of steps in doubt, and child runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, cast

from .._core.clock import TOO_LATE, Duration
from .._core.codec.json import MAX_WHOLE, arguments_digest, decode, encode
from .._core.context_vars import start_helper
from .._core.ids import child_run_id, step_id, unbroken
from .._core.json_schema import require_references
from .._core.log import log
from .._core.validation import must
from .._engines.base import Op
from .._journal.record import Record
from ..errors import (
    IdempotencyConflict,
    InvalidArgument,
    LeaseLost,
    Postponed,
    RunFailed,
    StorageError,
    UnserialisableResult,
    WaitTimeout,
    brief,
)
from ..interfaces import AgentRuntime, RunResult
from ..queue.records import (
    CLOSED,
    IN_DOUBT,
    LIVE,
    SIGNAL_ONLY,
    WAIT_CANCELLED,
    MailboxMessage,
    RowChanged,
    RunRow,
    answer_id,
    answered_request,
    same_input,
)
from ..state.base import APPROVED
from ..status import RunStatus
from ..tools.confirmation import misfit_of_answer
from .effects import effect_row, join_lineage, other_rows
from .journal_view import CHILD, CHILD_IN_DOUBT, SIGNAL, is_in_doubt
from .mailbox import Inbox, MailboxReader, consumed_numbers, message_of
from .parking import TIMED_OUT, Parking
from .result_codec import result_from_payload, result_payload
from .run_control import RunControl, Services, with_traceparent
from .run_writer import OUTCOME_UNKNOWN, Row
from .step import CURRENT_STEP, AlreadyDone, Identity
from .step_journal import RunJournal

_SHORT: Final = 5.0  # seconds of a wait inside a step that holds the slot of the worker
ADOPTION_SECONDS: Final = 5.0  # seconds for which the parent claims a child, to release it to workers


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and (not isinstance(timeout, (int, float)) or not 0 <= timeout <= TOO_LATE):
        raise must("timeout", f"be from 0 to {TOO_LATE:,.0f} seconds, or None", timeout)


class Waits:
    """The waits of one run under one claim, each with its record in the journal.

    Args:
        journal: The journal of the run.
        row: The row of the run as it was claimed.
        services: What the runner lends to the run.
        control: What the run shares with its runner.
        where: Returns the fields by which an event names the step that the calling code runs in.
    """

    def __init__(
        self, journal: RunJournal, row: RunRow, services: Services, control: RunControl,
        where: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        consumed = {number for record in journal.view.completed.values() for number in consumed_numbers(record.info)}
        self._mailbox = MailboxReader(journal.writer.queue, row.run_id, control.mail, consumed)
        self._parking = Parking(journal, row, services, control, self._mailbox)
        self._journal, self._row, self._services, self._control = journal, row, services, control
        self._writer, self._clock = journal.writer, services.clock
        self._where = where
        self._closing: set[asyncio.Task[None]] = set()  # tasks that close questions
        self._positions: dict[Identity, int] = {}  # of the waits and child runs that have begun
        #: The messages that were sent to the agent.
        self.inbox: Inbox = Inbox(journal, self._mailbox)

    @property
    def messages_read(self) -> int:
        """The number of the last mailbox message that this claim read."""
        return self._mailbox.cursor

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that are inside a wait of the run."""
        return list(self._parking.active_waits)

    async def regain_slot(self) -> None:
        """Wait for a free slot of the worker. If there is none for long, the run is released and this never returns."""
        await self._parking.regain_slot()

    def reclaim_slot(self) -> None:
        """Count the run as active again, even if no slot of the worker is free."""
        self._parking.reclaim_slot()

    # -- records of waits

    async def _find(self, name: str, key: str) -> Record | None:
        """Return the record of a wait or a child run that ended before."""
        journal = self._journal
        if journal.unconfirmed.pending:
            await journal.unconfirmed.resolve()
        return journal.lookup(name, key)

    def _enter(self, name: str, key: str, record: Record | None, *, may_be_lost: bool = False) -> str:
        """Note that the code reaches a wait or a child run, which must be next in the journal.

        Returns:
            Its name in the journal.
        """
        position = self._journal.enter(name, key, record, may_be_lost=may_be_lost)
        name = self._journal.view.journal_name(name, key)
        self._positions[name, key] = position
        return name

    async def _begin(self, name: str, key: str, seconds: float | None, approval: bool = False) -> Duration | None:
        """Return the time limit of a wait: as first recorded, else from now, which is recorded."""
        journal = self._journal
        if (name, key) in journal.view.started:
            until, began = journal.view.wait_deadlines.get((name, key), (None, 0.0))
            return None if until is None else self._parking.limit(until, until - began)
        limit = None if seconds is None else self._parking.limit(self._clock.wall() + seconds, seconds)
        until = None if limit is None else limit.until
        info: dict[str, Any] = {"until": until, **self._task_info()}
        if approval:  # readers of the journal tell it from a plain signal
            info["approval"] = True
        record = journal.records.started(name, key, pos=self._positions[name, key], quiet=True, info=info)
        # If the step around this wait is tried again, the wait keeps its limit.
        journal.view.started[name, key], journal.view.wait_deadlines[name, key] = record.seq, (until, record.t)
        await self._writer.buffer(record)
        return limit

    def _task_info(self) -> dict[str, Any]:
        return {"beside": True} if self._journal.in_child_task() else {}

    async def _end(
        self,
        name: str,
        key: str,
        value: Any,
        message: MailboxMessage | None = None,
        *,
        late: bool = False,
        digest: str | None = None,
        child: str | None = None,
        approval: str | None = None,
        messages: Sequence[MailboxMessage] = (),
        lazy: bool = False,
    ) -> Record:
        """Record how a wait ended.

        `approval` is the digest of its details, if it is an approval that was answered. `messages` are the messages to
        the agent that ended it. With `lazy` the record is written with the next record.
        """
        journal = self._journal
        info: dict[str, Any] = {"mail": message.seq} if message is not None else {"late": True} if late else {}
        if messages:
            info["mail"] = [each.seq for each in messages]
        if approval is not None:
            info |= {"approval": approval, **journal.about_flow()}
            self._writer.effects[name, key] = effect_row(journal, name, key, approval, APPROVED)
        if (
            child is not None
            and value["status"] != "succeeded"
            and is_in_doubt(await self._writer.state.records(child))
        ):
            info[CHILD_IN_DOUBT] = True
        text = encode(value, max_bytes=MAX_WHOLE)
        position = self._positions.pop((name, key))
        if lazy:
            position = 0  # the record may be lost although the records of later code are not
        record = journal.value_record(name, key, text, encode(info) if info else None, digest, position)
        with self._parking.committing():
            try:
                await journal.write((record,), (), CURRENT_STEP.get(), lazy=lazy)
            except BaseException as error:
                if not isinstance(error, OUTCOME_UNKNOWN):
                    for each in (*messages, *((message,) if message is not None else ())):
                        self._mailbox.put_back(each)
                raise
        if CHILD_IN_DOUBT in info:
            journal.view.children_in_doubt.add((name, key))
        journal.view.started.pop((name, key), None)
        journal.view.wait_deadlines.pop((name, key), None)
        journal.advance()
        return journal.view.completed[name, key]

    # -- time, signals and people

    async def sleep(self, seconds: float, given_key: str | None = None) -> None:
        """Wait for a time; a resumed run waits for what is left of it."""
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds <= TOO_LATE:
            raise must("seconds", f"be from 0 to {TOO_LATE:,.0f} seconds", seconds)
        name, key = "sleep", self._journal.key_for("w", "sleep", given_key)
        async with self._journal.keys.exclusive(name, key):
            record = await self._find(name, key)
            self._enter(name, key, record)
            if record is not None:
                return
            limit = await self._begin(name, key, seconds)
            await self._parking.wait(lambda: None, limit, "sleep")
            await self._end(name, key, None)

    async def pause(self, seconds: float, reason: str) -> None:
        """Wait for a time, of which nothing is recorded: after a park, the code asks again whether it has to wait.

        Args:
            seconds: How long to wait.
            reason: What the run waits for, as the parked run shows it.

        Raises:
            Postponed: The calling code is inside a step, which cannot be parked, and the wait is long.
        """
        if self._parking.can_park():
            await self._parking.wait(lambda: None, self._parking.limit(self._clock.wall() + seconds, seconds), reason)
        elif seconds <= (self._services.park_after or _SHORT):
            await self._clock.sleep_for(seconds)
        else:
            error = Postponed(f"{reason} has no room, and the run waits until it has")
            error.after, error.is_wait = seconds, True
            raise error

    async def signal(self, name: str, timeout: float | None, given_key: str | None = None) -> Any:
        """Wait for the next signal of that name."""
        name = unbroken("signal name", name)
        return await self._wait_for_signal(name, timeout, f"signal {name}", given_key=given_key)

    async def approve(
        self, name: str, details: Any, schema: dict[str, Any] | None, timeout: float | None, given_key: str | None
    ) -> Any:
        """Publish a request for approval and wait for its answer."""
        name = unbroken("approval name", name)
        require_references(schema, f"approval {name!r}: schema")
        shown = details
        if (redaction := self._journal.redaction) is not None:
            shown = redaction.stored_value("event", details, f"run {self._row.run_id}")
        request = {**self._where(), "name": name, "details": shown, "schema": schema}
        approval = arguments_digest(details) or ""

        problem: dict[str, str] = {}  # of the last answer to the question

        async def ask(request_id: str, key: str) -> None:
            before = await self._approved_before(f"signal:{name}", key, approval)
            # Needed even while other records follow in the journal: a concurrent step may have ended since. The id of
            # the wait is the id of the event, so the event is published once.
            text = encode({**request, **before, **problem, "request_id": request_id})
            row = (f"asked:{request_id}", "approval.requested", text, self._clock.wall())
            await self._ask(row, name, request_id)

        def fits(message: MailboxMessage) -> bool:
            # `runner.approve` did not check a plain signal or an answer from before the request. It checked
            # other answers against the question, which an earlier release or other code may have asked.
            reason = misfit_of_answer(decode(message.payload), schema)
            if reason is not None:
                self._mailbox.reject(message, f"approval {name!r}", reason)
                problem["problem"] = reason
            return reason is None

        return await self._wait_for_signal(name, timeout, f"approval {name}", ask, given_key, fits, approval, request)

    async def _approved_before(self, name: str, key: str, digest: str) -> dict[str, Any]:
        """Return the field of the request that names the run which got the same approval, if this run is a fork."""
        journal = self._journal
        if journal.view.origin == self._row.run_id:
            return {}
        for each in (name, *journal.view.former_names(name)):
            if rows := await other_rows(journal, effect_row(journal, each, key, digest, APPROVED)):
                return {"approved_before": rows[-1].run_id}
        return {}

    async def review(
        self, name: str, key: str, start: int, read: Callable[[Any], Any], tool: dict[str, Any] | None = None
    ) -> AlreadyDone | None:
        """Wait for a person to decide about a step in doubt.

        Args:
            name: The name of the step.
            key: Its key.
            start: Number of the record of its start. An answer is valid for this start only.
            read: Makes the step's result of the result in the answer.
            tool: The tool call that the step is: {"name", "id", "args"}.

        Returns:
            The step's result if it was done, None if it is to run again.

        Raises:
            RunFailed: if the answer is that the step failed.
        """

        def fits(message: MailboxMessage) -> bool:
            try:
                reviewed(decode(message.payload), read)
            except (InvalidArgument, UnserialisableResult) as reason:
                self._mailbox.reject(message, f"step {name!r} in doubt", reason)
                return False
            return True

        step, signal = step_id(self._row.run_id, name, key), f"{IN_DOUBT}{name}"
        about: dict[str, Any] = {"step_name": name, "step_id": step, "signal": signal}
        if tool is not None:
            call = {"tool_name": tool["name"], "tool_args": tool["args"], "tool_call_id": tool["id"]}
            if (redaction := self._journal.redaction) is not None:
                call = redaction.stored_value("event", call, f"run {self._row.run_id}")
            about |= call
        text = encode(about)

        async def ask(request_id: str, _: str) -> None:
            # Needed even while other records follow in the journal: a concurrent step may have ended since. The id of
            # the start is the id of the event, so the event is published once; a repeated question gets a new id.
            event_id = ":".join(("doubt", step, str(start), *request_id.split(".")[1:]))
            row = (event_id, "step.in_doubt", text, self._clock.wall())
            await self._ask(row, signal, request_id)

        answer = await self._wait_for_signal(signal, None, "in_doubt", ask, f"{step}:{start}", fits)
        outcome, result = reviewed(answer, read)
        if outcome == "failed":
            raise RunFailed(f"step {name!r} was reviewed as failed", "failed", answer)
        return None if outcome == "retry" else AlreadyDone(result)

    async def _wait_for_signal(
        self,
        signal: str,
        timeout: float | None,
        reason: str,
        ask: Callable[[str, str], Awaitable[Any]] | None = None,
        given_key: str | None = None,
        fits: Callable[[MailboxMessage], bool] = lambda message: True,
        approval: str | None = None,
        request: Any = None,
    ) -> Any:
        """Wait for a signal that `fits`; `ask` posts the question to a person when the wait begins."""
        _check_timeout(timeout)
        called = f"{SIGNAL}{signal}"  # keys are counted by this name, even if the journal contains another name
        key = self._journal.key_for("w", called, given_key)
        async with self._journal.keys.exclusive(called, key):
            record = await self._find(called, key)
            if record is None and request is not None:
                encode(request)  # an error must come before the order is checked, as it does on each resume
            name = self._enter(called, key, record)
            # A wait that was renamed receives messages to all of its names.
            names = (name.removeprefix(SIGNAL), signal, *self._journal.view.former_names(signal))
            if record is None:
                if approval is not None:
                    await join_lineage(self._journal)
                request_id = step_id(self._row.run_id, name, key)
                if ask is not None and (name, key) not in self._journal.view.started:
                    await ask(request_id, key)
                limit = await self._begin(name, key, timeout, approval is not None)
                if ask is None:
                    message = await self._parking.wait(lambda: self._mailbox.find("signal", *names), limit, reason)
                else:
                    message = await self._answer(names, limit, reason, request_id, lambda each: ask(each, key), fits)
                if message is TIMED_OUT:
                    record = await self._end(name, key, None, late=True)
                else:
                    record = await self._end(name, key, decode(message.payload), message, approval=approval)
        if record.info is not None and json.loads(record.info).get("late"):
            self._journal.keys.failed_try_keys.update({(called, key), (name, key)})
            late = "in time" if timeout is None else f"within {timeout:g} s"
            kind = "signal" if approval is None else "approval"
            fix = "Catch WaitTimeout to continue without it, or pass a longer timeout"
            raise WaitTimeout(f"{kind} {brief(signal)} did not arrive {late}. {fix}")
        return decode(record.result or "null")

    async def _answer(
        self, names: Sequence[str], limit: Duration | None, reason: str, request_id: str,
        ask: Callable[[str], Awaitable[Any]],
        fits: Callable[[MailboxMessage], bool],
    ) -> Any:  # fmt: skip
        """Wait for the answer to a question.

        The question is closed if another message or the time limit ends the wait, or if the code cancels it. A wait
        whose question is closed asks again.
        """
        asked = request_id

        def ends(message: MailboxMessage) -> bool:
            answered = answered_request(message.msg_id)
            if message.msg_id.startswith(SIGNAL_ONLY):
                self._mailbox.reject(message, reason, "its sender may not answer questions")
                return False
            return fits(message) if answered is None else answered == asked

        def found() -> MailboxMessage | None:
            return self._mailbox.find("signal", *names, fits=ends) or self._mailbox.find(CLOSED, *names, fits=ends)

        while True:
            with self._closed_if_cancelled(names[0], asked):
                message = await self._parking.wait(found, limit, reason)
                if message is not TIMED_OUT and message.kind == CLOSED:  # an earlier wait was cancelled, or timed out
                    is_late = limit is not None and limit.left() <= 0
                    message = TIMED_OUT if is_late else message
                elif message is TIMED_OUT or answered_request(message.msg_id) is None:
                    message = await self._close_question(names, asked, message)
            if message is TIMED_OUT or (message.kind != CLOSED and fits(message)):
                return message
            if message.kind == CLOSED:
                self._mailbox.put_back(message)  # a later call of this wait asks under the same ids
            # An answer that does not fit the code of this process closed the question.
            asked = f"{request_id}.{message.seq}"
            await ask(asked)

    async def _ask(self, row: Row, signal: str, request_id: str) -> None:
        """Publish a question to a person."""
        with self._closed_if_cancelled(signal, request_id):
            self._mailbox.passed(await self._writer.ask(row, signal, request_id))

    @contextmanager
    def _closed_if_cancelled(self, signal: str, request_id: str) -> Iterator[None]:
        """Close a question if the block is cancelled. The block does not wait for it, as it may be cancelled again."""
        try:
            yield
        except asyncio.CancelledError:
            task = start_helper(self._close_unless_ending(signal, request_id))
            self._closing.add(task)  # the event loop alone would not keep it
            task.add_done_callback(self._closing.discard)
            raise

    async def _close_unless_ending(self, signal: str, request_id: str) -> None:
        """Post that a question is closed, because the code of the run, which continues, cancelled its wait.

        If this is not written, the question stays open, and the next attempt closes it or waits for its answer.
        """
        if self._control.is_ending or self._writer.closed_error is not None:
            return
        op = self._writer.queue.post_op(self._row.run_id, CLOSED, signal, WAIT_CANCELLED, answer_id(request_id))
        with self._parking.committing():  # not parked before: the claim would have ended
            try:
                await self._writer.write(queue=[op])
            except (LeaseLost, StorageError) as error:
                log.warning("question %.120s of run %s stays open: %s", signal, self._row.run_id, type(error).__name__)

    async def _close_question(self, names: Sequence[str], request_id: str, end: Any) -> Any:
        """Post that a question is closed. Returns what ends the wait: `end`, or the answer if that was posted before.

        This is a commit before the commit of the wait's record, because only the order of the mailbox decides whether
        an answer, which `runner.approve` confirmed, came in time.
        """
        if self._writer.closed_error is not None:  # the record of the wait is refused too
            return end
        message: MailboxMessage | None = None if end is TIMED_OUT else end
        op = self._writer.queue.post_op(self._row.run_id, CLOSED, names[0], "null", answer_id(request_id))
        answer: MailboxMessage | None = None
        with self._parking.committing():
            try:
                [[(_, number)]] = (await self._writer.write(queue=[op]))[2:]
                self._mailbox.passed(number)
                if self._mailbox.cursor < number:
                    await self._mailbox.read()
                answer = self._mailbox.find("signal", *names, fits=lambda it: answered_request(it.msg_id) == request_id)
            except BaseException:
                if message is not None:
                    self._mailbox.put_back(message)
                raise
        if answer is None:
            return end
        self._mailbox.consume(answer)
        if message is not None:
            self._mailbox.put_back(message)
        return answer

    # -- messages to the agent

    async def messages(self, timeout: float | None, given_key: str | None = None) -> list[dict[str, Any]]:
        """Return the new messages to the agent, waiting for the first message."""
        _check_timeout(timeout)
        name, key = "messages", self._journal.key_for("w", "messages", given_key)
        async with self._journal.keys.exclusive(name, key):
            record = await self._find(name, key)
            self._enter(name, key, record, may_be_lost=True)
            if record is None:
                taken = await self.inbox.take()
                if not taken and timeout != 0:
                    limit = await self._begin(name, key, timeout)
                    first = await self._parking.wait(self.inbox.first, limit, "messages")
                    if first is not TIMED_OUT:
                        self._mailbox.put_back(first)
                        taken = await self.inbox.take()
                # That there was none need not be durable before the code acts on it: it consumes nothing.
                chats = [message_of(each) for each in taken]
                record = await self._end(name, key, chats, messages=taken, lazy=not taken)
        return cast("list[dict[str, Any]]", decode(record.result or "[]"))

    # -- a child run

    async def child(self, agent: AgentRuntime | str, input: dict[str, Any], given_key: str | None) -> RunResult:
        """Start a child run, unless an earlier attempt did, and wait for its result."""
        agent_key = agent if isinstance(agent, str) else getattr(agent, "key", None)
        if not isinstance(agent_key, str) or isinstance(agent, type):
            fix = f"Pass {agent.__name__}()" if isinstance(agent, type) else ""
            raise must("agent", "be an agent or an agent key", agent, fix)
        journal = self._journal
        called = f"{CHILD}{agent_key}"  # keys are counted by this name, even if the journal contains another name
        digest = arguments_digest(input)
        key = journal.key_for("c", called, given_key, digest)
        async with journal.keys.exclusive(called, key):
            record = await self._find(called, key)
            if record is None:
                await self._take_name_of_lineage(called, key)
            row = self._child_row(called, key, agent_key, input) if record is None else None
            name = self._enter(called, key, record)
            if record is None:
                assert row is not None
                try:
                    record = await self._run_child(name, key, agent, row, input, digest)
                except asyncio.CancelledError:  # by the caller, who may call the child again
                    journal.keys.keep(called, key, digest, {}, lambda: 0)
                    raise
        journal.keys.close(called, key, digest)
        result = result_from_payload(cast("dict[str, Any]", decode(record.result or "{}")))
        try:
            return result.raise_for_status()
        except RunFailed:
            if (name, key) in journal.view.children_in_doubt:  # another child would repeat the effect
                journal.keys.keep(called, key, digest, {}, lambda: 0)
            else:
                journal.keys.failed_try_keys.update({(called, key), (name, key)})
            raise

    async def _take_name_of_lineage(self, name: str, key: str) -> None:
        """Record a child run that a fork calls under the former name that another run of the lineage called it by.

        The lineage of the child is found by that name. Under another name, the child would repeat its effects.
        """
        journal = self._journal
        former = journal.view.former_names(name)
        if not former or journal.view.journal_name(name, key) != name:
            return
        await join_lineage(journal)
        if journal.view.origin == self._row.run_id:
            return
        for each in (name, *former):
            child = str(child_run_id(step_id(journal.view.origin, each, key)))
            if await self._writer.state.effects(child, "", ""):
                journal.view.keep_name(name, key, each)
                return

    def _child_row(self, name: str, key: str, agent_key: str, input: dict[str, Any]) -> RunRow:
        """Return the row of a child run to be stored, or raise InvalidArgument."""
        return self._writer.queue.new_row(
            str(child_run_id(step_id(self._row.run_id, self._journal.view.journal_name(name, key), key))), agent_key,
            input, with_traceparent(None, self._services.tracer), self._row.priority, parent_run_id=self._row.run_id,
            origin="inline" if self._services.run_child else "", tenant=self._row.tenant,
        )  # fmt: skip

    async def _run_child(
        self, name: str, key: str, agent: AgentRuntime | str, row: RunRow, input: dict[str, Any], digest: str | None
    ) -> Record:
        journal, inline, child = self._journal, self._services.run_child, row.run_id
        called_before = (name, key) in journal.view.started
        if not called_before:
            info = {"child": child, **self._task_info(), **journal.about_flow()}
            if former := journal.view.former_names(f"{CHILD}{row.agent}"):
                info["names"] = [f"{CHILD}{row.agent}", *former]
            record = journal.records.started(name, key, pos=self._positions[name, key], quiet=True, info=info)
            found = await journal.publish(record, [] if inline else [Op("queue.insert", (row,))])
            called_before = found is None or any(_ended_before(row, stored) for stored in found)
            journal.view.started[name, key] = record.seq
        if called_before and inline is None and (payload := await self._restart_child(row)) is not None:
            return await self._end(name, key, payload, digest=digest, child=child)
        if inline is not None:
            # Who resumes this run resumes the child too.
            recover = "inline" if self._row.origin else "worker"
            running = inline(agent, child, input, self._row.run_id, recover, row.tenant)
            payload = result_payload(await self._parking.join(running))
            return await self._end(name, key, payload, digest=digest, child=child)
        message = await self._wait_for_child(child)
        return await self._end(name, key, decode(message.payload), message, digest=digest, child=child)

    async def _wait_for_child(self, child: str) -> MailboxMessage:
        message = await self._parking.wait(lambda: self._mailbox.find("child", child), None, f"child {child}")
        return cast(MailboxMessage, message)

    async def _restart_child(self, row: RunRow) -> Any:
        """Make sure that workers can run a child that was called before.

        Returns:
            The payload of its result if it ended without a message to this run, else None. A child sends none if its
            parent ended too, because the parent failed or both were cancelled.
        """
        writer, mailbox, child = self._writer, self._mailbox, row.run_id
        while True:
            await mailbox.read()
            message = mailbox.find("child", child)
            if message is not None and await self._from_previous_generation(message, child):
                mailbox.consume(message)
            elif message is not None:
                return None  # its result is there, and its row may be deleted since
            stored: RunRow = (await writer.write(queue=[Op("queue.insert", (row,))]))[2][0]
            if stored.status in LIVE and self._has_passed(stored.cancel_at):
                await self._wait_for_child(child)  # it is being cancelled: let it end before it is reopened
                continue
            await mailbox.read()
            if (stored.status in LIVE and not stored.origin) or mailbox.find("child", child) is not None:
                return None
            if stored.status == "succeeded":
                record = await writer.state.ending(child)
                output = cast("dict[str, Any]", decode(stored.output or "{}"))
                return result_payload(RunResult(output)) if record is None else decode(record.result or "{}")
            with suppress(RowChanged, LeaseLost):
                if stored.status in LIVE:
                    await self._adopt_child(row)
                else:
                    await writer.write(queue=[Op("queue.reopen", (child, (stored.status,), self._clock.wall()))])
                return None

    async def _from_previous_generation(self, message: MailboxMessage, child: str) -> bool:
        """Return whether the message is from an end of the child that does not count in this generation of the run.

        So it is if the child did not succeed, ended or was cancelled before this generation began, and no earlier
        generation used the result: the child is resumed with this generation, or was already.
        """
        status = result_from_payload(cast("dict[str, Any]", decode(message.payload))).status
        if status is RunStatus.SUCCEEDED or self._journal.view.reopened_at is None:
            return False
        if self._has_passed(message.t) or not self._mailbox.is_last(message):  # a child sends one for each of its ends
            return True
        stored = await self._writer.queue.row(child)
        if stored is None:
            return False
        if message.msg_id.rpartition(":")[2] != str(stored.generation):
            return True
        return status is RunStatus.CANCELLED and self._has_passed(stored.cancel_at)

    def _has_passed(self, at: float | None) -> bool:
        """Return whether `at` is before the beginning of this generation of the run."""
        since = self._journal.view.reopened_at
        return at is not None and since is not None and at <= since

    async def _adopt_child(self, row: RunRow) -> None:
        """Release to workers a child that was called inline, unless it still runs there."""
        queue = self._writer.queue
        outcome, child = await queue.take(row, self._row.worker, ADOPTION_SECONDS, insert=False, reopen=False)
        if outcome == "claimed" and child is not None:
            update = queue.unchanged_update(child, child.claim_id)._replace(status="pending", parked=child.parked)
            await queue.settle(child.run_id, update)


def _ended_before(row: RunRow, stored: RunRow) -> bool:
    """Return whether the stored child ended: a deleted run with the id of the caller called it.

    Raises:
        IdempotencyConflict: It had another input.
    """
    if stored.status in LIVE:
        return False
    if not same_input(row, stored):
        raise IdempotencyConflict(
            f"child run {row.run_id} of agent {row.agent!r} must have the input of this call, got a run that a deleted "
            "run with the id of its caller has called. Delete it with runner.discard, or use another run id"
        )
    return True


# -- reviews

#: What an answer looks like, as JSON Schema. The plain strings "retry" and "failed" are accepted too.
ANSWER_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"outcome": {"enum": ["done", "retry", "failed"]}, "result": {}},
    "required": ["outcome"],
}


def reviewed(answer: Any, read: Callable[[Any], Any] = lambda result: result) -> tuple[str, Any]:
    """Return the outcome of a step in doubt by the answer of a reviewer, and its result if it was done.

    Raises:
        InvalidArgument: The outcome of the answer is unknown.
    """
    outcome = answer.get("outcome") if isinstance(answer, dict) else answer
    if outcome == "done" and isinstance(answer, dict):
        return outcome, read(answer.get("result"))
    if outcome in ("retry", "failed"):
        return outcome, None
    outcomes = '{"outcome": "done", "result": …}, {"outcome": "retry"} or {"outcome": "failed"}'
    raise must("the answer", f"be {outcomes}", answer)
