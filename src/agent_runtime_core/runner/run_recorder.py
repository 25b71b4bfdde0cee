"""What outlives a run, kept in the stores that its runner was given: its conversation, and what is audited."""

from __future__ import annotations

from typing import Any, cast

from .._core.codec.json import decode_known
from .._engines.base import Committer
from .._execution.context import Context, conversation_id
from .._execution.result_codec import OmittedHistory, decode_result, omitted_history_in
from ..interfaces import RunResult
from ..persistence.fencing import FencedWrites
from ..persistence.manager import PersistenceManager
from ..queue.records import RunRow
from .audit_log import AuditLog
from .backends import Backends
from .conversation_history import ConversationHistory, restore_history


class StoredRunRecorder:
    """One claim's part of it."""

    def __init__(self, stores: PersistenceManager, backends: Backends, row: RunRow, *, audited: bool = True) -> None:
        self.stores: PersistenceManager = stores
        self.backends: Backends = backends
        self.row: RunRow = row
        self.audited: bool = audited
        self.history: ConversationHistory | None = None
        self.ctx: Context | None = None

    async def fence(self, claim: FencedWrites) -> None:
        """Have the claims before this one refused by every store that the run may write to."""
        fenced: list[Committer] = []
        for documents in self.stores.homes():
            target = documents.commits
            if not any(target is each for each in fenced):
                fenced.append(target)
                await claim.install(target)

    async def load(self, ctx: Context) -> None:
        self.ctx = ctx
        if ctx.conversation_id is not None:
            self.history = ConversationHistory(
                self.stores.conversations, ctx.conversation_id, self.row, self.backends.queue.clock
            )
            await self.history.load(ctx)

    async def save(self, result: RunResult) -> None:
        if self.history is not None and not self._owned:
            await self.history.save(result)

    def omitted_history(self, result: RunResult) -> OmittedHistory | None:
        """The messages of a result that need not be recorded, as the conversation has them."""
        # An agent that keeps the conversation may change it, and the result must stay what it was.
        return None if self.history is None or self._owned else self.history.omitted(result)

    @property
    def _owned(self) -> bool:
        """Whether the agent keeps the conversation itself."""
        return self.ctx is not None and self.ctx.owns_conversation

    async def restore(self, text: str) -> RunResult:
        """A recorded result, with the messages that it names."""
        result, before = decode_result(text), omitted_history_in(text)
        return result if before is None else await restore_history(self.stores.conversations, result, before)

    async def audit(self, result: RunResult | None) -> None:
        audit = self.stores.audit if self.audited and self.stores.has_audit() else None
        if audit is not None:
            named = cast("dict[str, Any]", decode_known(self.row.input)).get("conversation_id")
            await AuditLog(audit, self.backends, self.row, conversation_id(named)).write(result)
