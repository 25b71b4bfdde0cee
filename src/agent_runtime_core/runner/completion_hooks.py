"""Agents of ours that have a say at the end of their runs, whoever ends them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from .._engines.base import Op
from ..interfaces import RunResult
from ..queue.records import RunRow
from .settings import RunInfo

log: logging.Logger = logging.getLogger("agent_runtime_core")

ON_END_TIMEOUT = 25.0  # seconds that `on_end` may take


class CompletionHook(ABC):
    """What an agent is asked when a run of it ends: `result.status` says how, `info` is the run as it was before.

    A run that is cancelled before a claim took it up asks the agent of its key in the process that cancels it.
    """

    @abstractmethod
    async def operations(self, info: RunInfo, result: RunResult) -> Sequence[Op]:
        """Writes of the event bus that go in with the end: in one commit with it where one engine holds all, else
        before the queue is told of it by a claim, and after it decided where there is none. They know themselves: an
        end may be written more than once."""

    @abstractmethod
    async def on_end(self, info: RunInfo, result: RunResult) -> None:
        """Called before a claim stores the end, so at least once for each; after it was stored where there is no
        claim, so at most once."""


async def completion_operations(agent: CompletionHook, row: RunRow, result: RunResult) -> list[Op]:
    """What the agent adds to the end of its run; nothing where it fails, which is logged."""
    try:
        return [*await agent.operations(RunInfo.of(row), result)]
    except Exception:  # what is told of an end does not keep a run from ending
        log.exception("agent %r could not tell of the end of run %s", row.agent, row.run_id)
        return []


async def call_on_end(agent: CompletionHook, row: RunRow, result: RunResult) -> None:
    """Let the agent hear of the end of its run; what it raises is logged."""
    try:
        async with asyncio.timeout(ON_END_TIMEOUT):
            await agent.on_end(RunInfo.of(row), result)
    except Exception:  # what is told of an end does not keep a run from ending
        log.exception("agent %r failed to hear of the end of run %s", row.agent, row.run_id)
