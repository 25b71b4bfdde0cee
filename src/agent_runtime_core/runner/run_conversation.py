"""Load the conversation of a run, and append the run's messages and unread messages to it when the run ends."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._core.log import log
from .._engines.payloads import UNREADABLE
from .._execution.context import Context
from .._execution.mailbox import consumed_numbers, message_of
from .._execution.run_control import RunRecorder
from .._journal.record import Record
from ..errors import ContextOverflow, LeaseLost, RequestRefused, StorageBusy, StorageFull, deciding_error, text_of
from ..interfaces import RunResult
from ..persistence.stored_history import UNANSWERED
from ..queue.records import MESSAGE, MailboxMessage
from ..status import RunStatus
from .claim import HeldClaim
from .completion_hooks import HistoryReader
from .guarded_calls import GuardedCalls
from .outcomes import NotSaved

#: After these errors the run resumes later, or in another process.
OUTAGES = (LeaseLost, StorageBusy, StorageFull, *UNREADABLE)
#: Errors of a provider that the messages of the run may have caused.
_REJECTIONS = (RequestRefused.__name__, ContextOverflow.__name__)


class RunConversation:
    """The conversation of one run under one claim. All calls of the application's store have a time limit.

    Args:
        recorder: Stores the conversation.
        calls: Makes the calls of the store.
        label: Names the run in messages.
        context: Returns the context variables of the calls.
        keep_unanswered: Whether a run that fails keeps messages of the user that no complete turn follows.
        reader: The agent, if it reads the conversation itself.
    """

    def __init__(
        self, recorder: RunRecorder, calls: GuardedCalls, label: str, context: Callable[[], contextvars.Context], *,
        keep_unanswered: bool, reader: HistoryReader | None = None,
    ) -> None:  # fmt: skip
        self._recorder, self._calls, self._label, self._context = recorder, calls, label, context
        self._keep_unanswered, self._reader = keep_unanswered, reader

    async def load(self, ctx: Context) -> Exception | None:
        """Load the earlier messages into the context; return the error that is a fault of the run."""
        return await self._call(self._recorder.load(ctx, self._reader))

    async def save(self, status: RunStatus, result: RunResult, sent: Sequence[dict[str, Any]]) -> None:
        """Append the messages of a run that ends: all of a success, the complete turns of another run.

        Args:
            status: The final status of the run.
            result: Its result.
            sent: The messages that were sent to the run while it was executed.

        Raises:
            NotSaved: The run succeeded, but its messages cannot be saved.
        """
        if status != RunStatus.SUCCEEDED:
            failed = status in (RunStatus.FAILED, RunStatus.TIMED_OUT)
            await self._keep(result, sent, unanswered=failed and self._keep_unanswered)
        elif (refusal := await self._call(self._recorder.save(result))) is not None:
            raise NotSaved(refusal)

    async def _keep(self, result: RunResult, sent: Sequence[dict[str, Any]], *, unanswered: bool) -> None:
        """Keep the messages of a run that did not succeed. The run ends as decided, even if its store fails."""
        rejected = result.error is not None and result.error.type in _REJECTIONS
        what = f"the conversation store of {self._label}"
        try:
            work = self._recorder.keep(result, sent, rejected=rejected, unanswered=unanswered)
            await self._calls.call(work, what, context=self._context(), within=False)
        except Exception as error:  # noqa: BLE001 - a store of the application may raise anything
            if isinstance(cause := deciding_error(error), LeaseLost):
                raise cause from None
            log.warning("the messages of %s are not in its conversation: %s", self._label, text_of(error))

    async def _call(self, work: Coroutine[Any, Any, None]) -> Exception | None:
        """Have the store do something under the claim of this run, and return the error that is a fault of the run.

        Raises:
            LeaseLost, StorageBusy, StorageFull: The store is not available, or the claim is lost.
            UnknownEncryptionKey, StorageCorrupt: The conversation cannot be decoded here.
        """
        try:
            await self._calls.call(work, f"a store of {self._label}", context=self._context())
        except Exception as error:  # noqa: BLE001 - a store of the application may raise anything
            if isinstance(cause := deciding_error(error), OUTAGES):
                raise cause from None
            return error
        return None


class UnreadMessages:
    """Adds the messages that arrive too late to the result of a run, so that no accepted message is lost.

    The end of a run is refused if the mailbox contains a message that its result does not take into account.

    Attributes:
        cursor: What the end of the run is checked against; see `HeldClaim.end`.
        sent: All messages that were sent to the run, in their order.
    """

    def __init__(self, claim: HeldClaim, ctx: Context | None, records: Iterable[Record]) -> None:
        self.cursor: int = -1
        self.sent: list[dict[str, Any]] = []
        self._claim, self._ctx, self._records = claim, ctx, records
        self._known = max(claim.row.mail_seq, 0 if ctx is None else ctx.messages_read)

    async def added_to(self, result: RunResult) -> RunResult:
        """Return the result with the unread messages, marked as unanswered."""
        claim = self._claim
        if self._known == 0 and claim.writer.ends_at_once:  # the usual run, without any message
            self.cursor = 0
            return result
        mail = await claim.backends.queue.mail(claim.row.run_id)
        # On several engines the end is several commits, and the queue's comes last: it cannot be refused any more.
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

    async def arrived(self) -> bool:
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
