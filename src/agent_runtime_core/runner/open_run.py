"""Run the caller's own code as a durable run, without an agent."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import Token
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from .._core.arguments import run_input
from .._core.context_vars import ACTIVE_RUN, ActiveRun, restore
from .._core.log import LOGGED_RUN, LoggedRun
from .._core.threads import AGENT_CONTEXT, HOME_LOOP, AgentContext
from .._execution.context import Context
from .._execution.result_codec import error_payload
from .._execution.run_control import RunControl
from .._execution.run_writer import ReadOnlyWriter, RunWriter
from .._execution.step_journal import StepJournal
from .._execution.sync_context import SyncRunContext
from ..errors import LeaseLost, Postponed, RunFailed, StorageClosed, deciding_error
from ..interfaces import AgentRuntime, ErrorInfo, RunContext, RunResult, describe
from ..persistence.fencing import CURRENT_CLAIM, FencedWrites
from ..portal import call, portal_loop, run_and_wait, takes_function
from ..queue.records import RunRow
from ..status import RunStatus
from .execution import RunExecution
from .outcomes import End
from .runner import AgentRunner
from .settings import RunnerConfig, run_busy_error

P = ParamSpec("P")
T = TypeVar("T")

AGENT = "open_run"


class _InlineAgent(AgentRuntime):
    """The agent of a run whose code is the caller's block. It is never called."""

    key = AGENT

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult()


class OpenRunSession:
    """An open run: a claim whose code is the caller's block."""

    def __init__(self, runner: AgentRunner, row: RunRow) -> None:
        self.execution: RunExecution = runner.new_execution(row, _InlineAgent(), inline=True)
        self.control: RunControl = self.execution.control
        self.control.refusal = self._refusal
        self.finished: bool = False
        self._left = False
        self._active: Token[ActiveRun | None] | None = None
        self._logged: Token[LoggedRun | None] | None = None

    async def enter(self, ended: bool) -> Context:
        """Start the block's attempt.

        Args:
            ended: The run succeeded before: its saved results are returned and nothing is added.
        """
        execution = self.execution
        await execution.require_readable()
        writer: RunWriter = execution.claim.writer
        if not ended:
            self._logged = execution.log_claim()
            execution.claim.register()
        else:
            writer = ReadOnlyWriter(execution.claim.row, *execution.backends, execution.claim.clock)
        records = await writer.open()
        journal = StepJournal(writer, records, self.control)
        if not ended and execution.tracing is not None:
            journal.trace = execution.tracing.start(records)
        self.finished = ended
        if not ended:
            early = await execution.end_without_running(journal)
            if early is not None:
                early.raise_for_status()
                self.finished = True
            else:
                await execution.record_start(journal, records)
        self.control.task = asyncio.current_task()
        overrides = await execution.limit_overrides()
        self._active = ACTIVE_RUN.set(self.control)
        self.ctx: Context = Context(execution.claim.row, journal, execution.services, self.control, overrides)
        self.fenced_writes: FencedWrites = execution.claim.fenced_writes(of_code=True)
        return self.ctx

    async def leave(self, error: BaseException | None) -> None:
        """Commit how the block ended.

        Raises:
            LeaseLost: Another process claimed the run.
            RunFailed: The run was cancelled.
        """
        execution, control = self.execution, self.control
        if self.finished:
            return
        task = asyncio.current_task()
        cause = None if error is None else deciding_error(error)
        cancelled_here = isinstance(cause, asyncio.CancelledError) and control.cancel_requested
        if cancelled_here and task is not None:
            task.uncancel()
        if control.lost:
            raise self._lease_lost() from error
        if control.cancelled:
            await self._end(RunStatus.CANCELLED, {})
            if isinstance(cause, asyncio.CancelledError) and not cancelled_here:
                return  # the caller's own cancellation is raised
            name = execution.claim.row.run_key or execution.claim.row.run_id
            raise RunFailed(
                f"run {name!r} was cancelled. Open it again to resume it", RunStatus.CANCELLED.value
            ) from error
        await self.ctx.journal.unconfirmed.resolve_at_end(error)
        if error is None:
            await self._end(RunStatus.SUCCEEDED)
        elif isinstance(cause, Postponed):
            await execution.claim.release()  # the next open_run() of it resumes
        elif isinstance(cause, Exception) and not isinstance(cause, LeaseLost):
            await self._end(RunStatus.FAILED, error=describe(error))
        elif not isinstance(cause, LeaseLost):
            await execution.claim.release()

    async def _end(
        self, status: RunStatus, event: dict[str, Any] | None = None, error: ErrorInfo | None = None
    ) -> None:
        result = RunResult(usage=self.ctx.usage, error=error)
        end = End(status, result, event if error is None else error_payload(error) or {})
        await self.execution.end(end, self.ctx)

    def _refusal(self) -> Exception:
        """Return the error of calls on the context after the block, or after the lease was lost."""
        row = self.execution.claim.row
        if self.control.lost and not self._left:
            return self._lease_lost()
        run = row.run_key or row.run_id
        return StorageClosed(
            f"run {run!r} is closed: its context was used outside of its `async with open_run(...)` block. "
            "Use ctx inside the block, or open the run again"
        )

    def _lease_lost(self) -> LeaseLost:
        row = self.execution.claim.row
        return LeaseLost(*self.execution.claim.writer.guard, row.run_key)

    def close(self) -> None:
        """Refuse further calls on the context, and stop extending the lease."""
        self.control.close()
        self._left = True
        self.execution.claim.unregister()
        if self.execution.tracing is not None:
            self.execution.tracing.end(self.execution.result, self.control)
        if self._active is not None:
            restore(ACTIVE_RUN, self._active)
        if self._logged is not None:
            restore(LOGGED_RUN, self._logged)
            self._logged = None


async def _open(
    path_or_url: str | os.PathLike[str],
    run_id: UUID | str | None,
    input: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    config: RunnerConfig | None,
    durability: str | None,
    tenant: str | None,
    params: Mapping[str, Any] | None,
    **options: Any,
) -> tuple[AgentRunner, OpenRunSession, Context]:
    given = run_input(input, params)
    config = config or RunnerConfig(worker_id=f"open_run-{os.getpid()}", run_timeout_seconds=math.inf, max_retries=1)
    # The block has no agent, and no result whose messages could be appended to a conversation.
    runner = AgentRunner.open(path_or_url, config=config, durability=durability, persistence=None)
    try:
        row = runner.queue.new_row(run_id, AGENT, given, metadata, origin="inline", tenant=tenant, **options)
        outcome, there = await runner.claim_run(row)
        assert there is not None
        if outcome in ("held", "behind"):
            raise run_busy_error(outcome, there, runner.queue.clock.wall())
        session = OpenRunSession(runner, there)
        try:
            return runner, session, await session.enter(outcome == "ended")
        except BaseException:
            await session.execution.claim.try_release()
            session.close()
            raise
    except BaseException:
        await runner.close()
        raise


async def _close(runner: AgentRunner, session: OpenRunSession, error: BaseException | None) -> None:
    session.control.leaving = True
    try:
        try:
            if waiting := session.ctx.waiting_tasks:
                await session.execution.cancel_all(waiting)  # nothing ends these waits after the block
        finally:
            await session.leave(error)
    finally:
        session.close()
        await runner.close()


@asynccontextmanager
async def open_run(
    path_or_url: str | os.PathLike[str],
    run_id: UUID | str | None = None,
    *,
    input: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: RunnerConfig | None = None,
    durability: str | None = None,
    concurrency_key: str | None = None,
    tenant: str | None = None,
    params: Mapping[str, Any] | None = None,
    concurrency_limit: int = 1,
    tags: Iterable[str] = (),
) -> AsyncIterator[Context]:
    """Execute a block of your code as a durable run.

        async with open_run("jobs.db", run_id="nightly") as ctx:
            report = await ctx.step("fetch", fetch)

    If the block completes, the run succeeds; if it raises, the run fails. Opening the same run id again resumes the
    run: saved results are returned. This also works after it succeeded, when nothing can be added. If the block is
    cancelled, the run is released. The library sets no time limit.

    Args:
        path_or_url: As in `AgentRunner.open`.
        run_id: Names the run. None makes a new id.
        input: The run's input.
        metadata: Stored with the run.
        config: Settings. None means no time limit.
        durability: As in `AgentRunner.open`.
        concurrency_key: Runs with the same key execute one at a time, or as many as `concurrency_limit` allows.
        tenant: Whose run it is; see `AgentRunner.submit`.
        params: Merged into the "params" of the input.
        concurrency_limit: As in `AgentRunner.submit`. A priority or a rate limit would have no effect, because no
            worker claims the run.
        tags: As in `AgentRunner.submit`.

    Returns:
        An async context manager, whose value is the context of the run.

    Raises:
        IdempotencyConflict: The run id belongs to a run with another input.
        RunBusy: Another process executes the run, or another run uses the concurrency key.
        RunFailed: The run was cancelled.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import open_run
        >>> async def main():
        ...     async with open_run("memory://", "report-1") as ctx:
        ...         return await ctx.step("rows", len, ["a", "b"])
        >>> asyncio.run(main())
        2
    """
    runner, session, ctx = await _open(
        path_or_url, run_id, input, metadata, config, durability, tenant, params, concurrency_key=concurrency_key,
        concurrency_limit=concurrency_limit, tags=tags,
    )  # fmt: skip
    outer = CURRENT_CLAIM.get()
    CURRENT_CLAIM.set(session.fenced_writes)
    try:
        yield ctx
    except BaseException as error:
        await _close(runner, session, error)
        raise
    else:
        await _close(runner, session, None)
    finally:
        CURRENT_CLAIM.set(outer)  # and not reset: a generator may be closed in another context


class _PortalCaller:
    """Awaits the calls of a `SyncRunContext` on the portal's loop."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return portal_loop()

    def call(
        self, ctx: AgentContext, fn: Callable[..., Awaitable[Any]], args: Sequence[Any], kwargs: Mapping[str, Any], /
    ) -> Any:
        if HOME_LOOP.get(None) is self.loop:  # a plain step: the call that it is part of is the main task
            return run_and_wait(self.loop, fn, tuple(args), dict(kwargs))
        context = contextvars.copy_context()
        context.run(AGENT_CONTEXT.set, ctx)
        try:
            return context.run(self._call, fn, *args, **kwargs)
        except concurrent.futures.CancelledError:  # an Exception, which the block might handle
            raise asyncio.CancelledError from None


class SyncRun:
    """An open run for code without an event loop.

    Args:
        claim: The claim of the run.

    Attributes:
        ctx: The context, whose coroutine functions `call` awaits.
        sync_ctx: The same context in blocking form.
    """

    def __init__(self, ctx: Context, claim: FencedWrites) -> None:
        self.ctx: Context = ctx
        self.sync_ctx: SyncRunContext = SyncRunContext(ctx, _PortalCaller(self.call))
        self._claim = claim

    def call(self, fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a coroutine function of this run and return its result, as in `run.call(executor.run, steps)`.

        Args:
            fn: A coroutine function.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            Its result.
        """
        takes_function("run.call", fn)

        async def run() -> T:
            self.ctx.control.task = asyncio.current_task()
            CURRENT_CLAIM.set(self._claim)
            ACTIVE_RUN.set(self.ctx.control)
            return await fn(*args, **kwargs)

        return call(run)


@contextmanager
def open_run_sync(
    path_or_url: str | os.PathLike[str],
    run_id: UUID | str | None = None,
    *,
    input: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: RunnerConfig | None = None,
    durability: str | None = None,
    concurrency_key: str | None = None,
    tenant: str | None = None,
    params: Mapping[str, Any] | None = None,
    concurrency_limit: int = 1,
    tags: Iterable[str] = (),
) -> Iterator[SyncRun]:
    """Execute a block of code without an event loop as a durable run; see `open_run`.

    with open_run_sync("jobs.db", run_id="nightly") as run:
        report = run.sync_ctx.step("fetch", fetch)

    Args:
        path_or_url: As in `open_run`, like the other arguments.
        run_id: As in `open_run`.
        input: As in `open_run`.
        metadata: As in `open_run`.
        config: As in `open_run`.
        durability: As in `open_run`.
        concurrency_key: As in `open_run`.
        tenant: As in `open_run`.
        params: As in `open_run`.
        concurrency_limit: As in `open_run`.
        tags: As in `open_run`.

    Returns:
        A context manager, whose value is the open run.
    """
    runner, session, ctx = call(
        _open, path_or_url, run_id, input, metadata, config, durability, tenant, params,
        concurrency_key=concurrency_key, concurrency_limit=concurrency_limit, tags=tags,
    )  # fmt: skip
    active = ACTIVE_RUN.set(ctx.control)
    try:
        yield SyncRun(ctx, session.fenced_writes)
    except BaseException as error:
        # A generator that was not used up is closed while the interpreter shuts down. Nothing can be written then, and
        # the end of the process releases the run.
        if not sys.is_finalizing():
            call(_close, runner, session, error)
        raise
    finally:
        restore(ACTIVE_RUN, active)
    call(_close, runner, session, None)
