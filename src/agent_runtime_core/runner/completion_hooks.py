"""Let agents of this library read the conversations of their runs, and add to the commit that ends them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from .._core.log import about_run, log
from .._engines.base import Op
from ..interfaces import RunResult
from ..queue.records import RunRow
from .settings import RunInfo

if TYPE_CHECKING:
    from .._execution.context import Context
    from ..persistence.base.conversations import ConversationStore
    from ..persistence.stored_history import StoredHistory

ON_END_TIMEOUT = 25.0  # seconds that `on_end` may take


class HistoryReader(ABC):
    """An agent that reads the conversations of its runs itself."""

    @abstractmethod
    async def read_history(self, ctx: Context, store: ConversationStore, conversation_id: UUID) -> StoredHistory | None:
        """Return the messages of the conversation, None if it does not exist.

        If they may not be the newest messages, it sets `ctx.history_stale`.
        """


class CompletionHook(ABC):
    """An agent whose methods are called when a run of it ends.

    `result.status` is the final status, and `info` the run as it was before. If a run is cancelled while no worker
    claims it, the process that cancels it calls its own agent with the run's key.
    """

    @abstractmethod
    async def operations(self, info: RunInfo, result: RunResult) -> Sequence[Op]:
        """Return writes to the event bus that belong to the end.

        On one engine they are in the same commit. On several engines a claim commits them before the queue's row; a
        cancellation without a claim commits them after it. They must be idempotent, because an end may be written more
        than once.
        """

    @abstractmethod
    async def on_end(self, info: RunInfo, result: RunResult) -> None:
        """React to the end.

        Called before a claim stores the end, so at least once for each end. Without a claim it is called after the end
        was stored, so at most once.
        """


async def completion_operations(agent: CompletionHook, row: RunRow, result: RunResult) -> list[Op]:
    """Return what the agent adds to the end of its run; nothing if its method fails, which is logged."""
    try:
        return [*await agent.operations(RunInfo.of(row), result)]
    except Exception:  # the run ends nevertheless
        log.exception(
            "operations() of agent %r failed at the end of run %s",
            row.agent,
            row.run_key or row.run_id,
            extra=about_run(row.run_id, row.attempt, row.tenant),
        )
        return []


async def call_on_end(agent: CompletionHook, row: RunRow, result: RunResult) -> None:
    """Call `on_end` of the agent. What it raises is logged."""
    try:
        async with asyncio.timeout(ON_END_TIMEOUT):
            await agent.on_end(RunInfo.of(row), result)
    except Exception:  # the run ends nevertheless
        log.exception(
            "on_end() of agent %r failed at the end of run %s",
            row.agent,
            row.run_key or row.run_id,
            extra=about_run(row.run_id, row.attempt, row.tenant),
        )
