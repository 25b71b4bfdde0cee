"""Store the conversation and the audit entries of a run in the stores of its runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from .._core.codec.json import decode_known
from .._engines.base import Committer
from .._execution.context import Context, conversation_id
from .._execution.loop_messages import loop_turns
from .._execution.result_codec import OmittedHistory, decode_result, omitted_history_in
from ..interfaces import RunResult
from ..persistence.fencing import FencedWrites
from ..persistence.manager import PersistenceManager
from ..queue.records import RunRow
from .audit_log import AuditLog
from .backends import Backends
from .completion_hooks import HistoryReader
from .conversation_history import ConversationHistory, restore_history


class StoredRunRecorder:
    """The `RunRecorder` of one claim. See there for its methods."""

    def __init__(self, stores: PersistenceManager, backends: Backends, row: RunRow, *, audited: bool = True) -> None:
        self.stores: PersistenceManager = stores
        self.backends: Backends = backends
        self.row: RunRow = row
        self.audited: bool = audited
        self.history: ConversationHistory | None = None
        self.ctx: Context | None = None

    async def fence(self, claim: FencedWrites) -> None:
        """Have every store that the run may write to refuse the run's earlier claims."""
        fenced: list[Committer] = []
        for documents in self.stores.document_stores():
            target = documents.commits
            if not any(target is each for each in fenced):
                fenced.append(target)
                await claim.install(target)

    async def load(self, ctx: Context, reader: HistoryReader | None = None) -> None:
        """Load the earlier messages of the conversation into the context; `reader` reads them, if there is one."""
        self.ctx = ctx
        if ctx.conversation_id is not None:
            self.history = ConversationHistory(
                self.stores.conversations, ctx.conversation_id, self.row, self.backends.queue.clock
            )
            await self.history.load(ctx, None if reader is None else reader.read_history)

    async def save(self, result: RunResult) -> None:
        """Append the run's new messages to the conversation."""
        if self.history is not None and not self._owned:
            await self.history.save(result)

    async def keep(
        self, result: RunResult, sent: Sequence[dict[str, Any]], *, rejected: bool, unanswered: bool
    ) -> None:  # fmt: skip
        """Append the complete turns of a run that did not succeed, and the user's messages."""
        if self._owned:
            return
        given = cast("dict[str, Any]", decode_known(self.row.input))
        named = conversation_id(given.get("conversation_id"))
        if named is None:
            return
        records = await self.backends.state.records(self.row.run_id)
        if self.ctx is not None:  # has also what is not written yet
            records = [*records, *self.ctx.journal.view.completed.values()]
        turns = [*loop_turns(records, _known)]
        if any(each.owned for each in turns):
            return
        if (history := self.history) is None:
            history = ConversationHistory(self.stores.conversations, named, self.row, self.backends.queue.clock)
            if not await history.load_recorded(records, given.get("messages") or []):
                return  # its code has never started
        await history.keep(turns, sent, result, rejected=rejected, unanswered=unanswered)

    def omitted_history(self, result: RunResult) -> OmittedHistory | None:
        """Return which messages of a result need not be recorded, because the conversation has them."""
        # An agent that stores the conversation itself may change it, and the saved result must stay the same.
        return None if self.history is None or self._owned else self.history.omitted(result)

    @property
    def _owned(self) -> bool:
        """Whether the agent stores the conversation itself."""
        return self.ctx is not None and self.ctx.owns_conversation

    async def restore(self, text: str) -> RunResult:
        """Return a saved result, with the messages that it refers to."""
        result, omitted = decode_result(text), omitted_history_in(text)
        return result if omitted is None else await restore_history(self.stores.conversations, result, omitted)

    async def audit(self, result: RunResult | None) -> None:
        """Write to the audit store what happened; `result` is that of a run that has finished."""
        audit = self.stores.audit if self.audited and self.stores.has_audit() else None
        if audit is not None:
            named = cast("dict[str, Any]", decode_known(self.row.input)).get("conversation_id")
            await AuditLog(audit, self.backends, self.row, conversation_id(named)).write(result)


def _known(text: str | None) -> Any:
    return None if text is None else decode_known(text)
