"""What the code of a run waits for: time, signals, people, and the runs that it calls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from .._core.clock import TOO_LATE
from .._core.codec.json import arguments_digest, decode, encode
from .._core.ids import child_run_id, step_id, unbroken
from .._core.json_schema import misfit
from .._engines.base import Op
from .._journal.record import Record
from ..errors import InvalidArgument, LeaseLost, RunFailed, UnserialisableResult, WaitTimeout, brief
from ..interfaces import AgentRuntime, RunResult
from ..queue.records import LIVE, MailboxMessage, RowChanged, RunRow
from ..state.base import APPROVED
from ..status import RunStatus
from .effects import effect_row, join_lineage, other_rows
from .mailbox import TIMED_OUT, Mailbox, answered_request
from .result_codec import result_from_payload, result_payload
from .step_policy import AlreadyDone
from .step_scope import CURRENT_STEP

log: logging.Logger = logging.getLogger("agent_runtime_core")

ADOPTION_SECONDS = 5.0  # seconds that a child is held to be given to workers


def _reviewed(answer: Any, read: Callable[[Any], Any]) -> tuple[str, Any]:
    """What an answer says became of a step in doubt, and its result if it was done."""
    outcome = answer.get("outcome") if isinstance(answer, dict) else answer
    if outcome == "done" and isinstance(answer, dict):
        return outcome, read(answer.get("result"))
    if outcome in ("retry", "failed"):
        return outcome, None
    raise InvalidArgument(
        f"""{brief(answer)} is none of {{"outcome": "done", "result": …}}, {{"outcome": "retry"}}, """
        """{"outcome": "failed"}"""
    )


class Waits(Mailbox):
    """The waits of one context."""

    async def sleep(self, seconds: float, known_by: str | None = None) -> None:
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < TOO_LATE:
            raise InvalidArgument(f"a sleep is a number of seconds of at least 0, not {brief(seconds)}")
        name, key = "sleep", self._book.key_for("w", "sleep", known_by)
        async with self._book.keys.exclusive(name, key):
            if await self._replayed(name, key) is not None:
                return
            until = await self._begin(name, key, seconds)
            assert until is not None
            await self._wait_for_message(lambda: None, until, "sleep")
            await self._end(name, key, None)

    async def signal(self, name: str, timeout: float | None, known_by: str | None = None) -> Any:
        name = unbroken("a signal's name", name)
        return await self._message(name, timeout, f"signal {name}", known_by=known_by)

    async def approve(
        self, name: str, details: Any, schema: dict[str, Any] | None, timeout: float | None, known_by: str | None
    ) -> Any:
        name = unbroken("a signal's name", name)
        request = {**self._book.control.where(), "name": name, "details": details, "schema": schema}

        approval = arguments_digest((details,), {})[0] or ""

        async def ask(wait: str, key: str) -> None:
            before = await self._approved_before(f"signal:{name}", key, approval)
            # Known by the wait, and told also where records lie ahead: a step beside it may have ended since.
            text = encode({**request, **before, "request_id": wait})
            await self._ledger.emit([(f"asked:{wait}", "approval.requested", text, self._clock.wall())])

        def answers(mail: MailboxMessage, wait: str) -> bool:
            if (meant := answered_request(mail.msg_id)) is not None:
                return meant == wait
            wrong = misfit(decode(mail.payload), schema or {})  # it came by another way, or before the question
            if wrong is not None:
                self._ignore(mail, f"approval {name!r}", wrong)
            return wrong is None

        await join_lineage(self._book)
        return await self._message(name, timeout, f"approval {name}", ask, known_by, answers, approval)

    async def _approved_before(self, name: str, key: str, digest: str) -> dict[str, Any]:
        """What the request says of the run that was given the same approval, if this run is a fork."""
        book = self._book
        if book.view.origin == self._row.run_id:
            return {}
        rows = await other_rows(book, effect_row(book, name, key, digest, APPROVED))
        return {"approved_before": rows[-1].run_id} if rows else {}

    async def review(self, name: str, key: str, start: int, read: Callable[[Any], Any]) -> AlreadyDone | None:
        """Park until somebody says what became of a step in doubt; the answer is about that start and no other."""

        def answers(mail: MailboxMessage, wait: str) -> bool:
            try:
                _reviewed(decode(mail.payload), read)
            except (InvalidArgument, UnserialisableResult) as wrong:
                self._ignore(mail, f"step {name!r} in doubt", wrong)
                return False
            return True

        step = step_id(self._row.run_id, name, key)
        request = {"step_name": name, "step_id": step, "signal": f"in_doubt:{name}"}
        # Known by the start, and told also where records lie ahead: a step beside it may have ended since.
        row = (f"doubt:{step}:{start}", "step.in_doubt", encode(request), self._clock.wall())
        answer = await self._message(
            f"in_doubt:{name}", None, "in_doubt", lambda *_: self._ledger.emit([row]), f"{step}:{start}", answers
        )
        outcome, result = _reviewed(answer, read)
        if outcome == "failed":
            raise RunFailed(f"step {name!r} was reviewed as failed", "failed", answer)
        return None if outcome == "retry" else AlreadyDone(result)

    def _ignore(self, mail: MailboxMessage, what: str, why: object) -> None:
        if mail.seq not in self._rejected:
            self._rejected.add(mail.seq)
            log.warning("what came for %.120s does not fit, and is no answer: %s", what, why)

    async def _message(
        self,
        wanted: str,
        timeout: float | None,
        reason: str,
        ask: Callable[[str, str], Awaitable[Any]] | None = None,
        known_by: str | None = None,
        answers: Callable[[MailboxMessage, str], bool] = lambda mail, wait: True,
        approval: str | None = None,
    ) -> Any:
        if timeout is not None and (not isinstance(timeout, (int, float)) or not 0 <= timeout < TOO_LATE):
            raise InvalidArgument(f"timeout is a number of seconds of at least 0, not {brief(timeout)}")
        name = f"signal:{wanted}"
        key = self._book.key_for("w", name, known_by)
        async with self._book.keys.exclusive(name, key):
            record = await self._replayed(name, key)
            if record is None:
                wait = step_id(self._row.run_id, name, key)
                if ask is not None and (name, key) not in self._book.view.started:
                    await ask(wait, key)
                until = await self._begin(name, key, timeout)
                mail = await self._wait_for_message(
                    lambda: self._find("signal", wanted, lambda mail: answers(mail, wait)), until, reason
                )
                if mail is TIMED_OUT:
                    record = await self._end(name, key, None, late=True)
                else:
                    record = await self._end(name, key, decode(mail.payload), mail, approval=approval)
        if record.info is not None and json.loads(record.info).get("late"):
            self._book.keys.failed_try_keys.add((name, key))
            raise WaitTimeout(f"no {reason:.300} came {'in time' if timeout is None else f'within {timeout:g} s'}")
        return decode(record.result or "null")

    # -- a called run

    async def child(self, agent: AgentRuntime | str, input: dict[str, Any], key: str | None) -> RunResult:
        agent_key = agent if isinstance(agent, str) else getattr(agent, "key", None)
        if not isinstance(agent_key, str) or isinstance(agent, type):
            raise InvalidArgument(f"call() takes an agent or the key of one, not {brief(agent)}")
        book = self._book
        name = f"call:{agent_key}"
        mark, _ = arguments_digest((input,), {})
        place = book.key_for("c", name, key, mark)
        async with book.keys.exclusive(name, place):
            record = await self._replayed(name, place)
            if record is None:
                try:
                    record = await self._child(name, place, agent, agent_key, input, mark)
                except asyncio.CancelledError:  # by its caller, who may call it once more
                    book.keys.reuse_key(name, place, mark, CURRENT_STEP.get())
                    raise
        result = result_from_payload(cast("dict[str, Any]", decode(record.result or "{}")))
        try:
            return result.raise_for_status()
        except RunFailed:
            book.keys.failed_try_keys.add((name, place))
            raise

    async def _child(
        self, name: str, place: str, agent: AgentRuntime | str, agent_key: str, input: dict[str, Any], mark: str | None
    ) -> Record:
        book, queue = self._book, self._ledger.queue
        child = str(child_run_id(step_id(self._row.run_id, name, place)))
        inline = self._services.run_child
        row = queue.new_row(
            child, agent_key, input, None, self._row.priority, parent_run_id=self._row.run_id,
            origin="inline" if inline else "",
        )  # fmt: skip
        there = (name, place) in book.view.started
        if not there:
            record = book.records.started(name, place, quiet=True, info={"child": child, **self._task_info()})
            there = not await book.publish(record, [] if inline else [Op("queue.insert", (row,))])
            book.view.started[name, place] = record.seq
        if there and inline is None and (unheard := await self._restart_child(row)) is not None:
            return await self._end(name, place, unheard, mark=mark)
        if inline is not None:
            # Whoever goes on with this run goes on with it too.
            recover = "inline" if self._row.origin else "worker"
            ended = result_payload(await inline(agent, child, input, self._row.run_id, recover))
            return await self._end(name, place, ended, mark=mark)
        mail = await self._wait_for_message(lambda: self._find("child", child), None, f"child {child}")
        return await self._end(name, place, decode(mail.payload), mail, mark=mark)

    async def _restart_child(self, row: RunRow) -> Any:
        """See that a child which was called before is there for workers; what it came to, if it ended unheard.

        That is while this run had ended too, by its own fault or cancelled with it: it told nobody then.
        """
        ledger, child = self._ledger, row.run_id
        while True:
            await self._read_new()
            mail = self._find("child", child)
            if mail is not None and await self._from_previous_generation(mail, child):
                self._consume(mail)
            elif mail is not None:
                return None  # it has told, and may be deleted since
            there: RunRow = (await ledger.write(queue=[Op("queue.insert", (row,))]))[2][0]
            if there.status in LIVE and self._has_passed(there.cancel_at):
                await self._wait_for_message(
                    lambda: self._find("child", child), None, f"child {child}"
                )  # to have let go
                continue
            await self._read_new()
            if (there.status in LIVE and not there.origin) or self._find("child", child) is not None:
                return None
            if there.status == "succeeded":
                record = await ledger.state.ending(child)
                output = cast("dict[str, Any]", decode(there.output or "{}"))
                return result_payload(RunResult(output)) if record is None else decode(record.result or "{}")
            with suppress(RowChanged, LeaseLost):
                if there.status in LIVE:
                    await self._adopt_child(row)
                else:
                    await ledger.write(queue=[Op("queue.reopen", (child, (there.status,), self._clock.wall()))])
                return None

    async def _from_previous_generation(self, mail: MailboxMessage, child: str) -> bool:
        """Whether a child that did not succeed ended, or was cancelled, before this generation of the run began, and
        no earlier one used that: it goes on with this one, or does already."""
        status = result_from_payload(cast("dict[str, Any]", decode(mail.payload))).status
        if status is RunStatus.SUCCEEDED or self._book.view.reopened_at is None:
            return False
        if self._has_passed(mail.t) or self._unread["child", child][-1] is not mail:  # it tells each end once
            return True
        there = await self._ledger.queue.row(child)
        if there is None:
            return False
        if mail.msg_id.rpartition(":")[2] != str(there.generation):
            return True
        return status is RunStatus.CANCELLED and self._has_passed(there.cancel_at)

    def _has_passed(self, at: float | None) -> bool:
        """Whether that was before this generation of the run began."""
        since = self._book.view.reopened_at
        return at is not None and since is not None and at <= since

    async def _adopt_child(self, row: RunRow) -> None:
        """Leave to workers a child that was called in place, unless it still runs there."""
        queue = self._ledger.queue
        outcome, child = await queue.take(row, self._row.worker, ADOPTION_SECONDS, insert=False, reopen=False)
        if outcome == "claimed" and child is not None:
            how = queue.unchanged_update(child, child.claim_id)._replace(status="pending", parked=child.parked)
            await queue.settle(child.run_id, how)
