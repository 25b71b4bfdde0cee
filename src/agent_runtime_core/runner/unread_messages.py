"""The messages to a run that its agent has not received when the run ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .._execution.context import Context
from .._execution.mailbox import consumed_numbers, message_of
from .._journal.record import Record
from ..interfaces import RunResult
from ..persistence.stored_history import UNANSWERED
from ..queue.records import MESSAGE, MailboxMessage, RowChanged
from .claim import HeldClaim


class UnreadMessages:
    """Adds the messages that arrive too late to the result of a run, so that no accepted message is lost.

    The end of a run is refused if the mailbox has a message that its result does not take into account.

    Attributes:
        cursor: What the end of the run is checked against; see `HeldClaim.end`.
        sent: All messages that were sent to the run, in their order.
    """

    def __init__(self, claim: HeldClaim, ctx: Context | None, records: Iterable[Record]) -> None:
        self.cursor: int = -1
        self.sent: list[dict[str, Any]] = []
        self._claim, self._ctx, self._records = claim, ctx, records
        self._known = max(claim.row.mail_seq, 0 if ctx is None else ctx.messages_read)

    async def end_with(self, result: RunResult, write: Callable[[RunResult, int], Awaitable[RunResult]]) -> RunResult:
        """Have the end of the run written, again whenever a message has arrived before it.

        Args:
            result: What the run returned.
            write: Writes the end with this result, checked against this cursor.
        """
        while True:
            whole = await self._added_to(result)
            try:
                return await write(whole, self.cursor)
            except RowChanged:
                if not await self._arrived():
                    raise

    async def _added_to(self, result: RunResult) -> RunResult:
        """Return the result with the unread messages, marked as unanswered."""
        claim = self._claim
        if self._known == 0 and claim.writer.ends_at_once:  # the usual run, without any message
            self.cursor = 0
            return result
        mail = await claim.backends.queue.mail(claim.row.run_id)
        # On several engines the end is several commits, and the queue's is the last one: it cannot be refused any more.
        self.cursor = max((each.seq for each in mail), default=0) if claim.writer.ends_at_once else -1
        sent = [each for each in mail if each.kind == MESSAGE]
        self.sent = [message_of(each) for each in sent]
        if not sent or not isinstance(result.final_messages, list):
            return result
        received = {number for record in self._records for number in consumed_numbers(record.info)}
        unread = [each for each in sent if each.seq not in received]
        before = result.final_messages or self._history(result, [each for each in sent if each.seq in received])
        marked = [_unanswered(message_of(each)) for each in unread]
        return replace(result, final_messages=[*before, *marked])

    async def _arrived(self) -> bool:
        """Return whether the end was refused because of new messages, and not because the claim is lost."""
        claim = self._claim
        row = await claim.backends.queue.row(claim.row.run_id)
        if row is None or row.status != "running" or row.claim_id != claim.row.claim_id:
            return False
        claim.writer.unmerge()
        self._known = row.mail_seq
        return row.mail_seq != self.cursor

    def _history(self, result: RunResult, received: Iterable[MailboxMessage]) -> list[Any]:
        """Return the messages of a run whose agent returned none."""
        initial = [] if self._ctx is None else self._ctx.initial_messages
        answer = result.final_output.get("response") if isinstance(result.final_output, Mapping) else None
        answers = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else []
        return [*initial, *map(message_of, received), *answers]


def _unanswered(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "metadata": {**(message.get("metadata") or {}), UNANSWERED: True}}
