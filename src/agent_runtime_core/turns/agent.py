"""The agent whose runs are turns."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from .._engines.base import Op
from .._execution.context import Context
from ..errors import (
    NotConfigured,
    PlanningError,
    ProviderError,
    StepExecutionError,
    ToolFailed,
    UnknownTool,
    deciding_error,
)
from ..interfaces import AgentRuntime, ErrorInfo, RunContext, RunResult
from ..persistence.base.conversations import ConversationStore
from ..persistence.stored_history import StoredHistory
from ..runner.completion_hooks import CompletionHook, HistoryReader
from ..runner.outcomes import FINAL_ERRORS
from ..runner.settings import RunInfo
from ..status import RunStatus
from .hooks import TurnLog, logged_turn
from .services import TurnServices
from .turn_run import TurnRun, end_event, finished_turn, load_turn, save, stop_steps

#: Errors that another attempt of the run would only repeat: each step has its own retries.
_FINAL = (*FINAL_ERRORS, PlanningError, UnknownTool, NotConfigured, ToolFailed)


class TurnAgent(AgentRuntime, HistoryReader, CompletionHook):
    """Executes turns. `final_output` has `response`, `plan`, `steps` and `metrics`."""

    key: str = "turn"
    trace_operation: str = "invoke_workflow"  # the name of its spans

    def __init__(self, services: TurnServices) -> None:
        self.services: TurnServices = services
        self.key = services.key

    async def run(self, ctx: RunContext) -> RunResult:
        assert isinstance(ctx, Context)
        with logged_turn(str(ctx.run_id)):
            return await TurnRun(self.services, ctx).run()

    async def read_history(self, ctx: Context, store: ConversationStore, conversation_id: UUID) -> StoredHistory | None:
        found = await self.services.contexts.for_tenant(ctx.tenant).conversation(store, conversation_id)
        ctx.history_stale = found.stale
        return found.value

    async def on_error(self, ctx: RunContext, error: BaseException) -> ErrorInfo | None:
        info = await super().on_error(ctx, error)
        assert info is not None
        failure = deciding_error(error)
        cause = deciding_error(failure.__cause__ or failure) if isinstance(failure, StepExecutionError) else failure
        if isinstance(failure, StepExecutionError):
            info.type = type(cause).__name__
            info.details = {"step": failure.step_name, "attempts": failure.attempts}
            info.retriable = isinstance(cause, ProviderError) and cause.retriable
        if isinstance(cause, PlanningError):
            info.details = {**info.details, "problems": cause.problems}
        if isinstance(cause, _FINAL):
            info.retriable = False
        assert isinstance(ctx, Context)
        await self._save_failure(ctx, error, info)
        return info

    async def _save_failure(self, ctx: Context, error: BaseException, info: ErrorInfo) -> None:
        services, turn = self.services, await load_turn(self.services, ctx)
        is_final = not info.retriable or ctx.failures + 1 >= services.max_retries
        turn.status = RunStatus.FAILED if is_final else RunStatus.PENDING
        turn.error = {"type": info.type, "message": info.message, "details": info.details}
        await save(services, ctx, turn)
        await services.hooks.call("on_error", turn, error)

    async def cancel(self, ctx: RunContext) -> None:
        assert isinstance(ctx, Context)
        turn = await load_turn(self.services, ctx)
        turn.status = RunStatus.CANCELLED
        stop_steps(turn)
        await save(self.services, ctx, turn)

    async def operations(self, info: RunInfo, result: RunResult) -> Sequence[Op]:
        turn = await finished_turn(self.services, info, result)
        return [self.services.topics.publication(end_event(self.services, turn, info.generation))]

    async def on_end(self, info: RunInfo, result: RunResult) -> None:
        turn = await finished_turn(self.services, info, result)
        TurnLog(turn.trace_id, turn.id).info("finished: %s", turn.status.value)
        await self.services.hooks.call("on_turn_end", turn)
