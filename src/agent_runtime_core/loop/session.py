"""What the two sides of a turn share: the conversation, its budget and its time, and the steps that record it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from .._core.clock import SYSTEM, Clock
from .._core.context_vars import start_helper, start_soon
from .._execution.recorded_calls import RecordedCalls
from ..errors import LimitExceeded, StepCancelledError
from ..interfaces import LLMClient
from ..limits import Budget, RunLimits
from ..tools.registry import ToolRegistry
from .state import CancellationToken, Hooks, TurnState


class Cancelled(Exception):
    """The token was cancelled."""


class LoopSession:
    """One conversation of a loop with a model."""

    def __init__(
        self, ctx: Any, client: LLMClient, tools: ToolRegistry, limits: RunLimits, hooks: Hooks,
        cancellation: CancellationToken | None, messages: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        self.ctx: Any = ctx
        self.client: LLMClient = client
        self.tools: ToolRegistry = tools
        self.hooks: Hooks = hooks
        self.budget: Budget = Budget(limits, getattr(ctx, "budget", None))
        self.cancellation: CancellationToken | None = cancellation
        self.messages: list[dict[str, Any]] = messages
        #: Of them, those since the last call of the model that are no answers to it.
        self.new_messages: list[dict[str, Any]] = messages
        self.clock: Clock = getattr(ctx, "clock", SYSTEM)
        self.steps: RecordedCalls = RecordedCalls(ctx)
        #: What tells this loop's steps from those of another one in the run.
        self.name: str = self.steps.journal.keys.next_key("l", "loop")
        #: Whether the last answer of the model was paid for by the run that this one was forked from.
        self.copied: bool = False
        self._since = 0.0  # when this stretch of work began
        self._turn = 0.0  # seconds of this turn before that
        self._late: LimitExceeded | None = None  # the time limit that something outlasted without minding it

    @property
    def run(self) -> Any:
        """The run as its user named it."""
        return getattr(self.ctx, "run_key", None) or getattr(self.ctx, "run_id", None)

    @property
    def traced(self) -> bool:
        return bool(getattr(self.ctx, "traced", False))

    def state(self, state: TurnState) -> None:
        if self.hooks.on_state is not None:
            self.hooks.on_state(state)

    def check(self, what: str) -> None:
        """Stop here if somebody wants that."""
        if self.cancellation is not None and self.cancellation.cancelled:
            raise Cancelled
        if self.ctx.cancelled():
            raise StepCancelledError(what)
        self.raise_if_late()

    def raise_if_late(self) -> None:
        """LimitExceeded if something of this turn came after its time."""
        if self._late is not None:
            raise self._late

    # -- time

    def begin_turn(self) -> None:
        self._turn, self._since = 0.0, self.clock.boot()

    def stop_timer(self) -> None:
        """What comes is no work of this run: it waits."""
        now = self.clock.boot()
        self._turn += now - self._since
        self.budget.add_seconds(now - self._since)
        self._since = now

    def start_timer(self) -> None:
        self._since = self.clock.boot()

    end_turn = stop_timer

    def add_work_time(self, seconds: float) -> None:
        """An earlier life of the run was at work for so long."""
        self._turn += seconds
        self.budget.add_seconds(seconds)

    def in_time(self, work: Awaitable[Any]) -> Awaitable[Any]:
        """Its result, unless a time limit or the token comes first.

        Work that does not listen to being cancelled keeps its result; the next `not_late` tells of it.
        """
        return work if self.cancellation is None and not self.budget.timed else self._in_time(work)

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        left = self.budget.remaining(*self._times())
        try:
            async with asyncio.timeout(None if left is None else max(left, 0)) as limit:
                result = await self.unless_cancelled(work)
        except TimeoutError:
            if limit.expired():
                raise self.budget.time_limit_error(*self._times()) from None
            raise
        if limit.expired():
            self._late = self.budget.time_limit_error(*self._times())
        return result

    def _times(self) -> tuple[float, float]:
        """Return the seconds of this stretch of work, and of this turn."""
        now = self.clock.boot() - self._since
        return now, self._turn + now

    async def unless_cancelled(self, work: Awaitable[Any]) -> Any:
        """Its result, unless the token comes first."""
        return await (work if self.cancellation is None else _until(self.cancellation, work))


async def _until(token: CancellationToken, work: Awaitable[Any]) -> Any:
    task = start_soon(work)
    watch = start_helper(token.wait())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
