"""What outlives a run, kept in the stores that its runner was given: its conversation, and what is audited."""

from __future__ import annotations

from typing import Any, cast

from .._core.codec.json import decode_known
from .._engines.base import Commits
from .._execution.context import Context, conversation_id
from .._execution.result_codec import Before, before_of, decode_result
from ..interfaces import RunResult
from ..persistence.fencing import Claim
from ..persistence.manager import PersistenceManager
from ..queue.records import RunRow
from .audit_log import Audit
from .backends import Backends
from .conversation_history import History, recall


class Chronicle:
    """One claim's part of it."""

    def __init__(self, stores: PersistenceManager, backends: Backends, row: RunRow, *, audited: bool = True) -> None:
        self.stores: PersistenceManager = stores
        self.backends: Backends = backends
        self.row: RunRow = row
        self.audited: bool = audited
        self.history: History | None = None
        self.ctx: Context | None = None

    async def fence(self, claim: Claim) -> None:
        """Have the claims before this one refused by every store that the run may write to."""
        fenced: list[Commits] = []
        for documents in self.stores.homes():
            target = documents.commits
            if not any(target is each for each in fenced):
                fenced.append(target)
                await claim.install(target)

    async def load(self, ctx: Context) -> None:
        self.ctx = ctx
        if ctx.conversation_id is not None:
            self.history = History(self.stores.conversations, ctx.conversation_id, self.row, self.backends.queue.clock)
            await self.history.load(ctx)

    async def keep(self, result: RunResult) -> None:
        if self.history is not None and not self._owned:
            await self.history.keep(result)

    def before(self, result: RunResult) -> Before | None:
        """The messages of a result that need not be recorded, as the conversation has them."""
        # An agent that keeps the conversation may change it, and the result must stay what it was.
        return None if self.history is None or self._owned else self.history.before(result)

    @property
    def _owned(self) -> bool:
        """Whether the agent keeps the conversation itself."""
        return self.ctx is not None and self.ctx.owns_conversation

    async def recall(self, text: str) -> RunResult:
        """A recorded result, with the messages that it names."""
        result, before = decode_result(text), before_of(text)
        return result if before is None else await recall(self.stores.conversations, result, before)

    async def tell(self, result: RunResult | None) -> None:
        audit = self.stores.audit if self.audited and self.stores.has_audit() else None
        if audit is not None:
            named = cast("dict[str, Any]", decode_known(self.row.input)).get("conversation_id")
            await Audit(audit, self.backends, self.row, conversation_id(named)).tell(result)
